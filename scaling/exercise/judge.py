"""Judge one answer in a separate process: python -m scaling.exercise.judge NAME FILE RESULT.

It checks which modules the file uses, whether anything is still blank and whether it runs at all, then judges by the
exercise's kind (kinds.py).
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path

from scaling.exercise.kinds import GRADERS, described
from scaling.exercise.page import Exercise, exercise_named

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
        return GRADERS[exercise.kind](exercise, names, text)
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


if __name__ == "__main__":
    right, message = assess(exercise_named(sys.argv[1]), Path(sys.argv[2]).read_text(encoding="utf-8"))
    Path(sys.argv[3]).write_text(json.dumps({"right": right, "message": message}))
