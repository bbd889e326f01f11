"""Judge one answer: python -m scaling.exercise.judge NAME FILE RESULT, or `assess`, which needs no torch.

It checks which modules the file uses, whether anything is still blank and whether it runs at all, then judges by the
exercise's kind:

    say       the file sets values, types or numbers, which must be right; known slips get a hint
    order     a pipeline's order of work for each rank: whether it runs, how long it takes, and how much it keeps
    write     a function of shards (ranks.py): its types, its results on ranks, and the bytes that it sends
"""

import ast
import contextlib
import io
import json
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scaling.exercise.page import Exercise, exercise_named
from scaling.schedules.schedule import from_orders
from scaling.schedules.simulator import Deadlock, simulate
from scaling.spec import ShardingError, parse

ALLOWED = {
    "math",
    "torch",
    "torch.nn.functional",
    "torch.func",
    "scaling.collectives",
    "collections",
    "itertools",
    "functools",
}
TOOLS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ppermute", "einsum", "shard", "masked")


class NotYet(Exception):
    """An answer breaks the exercise's terms, or fails before it can be judged."""


def assess(exercise: Exercise, text: str) -> tuple[bool, str]:
    """Return (whether the answer is right, the message)."""
    try:
        look(exercise, text)
        names = run(text, exercise.name)
        if exercise.kind == "say":
            return judge_values(exercise, names)
        if exercise.data["fn"] not in names:
            raise NotYet(f"there is no function {exercise.data['fn']}")
        if exercise.kind == "order":
            return judge_order(exercise, names[exercise.data["fn"]])
        from scaling.exercise.ranks import judge_shards

        return judge_shards(exercise, names[exercise.data["fn"]], text)
    except NotYet as refused:
        return False, str(refused)


def look(exercise: Exercise, text: str) -> None:
    """Refuse a text that is still blank, or that uses tools which would do the exercise."""
    try:
        program = ast.parse(text)
    except SyntaxError as error:
        raise NotYet(f"line {error.lineno} is not Python: {error.msg}") from None
    tools = exercise.data.get("tools", TOOLS)
    for node in ast.walk(program):
        if isinstance(node, ast.Constant) and node.value is ...:
            raise NotYet(f"line {node.lineno} is still blank")
        if isinstance(node, ast.Import):
            modules, names = [name.name for name in node.names], []
        elif isinstance(node, ast.ImportFrom):
            modules, names = [node.module or ""], [name.name for name in node.names]
        else:
            continue
        if strange := [module for module in modules if module not in ALLOWED]:
            raise NotYet(
                f"line {node.lineno} imports {strange[0]}: an answer is written with torch and {', '.join(tools)}"
            )
        if "scaling.collectives" in modules and (other := [name for name in names if name not in tools]):
            raise NotYet(f"line {node.lineno} imports {other[0]}: here an answer is written with {', '.join(tools)}")
    if "torch.distributed" in text or "__import__" in text or "importlib" in text:
        raise NotYet(f"it imports by a way of its own: an answer is written with torch and {', '.join(tools)}")


def run(text: str, name: str) -> dict:
    """Return the names that a file defines; its output is dropped."""
    names = {"__name__": name}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(text, f"{name}.py", "exec"), names)
    except BaseException as error:
        raise NotYet(f"the file itself fails: {described(error, name)}") from None
    return names


def judge_values(exercise: Exercise, names: Mapping) -> tuple[bool, str]:
    """Judge values: `wanted` is {name: value}, `slips` is [{name, value, hint}] of known wrong values."""
    wanted = exercise.data["wanted"]
    for name, value in wanted.items():
        if name not in names:
            return False, f"{name} is not set"
        given = names[name]
        if problem := mismatch(given, value):
            for slip in exercise.data.get("slips", ()):
                if slip["name"] == name and not mismatch(given, slip["value"]):
                    return False, slip["hint"]
            return False, f"{name} is {given!r}: {problem}"
    return True, exercise.data.get("then", "all of it")


