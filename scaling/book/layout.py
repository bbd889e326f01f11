"""Numbers in the book's notation, tables of them, and drawings side by side."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest

from scaling.common import console
from scaling.common.console import width


def format_number(value: float, digits: int = 4) -> str:
    """Return a number as the book writes it, to four significant digits: 1.97e14, 57,500, 0.9151, 44.35."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    power = int(exponent)
    if value and not -3 <= power < 6:
        return f"{_short(mantissa)}e{power}"
    return _short(f"{float(f'{mantissa}e{power}'):,.{max(0, digits - 1 - power)}f}")


def bar(value: float, whole: float) -> str:
    """Return a bar as text, which has 12 columns if the value is the whole."""
    return "#" * round(12 * value / whole)


def exact(value: float) -> str:
    """Return a count in full, with thousands separated; any other number to six digits."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else format_number(value, 6)


def _short(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def beside(pictures: Iterable[str], gap: int = 4, columns: int | None = None) -> str:
    """Return drawings of several lines side by side, on as many rows as they need."""
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
    """Return rows of text and numbers under their headers: counts in full, other numbers to four digits."""
    return console.table([[_written(cell) for cell in row] for row in rows], headers, columns)


def html_table(rows: Iterable[Sequence], headers: Sequence[str], below: Sequence[str] = ()) -> str:
    """Return the same table as HTML, its numbers to the right, without empty columns; `below`: text under each row."""
    columns = [*zip_longest(headers, *([_written(cell) for cell in row] for row in rows), fillvalue="")]
    columns = [each for each in columns if {*each[1:]} - {"", "-"}] or columns
    right = [all(map(console.NUMBER.fullmatch, each[1:])) for each in columns]

    def line(cells: Sequence[str], tag: str) -> str:
        aligned = (f"<{tag}{' style=text-align:right' * numbers}>" for numbers in right)
        return (
            f"<tr>{''.join(f'{start}{_shown(text)}</{tag}>' for start, text in zip(aligned, cells, strict=True))}</tr>"
        )

    head, *body = zip(*columns, strict=True)
    lines = []
    for row, why in zip_longest(body, below, fillvalue=""):
        under = f"<tr><td></td><td colspan={len(columns) - 1}><em>{escape(why)}</em></td></tr>" if why else ""
        lines.append(line(row, "td") + under)
    return f"<table class=docutils><thead>{line(head, 'th')}</thead><tbody>{''.join(lines)}</tbody></table>"


def _shown(text: str) -> str:
    """Return a cell as HTML: a bar of `bar` as a coloured one."""
    if text and not text.strip("#"):
        return f'<span class="bar" style="width:{len(text) / 2}em"></span>'
    return "<br>".join(map(escape, text.splitlines()))


def _written(cell) -> str:
    return cell if isinstance(cell, str) else exact(cell) if isinstance(cell, int) else format_number(cell)
