"""The law: what an operation on whole arrays does to their types, read forwards (`infer`) and as a list (`legal`).

An operation is a list of labels, as an einsum's letters: one for each dim of each operand and of the result. From the
layouts of its operands follow those that its kernel takes on each device and that of its result, or that there are
none. Nothing is sent: a replicated operand is sliced where another one is split, and a sum over a split dim is
unreduced. Plain Python.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from scaling.algebra.layouts import Axes, DimAxes, arrangements, subsets
from scaling.spec import format_axes

Sizes = tuple[int, ...]
EMPTY: Mapping[str, int] = {}
Inferred = tuple[tuple[DimAxes, ...], DimAxes]  # what the kernel takes of each operand, and its result


class Illegal(Exception):
    """No device could compute its part of the result from its parts of the operands: `what`, against which `rule`.

    `broken`: the law by its name, over which `axis`, for those who have words of their own.
    """

    def __init__(self, what: str, rule: str, broken: str = "", axis: str = ""):
        super().__init__(what, rule)
        self.what, self.rule, self.broken, self.axis = what, rule, broken, axis


class LabelledOp(NamedTuple):
    """An operation by its labels; an operand's dim of size 1 that is broadcast has None.

    A label that the result lacks is summed over. `linear`: in what the kernel is, so that it may be given unreduced
    arrays: "each" operand alone (a product), "all" of them together (a sum), the "first" (a quotient), or "" nothing.
    `whole`: the labels whose dims the kernel needs unsplit (softmax).
    """

    name: str
    inputs: tuple[tuple[str | None, ...], ...]
    output: tuple[str, ...]
    linear: str = ""
    whole: tuple[str, ...] = ()

    def infer(
        self, operands: Sequence[DimAxes], shapes: Sequence[Sizes] = (), sizes: Mapping | None = None
    ) -> Inferred:
        """(operands as the kernel takes them, result); raises Illegal. Sizes count in a Reshape alone."""
        split: dict[str, Axes] = {}
        for at, labels in zip(operands, self.inputs, strict=True):
            for label, axes in zip(labels, at.dims, strict=True):
                if label is not None and axes and split.setdefault(label, axes) != axes:
                    ours, theirs = format_axes(split[label]), format_axes(axes)
                    raise Illegal(
                        f"one operand splits a dim over {ours} and another one the same dim over {theirs}",
                        "operands are split alike along a dim that they share",
                    )
        self._check_whole(split, operands)
        used = [axis for axes in split.values() for axis in axes]
        unreduced = self._unreduced(operands, used)
        for axis in used:
            if used.count(axis) > 1:
                raise Illegal(
                    f"two dims are split over {axis}, and not the same one",
                    f"case 4: each device along {axis} would hold only the diagonal blocks of the result",
                    "case 4",
                    axis,
                )
        summed = [axis for label, axes in split.items() if label not in self.output for axis in axes]
        needed = tuple(
            DimAxes(tuple(split.get(label, ()) if label else () for label in labels), at.unreduced)
            for at, labels in zip(operands, self.inputs, strict=True)
        )
        result = DimAxes(tuple(split.get(label, ()) for label in self.output), tuple(sorted({*unreduced, *summed})))
        return needed, result

    def legal(self, axes: Axes, may: Sequence[Axes]) -> Iterator[Inferred]:
        """Every (operands as the kernel takes them, result) over the axes; operand i may be unreduced over `may[i]`."""
        labels = tuple(dict.fromkeys(d for own in self.inputs for d in own if d is not None and d not in self.whole))
        every = tuple(range(len(self.inputs)))
        carriers = {"each": [(i,) for i in every], "all": [every], "first": [(0,)], "": []}[self.linear]
        for split in arrangements(axes, len(labels)):
            over: dict[str | None, Axes] = dict(zip(labels, split, strict=True))
            idle = sorted(set(axes).difference(*split))
            summed = [axis for label, own in over.items() if label not in self.output for axis in own]
            result = tuple(over.get(label, ()) for label in self.output)
            dims = [tuple(over.get(label, ()) for label in own) for own in self.inputs]
            for sums in _carried(carriers, idle, may):
                partial = [tuple(sorted(itertools.chain(*(a for who, a in sums if i in who)))) for i in every]
                carried = itertools.chain(*(own for _, own in sums))
                needed = tuple(DimAxes(d, u) for d, u in zip(dims, partial, strict=True))
                yield needed, DimAxes(result, tuple(sorted([*summed, *carried])))

    def _check_whole(self, split: Mapping[str, Axes], operands: Sequence[DimAxes]) -> None:
        """Of the dims that are split: none is to be whole, and of a product's the operands have the same part."""
        for label, axes in split.items():
            if label in self.whole:
                raise Illegal(
                    f"{self.name} runs along a dim that is split over {format_axes(axes)}",
                    f"{self.name} needs the whole dim on each device",
                )
            own = [
                at.dims[labels.index(label)]
                for at, labels in zip(operands, self.inputs, strict=True)
                if label in labels
            ]
            if label not in self.output and any(each != axes for each in own):
                raise Illegal(
                    f"a contracted dim is split over {format_axes(axes)} in one operand alone",
                    "case 2: both operands of a product are split alike along a dim that is summed over",
                )

    def _unreduced(self, operands: Sequence[DimAxes], used: Sequence[str]) -> Axes:
        """The axes over which the result is a sum because operands are."""
        sums = [set(at.unreduced) for at in operands]
        every = sorted(set().union(*sums))
        if not every:
            return ()
        over = format_axes(every)
        if not self.linear:
            raise Illegal(f"an operand is unreduced over {over}", f"{self.name} of a sum is not the sum of {self.name}")
        if self.linear == "all" and any(sums[0] != other for other in sums):
            raise Illegal(
                f"one operand is a sum over {over} and another one is not",
                f"added to each device's term, the other one would count once for each device along {over}",
            )
        if self.linear == "each" and sum(map(len, sums)) > len(every):
            rule = "a product of sums is not the sum of the products"
            raise Illegal(f"two operands are unreduced over {over}", rule, "two sums")
        if self.linear == "first" and any(sums[1:]):
            raise Illegal(f"the second operand is unreduced over {over}", f"{self.name} is linear in its first operand")
        if meets := [axis for axis in every if axis in used]:
            raise Illegal(
                f"one operand is unreduced over {over}, over which another one is split",
                "a partial sum over an axis may only meet what is replicated over it",
                "meets",
                meets[0],
            )
        return tuple(every)


