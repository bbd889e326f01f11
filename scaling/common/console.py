"""Give all commands options within bounds, text that fits the terminal, and one clear error at a bad end.

For example:

    parser = Parser(prog="python -m scaling.tool", description="...")
    parser.add_argument("--seed", type=integer(0, 2**63 - 1), default=0)
    complain(error)                     # on the error stream, in at most 100 columns
    sys.exit(command(main))

    table([("v5e", "1.97e14"), ("v5p", "4.59e14")], ["chip", "FLOPs/s"])      # numbers to the right, words wrapped
"""

import argparse
import importlib
import math
import os
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from scaling.common.arguments import shortened

SEEDS = 2**63 - 1  # the greatest seed
WIDEST, NARROWEST = 100, 60  # columns
BINARY = {"": 1, "k": 2**10, "K": 2**10, "M": 2**20, "G": 2**30}  # a batch has sequences of 2^n tokens
DECIMAL = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
LARGEST, HIGHEST = 10**9, 1e30  # the largest whole number and the largest number that options take by default
LARGEST_COUNT = 1e20  # the largest count such as 4M
WORD = 150  # characters of the longest word that an error quotes whole, as a path is
PROFILE = "profile what the ranks run, and write it: to FILE.json or into a folder"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Format a parser's help in at most 100 columns.

    Paragraphs of the description and the epilog are filled; indented lines, which are examples, stay lines.
    """

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, **options | {"width": min(shutil.get_terminal_size().columns, WIDEST) - 2})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = [p.splitlines() for p in text.strip("\n").split("\n\n")]
        kept = [p if any(line.startswith("    ") for line in p) else [" ".join(map(str.strip, p))] for p in paragraphs]
        fill = partial(textwrap.fill, width=width, break_on_hyphens=False, break_long_words=False)

        def folded(line: str) -> str:
            if line.startswith(("    python ", "    torchrun ")):
                return fold_command(line, width)
            return fill(line, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 4) if line[:1] == " " else "")

        return "\n\n".join("\n".join(map(folded, p)) for p in kept)


def width() -> int:
    """Return the columns that may be used: the terminal's, between 60 and 100, or 100 if there is no terminal."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))


def fold(text: str, columns: int | None = None) -> str:
    """Continue every line that is too long on the next one, indented four columns more."""
    columns, lines = columns or width(), []
    for line in text.split("\n"):
        if len(line) <= columns:
            lines.append(line)
            continue
        further = line[: len(line) - len(line.lstrip())] + "    "
        lines += textwrap.wrap(line, columns, subsequent_indent=further, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines)


def fold_command(line: str, columns: int | None = None) -> str:
    """Continue a shell command that is too long on further lines that begin with an option."""
    first, *options = re.split(r" (?=--)", line)
    lines, columns = [first], columns or width()
    for option in options:
        if len(lines[-1]) + len(option) + 3 <= columns:
            lines[-1] += f" {option}"
        else:
            lines.append(f"{' ' * (len(line) - len(line.lstrip()))}    {option}")
    return " \\\n".join(lines)


def complain(error: object) -> None:
    """Print an error on the error stream, its lines folded and its longest words cut."""
    print(_folded(error), file=sys.stderr)


def _folded(error: object) -> str:
    """Return an error's text with its lines folded and its longest words cut."""
    return fold(re.sub(rf"\S{{{WORD},}}", lambda word: shortened(word[0]), str(error)))


def _described(text: str) -> str:
    """Return a module's docstring as a description: a sentence first, without the command, which the usage has."""
    first, *rest = text.strip().split("\n\n")
    first = re.sub(r"^`python -m [^`]*`: |: `python -m [^`]*`", "", first)
    return "\n\n".join([first[:1].upper() + first[1:] + "." * (first[-1:] not in ".:?!"), *rest])


class Parser(argparse.ArgumentParser):
    """A parser whose help and errors fit the terminal."""

    def __init__(self, *, formatter_class: Any = HelpFormatter, description: str | None = None, **options: Any):
        super().__init__(formatter_class=formatter_class, description=_described(description or ""), **options)

    def error(self, message: str) -> NoReturn:
        """Print the folded message, and exit with code 2."""
        self.exit(2, _folded(f"{self.prog}: error: {message}\n  `{self.prog} --help` lists the options") + "\n")


def integer(least: int = 0, most: int = LARGEST) -> Callable[[str], int]:
    """Return a type for argparse: an int from `least` to `most`."""
    return number(least, most, int)


