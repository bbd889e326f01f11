"""The law of reshapes: which dims of the result are split, if the devices keep their elements in row-major order.

Plain Python.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from scaling.algebra.law import Illegal, Inferred, Sizes
from scaling.algebra.layouts import Axes, DimAxes


class Reshape(NamedTuple):
    """An operation that splits and merges dims and keeps the elements in row-major order."""

    shape: Sizes
    name: str = "reshape"
    inputs: tuple = ((),)

    def infer(self, operands: Sequence[DimAxes], shapes: Sequence[Sizes], sizes: Mapping[str, int]) -> Inferred:
        """Return (operands as the kernel takes them, result); raise Illegal if the reshape would cut a block."""
        (at,), (shape,) = operands, shapes
        return (at,), DimAxes(resplit(at.dims, shape, self.shape, sizes), at.unreduced)


def resplit(dims: Sequence[Axes], shape: Sizes, new: Sizes, sizes: Mapping[str, int]) -> tuple[Axes, ...]:
    """Return the axes of each dim of the new shape; raise Illegal unless devices keep their elements in order.

    The index of an element is a number of mixed radix: for each dim the digits of its axes, then the position inside
    the block. The new dims take these digits in order, and each one takes its axes before its position.
    """
    digits: list[tuple[str | None, int]] = []  # (axis, or None inside a block; how many values)
    for size, axes in zip(shape, dims, strict=True):
        digits += [(axis, sizes[axis]) for axis in axes]
        block = size // math.prod(sizes[axis] for axis in axes)
        if digits and digits[-1][0] is None:
            block *= digits.pop()[1]
        digits += [(None, block)] if block != 1 else []
    split = []
    for size in new:
        axes, left = [], size
        while digits and digits[0][0] is not None and (left > 1 or digits[0][1] == 1):
            axis, count = digits.pop(0)
            if left % count:
                _refuse_cut(f"a dim of size {size} does not divide into the {count} blocks over {axis}")
            left //= count
            axes.append(axis)
        if left > 1:
            _, count = digits.pop(0)
            place = math.gcd(left, count)
            if place not in (left, count):
                _refuse_cut(f"a dim of size {size} would begin or end inside a block")
            if place < left:
                raise Illegal(
                    f"in the dim of size {size} the blocks over {digits[0][0]} would be interleaved",
                    "only the first of the dims that are merged may be split, or those before it down to one element",
                )
            digits[:0] = [(None, count // place)] if count > place else []
        split.append(tuple(axes))
    return tuple(split)


def _refuse_cut(what: str) -> NoReturn:
    raise Illegal(what, "a reshape cuts no block: each device keeps its elements, in their order")
