"""The rules by name, and the judge's answer about a program: its findings and unjudged lines, with their places.

A finding is placed at the line of the judged program that led to it, not at the line of the library that computes it.
"""

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import scaling

RULES = {
    "illegal-line": "a line obeys the notation by itself, whatever its operands are",
    "dims": "an operand has the dims that its type says, in their order",
    "split": "only a collective changes how an array is split",
    "unreduced": "a partial sum stays {U} until it is reduced",
    "reduced-twice": "what is reduced already is not reduced again",
    "partial-plus-whole": "to a partial sum only partial sums over the same axes are added",
    "nonlinear": "a nonlinear function of partial sums is not the sum of the function's parts",
    "product-of-sums": "a product of two partial sums is not the sum of the products",
    "how-reduced": "the parts are put together the way they were made: parts of a sum are added",
    "never-waited": "what async_op=True or defer=True returns is waited for",
    "discarded": "a collective changes nothing in place: what it returns is used",
    "untyped": "what has typed lines moves data by them alone: a raw collective has the gradient of the identity",
    "pending": "what is still in flight is waited for before it is used",
    "wrong-name": "a param goes into a line under its own name",
    "result": "a strategy's functions return what SPECS says",
    "derivative": "a strategy's backward is the derivative of its forward",
    "one-rank": "what launch.start returns is one rank's: a whole array, not that rank's part of one",
    "loss": "a loss is differentiated while it is unreduced, each device's own terms; its value is reduced afterwards",
    "specs": "SPECS is a dict of types",
    "ignore": "a comment that silences a finding names the rule: # scaling: ignore[rule]",
    "unjudged": "a program in which nothing could be judged is not taken for right",
    "python": "what is judged is Python",
}
NOTHING = "nothing in this file was judged: no array with a type reached an operation"
NO_LINE = "it has no literal typed line, so it was not run"
FORMATTED = "its typed lines are f-strings, so it was not run: write one line literally, or use `with judged(mesh)`"


def fault_text(what: str, rule: str, fix: str = "", detail: str = "") -> str:
    """Return a finding's text: the mistake, the rule (or `detail`, its words for this case) and the fix."""
    return f"{what}\n  rule: {detail or RULES[rule]}" + (f"\n  fix: {fix}" if fix else "")


@dataclass(frozen=True, order=True)
class Finding:
    """One fault: its place, the mistake in words, and the name of the broken rule."""

    file: str
    line: int
    message: str
    rule: str = ""

    @property
    def place(self) -> str:
        """The place as "file:line"."""
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        first, *rest = self.message.split("\n")
        return "\n".join([f"{self.place}: {first}", *rest]) + f"  [{self.rule}]"


@dataclass
class Judgement:
    """The judge's answer about one program.

    Attributes:
        findings: the faults.
        unjudged: ("file:line", why) for each value that was not judged.
        judged: how many operands and operations were.
        reached: (file, line number) of each typed call that ran.
        result: the types (Spec) of the returned values, None for a value that has no type.
    """

    findings: list[Finding] = field(default_factory=list)
    unjudged: list[tuple[str, str]] = field(default_factory=list)
    judged: int = 0
    reached: set[tuple[str, int]] = field(default_factory=set)
    result: Any = None

    def __str__(self) -> str:
        named = [f"{place}: not judged: {why}" for place, why in self.unjudged]
        return "\n".join([*map(str, self.findings), *named, f"{self.judged} calls judged, {len(named)} not"])


def place_parts(place: str) -> tuple[str, int]:
    """Return (file, line) of "file:line"; the line is 1 if the place has none."""
    file, _, line = place.rpartition(":")
    return (file, int(line)) if file and line.isdigit() else (place, 1)


LIBRARY = f"{Path(scaling.__file__).parent}/"
ROOMS = "spec/ algebra/ mesh/ check/ collectives/ scaled/ trace/ tree.py common/torch_private.py"
MACHINERY = tuple(LIBRARY + room for room in ROOMS.split())  # the rooms that run a typed line
FOREIGN = "/torch/", "/optree/", "contextlib", "<frozen"
PAGE_TOOLS = f"{LIBRARY}book/"  # tools that compare arrays of any types


@cache
def real_path(file: str) -> str:
    """Return a file's path without links."""
    return os.path.realpath(file)


def place_of_call(files: Collection[str] = (), skipped: tuple[str, ...] = MACHINERY) -> str:
    """Return "file:line" of the running call's innermost frame in `files`, real paths; without them, in any file.

    Frames in torch and in the `skipped` files do not count. It is "" if no frame is left.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        counts = not file.startswith(skipped) and not any(part in file for part in FOREIGN)
        if counts and (not files or real_path(file) in files):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def place_of_function(fn: Callable) -> str:
    """Return "file:line" of a function's first line, or the repr of a callable that has none (functools.partial)."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(fn)


def place_of_error(error: BaseException, files: Collection[str] = ()) -> str:
    """Return "file:line" of the call that raised an error, chosen as by `place_of_call`."""
    frames = [(f.filename, f.lineno or 1) for f in reversed(traceback.extract_tb(error.__traceback__))]
    chosen = (real_path(file) in files if files else not file.startswith(MACHINERY) for file, _ in frames)
    return next((f"{file}:{line}" for (file, line), own in zip(frames, chosen, strict=True) if own), "")
