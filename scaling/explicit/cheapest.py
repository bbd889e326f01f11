"""The cheapest layouts in which an operation is legal: what an error proposes, and what an out type leads to."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from scaling.algebra.law import Illegal, Inferred, LabelledOp, Sizes
from scaling.algebra.layouts import Axes, DimAxes, Setting, arrangements, divides, subsets
from scaling.algebra.resharding import FEW, START, Reached, path, reshard, shortest
from scaling.algebra.steps import Plan
from scaling.explicit.labels import letters
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
    """The plan that sends the least between two layouts, over idle axes too; of more than FEW axes as `reshard`."""
    before, after = spec_of(src), spec_of(dst)
    before.local_shape(shape, mesh)
    after.local_shape(shape, mesh)
    named = {*src.used, *dst.used}
    axes = tuple((axis, size) for axis, size in mesh.sizes.items() if size > 1 or axis in named)
    if len(axes) > FEW:
        return reshard(before, after, shape, mesh)
    return Plan((before,), after, path(ways_from(src, shape, axes, mesh), before, dst)[0])


def ways_from(at: DimAxes, shape: Sizes, axes: tuple[tuple[str, int], ...], mesh) -> dict[DimAxes, Reached]:
    """How an array is brought from a layout into every other: the steps that send the least, over all of `axes`.

    What it costs is in parts of the array, of which the mesh has the square of its size.
    """
    return _ways_from(at, tuple(math.gcd(n, mesh.size()) for n in shape), axes)


@lru_cache(maxsize=65536)
def _ways_from(at: DimAxes, shape: Sizes, axes: tuple[tuple[str, int], ...]) -> dict[DimAxes, Reached]:
    return shortest({at: START}, spec_of(at), shape, 1, Setting(axes, True, tuple(axis for axis, _ in axes)))


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


def legal_ways(op, shapes: Sequence[Sizes], axes: Axes, may: Sequence[Axes], mesh) -> Iterator[Inferred]:
    """Every (operands as the kernel takes them, result) of an operation, whose operands divide over the mesh.

    Operand i may be unreduced over the axes `may[i]`.
    """
    if isinstance(op, LabelledOp):
        for needed, result in op.legal(axes, may):
            if all(divides(at, shape, mesh.sizes) for at, shape in zip(needed, shapes, strict=True)):
                yield needed, result
        return
    for at in all_layouts(shapes[0], mesh, axes, may[0]):
        with contextlib.suppress(Illegal):
            yield op.infer((at,), shapes, mesh.sizes)


def cheapest_layouts(
    op, operands: Sequence[DimAxes], shapes: Sequence[Sizes], itemsizes: Sequence[float], mesh,
    out: DimAxes | None = None, result: tuple[Sizes, float] = ((), 1),
) -> Choice:  # fmt: skip
    """The layouts that cost the least bytes to reach, and of those the fewest that change (with `out`: the least work).

    `out`: the layout that the result is then brought into; `result`: its shape and the bytes of an element. Raises
    ShardingError if there are none.
    """
    axes = tuple(dict.fromkeys(a for at in (*operands, *((out,) if out else ())) for a in at.used))
    best: tuple[tuple, Choice] | None = None
    for inferred in legal_ways(op, shapes, axes, [at.unreduced for at in operands], mesh):
        needed, after = inferred
        nbytes = sum(bytes_to_change(*change, mesh) for change in zip(operands, needed, shapes, itemsizes, strict=True))
        if best is not None and nbytes > best[0][0]:
            continue
        try:
            nbytes += 0 if out is None else bytes_to_change(after, out, *result, mesh)
        except ShardingError:
            continue
        layouts = _as_they_are(op, operands, inferred, shapes, mesh)
        changed = sum(at != to for at, to in zip(operands, layouts, strict=True))
        work = math.prod(1 / mesh.size(at.used) for at in needed)
        key = (nbytes, changed, work) if out is None else (nbytes, work, changed)
        if best is None or key < best[0]:
            best = key, Choice(nbytes, layouts, inferred)
    if best is None:
        raise ShardingError(
            f"{op.name}: no layout of its operands makes it legal over {', '.join(axes)}"
            "\n  fix: change an operand's type, or reduce it before"
        )
    return best[1]


def _as_they_are(op, operands: Sequence[DimAxes], inferred: Inferred, shapes, mesh) -> tuple[DimAxes, ...]:
    """The layouts that the kernel takes, but of an operand that it only slices the one that it has."""
    layouts = list(inferred[0])
    for i, at in enumerate(operands):
        with contextlib.suppress(Illegal):
            tried = (*layouts[:i], at, *layouts[i + 1 :])
            if op.infer(tried, shapes, mesh.sizes) == inferred:
                layouts[i] = at
    return tuple(layouts)
