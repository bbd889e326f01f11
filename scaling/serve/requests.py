"""What a client asks for, as a JSON object: read and checked here, be it a line of a file or the body of a call."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from scaling.common.arguments import whole_numbers
from scaling.models.text import Unknown
from scaling.serve.sampling import SEEDS, Draw, Sampling, request_seeds
from scaling.serve.states import Request

KNOWN = ("id", "prompt", "ids", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "arrival")


class Fields:
    """The fields of a JSON object, each read as what it has to be. Null is as not given. ValueError with the reason."""

    def __init__(self, text: "str | bytes"):
        try:
            table = json.loads(text, parse_constant=self._no_number)
        except json.JSONDecodeError as error:
            raise ValueError(f"is not JSON: {error}") from None
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        if not isinstance(table, dict):
            raise ValueError("not a JSON object")
        self.given: Mapping[str, Any] = {name: value for name, value in table.items() if value is not None}

    @staticmethod
    def _no_number(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    def only(self, known: "tuple[str, ...]") -> None:
        if unknown := sorted(set(self.given) - set(known)):
            raise ValueError(f"unknown field {unknown[0]!r:.80}; known are {', '.join(known)}")

    def whole(self, name: str, default: int, least: int, top: int) -> int:
        value = self.given.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= top:
            raise ValueError(f"{name}={_short(value)} is not a whole number from {least} to {top}")
        return value

    def real(self, name: str, default: float | None = None) -> Any:
        value = self.given.get(name, default)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise ValueError(f"{name}={_short(value)} is not a number")
        return value

    def flag(self, name: str) -> bool:
        value = self.given.get(name, False)
        if not isinstance(value, bool):
            raise ValueError(f"{name}={_short(value)} is neither true nor false")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A text, or a list of texts, none of them empty."""
        value = self.given.get(name, [])
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
            raise ValueError(f"{name} is not a list of texts")
        return tuple(value)


def _short(value: Any) -> str:
    """Of a number with thousands of digits Python writes none."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 128:
        return f"a number of {value.bit_length()} bits"
    return f"{value!r:.80}"


class Wish(NamedTuple):
    """How a prompt is to be gone on from: `most` tokens, each drawn by `how`; before one of the texts `stops`."""

    how: Sampling
    seed: int
    most: int
    stops: tuple[str, ...]

    def draws(self, prompts: list[list[int]]) -> list[Draw]:
        """How each prompt's tokens are drawn: as `generate` draws them for these prompts and this seed."""
        return [Draw(self.how, seed) for seed in request_seeds(prompts, self.seed)]


def read_wish(
    fields: Fields, tokenizer, most: int, *, word: str = "max_new_tokens", temperature: float = 0.0, seed: int = 0
) -> Wish:
    """What the client says of how to go on; `word` is its name for `most`, and the numbers hold where it says none."""
    stops = fields.texts("stop")
    if stops and isinstance(tokenizer, Unknown):
        raise ValueError("a stop text needs the model's tokenizer, which is not known")
    top_k = fields.whole("top_k", 0, 1, 1 << 40) if "top_k" in fields.given else None
    how = Sampling(fields.real("temperature", temperature), top_k, fields.real("top_p"), fields.real("min_p"))
    return Wish(how, fields.whole("seed", seed, 0, SEEDS - 1), fields.whole(word, most, 1, 10**9), stops)


def read_ids(prompt: Any, tokenizer, V: int) -> list[int]:
    """The ids of a prompt, which is a text or these ids."""
    ids = tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else prompt
    return prompt_ids("the prompt", ids, V)


def prompt_ids(what: str, ids: Any, V: int) -> list[int]:
    """The ids of a text to be served. ValueError that begins with `what` for none, and for others."""
    found = whole_numbers(what, ids)
    if not found:
        raise ValueError(f"{what} is empty\n  fix: give at least one token")
    check_known_ids(what, found, V)
    return found


def check_known_ids(what: str, ids: Iterable[int], V: int) -> None:
    """ValueError that begins with `what` for the first id that is no token."""
    if (wrong := next((t for t in ids if not 0 <= t < V), None)) is not None:
        lies = f"token {_short(wrong)} lies outside the vocabulary, 0..{V - 1}"
        raise ValueError(f"{what}: {lies}\n  fix: encode it by this model's tokenizer")


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
    fields = Fields(text)
    fields.only(KNOWN)
    table = fields.given
    if ("prompt" in table) == ("ids" in table):
        raise ValueError('one of "prompt" and "ids" is needed')
    if "prompt" in table and not isinstance(table["prompt"], str):
        raise ValueError(f"prompt={table['prompt']!r:.40} is not a text")
    ids = read_ids(table.get("prompt", table.get("ids")), tokenizer, V)
    wish = read_wish(fields, tokenizer, most)
    arrival = fields.real("arrival", 0.0)
    if not 0 <= arrival < math.inf:
        raise ValueError(f"arrival={arrival!r} is not a time of 0 or later")
    request = Request(number, tuple(ids), wish.most, frozenset(ends))
    return RequestLine(number, table.get("id", number), float(arrival), request, wish.draws([ids])[0], wish.stops)


def read_requests(
    text: str, tokenizer, V: int, ends: tuple[int, ...], most: int
) -> tuple[list[RequestLine], list[dict]]:
    """(the requests, what is wrong with the other lines): lines are numbered from 1, empty ones are left out."""
    lines, bad = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                lines.append(_read_line(number, line, tokenizer, V, ends, most))
            except (ValueError, TypeError) as error:
                bad.append({"line": number, "error": str(error).splitlines()[0]})
    return lines, bad
