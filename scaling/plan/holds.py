"""What a chip holds at its fullest: params, gradients, optimizer state, activations, and the working set (Parts 4 to
6).

Of the first stage, which keeps the most microbatches, and of the last, which has the unembedding: the larger. The tests
hold it to the bytes that an abstract mesh counts for the strategies' own code.
"""

from dataclasses import dataclass

import numpy as np

from scaling.plan.job import Job
from scaling.plan.layout import POLICIES, Layout
from scaling.plan.ledger import Compute, Number, is_one, weight_elements
from scaling.spec import dtype_bytes


@dataclass(frozen=True)
class Held:
    """Bytes on one chip. `working`: gathered weights, whole gradients on their way, logits, a layer computed again.

    `shares`: of the params held, the share whose optimizer state is here, which this chip updates.
    """

    params: Number
    grads: Number
    optimizer: Number
    activations: Number
    working: Number
    shares: Number = 1.0

    @property
    def total(self) -> Number:
        return self.params + self.grads + self.optimizer + self.activations + self.working


def held(job: Job, c: Compute, l: Layout) -> Held:
    """Bytes on the fullest chip."""
    w, act = job.work, job.act_bytes
    dense, experts = weight_elements(job, l)
    dense = dense + w.small
    ways = (l.fsdp * l.context * l.expert, l.fsdp * l.context)  # of ZeRO-3: dense weights, experts
    ranks = (l.data * l.context * l.expert, l.data * l.context)  # of ZeRO-1
    sharded = np.where(l.zero == 3, 1, 0)
    params, states, whole = 0.0, 0.0, 0.0
    ends: list[Number] = [end / l.tensor for end in w.ends]
    first, last = ends
    both = (
        max(first.max(), last.max())
        if w.tied and hasattr(first, "max")
        else max(first, last)
        if w.tied
        else first + last
    )
    ends = np.where(l.pipe == 1, both, np.maximum(first, last))
    for elements, way, rank in ((c.layers * dense + ends, ways[0], ranks[0]), (c.layers * experts, ways[1], ranks[1])):
        params = params + elements / np.where(sharded, way, 1)
        states = states + elements / np.where(sharded, way, np.where(l.zero == 1, rank, 1))
        whole = whole + elements
    once = sharded * is_one(l.reduce, ("each", "once"), "once") * (l.microbatches > 1)
    grads = np.where(once, whole, params)

    split, apart = saved(job, l)
    each = c.tokens * c.layers * act
    narrow = np.where(is_one(l.remat, POLICIES, "none", "gather"), w.operands * (1 - dtype_bytes(job.dtype) / act), 0.0)
    activations = c.live * each * (split / l.tensor + apart - narrow / l.tensor)  # fp8 keeps operands in fp8

    layer = dense + experts
    gathered = sharded * np.where(ways[0] > 1, 2 * layer, 0) * act  # this layer's and the next one's
    scattered = (
        sharded * np.where((ways[0] > 1) & ~np.asarray(once, bool), 2 * layer, 0) * act
    )  # gradients on their way
    logits = np.where(w.ends[1] > 0, c.tokens * w.ends[1] / w.D / l.tensor * (act + 4), 0.0)
    recomputes = is_one(l.remat, POLICIES, "block", "matmuls")
    all_of_it = w.saved["none"]
    again = np.where(recomputes, c.tokens * act * (all_of_it[0] / l.tensor + all_of_it[1]), 0.0)
    passing = c.tokens * act * (w.D + max(w.dense / w.D, w.D) / l.tensor)  # a layer's cotangents
    return Held(
        params=job.param_bytes * params, grads=job.grad_bytes * grads, optimizer=job.optimizer_bytes * states,
        activations=activations, working=np.maximum(gathered + scattered + again + passing, logits),
        shares=states / params,
    )  # fmt: skip


def saved(job: Job, l: Layout) -> tuple[Number, Number]:
    """Elements that a layer saves of a token: (split over tensor, not split)."""
    found = job.work.saved
    if isinstance(l.remat, str):
        return found[l.remat]
    rows = [found.get(policy, found["none"]) for policy in POLICIES]
    split, whole = (np.array([pair[i] for pair in rows])[l.remat] for i in (0, 1))
    return split, whole
