"""Sets of times as lists of intervals (start, end), sorted and apart from each other; seconds.

union([(0, 2), (1, 3)]) -> [(0, 3)]      length(...) -> 3      intersect, subtract: of two such lists
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times that any of the intervals covers; empty ones and those turned round cover none."""
    joined: list[Interval] = []
    for start, end in sorted(each for each in intervals if each[0] < each[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        found += [(start, end)] if start < end else []
        i, j = (i + 1, j) if a[i][1] <= b[j][1] else (i, j + 1)
    return found


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """What of a is not in b."""
    left: list[Interval] = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            left += [(start, b[k][0])] if start < b[k][0] else []
            start = b[k][1]
            k += 1
        left += [(start, end)] if start < end else []
    return left


def within(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """What of the intervals lies from start to end; as quick for a short part of a long list."""
    first = max(0, bisect_right(intervals, (start, end)) - 1)
    last = bisect_right(intervals, (end, end))
    return intersect(intervals[first:last], [(start, end)])


def between(intervals: Sequence[Interval], within: Interval) -> list[Interval]:
    """The gaps that the intervals leave in one that is to be covered."""
    return subtract([within] if within[0] < within[1] else [], intervals)
