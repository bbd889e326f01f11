"""The fullest memory of a chip: params, gradients, optimizer state, activations, and buffers (Parts 4 to 6).

The fullest moment of a step may be the loss; the backward pass of the last layer, when all activations are live, of the
layer before it, when gradients are live as well, or of the first layer; or the end of the step. All stages together
store the embedding and the unembedding, and a stage gathers the one that it computes (strategies.transformer.stages).
The tests compare these formulas with the bytes that an abstract mesh counts. A job with `runs` is counted as
`scaling.train` runs it. Of 60 jobs that were drawn after the formulas were written, 54 are within 5% of the count that
the run's own step gives (`train.dry`).
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
    w = job.work
    dense, experts = weight_elements(job, l)
    ways, _, parts = zip(*(weight_ways(job, l, lane) for lane in ("weights", "experts")), strict=True)
    sharded = (l.zero == 3) & (ways[0] > 1)
    layers = l.chunks * depth(job, l)
    ends = (max(w.ends) if w.tied else sum(w.ends)) / (l.tensor * l.pipe)
    whole = layers * (dense + w.small) + ends, layers * experts
    shards = [np.where(l.zero == 3, way, np.where(l.zero == 1, part, 1)) for way, part in zip(ways, parts, strict=True)]
    params = sum(elements / np.where(l.zero == 3, way, 1) for elements, way in zip(whole, ways, strict=True))
    states = sum(elements / way for elements, way in zip(whole, shards, strict=True))
    once = sharded & (l.microbatches > 1) & is_one(l.reduce, REDUCES, "once")
    grads = job.grad_bytes * np.where(once, sum(whole), params)

    layer = kept(job, c, l)
    activations, one = c.live * layers * layer, layers * layer
    if job.offload:  # the chip holds two layers' inputs: one in use, and one in flight
        block = is_one(l.remat, POLICIES, "block")
        activations, one = (np.where(block, np.minimum(some, 2 * layer), some) for some in (activations, one))
    most = beside_state(job, c, l, activations, one, shards, sharded, once)
    return Held(
        params=job.param_bytes * params, grads=grads, optimizer=job.optimizer_bytes * states, activations=activations,
        working=np.maximum(most - activations - grads, 0.0), shares=states / params,
        apart=np.maximum(activations + grads - most, 0.0),
        reserved=FRAMEWORKS[job.framework].reserved * np.maximum(most - grads, activations),
    )  # fmt: skip


def beside_state(
    job: Job, c: Compute, l: Layout, activations: Amount, one: Amount, shards: list, sharded: Amount, once: Amount
) -> Amount:
    """Return the bytes beside params and state of `scaling.train`'s step at its fullest moment.

    `shards` are two numbers: over how many chips the gradients of dense weights and of experts are scattered.
    `once` says whether they are scattered after the last microbatch, as whole sums. A stage of a pipeline adds up whole
    gradients, has memory for the scattered ones as well, and holds its table of the vocabulary and its gradient whole.
    """
    w, act, grad, M = job.work, job.act_bytes, job.grad_bytes, l.microbatches
    dense, experts = weight_elements(job, l)
    layers, staged = l.chunks * depth(job, l), l.pipe > 1
    X, XE = shards
    whole = grad * layers * (dense + w.small + experts)
    own = grad * layers * ((dense + w.small) / X + experts / XE)
    first, last = (n / l.tensor for n in w.ends)  # the tables
    both, left = (last, grad * last) if w.tied else (first + last, grad * last / X)  # a tied table waits for both ends
    layer, table = kept(job, c, l), np.where(sharded, act, 0.0)

    stored = min(1.0, job.param_bytes / act)  # frozen weights in 4 bits are gathered in 4 bits
    gathered = (1 + stored * (layers > 1)) * act * (dense + experts)  # this layer's and the next one's
    gathered = np.where(sharded, gathered, 0.0)
    forward, back = (gathered + moment for moment in moments_of_layer(job, c, l))
    top = np.where(sharded & np.logical_not(staged), act * (dense + experts), 0.0)  # the last layer's stay for backward
    loss = _loss(job, c, l) + top
    embedding = (4 * (grad > 0) + grad * (grad < 4)) * first  # its gradient in fp32, and in the dtype of gradients
    largest = (1 - w.up) * np.maximum(dense - w.projections / l.tensor, experts)  # of a layer's leaves
    flying = np.where(sharded & np.logical_not(once), whole / layers, 0.0)  # a layer's gradients, whole, are scattered
    later = back + flying  # of all layers but the last: the gradients of the layer above are being scattered
    new = gathered + act * (grad > 0) * (dense + experts) + flying + 2 * c.tokens * w.D / l.tensor * act
    new = np.maximum.reduce([new, later, new + flying - 2 * act * (dense + experts) + act * largest])
    sums = np.where(once | np.logical_not(sharded), whole, own)  # of the microbatches before
    ends = grad * np.where(sharded & np.logical_not(once), both / X, both)

    alone = np.maximum.reduce([
        activations + back + grad * last,  # the head's gradient is scattered while the last layer runs backward
        activations - layer + np.maximum(back, new) + sums / layers + left,
        layer + np.maximum(back, new) + (layers - 1) / layers * sums + left,
        sums + flying + embedding + left + act * c.tokens * w.D / l.tensor,
        one + np.maximum(loss, forward) + table * last,
    ])  # fmt: skip
    waiting = np.where(
        M > 2, ends + table * both + left * w.tied * np.logical_not(once), left + grad * first * (not w.tied)
    )
    added = np.maximum.reduce([
        activations + back + sums + waiting + grad * last - left,
        activations - layer + new + sums + waiting,
        one + np.maximum(loss, forward) + sums + ends + table * last,
    ])  # fmt: skip
    stacked = own + grad * both / X + grad * layers * largest / np.where(experts > 0, XE, X)
    single = np.maximum(stacked, np.where(M == 1, alone, added))

    places = np.where(X > 1, own, 0.0) * job.runs
    posted = np.minimum(M - 1, 8) * c.tokens * w.D / l.tensor * act * job.runs
    full = np.where(c.live < M, activations, activations - one)  # before it there are no sums
    stages = np.maximum.reduce([
        activations + back + np.where(X > 1, own, whole) + act * first + posted,
        full + back + places + whole + (act + grad) * first + posted,
        one + np.maximum(back, loss) + places + whole + (act + grad) * last + posted,
        job.runs * (own + act * np.maximum(first, last) + grad * both / X * (1 + 1 / l.pipe)),
    ])  # fmt: skip
    return np.where(staged, stages, single)


def kept(job: Job, c: Compute, l: Layout) -> Amount:
    """Return the bytes that a layer saves for the backward pass of a microbatch."""
    w, act = job.work, job.act_bytes
    split, apart = of_policy(w.saved, l)
    if FRAMEWORKS[job.framework].sequence:
        split, apart = split + apart, 0.0 * apart
    split = split + stored_scores(job, l) * is_one(l.remat, POLICIES, "none")
    plain = is_one(l.remat, POLICIES, "none", "attention")
    narrow = np.where(plain, w.operands * (1 - dtype_bytes(job.dtype) / act), 0.0)  # fp8 keeps operands in fp8
    return c.tokens * act * (split / l.tensor + apart - narrow / l.tensor)


def of_policy(rows: dict[str, tuple], l: Layout) -> np.ndarray:
    """Return the numbers that belong to the layouts' checkpointing, from the numbers of each policy."""
    codes = POLICIES.index(l.remat) if isinstance(l.remat, str) else l.remat
    return np.array([rows[policy] for policy in POLICIES])[codes].T


