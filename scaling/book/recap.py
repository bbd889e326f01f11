"""Chapters as scripts: what each shows, and what it leaves when it is run in this process.

run_script(Path("chapters/01_roofline.py")).page.given      the answers that the chapter prints, from the chapter itself
"""

import ast
import contextlib
import io
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scaling.book.page import Page


class ScriptRun(NamedTuple):
    """What a chapter left: its names, what it printed, and its exit status."""

    names: dict[str, Any]
    text: str
    status: int

    @property
    def page(self) -> Page:
        return self.names["page"]


def part(path: Path) -> int:
    """The book's part that a chapter is about: of 05_fsdp.py 5."""
    return int(path.stem.partition("_")[0])


def shows(path: Path) -> str:
    """The first line of a chapter's docstring, without the part and without an address."""
    said = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
    return re.sub(r"^Part \d+[,:]? (?:and Part \d+, )?|: https:.*", "", said)


def minutes(path: Path) -> int:
    """To read a chapter and run it: 150 words of its text and code a minute, rounded up to five minutes."""
    return 5 * -(-len(path.read_text(encoding="utf-8").split()) // 750)


def has_numbers(path: Path) -> bool:
    """Whether a chapter sets numbers of the book beside its own."""
    return "Answer(" in path.read_text(encoding="utf-8")


def run_script(path: Path, options: Sequence[str] = (), text: str | None = None) -> ScriptRun:
    """The chapter, or an edited text of it, run in this process as a script with these options and `--small`."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    argv, handler, status = sys.argv, signal.getsignal(signal.SIGTERM), 0
    sys.argv = [str(path), "--small", *options]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(path.read_text(encoding="utf-8") if text is None else text, str(path), "exec"), names)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(bool(error.code))
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, handler)
    return ScriptRun(names, out.getvalue(), status)
