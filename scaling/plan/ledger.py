"""The ledger of one chip's step, its FLOPs and bytes, from which bound, forecast, bytes and the timeline follow.

It describes the fullest stage by formulas, for a system that does nothing needless. `tests/plan` compares it with the
closed forms of Part 5 and with the count of the run's own step. Gradients are sent in the dtype in
which they are stored. A run of `scaling.train` does nearly this for a job whose `shards` are fsdp alone; its own step
counts it exactly (`train.dry`, `plan.choose`). If a layout's fields are columns, so is everything here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scaling.cost.lanes import Amount, Lane
from scaling.hardware import Chip
from scaling.plan.job import POLICIES, REDUCES, SCHEDULES, Job, Layout
from scaling.plan.network import LANES

FORWARD = (  # a layer's computations, and the collectives that it waits for, each over its mesh axis
    "tensor: AG In", "compute: QKV", "context: AG K, V", "compute: scores", "compute: O", "tensor: RS Out",
    "expert: dispatch", "tensor: AG In", "compute: up", "compute: down", "tensor: RS Out", "expert: combine",
)  # fmt: skip
BACKWARD = (
    "expert: dispatch dOut", "tensor: AG dOut", "compute: down", "tensor: AG In again", "compute: up", "tensor: RS dIn",
    "expert: combine dIn", "tensor: AG dOut", "compute: O", "context: AG K, V", "compute: scores", "context: RS dK, dV",
    "tensor: AG In again", "compute: QKV", "tensor: RS dIn",
)  # fmt: skip
REGATHERED = "tensor: AG In again"  # only if the matmuls' results are saved, and not their operands


@dataclass(frozen=True)
class Compute:
    """FLOPs of one microbatch's forward on the fullest stage of a chip, and how well the pipeline is filled.

    Attributes:
        tokens: The tokens of the microbatch on the chips of one tensor group.
        layers: The layers of the stage.
        linear: FLOPs of its matmuls with weights.
        dots: FLOPs of its attention.
        head: FLOPs of the unembedding.
        again: The shares of `linear` and of `dots` that the backward pass recomputes.
        read: Bytes of the stage's weights, which matmuls read from memory.
        forward: Seconds at the chip's peak, the longer of computing and of reading weights (Part 1).
        backward: Seconds of the backward pass at the peak, likewise.
        fill: The time of the whole step over that of the fullest stage's work, which is 1 / (1 - bubble).
        live: The number of microbatches whose activations the first stage holds.
    """

    tokens: Amount
    layers: Amount
    linear: Amount
    dots: Amount
    head: Amount
    again: tuple[Amount, Amount]
    read: Amount
    forward: Amount
    backward: Amount
    fill: Amount
    live: Amount


def is_one(codes, words: tuple[str, ...], *wanted: str):
    """Return where a field, a word or codes that index `words`, is one of the wanted words."""
    if isinstance(codes, str):
        return codes in wanted
    found = codes == words.index(wanted[0])
    for word in wanted[1:]:
        found = found | (codes == words.index(word))
    return found


def compute(job: Job, chip: Chip, l: Layout) -> Compute:
    """Return the computing of a step, per chip."""
    w, C, C_wide = job.work, chip.flops(job.dtype), chip.flops(job.wide)
    replicas = l.pod * l.data * l.fsdp * l.expert
    tokens = np.ceil(job.sequences / (replicas * l.microbatches)) * np.ceil(job.seq / l.context)
    tokens = np.minimum(tokens, np.ceil(job.batch / (l.microbatches * l.context)))
    linear = 2 * tokens * (w.dense + w.kv * (copied(w, l) - 1) + w.routed) / l.tensor
    dots, head = tokens * w.dots / l.tensor, 2 * tokens * w.ends[1] / l.tensor
    layer = linear / C + dots / C_wide
    unit = head / C_wide / layer  # the unembedding in layers
    fullest = heaviest(w.L, unit, l.pipe)
    layers = fullest * w.L / (w.L + unit)
    share = fullest * unit / (w.L + unit)
    everything = is_one(l.remat, POLICIES, "block")
    again = (
        np.where(everything, 1.0, 0.0),
        np.where(everything | is_one(l.remat, POLICIES, "attention", "matmuls"), 1.0, 0.0),
    )
    dense, experts = weight_elements(job, l)
    read = layers * (dense + experts) * job.act_bytes
    math = layers * layer + share * layer
    forward = np.maximum(math, read / (chip.hbm_bw or np.inf))
    backward = 2 * math + layers * (again[0] * linear / C + again[1] * dots / C_wide)
    backward = np.maximum(backward, (2 * read + 2 * job.grad_bytes / job.act_bytes * read) / (chip.hbm_bw or np.inf))
    waits = (w.L + unit - fullest) / fullest * idle(l, linear / C, layer, backward / forward) / l.microbatches
    return Compute(
        tokens, layers, layers * linear, layers * dots, share / np.maximum(unit, 1e-30) * head, again, read,
        forward, backward, 1 + waits, _live(l),
    )  # fmt: skip


def copied(w, l: Layout) -> Amount:
    """Return how many copies of keys' and values' weights and heads there are: 1 unless K < |Y|."""
    return np.maximum(1.0, l.tensor / w.kv_heads)


def heaviest(L: int, unit: Amount, stages: Amount) -> Amount:
    """Return the layers of the fullest stage, in units of layers.

    The last stage also has the unembedding, so it may have fewer layers.
    """
    few = np.floor((L + unit) / stages)
    return np.minimum(*(np.maximum(n, unit + np.maximum(0, L - (stages - 1) * n)) for n in (few, few + 1)))


def idle(l: Layout, weight: Amount, forward: Amount, ratio: Amount) -> Amount:
    """Return a pipeline's idle time, in units of the time that the other stages take for a microbatch.

    It is 1 for 1F1B and 1/v if interleaved in v chunks. With the weight half W of the backward pass deferred, it is (F
    + B - W)/(F + B + W) in zb-h1 and half of (F + 2B - W)/(F + B + W) in DualPipeV (`schedules.closed_forms`).
    """
    total = forward * (1 + ratio)
    halves = total - forward - weight  # B, the half of the backward pass that the stage before waits for
    zero, dual = (forward + halves - weight) / total, (forward + 2 * halves - weight) / total / 2
    split = is_one(l.schedule, SCHEDULES, "zb-h1")
    return np.where(split, zero, np.where(is_one(l.schedule, SCHEDULES, "dualpipev"), dual, 1 / l.chunks))


def _live(l: Layout) -> Amount:
    """Return the microbatches whose activations the first stage holds (`closed_forms.live_activations`)."""
    Z, v = l.pipe, l.chunks
    many = np.where(is_one(l.schedule, SCHEDULES, "interleaved") & (v > 1), ((v - 1) * Z + 2 * (Z - 1) + 1) / v, Z)
    many = np.where(is_one(l.schedule, SCHEDULES, "dualpipev"), (2 * Z + 1) / 2, many)
    return np.minimum(many, l.microbatches)


@dataclass(frozen=True)
class Entry:
    """Collectives of one kind on the fullest stage in a step, with V = `nbytes` each.

    `axis`: the mesh axis to which they are charged; `lane`: the name of the lane that they run `over`. `kind`:
    "critical" if the layer waits for it; "ahead" for weights and their gradients, behind the layer's matmuls; "step"
    once per step, behind one microbatch; "hop" between stages. `ways`: their number in the forward and in the backward
    pass.
    """

    axis: str
    lane: str
    kind: str
    ways: tuple[Amount, Amount]
    nbytes: Amount
    over: Lane

    @property
    def moved(self) -> Amount:
        """Bytes V of all of them."""
        return sum(self.ways) * self.nbytes

    @property
    def seconds(self) -> Amount:
        """Seconds of one collective at the peak."""
        return self.over.seconds(self.nbytes)

    def hides(self, chip: Chip, l: Layout) -> Amount:
        """Return the share of a layer's collectives that runs behind its own matmuls, or another microbatch's."""
        near = self.over.near * chip.efficiency.hidden
        return np.where(is_one(l.schedule, SCHEDULES, "dualpipev"), 1.0, near) if self.axis == "expert" else near


def weight_elements(job: Job, l: Layout) -> tuple[Amount, Amount]:
    """Return the elements of one layer on one tensor rank, (dense, experts), whole along the axes of ZeRO-3.

    More tensor ranks than KV heads each store W_K and W_V whole, and compute with one head's part.
    """
    w = job.work
    stored = np.where(l.tensor > w.kv_heads, l.tensor, 1)
    return (w.dense + w.kv * (stored - 1)) / l.tensor, w.experts / (l.expert * l.tensor)


def weight_ways(job: Job, l: Layout, lane: str) -> tuple[Amount, Amount, Amount]:
    """Return three numbers for a lane, "weights" (dense) or "experts", leaving out the axes tensor and pipe.

    They are the number of ZeRO-3's shards, of ranks that hold the same shard, and of ZeRO-1's shards.
    """
    others = LANES[lane][1:]  # the axes other than fsdp
    shares = math.prod(getattr(l, axis) for axis in others if axis in job.shards)
    every = math.prod(getattr(l, axis) for axis in others)
    return l.fsdp * shares, l.data * every / np.where(l.zero == 3, shares, 1), l.data * shares


def ledger(job: Job, c: Compute, l: Layout, lanes: Mapping[str, Lane]) -> list[Entry]:
    """Return every collective of a step, over the lanes of its mesh."""
    w, act, M, n = job.work, job.act_bytes, l.microbatches, c.layers
    each = M * n
    replay, regather = (is_one(l.remat, POLICIES, policy) for policy in ("block", "matmuls"))
    found = []

    def add(axis: str, lane: str, kind: str, forward: Amount, backward: Amount, nbytes: Amount):
        found.append(Entry(axis, lane, kind, (forward, backward), nbytes, lanes[lane]))

    hidden = act * c.tokens * w.D
    whole = act * c.tokens * l.context * w.exchanged * copied(w, l) / l.tensor
    sent = hidden / l.tensor * (0.75 if job.dtype == "fp8" else 1)  # there in fp8, back in bf16
    for axis, nbytes in (("tensor", hidden), ("context", whole), ("expert", sent)):
        used = np.where(getattr(l, axis) > 1, each, 0)
        forward, backward = (sum(line.startswith(axis) for line in lines) for lines in (FORWARD, BACKWARD))
        skipped = np.where(regather, 0, BACKWARD.count(REGATHERED)) if axis == "tensor" else 0
        add(axis, axis, "critical", forward * used, (forward * replay + backward - skipped) * used, nbytes)

    dense, experts = weight_elements(job, l)
    alone, sharded = np.where(l.pipe == 1, 1, 0), np.where(l.zero == 3, 1, 0)
    ends = alone * (max(w.ends) if w.tied else sum(w.ends)) / l.tensor
    scatters = np.where(is_one(l.reduce, REDUCES, "each"), M, 1)
    kinds = [("weights", dense, ends, "data")] + [("experts", experts, 0.0, "experts data")] * bool(w.experts)
    for lane, elements, rest, data_lane in kinds:
        ways, ranks, _ = weight_ways(job, l, lane)
        used = np.where(ways > 1, sharded, 0)
        add("fsdp", lane, "ahead", used * M * n, used * M * (n - alone), act * elements)  # the last layer's stay
        add("fsdp", lane, "ahead", 0, used * scatters * n, job.grad_bytes * elements)
        if lane == "weights":  # the ends are gathered once
            add("fsdp", lane, "ahead", used * alone, 0, act * rest)
            add("fsdp", lane, "ahead", 0, used * scatters * alone, job.grad_bytes * rest)
        reduced = np.where(ranks > 1, 1, 0)
        own = (n * elements + rest) / np.where(l.zero == 3, ways, 1)
        gathers = np.where(l.zero == 1, reduced, 0)  # ZeRO-1: scattered, updated, gathered; else an AllReduce
        add("data", data_lane, "step", gathers, 0, act * own)
        own = job.grad_bytes * own
        add("data", data_lane, "step", 0, 2 * reduced - gathers, own)
        add("pod", "pod", "step", 0, np.where(l.pod > 1, 2, 0), own / np.where(l.zero == 1, ranks, 1))
    hops = np.where(l.pipe > 1, M * l.chunks + l.pipe - 2, 0)
    add("pipe", "pipe", "hop", hops, hops, hidden / l.tensor)
    return found
