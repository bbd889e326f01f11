"""Draw a listing frame by frame: before and after each line, which device holds which blocks of each array.

    frames = frames_of(log.events, given)         a frame for each line that a trace recorded
    print(text(frames, mesh))                     in the terminal
    svg(frames, mesh, title)                      an SVG that plays; `player` adds a slider, for a notebook or a page

Each cell of an array shows the device that stores it where the array is split the most: its number in the terminal, its
colour in an SVG. So one sees whose blocks a gather brings. The mesh's last axis goes across, the others down.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from scaling.spec import ShardingError, Spec, mesh_sizes, parse

MOVED = re.compile(r"(?P<op>[A-Za-z]+)(?P<axes>_[^(]+)?\((?P<operand>.*)\)")  # "AllGather_X(W[D_X, F])"
COLUMNS = 100  # the width of what is printed
Cells = list[list[int | None]]  # rows of cells: the device that stores each, None where it is absent


@dataclass(frozen=True)
class LineFrame:
    """One line of a listing: what it reads and makes, and every array that exists after it.

    Attributes:
        line: the line's text, such as "W[D, F] = AllGather_X(W[D_X, F])".
        read: the types of its operands.
        made: the type of its result; None for the frame of what is there at first.
        axes: the mesh axes along which it moves data.
        held: the type of each array after the line, by name.
    """

    line: str
    read: tuple[Spec, ...]
    made: Spec | None
    axes: tuple[str, ...]
    held: Mapping[str, Spec]


def frames_of(lines: Iterable[object], given: Iterable[Spec] = ()) -> list[LineFrame]:
    """Return the frames of a trace's events, or of their texts, after one of the types that are `given` at first.

    An operand that no line made, such as an activation's result, exists from the line that first reads it.
    """
    held = {spec.name: spec for spec in given}
    frames = [LineFrame("At first", (), None, (), dict(held))] if held else []
    for line in map(str, lines):
        made, _, right = line.partition(" = ")
        moved = MOVED.fullmatch(right)
        read = tuple(map(parse, [moved["operand"]] if moved else right.split(" * ")))
        after, axes = parse(made), parse(f"x[D{moved['axes']}]").axes if moved and moved["axes"] else ()
        held |= {spec.name: spec for spec in (*read, after)}
        frames.append(LineFrame(line, read, after, axes, dict(held)))
    return frames


def check_drawn(what, sizes: Mapping[str, int], most: int = 4096) -> None:
    """Raise ShardingError if the mesh has too many devices to be drawn."""
    if (devices := math.prod(sizes.values())) > most:
        raise ShardingError(
            f"{what}: a mesh of {devices:,} devices is not drawn, at most {most:,} are\n"
            f"  fix: draw a smaller mesh of the same axes"
        )


class Drawing:
    """The grids in which the arrays of some frames are drawn on a mesh.

    An array of more than two dims is drawn by the two that are split the most.
    """

    def __init__(self, frames: Sequence[LineFrame], mesh):
        """Raise ShardingError if the mesh is too large to be drawn, or lacks an axis."""
        self.sizes = mesh_sizes(mesh)
        check_drawn("a listing", self.sizes, 64)
        self.coords = [
            dict(zip(self.sizes, at, strict=True)) for at in itertools.product(*map(range, self.sizes.values()))
        ]
        self.columns = [*self.sizes.values()][-1] if self.sizes else 1
        self.known: dict[Spec, list[Cells]] = {}  # most arrays stay as they are from frame to frame
        self.types: dict[str, list[Spec]] = {}
        for frame in frames:
            for spec in (*frame.read, *frame.held.values()):
                spec.check_axes(self.sizes)
                self.types.setdefault(spec.name, []).append(spec)

    def cells(self, spec: Spec) -> list[Cells]:
        """Return, for each device in row-major order, the cells of the array that it holds."""
        if spec not in self.known:
            self.known[spec] = self._cells(spec)
        return self.known[spec]

    def _cells(self, spec: Spec) -> list[Cells]:
        types = [other for other in self.types[spec.name] if len(other.dims) == len(spec.dims)]
        finest = max(types, key=lambda other: self._ways(other.axes))
        counts = [math.lcm(*(self._ways(other.dims[i][1]) for other in types)) for i in range(len(spec.dims))]
        padded = [1, 1, *counts]  # a number or a vector is drawn as a matrix
        drawn = sorted(sorted(range(len(padded)), key=lambda i: (padded[i], i))[-2:])
        owners: dict[tuple[int, ...], int] = {}
        for device, ranges in enumerate(self._ranges(finest, counts)):
            for cell in itertools.product(*ranges):
                owners.setdefault(cell, device)

        def owner(ranges: list[range], place: tuple[int, int]) -> int | None:
            cell = [inside.start for inside in ranges]
            cell[drawn[0]], cell[drawn[1]] = place
            return owners[tuple(cell)] if all(i in inside for i, inside in zip(cell, ranges, strict=True)) else None

        rows, columns = (range(padded[i]) for i in drawn)
        return [[[owner(ranges, (i, j)) for j in columns] for i in rows] for ranges in self._ranges(spec, counts)]

    def _ways(self, axes: Sequence[str]) -> int:
        """Return the number of blocks over these axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def _ranges(self, spec: Spec, counts: Sequence[int]) -> Iterator[list[range]]:
        """Yield, for each device, the cells along each dim that it holds, with two dims of one cell in front."""
        for coord in self.coords:
            inside = spec.slices(counts, self.sizes, coord)
            yield [range(1), range(1), *(range(s.start, s.stop) for s in inside)]

    def rows(self) -> list[list[int]]:
        """Return the devices' numbers, a row for each place on the axes other than the last."""
        return [[*range(i, i + self.columns)] for i in range(0, len(self.coords), self.columns)]

    def name(self, device: int, last: bool) -> str:
        """Return a device's place on the last axis, or on the others, such as "X=0"."""
        named = [f"{axis}={i}" for axis, i in self.coords[device].items()]
        return "".join(named[-1:]) if last else ",".join(named[:-1])


