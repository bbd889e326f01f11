"""Sets of times as sorted lists of disjoint intervals (start, end), in seconds.

For example, union([(0, 2), (1, 3)]) is [(0, 3)], and its length is 3.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times that any of the intervals covers; empty and reversed intervals cover none."""
    joined: list[Interval] = []
    for start, end in sorted(each for each in intervals if each[0] < each[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Return the seconds that disjoint intervals cover."""
    return sum(end - start for start, end in intervals)


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the times in both; for a short b this is as quick as if a were short, too."""
    found, i, j = [], max(0, bisect_right(a, b[0]) - 1) if b else 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        found += [(start, end)] if start < end else []
        i, j = (i + 1, j) if a[i][1] <= b[j][1] else (i, j + 1)
    return found


def gaps(intervals: Sequence[Interval], within: Interval) -> list[Interval]:
    """Return the times of `within` that the intervals do not cover."""
    start, end = within
    edges = [start, *chain(*intersect(intervals, [within])), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the times in a but not in b; for a short a this is as quick as if b were short, too."""
    return intersect(a, gaps(b, (a[0][0], a[-1][1]))) if a else []