def judge_order(exercise: Exercise, fn: Callable) -> tuple[bool, str]:
    """Judge a pipeline's order: `fn(rank, stages, microbatches)` gives a list such as ["F0", "F1", "B0", ...].

    `makespan` is the best known length in units of a forward, `live` the number of microbatches that rank 0 keeps.
    """
    stages, microbatches = exercise.data["stages"], exercise.data["microbatches"]
    orders = []
    for rank in range(stages):
        try:
            given = [str(step) for step in fn(rank, stages, microbatches)]
        except Exception as error:
            raise NotYet(described(error, exercise.name)) from None
        steps = sorted(given)
        all_of = sorted(f"{kind}{m}" for kind in "FB" for m in range(microbatches))
        if steps != all_of:
            missing, extra = [s for s in all_of if s not in steps], [s for s in steps if s not in all_of]
            what = (
                f"lacks {', '.join(missing)}" if missing else f"has {', '.join(extra)}" if extra else "repeats a step"
            )
            return False, f"rank {rank} {what}: it runs F and B of each of {microbatches} microbatches once"
        for m in range(microbatches):
            if given.index(f"B{m}") < given.index(f"F{m}"):
                return False, f"rank {rank} runs B{m} before F{m}"
        orders.append([(step[0], 0, int(step[1:])) for step in given])
    schedule = from_orders("yours", stages, microbatches, orders, tuple(range(stages)))
    try:
        timeline = simulate(schedule)
    except Deadlock as error:
        return False, f"it never ends: {str(error).splitlines()[0]}"
    span, live = float(timeline.makespan), max(timeline.live)
    if span > exercise.data["makespan"]:
        return (
            False,
            f"it takes {span:g} where {exercise.data['makespan']:g} are enough: a rank waits where it could work",
        )
    if live > exercise.data["live"]:
        return (
            False,
            f"a rank keeps {live} microbatches where {exercise.data['live']} are enough: it runs too far ahead",
        )
    return True, f"it takes {span:g}, and no rank keeps more than {live} microbatches"


def mismatch(given: Any, wanted: Any) -> str:
    """Return the mistake in a value, in words; "" if it is right.

    A text with brackets is a type, which must have the same dims and axes; a number must be within 1%.
    """
    if isinstance(wanted, str) and "[" in wanted:
        try:
            same = parse(str(given)).same_sharding(parse(wanted))
        except ShardingError as error:
            return str(error)
        return "" if same else "that is a type, and not this one's"
    if isinstance(wanted, str):
        return "" if str(given).strip().lower() == wanted.lower() else "that is not it"
    if isinstance(wanted, (list, tuple)):
        return "" if list(wanted) == list(given if isinstance(given, (list, tuple)) else [given]) else "that is not it"
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        return "a number is asked for"
    return (
        "" if math.isclose(given, wanted, rel_tol=0.01) else "that is too " + ("much" if given > wanted else "little")
    )


def described(error: BaseException, name: str) -> str:
    """Return the message of an answer's error on this or another rank, with the answer's line where it occurred."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == f"{name}.py"]
    text, kind = str(error), type(error).__name__
    lines += [int(number) for number in re.findall(rf'"{name}\.py", line (\d+)', text)]
    if kind == "RankError":  # a rank's traceback, which ends with its error and what that says in further lines
        *_, (kind, text) = [("", text), *re.findall(r"^(?:\w+\.)*(\w+): (.*(?:\n .*)*)", text, re.MULTILINE)]
    said = text.strip() if kind in ("", "ShardingError") else f"{kind}: {text}"
    return f"{f'line {lines[-1]}: ' if lines else ''}{said}"


if __name__ == "__main__":
    right, message = assess(exercise_named(sys.argv[1]), Path(sys.argv[2]).read_text(encoding="utf-8"))
    Path(sys.argv[3]).write_text(json.dumps({"right": right, "message": message}))
