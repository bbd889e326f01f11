"""Run a chapter as a notebook, in a kernel (the `notebook` extra), and write the cells with their output if wanted.

python -m scaling.book.notebook chapters/01_roofline.py --out 01_roofline.ipynb
CHAPTER="--small" python -m scaling.book.notebook chapters/03_collectives.py
"""

import sys
from pathlib import Path

from scaling.common.console import Parser, output


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
    parser = Parser(description=(__doc__ or "").split("\n")[0])
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