def text(frames: Sequence[LineFrame], mesh) -> str:
    """Return the frames as text, each line with its operands, an arrow and its result."""
    drawing = Drawing(frames, mesh)
    lines: list[str] = []
    for number, frame in enumerate(frames):
        lines += ["", _numbered(number, frames)]
        specs = [*frame.held.values()] if frame.made is None else [*frame.read, frame.made]
        for group in _beside([_picture(drawing, spec) for spec in specs]):
            for row, parts in enumerate(itertools.zip_longest(*(block for _, block in group), fillvalue="")):
                joined = ""
                for (i, block), part in zip(group, parts, strict=True):
                    last = frame.made is not None and i == len(specs) - 1
                    joined += ("  ->  " if row == 1 else " " * 6) if last else " " * 3
                    joined += part.ljust(max(map(len, block)))
                lines.append(joined.rstrip())
    return "\n".join(lines[1:])


def _beside(blocks: list[list[str]]) -> list[list[tuple[int, list[str]]]]:
    """Return the pictures with their numbers: all in one row where that is narrow enough, or else each in its own.

    Raises:
        ShardingError: One picture alone is too wide.
    """
    widths = [max(map(len, block)) + 6 for block in blocks]
    if max(widths, default=0) > COLUMNS:
        raise ShardingError(
            f"{blocks[widths.index(max(widths))][0]}: its picture would be {max(widths):,} columns wide, at most "
            f"{COLUMNS} are written\n  fix: write an SVG (--plot FILE.svg), or draw a smaller mesh of the same axes"
        )
    numbered = [*enumerate(blocks)]
    return [numbered] if sum(widths) <= COLUMNS + 6 else [[each] for each in numbered]


def _numbered(number: int, frames: Sequence[LineFrame]) -> str:
    """Return a frame's line with its place among all lines."""
    first = int(frames[0].made is not None)  # without the arrays that are there at first
    return f"({number + first}/{len(frames) - 1 + first}) {frames[number].line}" if number + first else frames[0].line


def _picture(drawing: Drawing, spec: Spec) -> list[str]:
    """Return the type, and below it the devices with their cells."""
    cells, digits = drawing.cells(spec), len(str(len(drawing.coords) - 1))
    gap = " " if digits > 1 else ""
    shown = [[gap.join(("." if n is None else str(n)).rjust(digits) for n in row) for row in grid] for grid in cells]
    wide = max(len(drawing.name(drawing.columns - 1, True)), len(shown[0][0]))
    margin = max(len(drawing.name(device, False)) for device in range(len(cells)))
    heads = "  ".join(drawing.name(device, True).ljust(wide) for device in drawing.rows()[0])
    lines = [str(spec), " " * margin + " " * bool(margin) + heads]
    for row in drawing.rows():
        for i in range(len(shown[0])):
            name = drawing.name(row[0], False) if i == 0 else ""
            lines.append(name.ljust(margin) + " " * bool(margin) + "  ".join(shown[d][i].ljust(wide) for d in row))
    return lines


# As an SVG

LARGE, SMALL = 52, 24  # the side of a device in the frame's line, and in the row of all arrays below it
GAP, EDGE, TITLE, WIDE = 26, 12, 26, 640  # between arrays, around all, for the title; where the row of arrays breaks
SECONDS = 2.5  # a frame's time
HATCH = (
    '<defs><pattern id="partial" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line y2="6" stroke="#222" stroke-width="2" stroke-opacity=".55"/></pattern></defs>'
)
STYLE = (  # of these pictures alone, because a page's pictures share their styles
    ".listing text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#222}.listing .small{font-size:10px}"
    ".listing .title{font-weight:600;font-size:15px}"
)


