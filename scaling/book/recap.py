"""Chapters run for their answers: what each shows, the book's numbers beside ours, and what held.

run(Path("chapters/01_roofline.py")).answers      the rows that the chapter prints, from the chapter itself
"""

import ast
import contextlib
import io
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaling.book.answers import VERDICTS, Answer


@dataclass(frozen=True)
class Chapter:
    """A chapter that ran: `shows`, its docstring's first sentence; its answers and checks (what, held); exit status."""

    path: Path
    shows: str
    answers: tuple[Answer, ...] = ()
    checks: tuple[tuple[str, bool], ...] = ()
    status: int = 0

    @property
    def part(self) -> int:
        return part(self.path)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many answers have each of VERDICTS."""
        verdicts = [answer.verdict for answer in self.answers]
        return tuple(verdicts.count(verdict) for verdict in VERDICTS)


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


def run_chapter(path: Path, options: Sequence[str] = ("--small",)) -> Chapter:
    """The chapter, run in this process; what it prints is dropped, and its `page` read."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    argv, handler, status = sys.argv, signal.getsignal(signal.SIGTERM), 0
    sys.argv = [str(path), *options]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(bool(error.code))
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, handler)
    page = names["page"]
    return Chapter(path, shows(path), tuple(page.given), tuple(page.checks), status)
