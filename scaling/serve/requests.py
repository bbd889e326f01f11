"""A request as data, and its fields read from JSON, be it a line of a file or the body of a call. No torch."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

from scaling.common.arguments import check_within, of_type, quoted, whole_numbers
from scaling.configs import Config
from scaling.models.text import Unknown

SEEDS = 2**63
START = 8  # characters for each token that fits, after which the length of a text is checked
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character of UTF-16
TOO_LONG = "context_length_exceeded"
STOPS, STOP_LENGTH = 64, 1024  # the most stop texts of a request, and the most characters of one
DIGITS = 4300  # the most digits of a number that Python reads
NOT_FINITE = "logits without a finite maximum (NaN, inf or all -inf): no token can be drawn"
SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # the fields of Sampling, by which requests name them too
KNOWN = ("id", "prompt", "ids", "max_new_tokens", *SAMPLING, "seed", "stop", "arrival")


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


@dataclass(frozen=True)
class Sampling:
    """The way tokens are drawn; with temperature 0 it is the likeliest, the lower id if two are equal.

    Otherwise tokens are drawn from softmax(logits / temperature), where three filters keep the `top_k` likeliest
    tokens, the fewest likeliest tokens whose probabilities sum to at least `top_p`, and the tokens at least `min_p`
    times as likely as the likeliest. Each filter sees the tokens that the one before it keeps, rescaled to a sum of 1.
    A ValueError names a value that would leave no token.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        for name, kind, allowed in (
            ("temperature", Real, "[0, inf)"), ("top_k", Integral, "[1, inf)"), ("top_p", Real, "(0, 1]"),
            ("min_p", Real, "[0, 1]"),
        ):  # fmt: skip
            if (value := getattr(self, name)) is not None or name == "temperature":
                with blaming(name):
                    of_type(name, value, kind)
                    check_within(name, as_float(value) if kind is Real else value, allowed)
        for name in ("temperature", "top_p", "min_p"):  # torch divides by no whole number of more than 64 bits
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else as_float(value))


class Draw(NamedTuple):
    """The sampling of a request's tokens, and its seed."""

    how: Sampling = Sampling()
    seed: int = 0


class Request(NamedTuple):
    """A request for the tokens that follow a prompt.

    Attributes:
        stop: The ids of tokens that end the completion; such a token is its last.
        stops: Texts that end the completion, which is cut before them.
        scored: Whether the log-probabilities of the prompt are wanted, so that all of it is computed.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: frozenset[int] = frozenset()
    draw: Draw = Draw()
    stops: tuple[str, ...] = ()
    scored: bool = False

    def until_stop(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens up to the first that ends the request."""
        end = next((i for i, token in enumerate(tokens, 1) if token in self.stop), len(tokens))
        return tuple(tokens[:end])


def request_seeds(prompts: Sequence[Sequence[int]], seed: "int | Sequence[int]" = 0) -> list[int]:
    """Return a seed for each request: as given, or from one seed, the prompt, and the number of equal prompts before.

    So a prompt has the same random numbers alone and with others, and if it is given n times, it is drawn n times.
    """
    if not isinstance(seed, int):
        seed = whole_numbers("seed", seed)
        if len(seed) != len(prompts):
            raise ValueError(
                f"{len(seed)} seeds for {len(prompts)} prompts\n  fix: give one seed, or one for each prompt"
            )
        return [s % SEEDS for s in seed]
    seen: dict[tuple[int, ...], tuple[int, str]] = {}
    found = []
    for prompt in map(tuple, prompts):
        number, written = seen.get(prompt) or (0, repr([int(t) for t in prompt]))
        seen[prompt] = number + 1, written
        digest = hashlib.blake2b(f"({seed!r}, {number}, {written})".encode(), digest_size=8).digest()
        found.append(int.from_bytes(digest, "big") % SEEDS)
    return found


def longest_text(config: Config) -> int | None:
    """Return the tokens of the longest text that a model is made for; None if the config does not say.

    If positions are scaled by linear or yarn, a config.json has the length before scaling.
    """
    if config.max_positions < 1:
        return None
    if (scaling := config.rope_scaling) is None or scaling.kind not in ("linear", "yarn"):
        return config.max_positions
    before = scaling.original if scaling.kind == "yarn" else config.max_positions
    return max(config.max_positions, int(before * scaling.factor))


def served_text(config: Config) -> int | None:
    """Return the number of tokens of the longest text that can be served; None means no limit.

    Learned positions are as many as the model has vectors for. longrope rotates longer texts by other factors, so all
    of their cached keys would have to be rotated anew.
    """
    return config.learned_positions or (config.rope_scaling.short_texts if config.rope_scaling else None)


def check_served_text(config: Config, length: int) -> None:
    """Raise a ValueError if a text of `length` tokens is longer than `served_text`."""
    if (most := served_text(config)) is not None and length > most:
        rule = f"longrope rotates texts of more than {most} tokens otherwise, and cached keys are not rotated anew"
        rule = f"positions are learned, and there are {most}" if config.learned_positions else rule
        fix = "give a shorter prompt, or ask for fewer tokens"
        raise ValueError(f"{config.name}: a text of {length} tokens\n  rule: {rule}\n  fix: {fix}")