def number(least: float = 0.0, most: float = HIGHEST, kind: Callable = float) -> Callable:
    """Return a type for argparse: a number from `least` to `most`, as a float or, say, a Fraction."""
    what, shown = ("whole number", str) if kind is int else ("number", "{:g}".format)

    def read(text: str):
        try:
            value = kind(text) if len(text) <= 25 else None
        except (ValueError, ZeroDivisionError, OverflowError):
            value = None
        if value is None or not least <= value <= most:
            bounds = "above 0" if 0 < least < 1e-3 else f"of at least {shown(least)}"
            if most not in (LARGEST, HIGHEST) or (value is not None and value > most):
                bounds = f"from {shown(least)} to {shown(most)}"
            raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not a {what} {bounds}")
        return value

    return read


def parse_count(text: str, units: dict = BINARY) -> float:
    """Read a count with a unit: "4M" tokens of a batch are 4 * 2^20, "15T" of a data set are 15e12.

    A batch uses powers of two because it consists of sequences of 2^n tokens; `units` says which powers.
    """
    match = re.fullmatch(rf"([\d.,]+(?:e\d+)?)([{''.join(units)}]?)", text, re.ASCII)
    try:
        value = float(match[1].replace(",", "")) * units[match[2]] if match else math.inf
    except ValueError:
        value = math.inf
    if not 0 < value <= LARGEST_COUNT:
        low = re.fullmatch(r"-\d*\.?\d+|0+", text, re.ASCII)
        about = "a whole number of at least 1" if low else "a number; fix: write 4M, 4194304 or 4e6"
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not {about}")
    return value


def whole_count(text: str) -> int:
    """Return a count such as "4M" or "1.5k" as an int; an argument error if it is not a whole number."""
    if re.fullmatch(r"\d{1,5}(x\d{1,5})+", text, re.ASCII):
        count = math.prod(map(int, text.split("x")))
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is a slice; fix: give the number of its chips, {count}")
    value = parse_count(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is {value:,.10g}, not a whole number; fix: give {math.floor(value) or 1} or "
            f"{math.ceil(value)}"
        )
    return int(value)


def chip_count(text: str) -> int:
    """Return a number of chips, at most a billion: planners try all its divisors."""
    if (value := whole_count(text)) > LARGEST:
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is more than {LARGEST:,} chips; fix: give fewer")
    return value


