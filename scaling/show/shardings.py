"""Draw which devices hold which block, in the terminal, or as PNG or SVG with the `plot` extra (Part 3).

    python -m scaling.show "A[I_X, J_Y]" --mesh X=2,Y=2
    python -m scaling.show --plot nine.svg              the nine shardings of the book's figure
    python -m scaling.show schedule 1f1b --stages 4     a pipeline's schedule: scaling.show.timelines
    python -m scaling.show params --model llama3-70b    each leaf of a Transformer: scaling.show.params
    python -m scaling.show listing FILE                 a listing, line by line: scaling.book.drawing
    print(draw("A[I_X, J]", {"X": 2, "Y": 2}))          a mesh may also be a Mesh

A device is written as its number, row-major in the mesh. Replicas are separated by commas: `0, 1`; the devices whose
partial sums add up to a block are joined by plus signs: `0+2`. Each colour is one group of devices.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from scaling.common.console import Parser, complaining, picture
from scaling.show import svg
from scaling.show.frames import check_drawn
from scaling.spec import ShardingError, Spec, block_index, mesh_sizes, parse
from scaling.spec.sizes import format_sizes, parse_mesh

NINE = ("A[I, J]", "A[I_X, J]", "A[I, J_X]", "A[I_Y, J]", "A[I_XY, J]", "A[I_Y, J_X]", "A[I, J_Y]", "A[I_X, J_Y]",
        "A[I, J_XY]")  # fmt: skip
ANSI = (117, 215, 120, 211, 229, 183, 159, 187, 146, 222, 152, 174)


def blocks(spec: "str | Spec", mesh) -> dict[tuple[int, ...], list[list[int]]]:
    """Return {block: its replicas}; a replica is one device, or the devices whose partial sums add up to the block."""
    spec, sizes = parse(spec), mesh_sizes(mesh)
    spec.check_axes(sizes)
    check_drawn(spec, sizes)
    counts = {axis: range(n) for axis, n in sizes.items()}
    held: dict = {}
    for device, coords in enumerate(itertools.product(*counts.values())):
        at = dict(zip(counts, coords, strict=True))
        block = [block_index(axes, at, sizes) for _, axes in spec.dims]
        replica = tuple(i for axis, i in at.items() if axis not in spec.named_axes)
        held.setdefault(tuple(block), {}).setdefault(replica, []).append(device)
    return {block: list(replicas.values()) for block, replicas in sorted(held.items())}


def label(groups: list[list[int]]) -> str:
    """Format groups of devices: `[[0], [1]]` gives "0, 1", and `[[0, 2], [1, 3]]` gives "0+2, 1+3"."""
    return ", ".join("+".join(map(str, group)) for group in groups)


def draw(spec: "str | Spec", mesh, colour: bool = False) -> str:
    """Return the type as a grid of blocks with their devices; a 3-D array has a grid for each block of its first dim.

    Raises:
        ShardingError: The type has more than three dims.
    """
    spec, axes = parse(spec), mesh_sizes(mesh)
    dims = len(spec.dims)
    if not 1 <= dims <= 3:
        raise ShardingError(f"{spec}: only arrays of 1, 2 or 3 dims are drawn\n  fix: leave out dims that are whole")
    held = {(*[0] * (3 - dims), *block): label(groups) for block, groups in blocks(spec, mesh).items()}
    grids, rows, columns = (range(max(numbers) + 1) for numbers in zip(*held, strict=True))
    colours = {text: i for i, text in enumerate(held.values())}
    lines = [str(spec), f"  mesh {format_sizes(axes)}{remarks(spec, axes)}"]
    for grid in grids:
        lines += [f"  {spec.dim_names[0]} {grid}"] if dims == 3 else []
        cells = [[held[grid, row, column] for column in columns] for row in rows]
        names = [str(row) if dims > 1 else "" for row in rows]
        lines += _grid(cells, names, [*map(str, columns)], spec.dim_names[-2:], colours if colour else None)
    return "\n".join(lines)


def picture_of_blocks(specs: Iterable["str | Spec"], mesh) -> str:
    """Return an SVG of arrays of two dims, each cut into its blocks, which name their devices as `draw` does.

    A block has the colour of the first device that holds it.
    """
    sizes, pictures = mesh_sizes(mesh), []
    devices, columns = math.prod(sizes.values()), [*sizes.values()][-1]
    for spec in map(parse, specs):
        rows: dict[int, list[tuple[str, str]]] = {}
        for (row, _), groups in blocks(spec, mesh).items():
            rows.setdefault(row, []).append((label(groups), svg.colour(groups[0][0], devices, columns)))
        pictures.append((str(spec), [*rows.values()]))
    return svg.grids(pictures, 96, 96)


def remarks(spec: Spec, axes) -> str:
    """Return the axes of a mesh over which a type has replicas and partial sums, in words."""
    replicas, parts = spec.replicated(axes), spec.unreduced
    text = f"; replicas over {', '.join(replicas)}" if replicas else ""
    return text + (f"; partial sums over {', '.join(parts)}" if parts else "")


def _grid(cells, names, columns, dims, colours) -> list[str]:
    """Return a grid in box-drawing characters, with columns of one width and names in the margins."""
    width = max(len(text) for row in [*cells, columns] for text in row) + 2
    margin = max(len(name) for name in names) + 2
    lines = [(dims[-1].rjust(margin - 1) + "  " + " ".join(name.center(width) for name in columns)).rstrip()]
    rule = lambda a, b, c: " " * margin + a + b.join("─" * width for _ in columns) + c  # noqa: E731
    lines.append(rule("┌", "┬", "┐"))
    for number, (row, name) in enumerate(zip(cells, names, strict=True)):
        if number:
            lines.append(rule("├", "┼", "┤"))
        painted = []
        for text in row:
            paint = f"\033[48;5;{ANSI[colours[text] % len(ANSI)]};38;5;16m" if colours else ""
            painted.append(paint + text.center(width) + ("\033[0m" if paint else ""))
        lines.append(name.rjust(margin - 1) + " │" + "│".join(painted) + "│")
    lines.append(rule("└", "┴", "┘"))
    return lines


@complaining(ValueError, OSError)
def main(argv: "list[str] | None" = None) -> int:
    """Draw the shardings; return the exit code."""
    parser = Parser(prog="python -m scaling.show", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help="such as 'A[I_X, J_Y]'; by default the book's nine")
    parser.add_argument("--mesh", default="X=2,Y=2", help="mesh axes and their sizes (default X=2,Y=2)")
    parser.add_argument("--colour", "--color", action=argparse.BooleanOptionalAction, default=sys.stdout.isatty())
    parser.add_argument(
        "--plot", type=partial(picture, ends=(".svg",)), metavar="FILE.svg", help="write an SVG instead"
    )
    args = parser.parse_args(argv)
    mesh, types = parse_mesh(args.mesh), args.types or NINE
    if args.plot:
        Path(args.plot).write_text(svg.types(types, mesh), encoding="utf-8")
    else:
        print("\n\n".join(draw(spec, mesh, args.colour) for spec in types))
    return 0