def svg(frames: Sequence[LineFrame], mesh, title: str = "", only: int | None = None) -> str:
    """Return an SVG that shows the frames in turn, or `only` one of them, by its number from 0."""
    drawing = Drawing(frames, mesh)
    pictures = [_Picture(drawing, _numbered(number, frames), frame) for number, frame in enumerate(frames)]
    width, height = (max(sizes) for sizes in zip(*((each.width, each.height) for each in pictures), strict=True))
    count = len(frames)
    style = (
        f"{STYLE}@keyframes turns{count}{{0%{{visibility:visible}}{100 / count:.3f}%{{visibility:hidden}}}}"
        f".of{count}{{visibility:hidden;animation:turns{count} {SECONDS * count:g}s step-end infinite}}"
    )
    groups = []
    for number, each in enumerate(pictures):
        if only is None:
            delay = f'class="line of{count}" style="animation-delay:{number * SECONDS:g}s"'
            groups.append(f"<g {delay}>{''.join(each.parts)}</g>")
        elif number == only:
            groups.append(f"<g>{''.join(each.parts)}</g>")
    size = f'width="{width + 2 * EDGE:.0f}" height="{height + 2 * EDGE + TITLE:.0f}"'
    heading = _words(EDGE, EDGE + 12, title, "title")
    return (
        f'<svg class="listing" xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width + 2 * EDGE:.0f} '
        f'{height + 2 * EDGE + TITLE:.0f}"><style>{style}</style>{HATCH}<rect width="100%" height="100%" fill="#fff"/>'
        f'{heading}<g transform="translate({EDGE},{EDGE + TITLE})">{"".join(groups)}</g></svg>'
    )


def player(frames: Sequence[LineFrame], mesh, title: str = "") -> str:
    """Return HTML with the SVG and a slider, which stops it at a frame."""
    show = (
        "this.parentNode.querySelectorAll('.line').forEach((f, i) => {"
        "f.style.animation = 'none'; f.style.visibility = i == this.value ? 'visible' : 'hidden'})"
    )
    slider = f'<input type="range" min="0" max="{len(frames) - 1}" value="0" style="width:320px" aria-label="line"'
    legend = "A square is what one device holds of an array. Each block has the colour of the device that stores it; " \
        "hatched blocks are partial sums, and dashed lines join the devices that exchange blocks."  # fmt: skip
    picture = f'{svg(frames, mesh, title)}<br>{slider} oninput="{escape(show)}">'
    return f'<div style="overflow-x:auto">{picture}<p><small>{legend}</small></p></div>'


class _Picture:
    """One frame as the parts of an SVG: the line with its operands and result, and below it all arrays."""

    def __init__(self, drawing: Drawing, line: str, frame: LineFrame):
        self.drawing, self.parts = drawing, list[str]()
        self.width = self.height = 0.0
        self.parts.append(_words(0, 12, line))
        x, below = 0.0, 24.0
        if frame.made is not None:
            for spec in frame.read:
                x = self.array(spec, x, 24, LARGE, frame.axes) + GAP
            self.parts.append(_words(x, 24 + 16 + LARGE, "→"))
            x = self.array(frame.made, x + GAP, 24, LARGE)
            below = self.height + 28
            self.parts.append(_words(0, below - 8, "All arrays after this line", "small"))
        x, top = 0.0, below
        for spec in frame.held.values():
            if x > WIDE:
                x, top = 0.0, self.height + 16
            x = self.array(spec, x, top, SMALL, marked=spec is frame.made) + GAP

    def array(self, spec: Spec, x: float, y: float, side: float, moves: Sequence[str] = (), marked=False) -> float:
        """Draw an array as the mesh's devices, with lines along the axes that it `moves`; return its right edge."""
        drawing, step = self.drawing, side * 1.3
        self.parts.append(_words(x, y + 11, str(spec), "small"))
        x, width = x + (34 if side == LARGE and len(drawing.rows()) > 1 else 0), 6.2 * len(str(spec)) + x
        places = {}
        for device, cells in enumerate(drawing.cells(spec)):
            row, column = divmod(device, drawing.columns)
            left, top = places[device] = x + column * step, y + (32 if side == LARGE else 18) + row * step
            if side == LARGE and row == 0:
                self.parts.append(_words(left, top - 5, drawing.name(device, True), "small"))
            if side == LARGE and column == 0:
                self.parts.append(_words(left - 34, top + side / 2, drawing.name(device, False), "small"))
            wide, high = side / len(cells[0]), side / len(cells)
            self.parts.append(f'<rect {_box(left, top, side, side)} fill="#f2f2f2"/>')
            for i, j in itertools.product(range(len(cells)), range(len(cells[0]))):
                if (owner := cells[i][j]) is not None:
                    box = _box(left + j * wide, top + i * high, wide, high)
                    self.parts.append(f'<rect {box} fill="{colour(drawing, owner)}"/>')
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


def colour(drawing: Drawing, device: int) -> str:
    """Return a device's colour: its hue by the axes other than the last, its lightness by the last."""
    (row, column), rows = divmod(device, drawing.columns), len(drawing.coords) // drawing.columns
    if rows == 1:  # with one axis: its hue by that
        row, column, rows = column, 0, drawing.columns
    light = 48 + 30 * column / max(1, drawing.columns - 1)
    return f"hsl({(210 + 360 * row / rows) % 360:.0f},65%,{light:.0f}%)"


def _words(x: float, y: float, words: str, kind: str = "") -> str:
    """Return text at a place, as an element of an SVG."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
