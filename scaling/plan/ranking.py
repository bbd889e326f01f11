"""Which of two layouts is the better: what fits, then the shortest forecast, and of those as fast, the simplest."""

import numpy as np

from scaling.cost.lanes import Amount
from scaling.hardware import Chip
from scaling.plan.evaluate import Estimate
from scaling.plan.job import Job
from scaling.plan.layout import Layout

COMPLEXITY = {"pod": 0, "data": 1, "fsdp": 1, "tensor": 2, "expert": 2, "pipe": 3, "context": 3}
TIE = 0.03  # forecasts so much longer than the shortest, by share, count as equal to it


def complexity(layout: Layout) -> int:
    """How much there is to a layout: replicas or shards are little, stages and parts of sequences the most."""
    return sum(COMPLEXITY[axis] for axis, n in layout.sizes.items() if n > 1)


def simplest_first(chosen: list[tuple]) -> list[tuple]:
    """In order of rank, but for the first: of all as fast as the fastest, within TIE, the simplest, and of those the
    shortest without overlap: TP in the node rather than beyond it, replicas rather than shards."""
    order = sorted(chosen, key=lambda one: one[0])
    if not order or order[0][0][0] > 0:
        return order
    as_fast = [one for one in order if one[0][0] == 0 and one[0][1] <= (1 + TIE) * order[0][0][1]]
    first = min(as_fast, key=lambda one: (complexity(one[2]), one[0][2]))
    return [first, *(one for one in order if one is not first)]


def room(job: Job, chip: Chip) -> float:
    return job.headroom * chip.need("hbm_bytes")


def misses_by(job: Job, found: Estimate) -> Amount:
    """Bytes that a chip lacks."""
    return np.maximum(0.0, found.held.total - room(job, found.network.chip))


def fits(job: Job, found: Estimate) -> bool:
    return bool(misses_by(job, found) == 0)


def rank(job: Job, found: Estimate) -> tuple:
    """What fits first; then the shortest forecast."""
    return misses_by(job, found), found.forecast, found.worst, found.held.total
