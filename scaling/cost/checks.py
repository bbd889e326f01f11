"""What every function here asks of its numbers: sizes and bandwidths are positive, bytes are not negative."""

import math


def positive(**values) -> None:
    """ValueError that names the first value which is not a positive, finite number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{name} = {value!r}: must be a positive number")


def not_negative(**values) -> None:
    """ValueError that names the first value which is negative or no number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name} = {value!r}: must be a number, zero or more")


def whole(**values) -> None:
    """ValueError that names the first value which is not a whole number of 1 or more."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}: must be a whole number, 1 or more")


def one_of(name: str, value, choices) -> None:
    """ValueError that lists the choices."""
    if value not in choices:
        raise ValueError(f"{name} = {value!r}: one of {', '.join(map(repr, choices))}")
