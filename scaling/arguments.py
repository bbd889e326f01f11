"""What functions ask of the numbers and names that they are given. A bool is no number here, nor is a text."""

import math
from operator import index


def positive(**values) -> None:
    """ValueError that names the first value which is not a positive, finite number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{name} = {value!r}: must be a positive number\n  fix: give a finite one above 0")


def not_negative(**values) -> None:
    """ValueError that names the first value which is negative or no number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(
                f"{name} = {value!r}: must be a number, zero or more\n  fix: give a finite one, at least 0"
            )


def whole(least: int = 1, **values) -> None:
    """ValueError that names the first value which is not a whole number of at least `least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            what = f"{name} = {value!r}: must be a whole number, {least} or more"
            raise ValueError(f"{what}\n  fix: give an int of at least {least}")


def whole_numbers(name: str, values) -> list[int]:
    """The values, Python's, numpy's or a tensor's, as a list of ints. ValueError for floats, bools and texts, which
    `int` would cut off or read."""
    try:
        given = list(values.tolist() if hasattr(values, "tolist") else values)
        found = [index(value) for value in given]
    except TypeError:
        raise ValueError(f"{name} = {values!r:.60}: must be whole numbers\n  fix: give a list of ints") from None
    if any(isinstance(value, bool) for value in given):
        raise ValueError(f"{name} = {values!r:.60}: has bools among its numbers\n  fix: give a list of ints")
    return found


def flag(**values) -> None:
    """ValueError that names the first value which is not True or False: "no" would count as true."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} = {value!r}: must be True or False\n  fix: give a bool")


def one_of(name: str, value, choices) -> None:
    """ValueError that lists the choices."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} = {value!r}: one of {listed}\n  fix: choose one of these")
