"""A profile as text: the lines, where a step went, who was waited for, what to change. At most 100 columns."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from statistics import mean
from textwrap import wrap
from typing import Any

from scaling.hardware import Chip
from scaling.profile.lines import LineTotal
from scaling.profile.split import Parts

COLUMNS, LEAST = 100, 30  # of the whole, and of a line's name beside its numbers


def report(profile: Any, chip: Chip | None = None, dtype: str = "fp32", columns: int = COLUMNS) -> str:
    """All of a `Profile`."""
    parts = [profile.parts(rank) for rank in range(len(profile.timelines))]
    text = [_lines(profile.lines(), chip, dtype, columns), steps(parts)]
    if slow := profile.stragglers():
        text.append("\n".join(["slow ranks", *(f"  {each}" for each in slow)]))
    if advice := profile.suggestions(chip):
        text.append("\n".join(["to change", *(f"  {i}. {each}" for i, each in enumerate(advice, 1))]))
    return "\n\n".join(_folded(part, columns) for part in text)


def _lines(totals: Sequence[LineTotal], chip: Chip | None, dtype: str, columns: int = COLUMNS) -> str:
    """The lines by what they took in a step: milliseconds in which they held the rank, of a collective split."""
    heads = ["line", "calls", "ms", "exposed", "hidden", "waiting", "GFLOP", "MB"]
    heads += ["predicted", "of roof"] if chip else []
    rows = [_row(total, chip, dtype) for total in totals]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    room = columns - sum(widths[1:]) - 2 * len(widths[1:])
    if room >= LEAST:
        widths[0] = min(widths[0], room)
        rows = [["\n".join(wrap(name, widths[0], subsequent_indent="  ")), *cells] for name, *cells in rows]
    else:  # the name above its numbers
        widths[0] = 4
        rows = [each for name, *cells in rows for each in ([name], ["", *cells])]
    return _written(heads, rows, widths)


def _written(heads: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    """A table: the first column to the left, the others to the right; cells of several lines begin at the top."""

    def lines(cells: Sequence[str]) -> Iterator[str]:
        for parts in zip_longest(*(cell.split("\n") for cell in cells), fillvalue=""):
            first, *others = zip(parts, widths, strict=False)
            yield "  ".join([first[0].ljust(first[1]), *(cell.rjust(wide) for cell, wide in others)]).rstrip()

    rule = "  ".join("-" * wide for wide in widths)
    return "\n".join([*lines(heads), rule, *(line for row in rows for line in lines(row))])


def _row(total: LineTotal, chip: Chip | None, dtype: str) -> list[str]:
    moves = total.run.communicates
    waiting = f"{total.waiting * 1e3:.2f}" + (f" for {total.behind}" if total.behind is not None else "")
    calls = f"{total.calls:.0f}" if abs(total.calls - round(total.calls)) < 0.01 else f"{total.calls:.1f}"
    cells = [total.line, calls, f"{total.seconds * 1e3:.2f}"]
    cells += [f"{total.exposed * 1e3:.2f}", f"{total.hidden * 1e3:.2f}", waiting] if moves else [""] * 3
    cells += [f"{total.flops / 1e9:.3f}" if total.flops else "", f"{total.nbytes / 1e6:.2f}" if total.nbytes else ""]
    if chip:
        predicted, took = total.predicted(chip, dtype), total.exposed + total.hidden if moves else total.seconds
        cells += ["", ""] if not predicted else [f"{predicted * 1e3:.2f}", f"{predicted / took:.0%}" if took else ""]
    return cells


PARTS = (
    ("products", "products"),
    ("communication exposed", "exposed"),
    ("waiting for others", "waiting"),
    ("operations between lines", "between"),
    ("between operations", "python"),
    ("a step", "step"),
    ("communication hidden", "hidden"),
)


def steps(parts: Sequence[Sequence[Parts]]) -> str:
    """Where a step went on each rank (at most six are shown), in milliseconds: the mean over its steps."""
    shown = parts[:6]
    rows = [
        [name, *(f"{mean(getattr(each, part) for each in mine) * 1e3:.2f}" for mine in shown)] for name, part in PARTS
    ]
    heads = ["ms a step", *(f"rank {rank}" for rank in range(len(shown)))]
    return _written(heads, rows, [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))])


def _folded(text: str, columns: int) -> str:
    """Long lines continued on the next ones."""
    found = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())] + "    "
        found += (
            wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False) if len(line) > columns else [line]
        )
    return "\n".join(found)
