"""Chapters as scripts: their titles and lengths, and their results when they are run in this process.

For example, these are the answers that a chapter prints, from the chapter itself:

    run_script(Path("chapters/01_roofline.py")).page.given
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

from scaling.book.options import in_notebook
from scaling.book.page import Page


class ScriptRun(NamedTuple):
    """The results of a chapter: its names, its output, and its exit status."""

    names: dict[str, Any]
    text: str
    status: int

    @property
    def page(self) -> Page:
        """The chapter's page."""
        return self.names["page"]


def part(path: Path) -> int:
    """Return the book's part that a chapter is about: 5 for 05_fsdp.py."""
    return int(path.stem.partition("_")[0])


def shows(path: Path) -> str:
    """Return the first line of a chapter's docstring, without the part and the address."""
    line = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
    return re.sub(r"^Part \d+[,:]? (?:and Part \d+, )?|: https:.*", "", line)


def minutes(path: Path) -> int:
    """Return the minutes to read and run a chapter: 150 words a minute, rounded up to five minutes."""
    return 5 * -(-len(path.read_text(encoding="utf-8").split()) // 750)


def has_numbers(path: Path) -> bool:
    """Return whether a chapter compares numbers of the book with its own."""
    return "Answer(" in path.read_text(encoding="utf-8")


def _without_pictures() -> contextlib.AbstractContextManager:
    """Return a context in which a notebook shows no tables and pictures."""
    if not in_notebook():
        return contextlib.nullcontext()
    from IPython.utils.capture import capture_output

    return capture_output(stdout=False, stderr=False)


def run_script(path: Path, options: Sequence[str] = (), text: str | None = None) -> ScriptRun:
    """Run the chapter, or an edited text of it, in this process as a script with these options and `--small`."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    argv, handler, status = sys.argv, signal.getsignal(signal.SIGTERM), 0
    sys.argv = [str(path), "--small", *options]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, _without_pictures():
            exec(compile(path.read_text(encoding="utf-8") if text is None else text, str(path), "exec"), names)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(bool(error.code))
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, handler)
    return ScriptRun(names, out.getvalue(), status)
