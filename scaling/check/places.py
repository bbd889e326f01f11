"""Place a finding at the line of the judged program that led to it, not at the line of the library that computes it."""

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import scaling

LIBRARY = f"{Path(scaling.__file__).parent}/"
ROOMS = (
    "spec/",
    "algebra/",
    "mesh/",
    "check/",
    "collectives/",
    "scaled/",
    "trace/",
    "tree.py",
    "common/torch_private.py",
)
MACHINERY = tuple(LIBRARY + room for room in ROOMS)  # the rooms that run a typed line
FOREIGN = "/torch/", "/optree/", "contextlib", "<frozen"
PAGE_TOOLS = f"{LIBRARY}book/"  # tools that compare arrays of any types

Frame = tuple[str, int]  # file, line


@cache
def real_path(file: str) -> str:
    """Return a file's path without links."""
    return os.path.realpath(file)


def frames_of_call(skipped: tuple[str, ...] = MACHINERY) -> Iterator[Frame]:
    """Yield the frames of the running call, the innermost first, except frames in the skipped files and in torch."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(skipped) and not any(part in file for part in FOREIGN):
            yield file, frame.f_lineno
        frame = frame.f_back


def place_of_call(files: Collection[str] = (), skipped: tuple[str, ...] = MACHINERY) -> str:
    """Return "file:line" of the running call's innermost frame in `files`, real paths; without them, in any file.

    It is "" if no frame is in these files.
    """
    frames = (frame for frame in frames_of_call(skipped) if not files or real_path(frame[0]) in files)
    return next((f"{file}:{line}" for file, line in frames), "")


def place_of_function(fn: Callable) -> str:
    """Return "file:line" of a function's first line, or the repr of a callable that has none (functools.partial)."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(fn)


def place_of_error(error: BaseException, files: Collection[str] = ()) -> str:
    """Return "file:line" of the call that raised an error, chosen as by `place_of_call`."""
    frames = [(f.filename, f.lineno or 1) for f in reversed(traceback.extract_tb(error.__traceback__))]
    chosen = (real_path(file) in files if files else not file.startswith(MACHINERY) for file, _ in frames)
    return next((f"{file}:{line}" for (file, line), own in zip(frames, chosen, strict=True) if own), "")