def stored_scores(job: Job, l: Layout) -> Amount:
    """Return the elements that a layer stores per token of capped scores and their softmax; a ring stores none."""
    return np.where(l.context == 1, job.work.scores, 0.0) * job.runs


def moments_of_layer(job: Job, c: Compute, l: Layout) -> tuple[Amount, Amount]:
    """Return the most bytes of a layer's forward and backward, beside saved activations and gathered weights.

    The backward pass holds most at the end of the MLP or of attention, when the norm is differentiated. It then holds
    the arrays computed again, the cotangents, the gradients of weights in the dtype of the products, and the norm's two
    arrays, plus one in fp32. In both passes of a layer with experts, a token also has rows of D for each of its
    experts, in up to three forms at once: its results' cotangents, and its rows' cotangents before and after they
    are sent.
    """
    w, act, Y = job.work, job.act_bytes, l.tensor
    token = act * c.tokens
    dense, experts = weight_elements(job, l)
    new = act * (job.grad_bytes > 0)
    again = of_policy(w.again, l)
    scores = stored_scores(job, l) * np.logical_not(is_one(l.remat, POLICIES, "none"))
    attended, mlp = (again[0] + scores) / Y + again[1], again[2] / Y + again[3]
    before = np.where(is_one(l.remat, POLICIES, "block"), attended, 0.0)  # attention is computed again first
    wide, D = np.where(Y > 1, w.D, 0.0), w.D / Y
    second = token * (attended + wide + 7 * D) + new * (dense + experts)
    block = w.queries + 2 * w.kv / w.D, 6 * w.queries + 5 * w.kv / w.D  # of context attention, kept in fp32 as it sums
    ring = token * (attended + wide + 3 * D + block[0] / Y) + 4 * c.tokens * block[1] / Y
    second = np.maximum(second, np.where(l.context > 1, ring + new * (dense + experts - w.projections / Y), 0.0))
    if w.experts:
        rows = w.copies * w.D
        forward = token * (before + mlp + 2 * rows + 3 * D + wide)
        products = w.inner * w.up / Y  # dTmp and dGate
        first = token * (before + mlp + products + 4 * D + wide)
        first = np.maximum(first + token * 3 * rows, first + token * rows + new * experts)
    else:
        forward, first = 0.0, token * (before + mlp + wide + w.inner / Y + 6 * D) + new * (dense - w.projections / Y)
    masks = np.where(l.context == 1, token * w.masks, 0.0) * job.runs
    masks = masks * np.where(is_one(l.remat, POLICIES, "none"), c.live, 1)  # microbatches whose tape has it
    return forward + masks, np.maximum(first, second) + masks


def depth(job: Job, l: Layout) -> Amount:
    """Return the slots for layers in each chunk of a stage; if L does not divide, the last chunks leave one empty."""
    return np.ceil(job.work.L / (l.pipe * l.chunks))


def _loss(job: Job, c: Compute, l: Layout) -> Amount:
    """Return the bytes of the loss.

    These are the last layer's normed output and its cotangent; a chunk's logits, as computed and in fp32, and then the
    chunk's gradient of the unembedding; and for several chunks their sum in fp32.
    """
    D, table = job.work.D, job.work.ends[1] / l.tensor
    if each := FRAMEWORKS[job.framework].logits:
        return (2 + 1 / l.tensor) * c.tokens * D * job.act_bytes + each * c.tokens * table / D
    chunks = np.maximum(1, np.ceil(4 * c.tokens * table / D / LIMITS.chunk))
    logits = np.ceil(c.tokens / chunks) * table / D
    grads = table * (job.grad_bytes > 0)
    one = logits * job.act_bytes + np.maximum(4 * logits, job.act_bytes * grads)
    more = grads * np.where(chunks > 1, 4, 0) * (job.act_bytes < 4)
    return (2 + 1 / l.tensor) * c.tokens * D * job.act_bytes + one + more
