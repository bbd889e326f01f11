"""The fullest memory of a chip: params, gradients, optimizer state, activations, and buffers (Parts 4 to 6).

The fullest moment is one of five: the loss; in the backward pass the last layer, when all activations are live, the
layer before it, when gradients are live as well, and the first layer; and the end of the step. Stages
store the embedding and unembedding together, and each gathers its own (strategies.transformer.stages). The tests
compare this with the bytes that an abstract mesh counts for the book's stack and for a Transformer whose params are
whole. The memory of a run of `scaling.train` is counted by its own step (`train.dry`).
"""

from dataclasses import dataclass

import numpy as np

from scaling.common.limits import LIMITS
from scaling.cost.lanes import Amount
from scaling.plan.job import FRAMEWORKS, POLICIES, REDUCES, Job, Layout
from scaling.plan.ledger import Compute, is_one, weight_elements, weight_ways
from scaling.spec import dtype_bytes


@dataclass(frozen=True)
class Held:
    """Bytes on one chip, by kind.

    `working`: gathered weights, whole gradients in flight, logits, and a recomputed layer. `apart`: bytes counted twice
    that are never live together, because with one microbatch activations are freed as gradients are computed.
    `reserved`: blocks that the framework's allocator keeps. `shares`: the share of the chip's params whose optimizer
    state is here and which this chip updates.
    """

    params: Amount
    grads: Amount
    optimizer: Amount
    activations: Amount
    working: Amount
    apart: Amount = 0.0
    reserved: Amount = 0.0
    shares: Amount = 1.0

    @property
    def total(self) -> Amount:
        """Bytes at the fullest moment."""
        used = self.params + self.grads + self.optimizer + self.activations + self.working - self.apart
        return used + self.reserved


def held(job: Job, c: Compute, l: Layout) -> Held:
    """Return the bytes on the fullest chip.

    This is a chip of the first stage, which keeps the most microbatches, or of the last, which has the loss.
    """
    w, act = job.work, job.act_bytes
    dense, experts = weight_elements(job, l)
    ways, _, parts = zip(*(weight_ways(job, l, lane) for lane in ("weights", "experts")), strict=True)
    sharded = (l.zero == 3) & (ways[0] > 1)
    layers = l.chunks * depth(job, l)
    ends = (max(w.ends) if w.tied else sum(w.ends)) / (l.tensor * l.pipe)
    params, states, whole = 0.0, 0.0, 0.0
    every = (layers * (dense + w.small) + ends, ways[0], parts[0]), (layers * experts, ways[1], parts[1])
    for elements, way, part in every:
        params = params + elements / np.where(l.zero == 3, way, 1)
        states = states + elements / np.where(l.zero == 3, way, np.where(l.zero == 1, part, 1))
        whole = whole + elements
    own = job.grad_bytes * params
    late = sharded & (l.microbatches > 1) & is_one(l.reduce, REDUCES, "once")
    grads = np.where(late, job.grad_bytes * whole, own)

    split, apart = saved(job, l)
    narrow = np.where(
        is_one(l.remat, POLICIES, "none", "attention"), w.operands * (1 - dtype_bytes(job.dtype) / act), 0.0
    )
    one = c.tokens * layers * act * (split / l.tensor + apart - narrow / l.tensor)  # fp8 keeps operands in fp8
    activations, layer = c.live * one, one / layers
    if job.offload:  # the chip holds two layers' inputs: one in use, and one in flight
        block = is_one(l.remat, POLICIES, "block")
        activations, one = (np.where(block, np.minimum(kept, 2 * layer), kept) for kept in (activations, one))

    first, second = cotangents(job, c, l)
    backward = np.maximum(first, second)
    weights = act * (dense + experts)
    stored = min(1.0, job.param_bytes / act)  # frozen weights in 4 bits are gathered as they are stored
    gathered = np.where(sharded, (1 + stored) * weights, 0.0)  # this layer's and the next one's
    flying = np.where(sharded & np.logical_not(late), weights, 0.0)  # a layer's gradients, whole, on their way
    flying = flying * (job.grad_bytes > 0)  # frozen weights have none
    loss = _loss(job, c, l, sharded)
    table = np.where(l.pipe > 1, w.ends[1] / l.tensor * (act + job.grad_bytes), 0.0)  # gathered, its gradient whole
    working = np.maximum(gathered + backward + 2 * flying, loss) + table
    early = 0.0 if any(w.ends) else np.where(l.zero == 1, 0.0, grads)  # a stack's places for them, from the beginning
    attention = job.grad_bytes * layers * w.projections / l.tensor  # whose gradients come after an MLP's
    each, rest = 0.0, grads  # the gradients of one layer of a Transformer, which come as its layers are run back
    if any(w.ends):
        each = job.grad_bytes * (dense + w.small + experts)
        rest = grads - each * layers
    due = np.where(sharded, flying + early, rest + each - attention / layers)
    later = np.where(sharded, flying + np.maximum(flying, grads), rest + 2 * each)
    alone = np.maximum.reduce([
        activations + gathered + first + early,
        activations + gathered + second + due,
        activations - layer + gathered + first + due,
        activations - layer + gathered + second + later,
        layer + gathered + first + grads,
        one + loss,
    ])  # fmt: skip
    with_more = np.maximum.reduce([
        activations + gathered + backward + 2 * flying + grads,
        one + loss + grads, np.where(late, grads + 1.5 * own, 0.0),
    ])  # fmt: skip
    most = np.where(l.microbatches == 1, alone, with_more) + table
    return Held(
        params=job.param_bytes * params, grads=grads, optimizer=job.optimizer_bytes * states, activations=activations,
        working=np.maximum(working, most - activations - grads), shares=states / params,
        apart=np.maximum(activations + grads + working - most, 0.0),
        reserved=FRAMEWORKS[job.framework].reserved * np.maximum(most - grads, activations),
    )  # fmt: skip


