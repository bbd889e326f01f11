"""The memory of live tensors over time, as the allocator reports it, by line."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise

from scaling.profile.timeline import RankTimeline


@dataclass(frozen=True)
class Moment:
    """Bytes allocated since the profile began that live when a line's result is there, and the most until the next."""

    line: str
    when: float
    live: int
    peak: int


def memory_by_line(timeline: RankTimeline, step: int = 0) -> list[Moment]:
    """After each line of a step; the first row is the step's beginning."""
    totals = [0, *accumulate(nbytes for _, nbytes in timeline.memory)]  # once so many were made and freed
    start, end = timeline.steps[step]
    runs = sorted(timeline.of_step(step), key=lambda run: run.end)
    borders = [("", start), *((run.line, run.end) for run in runs), ("", end)]
    found = []
    for (line, when), (_, until) in pairwise(borders):
        first, last = (bisect_right(timeline.memory, t, key=lambda change: change[0]) for t in (when, until))
        found.append(Moment(line, when, totals[first], max(totals[first : last + 1])))
    return found
