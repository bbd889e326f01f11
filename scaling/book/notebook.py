"""Run chapters: as scripts in this process, or as notebooks in a kernel (the `notebook` extra).

python -m scaling.book.notebook chapters/01_roofline.py --out 01_roofline.ipynb
CHAPTER="--small" python -m scaling.book.notebook chapters/03_collectives.py

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
from scaling.common.console import Parser, output


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


def execute(chapter, timeout: int = 600):
    """Run all cells of a chapter's file or notebook, and return the notebook.

    Raises:
        CellExecutionError: a cell raised (nbclient's error).
    """
    import jupytext
    from nbclient import NotebookClient

    notebook = jupytext.read(chapter) if isinstance(chapter, str | Path) else chapter
    quiet = ["--log-level=ERROR"]  # no warning that it listens without encryption, on this machine only
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", extra_arguments=quiet).execute()
    return notebook


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(description="Run a chapter as a notebook, and write the cells with their output if wanted.")
    parser.add_argument("chapter", help="a script in percent cells")
    parser.add_argument("--out", type=output, metavar="FILE.ipynb", help="write the notebook with its output")
    args = parser.parse_args(argv)
    if Path(args.chapter).suffix not in (".py", ".ipynb") or not Path(args.chapter).is_file():
        parser.error(f"{args.chapter!r}: no such script; fix: name one, as chapters/01_roofline.py")
    try:
        notebook = execute(args.chapter)
    except ImportError as error:
        sys.exit(f"{error}\n  fix: pip install 'scaling-book-torch[notebook]'")
    if args.out:
        import nbformat

        nbformat.write(notebook, args.out)
    streams = [out for cell in notebook.cells for out in cell.get("outputs", ()) if out.output_type == "stream"]
    sys.stderr.write("".join(out.text for out in streams if out.name == "stderr"))
    printed = "".join(out.text for out in streams if out.name == "stdout").splitlines()
    print(printed[-1] if printed else "nothing printed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
