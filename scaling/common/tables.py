"""Tables as text, at most 100 columns wide, or narrower where the terminal (or COLUMNS) is.

For example:

    table([("v5e", "1.97e14"), ("v5p", "4.59e14")], ["chip", "FLOPs/s"])      # numbers to the right, words wrapped
"""

import re
from collections.abc import Sequence
from itertools import zip_longest
from textwrap import wrap

from scaling.common.console import width

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
        found += [*wrap(before, columns, subsequent_indent="    "), *lines(row)]
        found += wrap(after, columns, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(found)


def _wrapped(text: str, columns: int, hang: str) -> list[str]:
    """Return the lines of a cell; line breaks in the cell are kept."""
    found = (wrap(line, columns, subsequent_indent=hang, break_on_hyphens=False) for line in text.splitlines())
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