def depth(job: Job, l: Layout) -> Amount:
    """Return the slots for layers in each chunk of a stage; if L does not divide, the last chunks leave one empty."""
    return np.ceil(job.work.L / (l.pipe * l.chunks))


def cotangents(job: Job, c: Compute, l: Layout) -> tuple[Amount, Amount]:
    """Return bytes of one layer's backward pass, recomputation included, at two moments.

    The first moment is the fullest before the deferred gradients are computed. The second is the fullest after it,
    later in the MLP or in context attention.
    """
    w, token = job.work, job.act_bytes * c.tokens
    rows = np.where(l.tensor > 1, 2 + 2 / l.tensor, 2)
    split, apart = w.saved["none"]
    again = np.where(is_one(l.remat, POLICIES, "block", "matmuls"), split / l.tensor + apart, 0.0)
    again = again - np.where(is_one(l.remat, POLICIES, "block"), w.D / l.tensor, 0.0)  # attention's result is freed
    attended = split - w.saved.get("attention", (split, 0))[0]
    again = np.where(is_one(l.remat, POLICIES, "attention"), attended / l.tensor, again)
    rests = np.where((l.pipe > 1) & (w.late > 0), depth(job, l) - 1, 0)  # dOut of the stage's other layers
    first = token * ((rows + rests) * w.D + w.inner / l.tensor + again)
    block = w.queries + 2 * w.kv / w.D, 6 * w.queries + 5 * w.kv / w.D  # of context attention, kept in fp32 as it sums
    attention = token * (rows * w.D + again) + c.tokens * (job.act_bytes * block[0] + 4 * block[1]) / l.tensor
    return first, np.maximum(first - token * w.late / l.tensor, np.where(l.context > 1, attention, 0.0))


def _loss(job: Job, c: Compute, l: Layout, sharded: Amount) -> Amount:
    """Return the bytes of the loss.

    These are the last layer's normed output and its cotangent; a chunk's logits, as computed and in fp32, and then the
    chunk's gradient of the unembedding; for several chunks their sum in fp32; and a gathered unembedding.
    """
    if not job.work.ends[1]:
        return 0.0
    D, table = job.work.D, job.work.ends[1] / l.tensor
    if each := FRAMEWORKS[job.framework].logits:
        gathered = table * np.where(sharded, job.act_bytes, 0)
        return (2 + 1 / l.tensor) * c.tokens * D * job.act_bytes + each * c.tokens * table / D + gathered
    chunks = np.maximum(1, np.ceil(4 * c.tokens * table / D / LIMITS.chunk))
    logits = np.ceil(c.tokens / chunks) * table / D
    grads = table * (job.grad_bytes > 0)
    one = logits * job.act_bytes + np.maximum(4 * logits, job.act_bytes * grads)
    more = grads * np.where(chunks > 1, 4, 0) * (job.act_bytes < 4) + table * np.where(sharded, job.act_bytes, 0)
    return (2 + 1 / l.tensor) * c.tokens * D * job.act_bytes + one + more


def saved(job: Job, l: Layout) -> tuple[Amount, Amount]:
    """Return the elements that a layer saves per token: (split over tensor, not split)."""
    found = job.work.saved
    rows = [found.get(policy, found["none"]) for policy in ([l.remat] if isinstance(l.remat, str) else POLICIES)]
    split, whole = (np.array([pair[i] for pair in rows])[0 if len(rows) == 1 else l.remat] for i in (0, 1))
    return (split + whole, 0.0 * whole) if FRAMEWORKS[job.framework].sequence else (split, whole)