def _carried(carriers: Sequence[tuple[int, ...]], idle: Sequence[str], may: Sequence[Axes]) -> Iterator[tuple]:
    """Ways to give idle axes to operands that are unreduced over them: ((who together, the axes), ...)."""
    if not carriers:
        yield ()
        return
    who, *rest = carriers
    pool = tuple(axis for axis in idle if all(axis in may[i] for i in who))
    for axes in subsets(pool, least=0):
        for others in _carried(rest, [axis for axis in idle if axis not in axes], may):
            yield ((who, axes), *others)


class Reshape(NamedTuple):
    """Splitting and merging dims: row-major order stays."""

    shape: Sizes
    name: str = "reshape"
    inputs: tuple = ((),)

    def infer(self, operands: Sequence[DimAxes], shapes: Sequence[Sizes], sizes: Mapping[str, int]) -> Inferred:
        (at,), (shape,) = operands, shapes
        return (at,), DimAxes(resplit(at.dims, shape, self.shape, sizes), at.unreduced)


def resplit(dims: Sequence[Axes], shape: Sizes, new: Sizes, sizes: Mapping[str, int]) -> tuple[Axes, ...]:
    """The axes of each dim of the new shape, if each device keeps its elements in their order; raises Illegal.

    The index of an element is a number of mixed radix: for each dim the digits of its axes, then that of the place in
    the block. The new dims take these digits in order, and each one its axes before its place.
    """
    digits: list[tuple[str | None, int]] = []  # (axis, or None of a place, how many)
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
