"""The cost of a layout: its bound, its forecast, what binds it and a chip's memory; for one layout, or columns of many.

The bound is the book's roofline. Forward and backward are counted apart. Each takes the longer of computing and of
communicating behind it, at the peaks, and the pipeline's bubble comes on top: no step is shorter. The forecast is the
same at the rates that the chip reaches (`scaling.hardware.Efficiency`). It adds the operations between the matmuls, the
collectives that a layer waits for, and the work that a step does once, as far as one microbatch does not hide it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scaling.cost.lanes import LINKS, Amount
from scaling.cost.layers import Cost
from scaling.hardware import Chip
from scaling.plan.holds import Held, held
from scaling.plan.job import AXES, Job, Layout
from scaling.plan.ledger import Compute, Entry, compute, ledger
from scaling.plan.network import Network

TILE = 128  # rows of a tile of a grouped product
LOGITS = 16  # bytes per logit that pass through memory in a third of the step: bf16 and fp32, softmax, gradient


def busy_links(timed: Sequence[tuple[Entry, Amount]]) -> list[Amount]:
    """Return the seconds for which each kind of link is busy, given the seconds of each entry's collectives."""
    found: list[Amount] = [0.0] * LINKS
    for entry, seconds in timed:
        found = [before + load * seconds for before, load in zip(found, entry.over.links, strict=True)]
    return found


def step_bounds(job: Job, c: Compute, entries: Sequence[Entry], microbatches: Amount) -> tuple[Amount, Amount]:
    """Return (the least seconds of a step, its seconds if nothing overlapped), with the bubble."""
    total, worst, each = 0.0, 0.0, [entry.seconds for entry in entries]
    for way, once in enumerate((c.forward, c.backward)):
        timed = [(entry, entry.ways[way] * seconds) for entry, seconds in zip(entries, each, strict=True)]
        math, everything = microbatches * once, sum(seconds for _, seconds in timed)
        comms = np.maximum.reduce(busy_links(timed)) if job.overlap == "max" else everything
        total = total + (math + comms if job.overlap == "none" else np.maximum(math, comms))
        worst = worst + math + everything
    return total * c.fill, worst * c.fill


@dataclass(frozen=True)
class StepParts:
    """Seconds that each kind of work adds to a forecast step on the fullest stage; they sum to the step."""

    matmuls: Amount
    attention: Amount
    memory: Amount
    recomputed: Amount
    critical: Amount
    weights: Amount
    bubble: Amount
    once: Amount
    update: Amount

    @property
    def total(self) -> Amount:
        """Seconds of the step."""
        return (
            self.matmuls + self.attention + self.memory + self.recomputed + self.critical + self.weights + self.bubble
            + self.once + self.update
        )  # fmt: skip


def reached_rates(job: Job, chip: Chip) -> tuple[float, float, float]:
    """Return the FLOPs/s of products of the wide dtype and of attention's kernel, and the bytes/s of memory."""
    rate, wide = chip.efficiency, chip.flops(job.wide)
    return wide * rate.of_matmul(job.wide), wide * rate.attention, (chip.hbm_bw or np.inf) * rate.memory


def layer_products(job: Job, chip: Chip, c: Compute, l: Layout) -> Amount:
    """Return the seconds of the forward products of the stage's layers, at the rates that their shapes reach.

    Experts multiply in grouped products, in tiles of TILE rows, so an expert with 130 rows takes as long as one with
    256. If experts are narrow, such as F = 2,048 on a TPU, their products reach a lower rate.
    """
    w, narrow = job.work, chip.flops(job.dtype) * chip.efficiency.of_matmul(job.dtype)
    if not w.copies:
        return c.linear / narrow
    routed = 2 * c.tokens * c.layers * w.routed / l.tensor
    rows = c.tokens * l.expert * w.copies / w.experts_count  # of one expert, from all ranks of its group
    filled = rows / (TILE * np.ceil(rows / TILE))
    F = w.routed * (1 - w.up) / (w.D * w.copies)
    return (c.linear - routed + routed * (1 + chip.efficiency.narrow / F) / filled) / narrow


def layer_between(job: Job, chip: Chip, c: Compute, l: Layout) -> Amount:
    """Return the seconds between the forward products of the stage's layers: memory traffic, and experts' routing."""
    bandwidth = (chip.hbm_bw or np.inf) * chip.efficiency.memory
    passed = c.tokens * c.layers * job.act_bytes * job.work.passes / l.tensor / bandwidth
    return passed + (c.layers * chip.efficiency.routing if job.work.copies else 0.0)


def matmul_passes(job: Job, math: Amount, reads: Amount) -> tuple[Amount, Amount]:
    """Return the seconds of matmuls forward and backward, by computing, or by reading weights and adding gradients."""
    forward, adds = np.maximum(math, reads), 2 * reads * job.grad_bytes / job.act_bytes
    return forward, forward + np.maximum(math, adds)


