"""What the commands share: numbers within bounds, and one clear line at a bad end.

parser.add_argument("--seed", type=integer(0, 2**63 - 1), default=0)
sys.exit(command(main))
"""

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from scaling.sizes import shortened

SEEDS = 2**63 - 1  # the greatest seed
PROFILE = "profile what the ranks run, and write it: to FILE.json or into a folder"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """For a parser's help: at most 100 columns. Paragraphs of its description and epilog are filled; indented lines,
    which are examples, stay lines."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, **options | {"width": min(shutil.get_terminal_size().columns, 100) - 2})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = [p.splitlines() for p in text.strip("\n").split("\n\n")]
        kept = [p if any(line.startswith("    ") for line in p) else [" ".join(map(str.strip, p))] for p in paragraphs]
        fill = partial(textwrap.fill, width=width, break_on_hyphens=False, break_long_words=False)
        return "\n\n".join("\n".join(fill(line, subsequent_indent=_further_in(line)) for line in p) for p in kept)


def _further_in(line: str) -> str:
    """What an indented line is continued with: four columns more; a line that is not indented, at the left."""
    indent = line[: len(line) - len(line.lstrip())]
    return indent and indent + "    "


def integer(least: int = 0, most: int = 10**9) -> Callable[[str], int]:
    """A type for argparse: an int from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text) if len(text) <= 25 else None
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not a whole number from {least} to {most}")
        return value

    return read


def number(least: float = 0.0, most: float = 1e30, kind: Callable = float) -> Callable:
    """A type for argparse: a number from `least` to `most`, as a float or, say, a Fraction."""

    def read(text: str):
        try:
            value = kind(text) if len(text) <= 25 and least <= float(Fraction(text)) <= most else None
        except (ValueError, ZeroDivisionError, OverflowError):
            value = None
        if value is None:
            raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not a number from {least:g} to {most:g}")
        return value

    return read


def output(text: str) -> str:
    """A type for argparse: a file to be written, in a folder that there is; said before any work is done."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        why = "is a folder" if path.is_dir() else f"there is no folder {shortened(str(path.parent))}"
        raise argparse.ArgumentTypeError(f"cannot write {shortened(text)}: {why}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {shortened(text)}: no permission")
    return text


def picture(text: str) -> str:
    """A type for argparse: as `output`, of a picture, whose name says which of two kinds it is."""
    if Path(text).suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{shortened(text)}: the file's name ends in .png or .svg")
    return output(text)


def place(text: str) -> str:
    """A type for argparse: FILE.json, or a folder, either of which need not be there yet; "" is none."""
    path = Path(text).absolute()
    nearest = next(each for each in (path, *path.parents) if each.exists())
    if text and nearest.is_dir() == (nearest == path and path.suffix == ".json"):
        raise argparse.ArgumentTypeError(
            f"cannot write {shortened(text)}: it must be FILE.json or a folder, and {shortened(str(nearest))} is not"
        )
    if text and not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {shortened(text)}: no permission in {shortened(str(nearest))}")
    return text


def command(main: Callable[[], int]) -> int:
    """Run a command's main and return its exit code. A reader that goes away, as `| head` does, ends it quietly."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write goes nowhere
        return 141  # as a program that SIGPIPE ends
    except KeyboardInterrupt:
        return 130
