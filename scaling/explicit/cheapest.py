"""The cheapest layouts in which an operation is legal: what an error proposes, and what an out type leads to."""

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

from scaling.algebra.law import Illegal, Inferred, Sizes
from scaling.algebra.layouts import DimAxes
from scaling.algebra.planner import PlannedOp, Way, cheapest, legal_ways
from scaling.algebra.resharding import PlannedArray, every_axis
from scaling.explicit.labels import letters
from scaling.spec import ShardingError, Spec


class Choice(NamedTuple):
    """Layouts to bring operands into, and what is inferred from them."""

    layouts: tuple[DimAxes, ...]
    inferred: Inferred


def spec_of(at: DimAxes, name: str = "") -> Spec:
    """A layout as a type: its dims are named I, J, ..."""
    return Spec(name, tuple(zip(letters(len(at.dims)), at.dims, strict=True)), at.unreduced)


def value(shape: Sizes, itemsize: float) -> PlannedArray:
    """An array for the planner; what it sends is counted in bytes."""
    return PlannedArray(spec_of(DimAxes(((),) * len(shape))), tuple(shape), int(math.prod(shape) * itemsize))


def cheapest_layouts(
    op, operands: Sequence[DimAxes], shapes: Sequence[Sizes], itemsizes: Sequence[float], mesh,
    out: DimAxes | None = None, result: tuple[Sizes, float] = ((), 1),
) -> Choice:  # fmt: skip
    """The layouts that cost the least bytes to reach, and of those the fewest that change (with `out`: the least work).

    `out`: the layout that the result is then brought into; `result`: its shape and the bytes of an element. Raises
    ShardingError if there are none.
    """
    ends = () if out is None else (out,)
    axes = tuple(dict.fromkeys(a for at in (*operands, *ends) for a in at.used))
    given, ways = tuple(range(len(operands))), []
    for needed, after in legal_ways(op, shapes, axes, [at.unreduced for at in operands], mesh.sizes):
        work = math.prod(1 / mesh.size(at.used) for at in needed)
        if out is None:  # all work is less than one operand that changes
            kept = _as_they_are(op, operands, (needed, after), shapes, mesh)
            work = sum(at != to for at, to in zip(operands, kept, strict=True)) + work / 2
        ways.append(Way(needed, after, (0, work, 0)))
    values = [value(*sized) for sized in (*zip(shapes, itemsizes, strict=True), result)]
    stages = [PlannedOp(given, len(given), ways)]
    stages += [PlannedOp((len(given),), None, [Way((end,), end)]) for end in ends]
    within = every_axis((*operands, *ends), mesh.sizes)
    _, choices = cheapest(values, dict(enumerate(operands)), stages, within)
    if not choices:
        raise ShardingError(
            f"{op.name}: no layout of its operands makes it legal over {', '.join(axes)}"
            "\n  fix: change an operand's type, or reduce it before"
        )
    way = choices[0].way
    inferred = way.needed, way.result
    return Choice(_as_they_are(op, operands, inferred, shapes, mesh), inferred)


def _as_they_are(op, operands: Sequence[DimAxes], inferred: Inferred, shapes, mesh) -> tuple[DimAxes, ...]:
    """The layouts that the kernel takes, but of an operand that it only slices the one that it has."""
    layouts = list(inferred[0])
    for i, at in enumerate(operands):
        with contextlib.suppress(Illegal):
            tried = (*layouts[:i], at, *layouts[i + 1 :])
            if op.infer(tried, shapes, mesh.sizes) == inferred:
                layouts[i] = at
    return tuple(layouts)
