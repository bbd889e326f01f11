"""Refuse a tokenizer.json whose replacements make a text grow without bound.

Seven replacements that each write "a" ten times turn one "a" into ten million characters, in 12 s; seventy never end.
So each is tried alone on a part of the text, before the library applies all of them to the whole text.
"""

import json
from collections.abc import Iterator
from typing import Any

UNCHECKED, MOST_TIMES = 16, 100  # factors of growth: up to the first none is checked, beyond the second it is refused
CONTENT = 256  # characters that one replacement may write
PART = 1000  # characters that are checked at a time, so that no step takes much memory
FIX = "give the tokenizer.json that the model came with"


def replacements(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or of a decoder of the library `tokenizers`, as its file has them."""
    waiting = [json.loads(part.__getstate__())] if part is not None else []
    while waiting:
        step = waiting.pop(0)
        inner = step.get("normalizers", step.get("decoders"))
        if inner is None:
            yield step
        else:
            waiting = [*inner, *waiting]


def growth(steps: list[dict[str, Any]]) -> float:
    """Return the largest factor by which a text can grow. A regular expression may match between characters."""
    times = 1.0
    for step in steps:
        if step["type"] == "Replace":
            written, pattern = len(step["content"]), step["pattern"].get("String")
            times *= 1 + written if not pattern else max(1.0, written / len(pattern))
    return times


def growing_steps(name: str, loaded: Any) -> list[Any]:
    """Return the normalizers to be tried one by one on each text; none where no text can grow much.

    Raises:
        ValueError: The file's decoder may make a text ever longer, or one replacement writes too much.
    """
    steps, decoder = [*replacements(loaded.normalizer)], [*replacements(loaded.decoder)]
    contents = [step["content"] for step in (*steps, *decoder) if step["type"] == "Replace"]
    why, longest = "", max(map(len, contents), default=0)
    if longest > CONTENT:
        why = f"a replacement writes {longest:,} characters, of at most {CONTENT}"
    elif growth(decoder) > MOST_TIMES:
        why = f"its decoder may make a text {growth(decoder):,.0f} times as long, of at most {MOST_TIMES}"
    if why:
        raise ValueError(f"{name}: {why}\n  fix: {FIX}")
    if growth(steps) <= UNCHECKED:
        return []
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    return [type(loaded).from_str(json.dumps(empty | {"normalizer": step})).normalizer for step in steps]


def check_growth(name: str, steps: list[Any], text: str) -> None:
    """Raise a ValueError if the normalizers make a part of a text too long. Each step is checked before the next."""
    for begin in range(0, len(text) if steps else 0, PART):
        part = text[begin : begin + PART]
        for step in steps:
            part = step.normalize_str(part)
            if len(part) > MOST_TIMES * PART:
                raise ValueError(
                    f"{name}: its normalizers make a text more than {MOST_TIMES} times as long\n  fix: {FIX}"
                )
