"""Draw as SVG, without a library and with one palette for all pages: listings, types, and time lines.

played(frames, mesh, title)               the frames of scaling.show.frames in turn, an SVG that plays
player(frames, mesh, title)               the same with a slider, for a notebook or a page
types(["A[I_X, J]", "A[I, J_Y]"], mesh)   the blocks that each device holds
grids([(title, rows)], width, height)     rows of coloured cells with text, such as an array's blocks
time_lines([(title, bars)], colours)      the time lines of scaling.show.bars
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType

from scaling.show.bars import TimeLine, end_of, rows_of
from scaling.show.charts import tick_label, ticks
from scaling.show.frames import Drawing, LineFrame, Permutes, numbered, one_type
from scaling.spec import Spec

LARGE, SMALL = 52, 24  # the side of a device in the frame's line, and in the row of all arrays below it
GAP, EDGE, TITLE, WIDE = 26, 12, 26, 640  # between arrays, around all, for the title; where the row of arrays breaks
SECONDS = 2.5  # a frame's time
HATCH = (
    '<defs><pattern id="partial" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line y2="6" stroke="#222" stroke-width="2" stroke-opacity=".55"/></pattern></defs>'
)
STYLE = (  # of these pictures alone, because a page's pictures share their styles
    ".drawn text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#222}.drawn .small{font-size:10px}"
    ".drawn .title{font-weight:600;font-size:15px}"
)
LEGEND = (
    "A square is what one device holds of an array. Each block has the colour of the device that stores it; "
    "hatched blocks are partial sums, and dashed lines join the devices that exchange blocks."
)
ROWS = ("#86aef0", "#f5a45d", "#5fc7b0", "#86cf7f", "#c58fe0", "#e07a8b")
ROW, LEFT, ACROSS, LETTER = 22, 64, 800, 6.1  # a time line: row, names of rows, time, letter of size 10


def document(parts: Iterable[str], width: float, height: float, title: str = "", style: str = "") -> str:
    """Return an SVG of parts in a drawing of this size, under its title, with an edge around it."""
    above = EDGE + TITLE * bool(title)
    size = f"{max(width, 1.5 * LETTER * len(title)) + 2 * EDGE:.0f}", f"{height + EDGE + above:.0f}"
    return (
        f'<svg class="drawn" xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}"><style>{STYLE}{style}</style>{HATCH}'
        f'<rect width="100%" height="100%" fill="#fff"/>{_words(EDGE, EDGE + 12, title, "title") if title else ""}'
        f'<g transform="translate({EDGE},{above})">{"".join(parts)}</g></svg>'
    )


def played(frames: Sequence[LineFrame], mesh, title: str = "") -> str:
    """Return an SVG that shows the frames in turn."""
    drawing = Drawing(frames, mesh)
    pictures = [_Picture(drawing, numbered(number, frames), frame) for number, frame in enumerate(frames)]
    width, height = (max(sizes) for sizes in zip(*((each.width, each.height) for each in pictures), strict=True))
    count = len(frames)
    style = (
        f"@keyframes turns{count}{{0%{{visibility:visible}}{100 / count:.3f}%{{visibility:hidden}}}}"
        f".of{count}{{visibility:hidden;animation:turns{count} {SECONDS * count:g}s step-end infinite}}"
    )
    groups = (
        f'<g class="line of{count}" style="animation-delay:{number * SECONDS:g}s">{"".join(each.parts)}</g>'
        for number, each in enumerate(pictures)
    )
    return document(groups, width, height, title, style)


def types(specs: Iterable["str | Spec"], mesh) -> str:
    """Return an SVG of types beside each other, each as the mesh's devices with the blocks that they hold.

    Raises:
        ShardingError: The mesh is too large to be drawn, or lacks an axis.
    """
    pictures = [_Picture(Drawing([frame], mesh), "", frame) for frame in map(one_type, specs)]
    return _flowed((picture.parts, picture.width, picture.height) for picture in pictures)


def grids(pictures: Iterable[tuple[str, Sequence[Sequence[tuple[str, str]]]]], width: float, height: float) -> str:
    """Return an SVG of grids beside each other, all of one size; each is (title, rows of (text, colour))."""
    drawn = []
    for title, rows in pictures:
        parts, high = [_words(0, 11, title, "small")], height / len(rows)
        for i, row in enumerate(rows):
            wide = width / len(row)
            for j, (text, fill) in enumerate(row):
                x, y, lines = j * wide, 18 + i * high, text.splitlines()
                parts.append(f'<rect {_box(x, y, wide, high)} fill="{fill or "#f2f2f2"}" stroke="#444"/>')
                parts += [
                    _words(x + (wide - LETTER * len(line)) / 2, y + high / 2 + 4 + 12 * (k - (len(lines) - 1) / 2),
                           line, "small") for k, line in enumerate(lines)
                ]  # fmt: skip
        drawn.append((parts, max(width, LETTER * len(title)), height + 18))
    return _flowed(drawn)


def _flowed(drawn: Iterable[tuple[Sequence[str], float, float]]) -> str:
    """Return an SVG of drawings, each (its parts, width, height), beside each other on as many rows as they need."""
    parts, x, y, width, height = list[str](), 0.0, 0.0, 0.0, 0.0
    for each, wide, high in drawn:
        if x and x + wide > WIDE:
            x, y = 0.0, height + GAP
        parts.append(f'<g transform="translate({x:.0f},{y:.0f})">{"".join(each)}</g>')
        width, height = max(width, x + wide), max(height, y + high)
        x += wide + GAP
    return document(parts, width, height)


def time_lines(
    lines: Sequence[TimeLine], colours: Mapping[str, str] = MappingProxyType({}), unit: str | None = "", end: float = 0
) -> str:
    """Return an SVG of time lines below each other, each with its time axis, and a legend of the kinds of bars.

    A bar has the colour of its kind; if `colours` has none for it, the colour of its row. All lines end at `end`, or
    else each with its last bar. If `unit` is None, the bars are parts of a whole instead of a time, and there is no
    axis.
    """
    parts, y = list[str](), 0.0
    for title, bars in lines:
        last, rows = float(end or end_of(bars)), rows_of(bars)
        top = y + 20 * bool(title)
        parts.append(_words(0, y + 12, title))
        parts += [_words(0, top + i * ROW + 15, row, "small") for i, row in enumerate(rows)]
        for bar in bars:
            left, wide = LEFT + float(bar.start) / last * ACROSS, float(bar.seconds) / last * ACROSS
            box = _box(left, top + rows.index(bar.row) * ROW, wide, ROW - 2)
            fill = colours.get(bar.kind) or ROWS[rows.index(bar.row) % len(ROWS)]
            parts.append(f'<rect {box} fill="{fill}" stroke="#fff" stroke-width=".6"/>')
            if wide > LETTER * len(bar.label):
                middle = left + (wide - LETTER * len(bar.label)) / 2
                parts.append(_words(middle, top + rows.index(bar.row) * ROW + 14, bar.label, "small"))
        y = top + len(rows) * ROW
        if unit is None:
            y += 8
            continue
        for tick in ticks(0, last, False, 8):
            x = LEFT + tick / last * ACROSS
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 4:.1f}" stroke="#444"/>')
            parts.append(_words(x - LETTER / 2 * len(tick_label(tick)), y + 15, tick_label(tick), "small"))
        parts.append(_words(0, y + 15, f"time {unit}".strip(), "small"))
        y += 30
    x, used = 0.0, {bar.kind for _, bars in lines for bar in bars}
    for kind in (kind for kind in colours if kind in used):
        wide = 16 + LETTER * len(kind) + 20
        if x + wide > LEFT + ACROSS:
            x, y = 0.0, y + 18
        parts.append(f'<rect {_box(x, y, 12, 12)} fill="{colours[kind]}"/>{_words(x + 16, y + 10, kind, "small")}')
        x += wide
    return document(parts, LEFT + ACROSS + 20, y + 14 * bool(x))


def player(frames: Sequence[LineFrame], mesh, title: str = "") -> str:
    """Return HTML with the SVG and a slider, which stops it at a frame."""
    show = (
        "this.parentNode.querySelectorAll('.line').forEach((f, i) => {"
        "f.style.animation = 'none'; f.style.visibility = i == this.value ? 'visible' : 'hidden'})"
    )
    slider = f'<input type="range" min="0" max="{len(frames) - 1}" value="0" style="width:320px" aria-label="line"'
    picture = f'{played(frames, mesh, title)}<br>{slider} oninput="{escape(show)}">'
    return f'<div style="overflow-x:auto">{picture}<p class="legend"><small>{LEGEND}</small></p></div>'


class _Picture:
    """One frame as the parts of an SVG: the line with its operands and result, and below it all arrays."""

    def __init__(self, drawing: Drawing, line: str, frame: LineFrame):
        self.drawing, self.parts = drawing, list[str]()
        self.width, self.height = 1.3 * LETTER * len(line), 0.0  # its letters have size 13
        self.parts += [_words(0, 12, line)] if line else []
        x, below = 0.0, 24.0 * bool(line)
        for spec in frame.read:
            x = self.array(spec, x, below, LARGE, frame.before, frame.axes) + GAP
        if frame.made is not None:
            self.parts.append(_words(x, below + 16 + LARGE, "→"))
            x = self.array(frame.made, x + GAP, below, LARGE, frame.after)
            below = self.height + 28
            self.parts.append(_words(0, below - 8, "All arrays after this line", "small"))
        x, top = 0.0, below
        for spec in frame.held.values():
            if x > WIDE:
                x, top = 0.0, self.height + 16
            x = self.array(spec, x, top, SMALL, frame.after, marked=spec is frame.made) + GAP

    def array(self, spec: Spec, x, y, side, permutes: Permutes, moves: Sequence[str] = (), marked=False) -> float:
        """Draw an array as the mesh's devices, with lines along the axes that it `moves`; return its right edge."""
        drawing, step = self.drawing, side * 1.3
        self.parts.append(_words(x, y + 11, str(spec), "small"))
        width, margin = 6.2 * len(str(spec)) + x, LETTER * len(drawing.name(0, False)) + 6
        x += margin if side == LARGE and len(drawing.rows()) > 1 else 0
        places = {}
        for device, cells in enumerate(drawing.cells(spec, permutes)):
            row, column = divmod(device, drawing.columns)
            left, top = places[device] = x + column * step, y + (32 if side == LARGE else 18) + row * step
            if side == LARGE and row == 0:
                self.parts.append(_words(left, top - 5, drawing.name(device, True), "small"))
            if side == LARGE and column == 0:
                self.parts.append(_words(left - margin, top + side / 2, drawing.name(device, False), "small"))
            wide, high = side / len(cells[0]), side / len(cells)
            self.parts.append(f'<rect {_box(left, top, side, side)} fill="#f2f2f2"/>')
            for i, j in itertools.product(range(len(cells)), range(len(cells[0]))):
                if (owner := cells[i][j]) is not None:
                    box = _box(left + j * wide, top + i * high, wide, high)
                    self.parts.append(f'<rect {box} fill="{colour(owner, len(drawing.coords), drawing.columns)}"/>')
                    if spec.unreduced:
                        self.parts.append(f'<rect {box} fill="url(#partial)"/>')
            edge = 'stroke="#d00" stroke-width="2"' if marked else 'stroke="#444"'
            self.parts.append(f'<rect {_box(left, top, side, side)} fill="none" {edge}/>')
        self.arrows(places, side, moves)
        right = max(x + drawing.columns * step - side * 0.3, width)
        self.width, self.height = max(self.width, right), max(self.height, *(top + side for _, top in places.values()))
        return right

    def arrows(self, places: Mapping[int, tuple[float, float]], side: float, axes: Sequence[str]) -> None:
        """Draw a line between each two devices that are neighbours along one of the axes."""
        coords = self.drawing.coords
        for a, b in itertools.combinations(range(len(coords)), 2):
            steps = {axis: n - coords[a][axis] for axis, n in coords[b].items() if n != coords[a][axis]}
            if any(steps == {axis: 1} for axis in axes):
                (x1, y1), (x2, y2) = ((x + side / 2, y + side / 2) for x, y in (places[a], places[b]))
                line = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
                self.parts.append(f'<line {line} stroke="#d00" stroke-width="2.5" stroke-dasharray="5 3"/>')


def colour(device: int, devices: int, columns: int) -> str:
    """Return the colour of one of so many devices: its hue by its row, its lightness by which of the columns it is in.

    If there is one row, the hue is by the column.
    """
    (row, column), rows = divmod(device, columns), devices // columns
    if rows == 1:
        row, column, rows = column, 0, columns
    light = 48 + 30 * column / max(1, columns - 1)
    return f"hsl({(210 + 360 * row / rows) % 360:.0f},65%,{light:.0f}%)"


def _words(x: float, y: float, words: str, kind: str = "") -> str:
    """Return text at a point, as an element of an SVG."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
