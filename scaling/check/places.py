"""Place a finding at the line of the judged program that led to it, not at the line of the library that computes it."""

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import scaling
from scaling.check.lines import check_lines

LIBRARY = f"{Path(scaling.__file__).parent}/"
ROOMS = "check/", "collectives/", "trace/", "tree.py", "common/torch_private.py"
MACHINERY = tuple(LIBRARY + room for room in ROOMS)  # the rooms that run a typed line
FOREIGN = "/torch/", "/optree/", "contextlib", "<frozen"
PAGE_TOOLS = f"{LIBRARY}book/"  # tools that compare arrays of any types

Frame = tuple[str, int]  # file, line

real_path = cache(os.path.realpath)


def frames_of_call(skipped: tuple[str, ...] = MACHINERY) -> Iterator[Frame]:
    """Yield the frames of the running call, the innermost first, except frames in the skipped files and in torch."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(skipped) and not any(part in file for part in FOREIGN):
            yield file, frame.f_lineno
        frame = frame.f_back


def choose_place(frames: Iterable[Frame], files: Collection[str] = ()) -> str:
    """Return "file:line" of the frame to which a finding belongs; the frames begin with the innermost.

    It is the innermost frame in `files`, the judged files by their real paths, or in any file if `files` is empty. A
    library module without typed lines computes a result for its caller, so the fault is the caller's: `rms_norm` of
    partial sums. A library module with typed lines is judged by the library's own programs, so the search ends there.
    """
    innermost = ""
    for file, line in frames:
        place = f"{file}:{line}"
        innermost = innermost or place
        if real_path(file) in files:
            return place
        if file.startswith(LIBRARY):
            if is_judged_alone(file):
                return place
        elif not files:
            return place
    return innermost


@cache
def is_judged_alone(file: str) -> bool:
    """Return whether a library module has typed lines, or only compares arrays, so that no caller answers for it."""
    return file.startswith(PAGE_TOOLS) or bool(check_lines(Path(file).read_text(encoding="utf-8"), file)[1])


def place_of_call(files: Collection[str] = ()) -> str:
    """Return "file:line" of the running call."""
    return choose_place(frames_of_call(), files)


def innermost_place() -> str:
    """Return "file:line" of the running call, in the library if it is made there."""
    return next((f"{file}:{line}" for file, line in frames_of_call()), "")


def place_of_function(fn: Callable) -> str:
    """Return "file:line" of a function's first line, or the repr of a callable that has none (functools.partial)."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(fn)


def place_of_error(error: BaseException, files: Collection[str] = ()) -> str:
    """Return "file:line" of the call that raised an error.

    An error ends the program, whoever raises it, so the innermost line in the judged files comes first.
    """
    frames = [(f.filename, f.lineno or 1) for f in reversed(traceback.extract_tb(error.__traceback__))]
    own = [(file, line) for file, line in frames if real_path(file) in files]
    outside = [frame for frame in frames if not frame[0].startswith(MACHINERY)]
    return choose_place(own or outside, files)
