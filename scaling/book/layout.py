"""Text that fits: at most 100 columns, or fewer where the terminal (or COLUMNS) has fewer.

table([("v5e", 1.97e14), ("v5p", 4.59e14)], ["chip", "FLOPs/s"])      numbers to the right, words wrapped
"""

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from textwrap import wrap

from scaling.console import width

NUMBER = re.compile(r"[-+<>~]?[\d.,]+(e[-+]?\d+)?(%|x| us| ms| s| ns)?|-|inf|")  # what stands to the right in a table


def format_number(value: float, digits: int = 4) -> str:
    """A number as the book writes them, to four significant digits: 1.97e14, 57,500, 0.9151, 44.35."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    power = int(exponent)
    if value and not -3 <= power < 6:
        return f"{_short(mantissa)}e{power}"
    return _short(f"{float(f'{mantissa}e{power}'):,.{max(0, digits - 1 - power)}f}")


def bar(value: float, whole: float, columns: int = 12) -> str:
    """A bar as text, so many columns long where the value is the whole."""
    return "#" * round(columns * value / whole)


def exact(value: float) -> str:
    """A count in full, with thousands separated; what is no whole number to six digits."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else format_number(value, 6)


def _short(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def beside(pictures: Iterable[str], gap: int = 4, columns: int | None = None) -> str:
    """Drawings of several lines side by side, on as many rows as they need."""
    columns, rows, used = columns or width(), [], 0
    for picture in pictures:
        wide = max(map(len, picture.splitlines()))
        if not rows or used + gap + wide > columns:
            rows.append([])
            used = -gap
        rows[-1].append(picture)
        used += gap + wide
    return "\n\n".join(_side_by_side(row, gap) for row in rows)


def _side_by_side(pictures: list[str], gap: int) -> str:
    columns = [picture.splitlines() for picture in pictures]
    widths = [max(map(len, lines)) + gap for lines in columns]
    rows = zip_longest(*columns, fillvalue="")
    return "\n".join("".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def table(rows: Iterable[Sequence], headers: Sequence[str], columns: int | None = None) -> str:
    """Rows under their headers: columns of numbers to the right; the widest columns of words wrapped until all fit.

    A header may have several lines; of a column of numbers only the header is wrapped.
    """
    columns = columns or width()
    body = [[_written(cell) for cell in row] for row in rows]
    across = [[row[i] for row in body] for i in range(len(headers))]
    numeric = [bool(column) and all(NUMBER.fullmatch(cell) for cell in column) for column in across]
    widths = [max(map(len, [*column, *head.split("\n")])) for column, head in zip(across, headers, strict=True)]
    least = [max(map(len, [*(column if right else " ".join(column).split()), *head.split()]))
             for column, head, right in zip(across, headers, numeric, strict=True)]  # fmt: skip
    while sum(widths) + 2 * (len(widths) - 1) > columns:
        able = [i for i, w in enumerate(widths) if w > least[i]]
        if not able:
            break  # nothing can give way: the table is as wide as its words
        widths[max(able, key=widths.__getitem__)] -= 1

    def lines(cells) -> list[str]:
        wrapped = [_wrapped(cell, w) for cell, w in zip(cells, widths, strict=True)]
        return [
            "  ".join(
                text.rjust(w) if right else text.ljust(w) for text, w, right in zip(parts, widths, numeric, strict=True)
            ).rstrip()
            for parts in zip_longest(*wrapped, fillvalue="")
        ]

    rule = "  ".join("-" * w for w in widths)
    return "\n".join([*lines(headers), rule, *(line for row in body for line in lines(row))])


def _written(cell) -> str:
    """A cell as text: counts in full, other numbers to four digits."""
    return cell if isinstance(cell, str) else exact(cell) if isinstance(cell, int) else format_number(cell)


def _wrapped(text: str, columns: int) -> list[str]:
    """The lines of a cell; what was written as several lines stays so."""
    return [part for line in text.splitlines() for part in wrap(line, columns, break_on_hyphens=False)] or [""]
