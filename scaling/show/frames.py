"""Draw a listing frame by frame: before and after each line, which device holds which blocks of each array.

    frames = frames_of(log.events, given)         a frame for each line that a trace recorded
    print(text(frames, mesh))                     in the terminal; scaling.show.svg draws the same frames as SVG
    print(device_grids("A[I_X, J]", mesh))        one type: the blocks of each device

Each cell of an array shows the device that stores it where the array is split the most: its number in the terminal, its
colour in an SVG. So one sees whose blocks a gather brings. The mesh's last axis goes across, the others down.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from scaling.spec import ShardingError, Spec, block_index, mesh_sizes, parse

TIMES = re.compile(r" \*(?:_\w+)? ")  # the sign in "A[I, J] * B[J, K]" (a trace) or "A[I, J] *_J B[J, K]" (a plan)
MOVED = re.compile(r"(?P<op>[A-Za-z]+)(?P<axes>_[^(]+)?\((?P<operand>.*)\)")  # "AllGather_X(W[D_X, F])"
COLUMNS = 100  # the width of printed text
Cells = list[list[int | None]]  # rows of cells: the device that stores each, None where it is absent
Permutes = Mapping[str, tuple[tuple[tuple[str, ...], tuple[tuple[int, int], ...]], ...]]  # by name: (axes, its pairs)


@dataclass(frozen=True)
class LineFrame:
    """One line of a listing: its operands, its result, and every array that exists after it.

    Attributes:
        line: the line's text, such as "W[D, F] = AllGather_X(W[D_X, F])", or "".
        read: the types of its operands.
        made: the type of its result; None for the frame of the initial arrays.
        axes: the mesh axes along which it moves data.
        held: the type of each array after the line, by name.
        before: the CollectivePermutes that have moved the blocks of each array before the line, by name.
        after: the same after the line.
    """

    line: str
    read: tuple[Spec, ...]
    made: Spec | None
    axes: tuple[str, ...]
    held: Mapping[str, Spec]
    before: Permutes = field(default_factory=dict)
    after: Permutes = field(default_factory=dict)


def frames_of(lines: Iterable[object], given: Iterable[Spec] = ()) -> list[LineFrame]:
    """Return the frames of a trace's events, or of their texts, after one of the types that are `given` at first.

    An operand that no line made, such as an activation's result, exists from the line that first reads it. A
    CollectivePermute that does not change the type moves blocks from device to device; its event has the pairs.
    """
    held = {spec.name: spec for spec in given}
    frames, permutes = [LineFrame("At first", (), None, (), dict(held))] if held else [], dict[str, tuple]()
    for each in lines:
        line, before = str(each), dict(permutes)
        made, _, right = line.partition(" = ")
        moved = MOVED.fullmatch(right)
        read = tuple(map(parse, [moved["operand"]] if moved else TIMES.split(right)))
        after, axes = parse(made), parse(f"x[D{moved['axes']}]").axes if moved and moved["axes"] else ()
        held |= {spec.name: spec for spec in (*read, after)}
        earlier = permutes.pop(after.name, ())
        if (pairs := getattr(each, "perm", ())) and read[0] == after:
            permutes[after.name] = (*earlier, (axes, pairs))
        frames.append(LineFrame(line, read, after, axes, dict(held), before, dict(permutes)))
    return frames


def one_type(spec: "str | Spec") -> LineFrame:
    """Return the frame of one type alone."""
    return LineFrame("", (parse(spec),), None, (), {})


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
        self.known: dict[Spec, list[Cells]] = {}  # most arrays do not change from frame to frame
        self.types: dict[str, list[Spec]] = {}
        for frame in frames:
            for spec in (*frame.read, *frame.held.values()):
                spec.check_axes(self.sizes)
                self.types.setdefault(spec.name, []).append(spec)

    def cells(self, spec: Spec, permutes: Permutes = MappingProxyType({})) -> list[Cells]:
        """Return, for each device in row-major order, the cells of the array that it holds after these permutes."""
        if spec not in self.known:
            self.known[spec] = self._cells(spec)
        cells = self.known[spec]
        for axes, pairs in permutes.get(spec.name, ()):
            cells = self._permuted(cells, axes, {target: source for source, target in pairs})
        return cells

    def _permuted(self, cells: list[Cells], axes: Sequence[str], sources: Mapping[int, int]) -> list[Cells]:
        """Return the cells after each device received the cells of the device at its `sources` block along the axes."""
        absent: Cells = [[None] * len(row) for row in cells[0]]
        places = itertools.product(*(range(self.sizes[axis]) for axis in axes))
        at = [dict(zip(axes, place, strict=True)) for place in places]  # the blocks' coordinates, in their order
        found = (sources.get(block_index(axes, coord, self.sizes)) for coord in self.coords)
        pairs = zip(found, self.coords, strict=True)
        return [absent if i is None else cells[self.coords.index(coord | at[i])] for i, coord in pairs]

    def _cells(self, spec: Spec) -> list[Cells]:
        types = [other for other in self.types[spec.name] if len(other.dims) == len(spec.dims)]
        finest = max(types, key=lambda other: self._ways(other.axes))
        counts = [math.lcm(*(self._ways(other.dims[i][1]) for other in types)) for i in range(len(spec.dims))]
        counts = [int(dim) if dim.isdigit() else ways for dim, ways in zip(spec.dim_names, counts, strict=True)]
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
        lines += ["", numbered(number, frames)]
        specs = [*frame.held.values()] if frame.made is None else [*frame.read, frame.made]
        moved = [*[frame.before] * len(frame.read), frame.after] if frame.read else [{}] * len(specs)
        for group in _beside([_picture(drawing, *each) for each in zip(specs, moved, strict=True)]):
            for row, parts in enumerate(itertools.zip_longest(*(block for _, block in group), fillvalue="")):
                joined = ""
                for (i, block), part in zip(group, parts, strict=True):
                    last = frame.made is not None and i == len(specs) - 1
                    joined += ("  ->  " if row == 1 else " " * 6) if last else " " * 3
                    joined += part.ljust(max(map(len, block)))
                lines.append(joined.rstrip())
    return "\n".join(lines[1:])


def device_grids(spec: "str | Spec", mesh) -> str:
    """Return one type, and below it the blocks that each device holds."""
    frame = one_type(spec)
    return "\n".join(map(str.rstrip, _picture(Drawing([frame], mesh), frame.read[0])))


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


def numbered(number: int, frames: Sequence[LineFrame]) -> str:
    """Return a frame's line with its place among all lines."""
    first = int(frames[0].made is not None)  # without the arrays that are there at first
    return f"({number + first}/{len(frames) - 1 + first}) {frames[number].line}" if number + first else frames[0].line


def _picture(drawing: Drawing, spec: Spec, permutes: Permutes = MappingProxyType({})) -> list[str]:
    """Return the type, and below it the devices with their cells."""
    cells, digits = drawing.cells(spec, permutes), len(str(len(drawing.coords) - 1))
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