def forecast(job: Job, chip: Chip, c: Compute, l: Layout, entries: Sequence[Entry], own: Held) -> StepParts:
    """Return the parts of the step's likely time; their sum is never below the bound."""
    rate, M = chip.efficiency, l.microbatches
    wide, kernel, bandwidth = reached_rates(job, chip)
    linear = layer_products(job, chip, c, l)
    math, attention = linear + c.head / wide, c.dots / kernel
    reads = c.read / bandwidth
    forward, backward = matmul_passes(job, math, reads)
    between = layer_between(job, chip, c, l)
    logits = LOGITS * c.head / np.maximum(2 * job.work.D, 1)  # of the stage's share of the unembedding
    memory = between + logits / bandwidth
    again = c.again[0] * (np.maximum(linear, reads) + between) + c.again[1] * attention

    critical, exposed, late = 0.0, 0.0, 0.0
    hides = [entry.hides(chip, l) if entry.kind == "critical" else 1.0 for entry in entries]
    each = [entry.over.forecast(entry.nbytes, rate) for entry in entries]
    for way, computing in enumerate((forward + attention + memory, backward + 2 * (attention + memory) + again)):
        layers, once, waits = [], [], 0.0  # of a microbatch, of a step; the waits of a microbatch
        for entry, seconds, behind in zip(entries, each, hides, strict=True):
            if entry.kind == "step":
                once.append((entry, entry.ways[way] * seconds))
                continue
            layers.append((entry, seconds := entry.ways[way] * seconds / M))
            if entry.kind != "hop":  # what runs behind computing takes cores from it
                waits = waits + (1 - behind + rate.cores * behind) * seconds
        loads, working = busy_links(layers), computing + waits
        pace = np.maximum(working, np.maximum.reduce(loads))
        critical, exposed = critical + waits, exposed + pace - working
        late = late + np.maximum.reduce([
            np.maximum(0.0, busy - (pace - load)) for busy, load in zip(busy_links(once), loads, strict=True)
        ])  # fmt: skip
    matmuls = forward + backward
    work = M * (matmuls + 3 * (attention + memory) + again + critical + exposed)
    update = 2 * own.optimizer + (2 * own.params + own.grads) * own.shares
    return StepParts(
        M * matmuls, 3 * M * attention, 3 * M * memory, M * again, M * critical, M * exposed,
        (work + late) * (c.fill - 1), late, update / bandwidth,
    )  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """The forecast of a layout: its seconds per step and bytes per chip.

    The layout may have columns, one entry for each of many layouts, on a network with columns. Then so do the numbers.
    """

    job: Job
    network: Network
    layout: Layout

    @cached_property
    def compute(self) -> Compute:
        """The computing of a step, per chip."""
        return compute(self.job, self.network.chip, self.layout)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The collectives of a step."""
        every = ledger(self.job, self.compute, self.layout, self.network.lanes)
        return tuple(entry for entry in every if np.any(entry.moved > 0))

    @cached_property
    def held(self) -> Held:
        """The bytes on the fullest chip."""
        return held(self.job, self.compute, self.layout)

    @property
    def room(self) -> float:
        """Bytes of a chip that may be used."""
        return self.job.headroom * self.network.chip.need("hbm_bytes")

    @property
    def misses(self) -> Amount:
        """Bytes that a chip lacks."""
        return np.maximum(0.0, self.held.total - self.room)

    @property
    def fits(self) -> bool:
        """Whether a chip has enough memory."""
        return bool(self.misses == 0)

    @cached_property
    def bounds(self) -> tuple[Amount, Amount]:
        """The least seconds of a step, and its seconds if nothing overlapped."""
        return step_bounds(self.job, self.compute, self.entries, self.layout.microbatches)

    @property
    def bound(self) -> Amount:
        """The least seconds of a step."""
        return self.bounds[0]

    @property
    def worst(self) -> Amount:
        """Seconds of a step if nothing overlapped."""
        return self.bounds[1]

    @cached_property
    def parts(self) -> StepParts:
        """The parts of the forecast."""
        return forecast(self.job, self.network.chip, self.compute, self.layout, self.entries, self.held)

    @property
    def forecast(self) -> Amount:
        """The likely seconds of a step."""
        return self.parts.total

    @cached_property
    def cost(self) -> Cost:
        """The parts of the bound: forward and backward, computing and each axis's collectives."""
        times: tuple[dict[str, float], ...] = ({}, {})
        for entry in self.entries:
            for way, count in enumerate(entry.ways):
                if count:
                    times[way][entry.axis] = times[way].get(entry.axis, 0.0) + float(count * entry.seconds)
        overlap = "sum" if self.job.overlap == "none" else self.job.overlap
        forward, backward = (
            Cost(float(self.layout.microbatches * once), tuple(sorted(by_axis.items())), overlap)
            for once, by_axis in zip((self.compute.forward, self.compute.backward), times, strict=True)
        )
        return forward + backward

    @property
    def useful(self) -> float:
        """Seconds of the model's FLOPs at the chips' peak."""
        return self.job.flops() / self.layout.chips / self.network.chip.flops(self.job.dtype)

    @property
    def bubble(self) -> float:
        """The share of a step in which the fullest stage waits for the pipeline."""
        return 1 - 1 / self.compute.fill

    @property
    def mfu_limit(self) -> float:
        """Useful FLOPs over the peak at the bound, the most that the roofline allows."""
        return self.useful / self.bound

    @property
    def mfu(self) -> float:
        """Useful FLOPs over the peak at the forecast."""
        return self.useful / self.forecast

    @property
    def per_chip(self) -> float:
        """Tokens per second and chip at the forecast."""
        return self.job.batch / self.forecast / self.chips

    @property
    def chips(self) -> int:
        """The number of chips."""
        return self.layout.chips

    def size(self, axis: str) -> int:
        """Return the size of a mesh axis."""
        return self.layout.sizes[axis]

    @property
    def name(self) -> str:
        """The name of the layout."""
        return self.layout.name

    @property
    def bytes(self) -> dict[str, float]:
        """V of a chip's collectives in a step by mesh axis, an AllReduce counted twice."""
        moved: dict[str, float] = {}
        for entry in self.entries:
            moved[entry.axis] = moved.get(entry.axis, 0.0) + float(entry.moved)
        return {axis: moved[axis] for axis in AXES if moved.get(axis)}


def evaluate(job: Job, network: Network, layout: Layout) -> Estimate:
    """Return the time and memory of one layout."""
    return Estimate(job, network, layout)
