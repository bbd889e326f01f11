"""A profile as text: the lines, where a step went, who was waited for, what to change. At most 100 columns."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from scaling.common.console import fold
from scaling.common.tables import table
from scaling.hardware import Chip
from scaling.profile.split import LineTotal, Parts

COLUMNS, LEAST = 100, 30  # of the whole, and of a line's name beside its numbers


def report(profile: Any, chip: Chip | None = None, dtype: str = "fp32", columns: int = COLUMNS) -> str:
    """All of a `Profile`."""
    parts = [profile.parts(rank) for rank in range(len(profile.timelines))]
    text = [_lines(profile.lines(), chip, dtype, columns), steps(parts)]
    if slow := profile.stragglers():
        text.append("\n".join(["slow ranks", *(f"  {each}" for each in slow)]))
    if advice := profile.suggestions():
        text.append("\n".join(["to change", *(f"  {i}. {each}" for i, each in enumerate(advice, 1))]))
    return "\n\n".join([text[0], *(fold(part, columns) for part in text[1:])])


def _lines(totals: Sequence[LineTotal], chip: Chip | None, dtype: str, columns: int = COLUMNS) -> str:
    """The lines by what they took in a step: milliseconds in which they held the rank, of a collective split."""
    heads = ["calls", "ms", "exposed", "hidden", "waiting", "GFLOP", "MB", *(["predicted", "of roof"] if chip else [])]
    rows, names = [_row(total, chip, dtype) for total in totals], [total.line for total in totals]
    taken = sum(2 + max(map(len, cells)) for cells in zip(heads, *rows, strict=True))
    right = [False, *([True] * len(heads))]
    if columns - taken >= LEAST:
        rows = [[name, *cells] for name, cells in zip(names, rows, strict=True)]
        return table(rows, ["line", *heads], columns, right=right, hang="  ")
    return table([["", *cells] for cells in rows], ["line", *heads], columns, right=right, above=names)


def _row(total: LineTotal, chip: Chip | None, dtype: str) -> list[str]:
    moves = total.run.communicates
    waiting = f"{total.waiting * 1e3:.2f}" + (f" for {total.behind}" if total.behind is not None else "")
    calls = f"{total.calls:.0f}" if abs(total.calls - round(total.calls)) < 0.01 else f"{total.calls:.1f}"
    cells = [calls, f"{total.seconds * 1e3:.2f}"]
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
    return table(rows, heads)