def output(text: str) -> str:
    """Check, as a type for argparse, that a file can be written in an existing folder, before any work is done."""
    path = Path(text)
    with _writing(text):
        if not path.parent.is_dir() or path.is_dir():
            why = "is a folder" if path.is_dir() else f"there is no folder {shortened(str(path.parent))}"
            raise argparse.ArgumentTypeError(f"cannot write {shortened(text)}: {why}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise argparse.ArgumentTypeError(f"cannot write {shortened(text)}: no permission")
    return text


def folder(text: str) -> str:
    """Check, as a type for argparse, that a folder exists and can be written to."""
    if not os.path.isdir(text) or not os.access(text, os.W_OK):
        raise argparse.ArgumentTypeError(f"{shortened(text)!r}: there is no such folder that can be written to")
    return text


def picture(text: str, ends: tuple[str, ...] = (".png", ".svg")) -> str:
    """Check, as a type for argparse, that `output` allows the file and that its name ends in .png or .svg."""
    if Path(text).suffix not in ends:
        raise argparse.ArgumentTypeError(f"{shortened(text)!r}: the file's name ends in {' or '.join(ends)}")
    return output(text)


def place(text: str) -> str:
    """Check, as a type for argparse, the name of a FILE.json or a folder that need not exist yet; "" means none."""
    path = Path(text).absolute()
    with _writing(text):
        nearest = next(each for each in (path, *path.parents) if each.exists() or each.is_symlink())
        if text and nearest.is_dir() == (nearest == path and path.suffix == ".json"):
            raise argparse.ArgumentTypeError(
                f"cannot write {shortened(text)}: it must be FILE.json or a folder, and {shortened(str(nearest))} "
                "is not"
            )
        if text and not os.access(nearest, os.W_OK):
            raise argparse.ArgumentTypeError(
                f"cannot write {shortened(text)}: no permission in {shortened(str(nearest))}"
            )
        if text and nearest.is_dir():  # root passes os.access everywhere, also in /proc, where no file can be made
            tempfile.TemporaryFile(dir=nearest).close()
    return text


@contextmanager
def _writing(text: str) -> Iterator[None]:
    """Report the system's error about a name, such as that it is too long, as an error of the option."""
    try:
        yield
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {shortened(text)}: {error.strerror}") from None


UNUSABLE: dict[type[Exception], tuple[str, str]] = {  # the system's errors about a file in words, and the fix
    FileNotFoundError: ("no such file or folder", "give the path of one"),
    IsADirectoryError: ("is a folder", "give the path of a file"),
    NotADirectoryError: ("is not a folder", "give the path of one"),
    PermissionError: ("no permission", "give one that you may read and write"),
}


def complaining(*errors: type[Exception], code: int = 1) -> Callable:
    """Return a decorator of a command's main that turns errors of the user's making into a message and an exit code.

    The listed errors are printed without a traceback, and `code` is returned. An error of the system that names a file
    is printed with its fix.
    """

    def around(main: Callable[..., int]) -> Callable[..., int]:
        @wraps(main)
        def run(argv: list[str] | None = None) -> int:
            try:
                return main(argv)
            except BrokenPipeError:  # `command` handles it
                raise
            except errors as error:
                text = str(error)
                if type(error) in UNUSABLE and (path := getattr(error, "filename", None)):
                    wrong, fix = UNUSABLE[type(error)]
                    text = f"{path}: {wrong}\n  fix: {fix}"
                complain(f"{type(error).__name__}: {text}")
                return code

        return run

    return around


def command_of(module: str, arguments: list[str] | None = None) -> int:
    """Run the main of a module and return its exit code.

    The module is imported here because torch takes seconds to import, and Ctrl-C should end those quietly, too.
    """
    return command(lambda: importlib.import_module(module).main(arguments))


def command(main: Callable[[], int]) -> int:
    """Run a command's main and return its exit code; end quietly when the reader goes away, as `| head` does."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard the output that is still buffered
        return 141  # the exit code of a program that SIGPIPE ends
    except KeyboardInterrupt:
        complain("interrupted")
        return 130


WIDE = 10_000  # columns: wide enough that no line is wrapped
NUMBER = re.compile(r"[-+<>~]?[\d.,]+(e[-+]?\d+)?(%|x| us| ms| s| ns)?|-|inf|")  # cells that are aligned to the right


def table(
    rows: Sequence[Sequence], headers: Sequence[str], columns: int | None = None, *,
    right: Sequence[bool] = (), hang: str = "", above: Sequence[str] = (), below: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return the rows under their headers; the widest columns of words are wrapped until all fit.

    Args:
        rows: Cells of any type, written as `str` writes them; a row may end early. A cell or header may have several
            lines.
        headers: One text for each column.
        columns: The width of the table; the terminal's by default.
        right: Which columns are aligned to the right, with only their headers wrapped; by default the columns of
            numbers.
        hang: The prefix of a wrapped cell's further lines.
        above: Text over all columns that is put above each row.
        below: Text over all columns that is put below each row.
    """
    columns = columns or width()
    rows = [[*map(str, row), *[""] * (len(headers) - len(row))] for row in rows]
    across = [[line for row in rows for line in row[i].splitlines() or [""]] for i in range(len(headers))]
    right = right or [bool(column) and all(NUMBER.fullmatch(line) for line in column) for column in across]
    widths = [max(map(len, [*column, *head.split("\n")])) for column, head in zip(across, headers, strict=True)]
    least = [
        max(map(len, [*(column if numbers else " ".join(column).split()), *head.split()]), default=0)
        for column, head, numbers in zip(across, headers, right, strict=True)
    ]
    while sum(widths) + 2 * (len(widths) - 1) > columns:
        able = [i for i, w in enumerate(widths) if w > least[i]]
        if not able:
            break  # no column can shrink further: the table is as wide as its words
        widths[max(able, key=widths.__getitem__)] -= 1

    def lines(cells: Sequence[str]) -> list[str]:
        wrapped = [_wrapped(cell, w, hang) for cell, w in zip(cells, widths, strict=True)]
        return [
            "  ".join(
                text.rjust(w) if numbers else text.ljust(w)
                for text, w, numbers in zip(parts, widths, right, strict=True)
            ).rstrip()
            for parts in zip_longest(*wrapped, fillvalue="")
        ]

    found = [*lines(headers), "  ".join("-" * w for w in widths)]
    for row, before, after in zip_longest(rows, above, below, fillvalue=""):
        found += [*textwrap.wrap(before, columns, subsequent_indent="    "), *lines(row)]
        found += textwrap.wrap(after, columns, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(found)


def _wrapped(text: str, columns: int, hang: str) -> list[str]:
    """Return the lines of a cell; line breaks in the cell are kept."""
    found = (textwrap.wrap(line, columns, subsequent_indent=hang, break_on_hyphens=False) for line in text.splitlines())
    return [part for lines in found for part in lines] or [""]


def significant(number: float) -> str:
    """Format four significant digits, with an exponent that is a multiple of three up to 1e14: 13.02e9, 0.9151."""
    if number == 0:
        return "0"
    exponent = int(f"{number:e}".partition("e")[2])
    third = 0 if -3 <= exponent < 6 else exponent if abs(exponent) > 14 else exponent - exponent % 3
    scaled = number / 10**third
    text = f"{scaled:,.{max(0, 3 - (exponent - third))}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text + (f"e{third}" if third else "")
