"""The cheapest layouts in which an operation is legal: what an error proposes, and what an out type leads to."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from scaling.algebra.layouts import DimAxes, arrangements, divides, subsets
from scaling.algebra.resharding import reshard
from scaling.algebra.steps import Plan
from scaling.explicit.labels import letters
from scaling.explicit.ops import Illegal, Inferred, Sizes
from scaling.spec import ShardingError, Spec


class Choice(NamedTuple):
    """Layouts to bring operands into, what each device sends for it (and then for the result), and what is inferred."""

    nbytes: float
    layouts: tuple[DimAxes, ...]
    inferred: Inferred


def spec_of(at: DimAxes, name: str = "") -> Spec:
    """A layout as a type: its dims are named I, J, ..."""
    return Spec(name, tuple(zip(letters(len(at.dims)), at.dims, strict=True)), at.unreduced)


def plan_change(src: DimAxes, dst: DimAxes, shape: Sizes, mesh) -> Plan:
    return reshard(spec_of(src), spec_of(dst), shape, mesh)


def bytes_to_change(src: DimAxes, dst: DimAxes, shape: Sizes, nbytes: float, mesh) -> float:
    """Bytes that each device sends to bring an array of this shape from one layout to another."""
    return 0 if src == dst else plan_change(src, dst, shape, mesh).wire_bytes(shape_sizes(shape), mesh, nbytes)


def shape_sizes(shape: Sizes) -> dict[str, int]:
    return dict(zip(letters(len(shape)), shape, strict=True))


def all_layouts(shape: Sizes, mesh, axes: Sequence[str], unreduced: Sequence[str] = ()) -> list[DimAxes]:
    """Every layout of an array of this shape over some of the axes; unreduced over some of `unreduced`."""
    found = []
    for dims in arrangements(tuple(axes), len(shape)):
        used = set(itertools.chain(*dims))
        for over in subsets(tuple(sorted(set(unreduced) - used)), least=0):
            at = DimAxes(dims, over)
            if divides(at, shape, mesh.sizes):
                found.append(at)
    return found


def cheapest_layouts(
    op, operands: Sequence[DimAxes], shapes: Sequence[Sizes], itemsizes: Sequence[float], mesh,
    out: DimAxes | None = None, result: tuple[Sizes, float] = ((), 1),
) -> Choice:  # fmt: skip
    """The layouts that cost the least bytes to reach, and of those the fewest that change (with `out`: the least work).

    `out`: the layout that the result is then brought into; `result`: its shape and the bytes of an element. Raises
    ShardingError if there are none.
    """
    axes = tuple(dict.fromkeys(a for at in (*operands, *((out,) if out else ())) for a in at.used))
    reachable = []
    for at, shape, nbytes in zip(operands, shapes, itemsizes, strict=True):
        ways = [
            (bytes_to_change(at, to, shape, nbytes, mesh), to != at, to)
            for to in all_layouts(shape, mesh, axes, at.unreduced)
        ]
        reachable.append(sorted(ways, key=lambda way: way[:2]))
    best: tuple[tuple, Choice] | None = None
    for ways in itertools.product(*reachable):
        nbytes, to = sum(way[0] for way in ways), tuple(way[2] for way in ways)
        if best is not None and nbytes > best[0][0]:
            continue
        try:
            inferred = op.infer(to, shapes, mesh.sizes)
            if out is not None:
                nbytes += bytes_to_change(inferred[1], out, *result, mesh)
        except (Illegal, ShardingError):
            continue
        changed = sum(way[1] for way in ways)
        work = math.prod(1 / mesh.size(at.used) for at in inferred[0])
        key = (nbytes, changed, work) if out is None else (nbytes, work, changed)
        if best is None or key < best[0]:
            best = key, Choice(nbytes, to, inferred)
    if best is None:
        raise ShardingError(
            f"{op.name}: no layout of its operands makes it legal over {', '.join(axes)}"
            "\n  fix: change an operand's type, or reduce it before"
        )
    return best[1]
