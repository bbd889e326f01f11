"""Draw time lines: pipelines, a layer, requests in their slots, chunks through a core. Time goes to the right.

A time line is a list of `Bar`s in one unit of time, and its rows have the order in which they first occur.

    print(text(bars, 80))                                    in the terminal
    svg.time_lines([(title, bars)], {"forward": "#f5a45d"})  as SVG (scaling.show.svg)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TimeLine = tuple[str, Sequence["Bar"]]  # (title, bars)


@dataclass(frozen=True)
class Bar:
    """Something that runs in a `row` from `start` to `end`.

    The `label` is written on the bar, and the `kind` decides its colour.
    """

    row: str
    label: str
    start: Any
    end: Any
    kind: str = ""

    @property
    def seconds(self) -> Any:
        """The length of the bar, in the unit of its time line."""
        return self.end - self.start


def rows_of(bars: Sequence[Bar]) -> list[str]:
    """Return the rows of bars, in the order in which they first occur."""
    return list(dict.fromkeys(bar.row for bar in bars))


def end_of(bars: Sequence[Bar]) -> Any:
    """Return the end of the last bar."""
    return max(bar.end for bar in bars)


def busy(bars: Sequence[Bar], row: str) -> Any:
    """Return the time that the bars of a row take."""
    return sum(bar.seconds for bar in bars if bar.row == row)


def text(
    bars: Sequence[Bar], width: int, end: Any = None, *, idle: str = ".", fill: str = "-",
    paint: Mapping[str, int] | None = None,
) -> str:  # fmt: skip
    """Return a line of text for each row, with `width` columns from 0 to `end`, by default the end of the last bar.

    A bar shows its label, cut to the room that it has, and is filled up with `fill`, or with the label again if `fill`
    is "". It takes at least one column, and is drawn over earlier bars. `paint` has the ANSI colour of each kind.
    """
    span, rows = end or end_of(bars), rows_of(bars)
    margin, cells = max(map(len, rows)), {row: [idle] * width for row in rows}
    for bar in bars:
        if bar.start < span:
            first = min(width - 1, round(float(bar.start / span * width)))
            last = min(width, max(first + 1, round(float(bar.end / span * width))))
            shown = _written(bar.label, last - first, fill)
            cells[bar.row][first:last] = [_painted(each, paint[bar.kind]) for each in shown] if paint else shown
    return "\n".join(f"{row:<{margin}} |{''.join(line)}|" for row, line in cells.items())


def _written(label: str, room: int, fill: str) -> str:
    """Return a label that is cut to whole words, or else to letters, and filled up."""
    while len(label) > room and " " in label:
        label = label.rpartition(" ")[0]
    return label[:room].ljust(room, fill) if fill else (label * room)[:room]


def _painted(character: str, colour: int) -> str:
    """Return a cell on its colour, in bold if it is a letter, which begins a label."""
    return f"\x1b[{'1' if character.isalpha() else '22'};38;5;16;48;5;{colour}m{character}\x1b[0m"