def read_ids(prompt: Any, tokenizer, V: int, room: int | None = None, special: bool = True) -> list[int]:
    """Return the ids of a prompt, which is a text or these ids.

    Args:
        prompt: The prompt.
        tokenizer: The model's tokenizer.
        V: The size of the vocabulary.
        room: How many tokens fit. A longer prompt is refused before there is work for each token: a text if it has more
            characters than that number of the longest tokens, or if its first `START` characters for each token that
            fits are already too many tokens.
        special: Whether a text gets the tokens that the tokenizer puts around it.
    """
    if isinstance(prompt, str):
        if room is not None:
            check_prompt_fits(len(prompt), "characters", room, room * tokenizer.longest)
            if len(prompt) > (start := START * room):
                count = len(tokenizer.encode(prompt[:start])) - tokenizer.longest  # a token that is cut may be many
                check_prompt_fits(count, "tokens and more", room, room)
        if SURROGATE.search(prompt):
            raise ValueError("the prompt has half of a surrogate pair, which is no character\n  fix: leave it out")
        prompt = tokenizer.encode(prompt, special=special)
    if room is not None and hasattr(prompt, "__len__"):
        check_prompt_fits(len(prompt), "tokens", room, room)
    return prompt_ids("the prompt", prompt, V)


def check_prompt_fits(length: int, unit: str, room: int, most: int) -> None:
    """Raise a RequestError for a prompt of more than `most` units, where `room` tokens fit before an answer."""
    if length > most:
        what = f"the prompt has {length:,} {unit}: this model's maximum context length is {room + 1:,} tokens"
        raise RequestError(f"{what}, with the answer\n  fix: give a shorter prompt", None, TOO_LONG)


def prompt_ids(what: str, ids: Any, V: int) -> list[int]:
    """Return the ids of a text to be served; the ValueError for none, or for wrong ones, begins with `what`."""
    found = whole_numbers(what, ids)
    if not found:
        raise ValueError(f"{what} is empty\n  fix: give at least one token")
    check_known_ids(what, found, V)
    return found


def check_known_ids(what: str, ids: Iterable[int], V: int) -> None:
    """Raise a ValueError that begins with `what` for the first id outside the vocabulary."""
    if (wrong := next((t for t in ids if not 0 <= t < V), None)) is not None:
        lies = f"token {quoted(wrong)} lies outside the vocabulary, 0..{V - 1}"
        raise ValueError(f"{what}: {lies}\n  fix: encode it by this model's tokenizer")


class Defaults(NamedTuple):
    """The values of fields that a client leaves out.

    Attributes:
        most: The most new tokens.
        word: The name of the field with the most new tokens.
        how: How the tokens are drawn.
        seed: The seed.
        least: The fewest new tokens that a client may ask for.
    """

    most: int
    word: str = "max_new_tokens"
    how: Sampling = Sampling()
    seed: int = 0
    least: int = 1


def requests_of(
    fields: Fields, prompts: list[tuple[int, ...]], ids: Iterator[int], tokenizer, ends: Sequence[int], unsaid: Defaults
) -> list[Request]:
    """Return a request for each prompt, with these ids.

    Its tokens are drawn as `generate` draws them for these prompts and this seed. They end with one of `ends`, or
    before one of the client's stop texts.
    """
    stops = fields.stops()
    if stops and isinstance(tokenizer, Unknown):
        raise RequestError("a stop text needs the model's tokenizer, which is not known", "stop")
    own = unsaid.how
    top_k = fields.whole("top_k", own.top_k or 0, -1, 1 << 40)
    temperature, top_p = fields.real("temperature", own.temperature), fields.real("top_p", own.top_p)
    how = Sampling(temperature, top_k if top_k > 0 else None, top_p, fields.real("min_p", own.min_p))
    seeds = request_seeds(prompts, fields.whole("seed", unsaid.seed, -SEEDS, SEEDS - 1))
    most, stop = fields.whole(unsaid.word, unsaid.most, unsaid.least, 10**9), frozenset(ends)
    drawn = [(next(ids), prompt, Draw(how, seed)) for prompt, seed in zip(prompts, seeds, strict=True)]
    return [Request(id, prompt, most, stop, draw, stops) for id, prompt, draw in drawn]


class RequestLine(NamedTuple):
    """A request of the file, whose id is the number of its line; `name`: the line's own id, or that number."""

    name: Any
    arrival: float
    request: Request


def _read_line(number: int, text: bytes, tokenizer, V: int, ends: tuple[int, ...], unsaid: Defaults) -> RequestLine:
    """Return the request of a line; a ValueError names the line's mistake."""
    fields = Fields(text)
    fields.only(KNOWN)
    table = fields.given
    if ("prompt" in table) == ("ids" in table):
        raise ValueError('one of "prompt" and "ids" is needed')
    if "prompt" in table and not isinstance(table["prompt"], str):
        raise ValueError(f"prompt={table['prompt']!r:.40} is not a text")
    ids = read_ids(table.get("prompt", table.get("ids")), tokenizer, V)
    (request,) = requests_of(fields, [tuple(ids)], iter([number]), tokenizer, ends, unsaid)
    arrival = fields.real("arrival", 0.0)
    if not 0 <= arrival < math.inf:
        raise ValueError(f"arrival={arrival!r} is not a time of 0 or later")
    name = table.get("id", number)
    try:
        json.dumps(name, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise ValueError(
            "its id has half of a surrogate pair or an infinite number, so no answer could name it"
        ) from None
    return RequestLine(name, arrival, request)


def read_requests(
    data: bytes, tokenizer, V: int, ends: tuple[int, ...], most: int, how: Sampling | None = None
) -> tuple[list[RequestLine], list[dict]]:
    """Return the requests, and the errors of the other lines; lines are numbered from 1, and empty ones are left out.

    A newline alone ends a line of JSON, because a text in it may have the other line ends of Unicode.

    `most` and `how`: the new tokens of a line that does not say how many, and how they are drawn (default: greedily).
    """
    lines, bad = [], []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                lines.append(_read_line(number, line, tokenizer, V, ends, Defaults(most, how=how or Sampling())))
            except (ValueError, TypeError) as error:
                bad.append({"line": number, "error": str(error).splitlines()[0]})
    return lines, bad
