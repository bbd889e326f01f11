"""The memory of live tensors over time, as the allocator reports it, by line."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from scaling.profile.timeline import RankTimeline


@dataclass(frozen=True)
class Moment:
    """Bytes allocated since the profile began that live when a line's result is there, and the most until the next."""

    line: str
    when: float
    live: int
    peak: int


def live(timeline: RankTimeline) -> list[tuple[float, int]]:
    """(when, bytes then alive): of what was made after the profile began, less what was freed."""
    totals = accumulate(nbytes for _, nbytes in timeline.memory)
    return [(when, total) for (when, _), total in zip(timeline.memory, totals, strict=True)]


def memory_by_line(timeline: RankTimeline, step: int = 0) -> list[Moment]:
    """After each line of a step; the first row is the step's beginning."""
    curve = live(timeline)
    start, end = timeline.steps[step]
    borders = [("", start), *((run.line, run.end) for run in sorted(timeline.of_step(step), key=lambda run: run.end))]
    found = []
    for i, (line, when) in enumerate(borders):
        until = borders[i + 1][1] if i + 1 < len(borders) else end
        found.append(Moment(line, when, at(curve, when), most(curve, when, until)))
    return found


def at(curve: Sequence[tuple[float, int]], when: float) -> int:
    place = bisect_right(curve, when, key=lambda point: point[0])
    return curve[place - 1][1] if place else 0


def most(curve: Sequence[tuple[float, int]], start: float, end: float) -> int:
    a, b = (bisect_right(curve, t, key=lambda point: point[0]) for t in (start, end))
    return max([at(curve, start), *(total for _, total in curve[a:b])])
