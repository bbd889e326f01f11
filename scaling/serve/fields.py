"""The fields of a request that comes as JSON, and the errors about wrong ones. No torch."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from scaling.common.arguments import quoted

STOPS, STOP_LENGTH = 64, 1024  # the most stop texts of a request, and the most characters of one
DIGITS = 4300  # the most digits of a number that Python reads


class RequestError(ValueError):
    """A fault in a request. `param` names the field that is wrong, `code` is OpenAI's word for the mistake."""

    def __init__(self, reason: str, param: str | None = None, code: str | None = None):
        super().__init__(reason)
        self.param, self.code = param, code


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Turn an error of the block into a RequestError that names this field, unless the error names one already."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RequestError(str(error), getattr(error, "param", None) or param, getattr(error, "code", None)) from None


class Fields:
    """The fields of a JSON object, each read with its type; a RequestError names the reason and the field.

    A key whose value is null counts as not given, also inside objects.
    """

    def __init__(self, text: "str | bytes"):
        try:
            table = json.loads(
                text, parse_constant=self._no_number, parse_int=self._int, object_hook=self._without_nulls
            )
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"is not JSON: {error}\n  fix: send a JSON object") from None
        except RecursionError:
            raise ValueError("is nested too deeply\n  fix: send an object of plain fields") from None
        if not isinstance(table, dict):
            raise ValueError('not a JSON object\n  fix: send one, such as {"prompt": "Hi"}')
        self.given: Mapping[str, Any] = table

    @staticmethod
    def _no_number(name: str) -> None:
        raise ValueError(f"{name} is not a number of JSON\n  fix: give a finite one")

    @staticmethod
    def _int(digits: str) -> int:
        if len(digits) > DIGITS:
            raise ValueError(f"has a number of {len(digits):,} digits\n  fix: give one of at most {DIGITS:,}")
        return int(digits)

    @staticmethod
    def _without_nulls(table: dict) -> dict:
        return {name: value for name, value in table.items() if value is not None} if None in table.values() else table

    def only(self, known: "tuple[str, ...]") -> None:
        """Check that all fields are known."""
        if unknown := min(self.given.keys() - set(known), default=None):
            text = f"unknown field {unknown!r:.80}\n  fix: give only these: {', '.join(known)}"
            raise RequestError(text, unknown[:80])

    def whole(self, name: str, default: int, least: int, top: int) -> int:
        """Return a whole number from `least` to `top`."""
        value = self.given.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= top:
            text = (
                f"{name}={quoted(value)} is not a whole number from {least} to {top}\n  fix: give one, or leave it out"
            )
            raise RequestError(text, name)
        return value

    def real(self, name: str, default: float | None = None) -> Any:
        """Return a number as a float, or None."""
        value = self.given.get(name, default)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise RequestError(f"{name}={quoted(value)} is not a number\n  fix: give one, or leave it out", name)
        return None if value is None else as_float(value)

    def flag(self, name: str) -> bool:
        """Return a field that is true or false."""
        value = self.given.get(name, False)
        if not isinstance(value, bool):
            raise RequestError(f"{name}={quoted(value)} is neither true nor false\n  fix: give one of them", name)
        return value

    def stops(self) -> tuple[str, ...]:
        """Return the stop texts: one, or a list of them, none of them empty."""
        value = self.given.get("stop", [])
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or len(value) > STOPS:
            raise RequestError(f"stop is not a list of at most {STOPS} texts\n  fix: give fewer", "stop")
        if not all(isinstance(text, str) and 1 <= len(text) <= STOP_LENGTH for text in value):
            text = f"stop is not a list of texts of 1 to {STOP_LENGTH:,} characters\n  fix: give a list of such texts"
            raise RequestError(text, "stop")
        return tuple(value)


def as_float(value: Any) -> float:
    """Return the number as a float; infinity for a whole number that is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
