"""Sets of times as lists of intervals (start, end), sorted and apart from each other; seconds.

union([(0, 2), (1, 3)]) -> [(0, 3)]      length(...) -> 3      intersect, subtract: of two such lists
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain

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
    """The times in both; as quick for a short b as if a were short too."""
    found, i, j = [], max(0, bisect_right(a, b[0]) - 1) if b else 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        found += [(start, end)] if start < end else []
        i, j = (i + 1, j) if a[i][1] <= b[j][1] else (i, j + 1)
    return found


def gaps(intervals: Sequence[Interval], within: Interval) -> list[Interval]:
    """What the intervals leave of one that is to be covered."""
    start, end = within
    edges = [start, *chain(*intersect(intervals, [within])), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """What of a is not in b; as quick for a short a as if b were short too."""
    return intersect(a, gaps(b, (a[0][0], a[-1][1]))) if a else []
