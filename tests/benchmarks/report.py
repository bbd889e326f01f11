"""What the benchmarks are asked, and the tables that they print."""

import argparse
import os
import platform
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

from scaling.common.console import Parser


def options(about: str | None, **defaults) -> Parser:
    """Options by their defaults: a whole number, numbers by commas, or names by commas, and then no others."""
    parser = Parser(description=about)
    for name, default in defaults.items():
        if isinstance(default, int):
            parser.add_argument(f"--{name}", type=int, default=default, help=f"(default {default})")
        else:
            known = [*default]
            text = f"by commas: {','.join(map(str, known))}"
            parser.add_argument(f"--{name}", type=lambda text, of=known: listed(text, of), default=known, help=text)
    return parser


def listed(text: str, known: list) -> list:
    """Some of these names, or any numbers."""
    try:
        found = [type(known[0])(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: give numbers by commas") from None
    if isinstance(known[0], str) and (unknown := set(found) - set(known)):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {', '.join(known)}")
    return found


def table(head: list[str], rows: list[list], left: int = 1) -> str:
    """Markdown; the first `left` columns are words."""
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)])
    pads = [str.ljust if i < left else str.rjust for i in range(len(head))]
    padded = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def show(rows: list, head: list[str], left: int = 1) -> None:
    print(table(head, rows, left), end="\n\n", flush=True)


def ms(seconds: list[float], digits: int = 1) -> str:
    return f"{1e3 * statistics.median(seconds):.{digits}f}"


def beside(ours: list[float], theirs: list[float], digits: int = 1) -> list[str]:
    """Milliseconds of both, and their ratio."""
    return [ms(ours, digits), ms(theirs, digits), spread(ratios(ours, theirs))]


def spread(ratios: tuple[float, float, float]) -> str:
    low, middle, high = ratios
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> tuple[float, float, float]:
    """Quartiles, of samples that were taken one after the other."""
    return quartiles([a / b for a, b in zip(ours, theirs, strict=True)])


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """(first quartile, median, third)."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def machine() -> str:
    import torch  # here: what starts gpu.py's parts runs without it

    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    model = named[1] if named else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {model}, torch {torch.__version__}, Python {platform.python_version()}"
