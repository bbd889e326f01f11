"""What the benchmarks are asked, and the tables that they print."""

import json
import os
import platform
import statistics
from pathlib import Path

from scaling.common.console import Parser


def listed(text: str) -> list[str]:
    return text.split(",")


COMMON = {
    "ranks": {"type": int, "help": "(default %(default)s)"},
    "only": {"type": listed, "help": "by commas: %(default)s"},
    "strategies": {"type": listed, "help": "by commas: %(default)s"},
    "sizes": {"type": listed, "help": "by commas: %(default)s"},
    "optimizers": {"type": listed, "help": "by commas: %(default)s"},
    "rivals": {"type": listed, "help": "of PyTorch's, by commas: %(default)s"},
    "wire": {"type": lambda text: [float(x) for x in listed(text)],
             "help": "speeds in MB/s, by commas, 0 for loopback's: %(default)s"},
    "steps": {"type": int, "help": "timed samples of each side (default %(default)s)"},
    "threads": {"type": int, "help": "threads of each rank (default %(default)s)"},
    "json": {"type": Path, "help": "write the figures to this file"},
}  # fmt: skip


def options(about: str | None, **defaults) -> Parser:
    """A parser of options of COMMON, by their defaults; of names there are all."""
    parser = Parser(description=about)
    for name, default in defaults.items():
        alone = default is None or isinstance(default, (int, str))
        parser.add_argument(f"--{name}", default=default if alone else ",".join(default), **COMMON[name])
    return parser


def write(path: Path | None, found) -> None:
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n")


def table(head: list[str], rows: list[list], left: int = 1) -> str:
    """Markdown; the first `left` columns are words."""
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    marks = [("-" * width)[: width - (i >= left)] + ":" * (i >= left) for i, width in enumerate(widths)]

    def row(cells: list[str]) -> str:
        padded = [
            f"{cell:<{w}}" if i < left else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    return "\n".join(map(row, (lines[0], marks, *lines[1:])))


def show(rows: list, head: list[str], left: int = 1) -> None:
    print(table(head, rows, left), end="\n\n", flush=True)


def spread(ratios: tuple[float, float, float]) -> str:
    low, middle, high = ratios
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def ratios(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Quartiles, of samples that were taken one after the other."""
    return quartiles([a / b for a, b in zip(ours, theirs, strict=True)])


def machine() -> str:
    import torch  # here: what starts gpu.py's parts runs without it

    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":")[1].strip() if lines else model
    return f"{os.cpu_count()} cores of {model}, torch {torch.__version__}, Python {platform.python_version()}"


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """(first quartile, median, third)."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
