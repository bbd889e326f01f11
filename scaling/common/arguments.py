"""Check the numbers, names and files that callers give. A bool or a text never counts as a number here."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from operator import index
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a table"}
WORDS |= {list: "a list", tuple: "a list", NoneType: "nothing"}
WORDS |= {Integral: WORDS[int], Real: WORDS[float]}  # numpy's too
ANYTHING: Mapping[str, Any] = {}  # no restrictions


def is_real(value: Any) -> bool:
    """Return whether a value is a real number of any kind, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def positive(**values) -> None:
    """Raise a ValueError that names the first value which is not a positive, finite number."""
    for name, value in values.items():
        if not (is_real(value) and isinstance(value, (int, float)) and 0 < value < math.inf):
            _refuse(name, value, "must be a positive number", "give a finite one above 0")


def not_negative(**values) -> None:
    """Raise a ValueError that names the first value which is negative or not a number (or a tensor of one number)."""
    for name, value in values.items():
        number: Any = value.item() if hasattr(value, "numel") and value.numel() == 1 else value
        if not (is_real(number) and 0 <= number < math.inf):
            _refuse(name, value, "must be a number, zero or more", "give a finite one, at least 0")


def whole(least: int = 1, **values) -> None:
    """Raise a ValueError that names the first value which is not a whole number of at least `least`."""
    for name, value in values.items():
        if not (is_real(value) and isinstance(value, int) and value >= least):
            _refuse(name, value, f"must be a whole number, {least} or more", f"give an int of at least {least}")


def whole_numbers(name: str, values) -> list[int]:
    """Return the values (Python's, numpy's or a tensor's) as a list of ints.

    Raises:
        ValueError: some are floats, bools or texts, which `int` would cut off or read.
    """
    try:
        given = list(values.tolist() if hasattr(values, "tolist") else values)
        found = [index(value) for value in given]
    except TypeError:
        _refuse(name, values, "must be whole numbers", "give a list of ints")
    if any(isinstance(value, bool) for value in given):
        _refuse(name, values, "has bools among its numbers", "give a list of ints")
    return found


def flag(**values) -> None:
    """Raise a ValueError that names the first value which is not True or False, since "no" would count as true."""
    for name, value in values.items():
        if not isinstance(value, bool):
            _refuse(name, value, "must be True or False", "give a bool")


def one_of(name: str, value, choices) -> None:
    """Raise a ValueError that lists the choices unless the value is one of them."""
    if value not in choices:
        _refuse(name, value, f"one of {', '.join(map(repr, choices))}", "choose one of these")


def of_type(name: str, value, *kinds: type) -> None:
    """Raise a ValueError unless the value has one of these types.

    A whole number also counts as a float. A bool counts as neither.
    """
    fits = isinstance(value, (*kinds, int) if float in kinds else kinds)
    if not fits or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(WORDS.get(kind, kind.__name__) for kind in kinds if kind is not NoneType)
        raise ValueError(f"{name} is {quoted(value)}: must be {expected}\n  fix: give it as {expected}")


def check_within(name: str, value: Any, allowed: "str | tuple") -> None:
    """Raise a ValueError unless a value is allowed.

    `allowed` is an interval of numbers, such as "[0, 1)" or "(0, inf)", or a tuple of the values to choose from.
    """
    if isinstance(allowed, tuple):
        fits, wanted = value in allowed, f"one of {', '.join(map(repr, allowed))}"
    else:
        low, high = map(float, allowed[1:-1].split(","))
        fits = is_real(value) and low <= value <= high
        fits = fits and (value > low or allowed[0] == "[") and (value < high or allowed[-1] == "]")
        wanted = f"in {allowed}"
    if not fits:
        raise ValueError(f"{name} is {quoted(value)}: must be {wanted}\n  fix: choose another value, {wanted}")


def check_fields(record, name: str = "", within: "Mapping[str, str | tuple]" = ANYTHING) -> None:
    """Raise a ValueError that names the first field of a dataclass whose value does not have the field's type.

    `within` says for some fields which values `check_within` allows. A field of numbers may be None if its type is.
    """
    for field in fields(record):
        kinds: tuple[Any, ...] = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
        of_type(f"{name}{field.name}", getattr(record, field.name), *(get_origin(kind) or kind for kind in kinds))
    for field, allowed in within.items():
        if (value := getattr(record, field)) is not None or isinstance(allowed, tuple):
            check_within(f"{name}{field}", value, allowed)


def read_table(path: "str | Path") -> dict[str, Any]:
    """Return the table that a file holds, read as TOML if its name ends in .toml, else as JSON.

    Raises:
        ValueError: the file cannot be read or holds no table; the message says why.
    """
    path = Path(path)
    form, read = ("TOML", tomllib.loads) if path.suffix == ".toml" else ("JSON", json.loads)
    try:
        table = read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}\n  fix: give a file that can be read") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a {form} file: {error}\n  fix: write it as {form}") from error
    of_type(str(path), table, dict)
    return table


def table_if_any(path: "str | Path") -> dict[str, Any]:
    """Return the table that a file holds, as `read_table` does, or an empty one if there is no such file."""
    return read_table(path) if Path(path).is_file() else {}


def quoted(value: Any) -> str:
    """Return the start of repr(value); for numbers whose digits Python may refuse to write, a description."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 128:
        return f"a number of {value.bit_length()} bits"
    try:
        return repr(value)[:60]
    except RecursionError:
        return "a value that is nested too deeply"
    except ValueError:
        return f"a {type(value).__name__} of numbers with thousands of digits"


def _refuse(name: str, value: Any, wanted: str, fix: str) -> NoReturn:
    raise ValueError(f"{name} = {quoted(value)}: {wanted}\n  fix: {fix}") from None


def shortened(text: str) -> str:
    """Cut a text that is too long for a line, as error messages quote it."""
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text):,} characters)"
