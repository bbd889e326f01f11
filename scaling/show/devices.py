"""Draw a sharding as each device sees it: a mesh of devices, and in every device the part of the array that it holds.

    print(draw("A[I_X, J]", {"X": 2, "Y": 2}))           in the terminal: the device holds the full squares
    save("a.svg", ["A[I_X, J]", "A[I_YX, J]"], mesh)     as PNG or SVG, with the `plot` extra

`scaling.show.shardings` draws the array instead, with the devices that hold each block.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from scaling.show.charts import blank
from scaling.show.shardings import COLOURS, blocks
from scaling.spec import ShardingError, Spec, mesh_sizes, parse

HELD, PARTIAL, ABSENT = "█", "▒", "·"  # partial sums are drawn lighter


def held_cells(spec: "str | Spec", mesh, cells: int | None = None) -> dict[tuple[int, int], list[list[bool]]]:
    """Return, by a device's (row, column) in the mesh, which of the array's cells x cells squares the device holds.

    The mesh's first axis goes down and its second axis across. `cells` is by default the number of devices.

    Raises:
        ShardingError: The mesh has more than two axes, or the array more than two dims.
    """
    spec, sizes = parse(spec), mesh_sizes(mesh)
    if not 1 <= len(sizes) <= 2 or not 1 <= len(spec.dims) <= 2:
        raise ShardingError(
            f"{spec} on a mesh of {', '.join(sizes)}: only arrays of 1 or 2 dims on meshes of 1 or 2 axes are drawn\n"
            f"  fix: leave out axes that hold replicas, and dims that are whole"
        )
    cells = cells or math.prod(sizes.values())
    shape = dict.fromkeys(spec.dim_names, cells)
    (down, rows), (across, columns) = (*sizes.items(), ("", 1))[:2]
    found = {}
    for row in range(rows):
        for column in range(columns):
            coord = {down: row} | ({across: column} if across else {})
            first, last = (slice(0, 1), *spec.slices(shape, sizes, coord))[-2:]
            height = cells if len(spec.dims) == 2 else 1
            inside = [[first.start <= i < first.stop and last.start <= j < last.stop for j in range(cells)]
                      for i in range(height)]  # fmt: skip
            found[row, column] = inside
    return found


def draw(spec: "str | Spec", mesh, cells: int | None = None) -> str:
    """Return the mesh as a grid of devices in text, each with its part of the array."""
    spec, sizes = parse(spec), mesh_sizes(mesh)
    found, full = held_cells(spec, mesh, cells), PARTIAL if spec.unreduced else HELD
    (down, rows), (across, columns) = (*sizes.items(), ("", 1))[:2]
    width = len(next(iter(found.values()))[0])
    margin, gap = len(f"{down}={rows - 1}") + 1, " " * 2
    wide = max(width, len(f"{across}={columns - 1}"))
    head = " " * margin + gap.join((f"{across}={c}" if across else "").ljust(wide) for c in range(columns))
    lines = [str(spec), *([head.rstrip()] if across else [])]
    for row in range(rows):
        pictures = [found[row, column] for column in range(columns)]
        for i in range(len(pictures[0])):
            name = f"{down}={row}" if i == 0 else ""
            drawn = gap.join("".join(full if on else ABSENT for on in picture[i]).ljust(wide) for picture in pictures)
            lines.append((name.ljust(margin) + drawn).rstrip())
        if row < rows - 1 and len(pictures[0]) > 1:
            lines.append("")
    return "\n".join(lines)


def figure(specs: Sequence["str | Spec"], mesh, columns: int = 3):
    """Draw types next to each other in a matplotlib Figure, each as a mesh of devices with their blocks in colour.

    Partial sums are hatched. ImportError without matplotlib.
    """
    columns = min(columns, len(specs))
    height = -(-len(specs) // columns)
    picture = blank(3.2 * columns, 3.4 * height)
    for number, spec in enumerate(map(parse, specs), 1):
        _draw_mesh(picture.add_subplot(height, columns, number), spec, mesh)
    return picture


def _draw_mesh(axes, spec: Spec, mesh) -> None:
    """Draw one type's devices into matplotlib axes."""
    from matplotlib.patches import Rectangle

    (down, rows), (across, places) = (*mesh_sizes(mesh).items(), ("", 1))[:2]
    colour_of = {}  # by device
    for i, groups in enumerate(blocks(spec, mesh).values()):
        colour_of |= {device: COLOURS[i % len(COLOURS)] for group in groups for device in group}
    step = 1.25  # the distance between devices, whose size is 1
    for (row, column), cells in held_cells(spec, mesh).items():
        left, bottom, colour = column * step, (rows - 1 - row) * step, colour_of[row * places + column]
        wide, high = 1 / len(cells[0]), 1 / len(cells)
        for i, line in enumerate(cells):
            for j, on in enumerate(line):
                paint = {"facecolor": colour if on else "white", "edgecolor": "#bbbbbb", "linewidth": 0.5}
                hatch = "///" if on and spec.unreduced else None
                axes.add_patch(
                    Rectangle((left + j * wide, bottom + 1 - (i + 1) * high), wide, high, hatch=hatch, **paint)
                )
        axes.add_patch(Rectangle((left, bottom), 1, 1, fill=False, edgecolor="black", linewidth=1.2))
    axes.set_title(str(spec), fontsize=11)
    axes.set(xlim=(-0.1, places * step - 0.15), ylim=(-0.1, rows * step - 0.15), aspect="equal")
    axes.set_xticks([c * step + 0.5 for c in range(places)], [f"{across}={c}" if across else "" for c in range(places)])
    axes.set_yticks([(rows - 1 - r) * step + 0.5 for r in range(rows)], [f"{down}={r}" for r in range(rows)])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def save(path: "str | Path", specs: Sequence["str | Spec"], mesh, columns: int = 3) -> Path:
    """Write the figure as PNG or SVG, by the file's name."""
    figure(specs, mesh, columns).savefig(path, dpi=150)
    return Path(path)
