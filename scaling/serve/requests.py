"""A file of requests: a JSON object a line, read and checked; a line that is wrong is named, and the rest is kept."""

import json
import math
from typing import Any, NamedTuple

from scaling.models.text import Unknown
from scaling.serve.engine import Draw
from scaling.serve.sampling import SEEDS, Sampling, request_seeds
from scaling.serve.states import Request

KNOWN = ("id", "prompt", "ids", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "arrival")


class RequestLine(NamedTuple):
    """A request of the file: `number` is its line, `name` its "id" or that number."""

    number: int
    name: Any
    arrival: float
    request: Request
    draw: Draw
    stops: tuple[str, ...]


def _read_line(number: int, text: str, tokenizer, V: int, ends: tuple[int, ...], most: int) -> RequestLine:
    """The request of a line. ValueError that says what is wrong with it."""
    table = json.loads(text)
    if not isinstance(table, dict):
        raise ValueError("not a JSON object")
    if unknown := sorted(set(table) - set(KNOWN)):
        raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(KNOWN)}")
    table = {name: value for name, value in table.items() if value is not None}
    if ("prompt" in table) == ("ids" in table):
        raise ValueError('one of "prompt" and "ids" is needed')

    def whole(name: str, default: int, least: int, top: int) -> int:
        value = table.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= top:
            raise ValueError(f"{name}={value!r} is not a whole number from {least} to {top}")
        return value

    def real(name: str, default: float | None) -> Any:
        value = table.get(name, default)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise ValueError(f"{name}={value!r} is not a number")
        return value

    ids, stops = table.get("ids"), table.get("stop", [])
    if ids is None:
        if not isinstance(table["prompt"], str):
            raise ValueError(f"prompt={table['prompt']!r:.40} is not a text")
        ids = tokenizer.encode(table["prompt"], special=True)
    if not isinstance(ids, list) or not all(isinstance(t, int) and not isinstance(t, bool) for t in ids):
        raise ValueError("ids is not a list of whole numbers")
    if not ids:
        raise ValueError("an empty prompt")
    if wrong := [t for t in ids if not 0 <= t < V]:
        raise ValueError(f"token {wrong[0]} lies outside the vocabulary, 0..{V - 1}")
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("stop is not a list of texts")
    if stops and isinstance(tokenizer, Unknown):
        raise ValueError("a stop text needs the model's tokenizer, which is not known")
    top_k = whole("top_k", 0, 1, 1 << 40) if table.get("top_k") is not None else None
    how = Sampling(real("temperature", 0.0), top_k, real("top_p", None), real("min_p", None))
    seed = request_seeds([ids], whole("seed", 0, 0, SEEDS - 1))[0]
    arrival = real("arrival", 0.0)
    if not 0 <= arrival < math.inf:
        raise ValueError(f"arrival={arrival!r} is not a time of 0 or later")
    request = Request(number, tuple(ids), whole("max_new_tokens", most, 1, 10**9), frozenset(ends))
    return RequestLine(number, table.get("id", number), float(arrival), request, Draw(how, seed), tuple(stops))


def read_requests(
    text: str, tokenizer, V: int, ends: tuple[int, ...], most: int
) -> tuple[list[RequestLine], list[dict]]:
    """(the requests, what is wrong with the other lines): lines are numbered from 1, empty ones are left out."""
    lines, bad = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                lines.append(_read_line(number, line, tokenizer, V, ends, most))
            except json.JSONDecodeError as error:
                bad.append({"line": number, "error": f"is not JSON: {error}"})
            except (ValueError, TypeError, RecursionError) as error:
                bad.append({"line": number, "error": str(error).splitlines()[0]})
    return lines, bad
