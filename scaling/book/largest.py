"""The largest of some differences, for those who judge by it."""

from collections.abc import Iterable


def largest(numbers: Iterable[float]) -> float:
    """The largest; NaN if one of them is: `max` keeps what stands before a NaN, which then goes unseen."""
    return max(numbers, key=lambda x: (x != x, x))
