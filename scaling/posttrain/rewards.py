"""Read prompts from a file, and score the model's answers by a function in a Python file.

A line of a .jsonl file is an object with a "prompt", a text or messages, or with "messages", which the tokenizer's chat
template writes up to where the answer begins; it has any other keys that the reward function needs. A line of any other
file is a prompt. A reward file has a function `score(prompt, answer, row)`, which gets two texts and the line's
object and returns a number.
"""

import hashlib
import importlib.util
import math
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from scaling.models.text import Tokenizer
from scaling.train.batches import epoch_order
from scaling.train.documents import ASSISTANT, Reader, parse_json_line, template_variables


class RewardError(ValueError):
    """An invalid reward, whose fault lies in the user's file."""


class Prompt(NamedTuple):
    """A prompt, with its file and line, its text, its ids, and the object of its line."""

    where: str
    text: str
    ids: list[int]
    row: dict[str, Any]


def read_prompts(path: Path, by: Tokenizer, longest: int) -> list[Prompt]:
    """Return the prompts of a file.

    Raises:
        ValueError: A line has no prompt, or one of more than `longest` tokens; the message names the line.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file\n  fix: give a .jsonl file with a prompt in each line, or a text")
    found, reader = [], Reader(by)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}\n  fix: convert it") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where, row = f"{path}:{number}", {"prompt": line}
        try:
            row = parse_json_line(line) if path.suffix == ".jsonl" else row
            text, ids = encode_prompt(row, reader)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not 0 < len(ids) <= longest:
            raise ValueError(
                f"{where}: the prompt has {len(ids)} tokens\n  rule: a prompt is never cut, and with the answer has at "
                f"most --seq tokens\n  fix: give a greater --seq or a smaller --max-new-tokens: {longest} are left"
            )
        found.append(Prompt(where, text, ids, row))
    if not found:
        raise ValueError(f"{path}: has no prompt\n  fix: write at least one line")
    return found


def encode_prompt(row: Any, reader: Reader) -> tuple[str, list[int]]:
    """Return the text of a row's prompt and its ids, up to where the answer begins.

    A text gets the tokens that the tokenizer puts around a text. The chat template writes them around messages.

    Raises:
        ValueError: The row has neither a text nor messages, or the messages cannot be answered.
    """
    match row:
        case {"prompt": str(text)} if text:
            return text, list(reader.by.encode(text, special=True))
        case {"prompt": [_, *_] as messages} | {"messages": [_, *_] as messages}:
            if reader.template is None:
                raise ValueError('messages, but the tokenizer has no chat template\n  fix: give a text as "prompt"')
            text = reader.template.render(messages, add_generation_prompt=True, **template_variables(row))
            if messages[-1].get("role") == ASSISTANT:
                fix = "leave the answer out, or give it to the reward function under another key"
                raise ValueError(f"the last message is the assistant's, so nothing is asked\n  fix: {fix}")
            return text, list(reader.by.encode(text))
    fix = 'write {"prompt": "..."} or {"messages": [...]} in each line'
    raise ValueError(f"has neither a text nor messages as its prompt\n  fix: {fix}")


def prompts_of_step(prompts: Sequence[Prompt], seed: int, step: int, count: int) -> list[Prompt]:
    """Return the prompts of a step, where steps count from 1.

    Each epoch has all prompts once, in an order drawn by the seed.
    """
    places = (divmod(place, len(prompts)) for place in range((step - 1) * count, step * count))
    return [prompts[int(epoch_order(seed, epoch, len(prompts))[at])] for epoch, at in places]


def number_of(*words: Any) -> int:
    """Return a whole number below 2^62 that depends only on these words."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "big") >> 2


def reward_of(given: str) -> Callable[[str, str, dict], float]:
    """Return the function NAME of FILE.py:NAME, or `score` of FILE.py.

    Raises:
        ValueError: The file cannot be run, or has no such function; the message names the file, and its line.
    """
    file, _, name = given.partition(".py:")
    path, name = Path(file + ".py" if name else given), name or "score"
    if not path.is_file():
        raise ValueError(f"{path}: no such file\n  fix: give a Python file with def score(prompt, answer, row)")
    spec: Any = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: does not parse: {error.msg}\n  fix: mend that line") from None
    except (Exception, SystemExit) as error:
        raise ValueError(f"{line_of(error, path)}: {type(error).__name__}: {error}\n  fix: mend that line") from None
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path}: has no function {name}\n  fix: write def {name}(prompt, answer, row)")
    return getattr(module, name)


def line_of(error: BaseException, path: Path) -> str:
    """Return FILE:LINE of the innermost line of `path` in the error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"{path}:{lines[-1] if lines else 1}"


def score_answers(
    score: Callable, prompts: Sequence[Prompt], answers: Sequence[str], seconds: float, path: Path, threads: int = 1
) -> list[float]:
    """Return the reward of each answer; up to `threads` rewards are computed at the same time.

    Raises:
        RewardError: A reward raises an error, takes longer than `seconds`, or is not a finite number.
    """
    found = [math.nan] * len(answers)
    waiting, running = iter(range(len(answers))), {}
    for i in islice(waiting, threads):
        running[start_call(score, prompts[i].text, answers[i], prompts[i].row)] = i, time.monotonic() + seconds
    while running:
        left = min(limit for _, limit in running.values()) - time.monotonic()
        ended, _ = wait(running, max(0.0, left), FIRST_COMPLETED)
        late = [call for call, (_, limit) in running.items() if limit <= time.monotonic()] if not ended else []
        for call in [*ended, *late]:
            i, _ = running.pop(call)
            if what := f"took longer than {seconds:g} seconds" if call in late else fault_of(call, path):
                raise RewardError(
                    f"{path}: the reward of {prompts[i].where} {what}, for the answer {answers[i]!r:.200}\n  rule: a "
                    "reward is a finite number for every answer\n  fix: mend the file, or give --reward-seconds"
                )
            found[i] = float(call.result())
            for i in islice(waiting, 1):
                running[start_call(score, prompts[i].text, answers[i], prompts[i].row)] = i, time.monotonic() + seconds
    return found


def fault_of(call: Future, path: Path) -> str:
    """Return what is wrong with a reward that has been computed, or "" if it is a finite number."""
    try:
        given = call.result()
        return "" if hasattr(given, "__float__") and math.isfinite(float(given)) else f"returned {given!r:.60}"
    except (Exception, SystemExit) as error:
        return f"raised {type(error).__name__} at {line_of(error, path)}: {error}"


def start_call(fn: Callable, *args: Any) -> Future:
    """Call fn(*args) in a thread that the program's end does not wait for, and return its future result."""
    result: Future = Future()

    def call() -> None:
        try:
            result.set_result(fn(*args))
        except BaseException as error:
            result.set_exception(error)

    Thread(target=call, name="reward", daemon=True).start()
    return result
