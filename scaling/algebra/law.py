"""The law: what an operation on whole arrays does to their types, read forwards (`infer`) and as a list (`legal`).

An operation is a list of labels, as an einsum's letters: one for each dim of each operand and of the result. From the
layouts of its operands follow those that its kernel takes on each device and that of its result, or that there are
none. Nothing is sent: a replicated operand is sliced where another one is split, and a sum over a split dim is
unreduced. A line of `scaling.collectives.einsum` obeys the same law, but that nothing is sliced. Plain Python.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from scaling.algebra.layouts import Axes, DimAxes, arrangements, layout, retyped
from scaling.spec import Line, ShardingError, Spec, format_axes, parse_line, refuse

Sizes = tuple[int, ...]
Inferred = tuple[tuple[DimAxes, ...], DimAxes]  # what the kernel takes of each operand, and its result
REDUCE = "all_reduce or reduce_scatter one of them first"


class Illegal(Exception):
    """No device could compute its part of the result from its parts of the operands: `what`, against which `rule`; and
    the `fix` of a product's line."""

    def __init__(self, what: str, rule: str, fix: str = ""):
        super().__init__(what, rule, fix)
        self.what, self.rule, self.fix = what, rule, fix


class LabelledOp(NamedTuple):
    """An operation by its labels; an operand's dim of size 1 that is broadcast has None.

    A label that the result lacks is summed over. `linear`: in what the kernel is, so that it may be given unreduced
    arrays: "each" operand alone (a product), "all" of them together (a sum), the "first" (a quotient), or "" nothing.
    `whole`: the labels whose dims the kernel needs unsplit (softmax). `slices`: whether an operand that is replicated
    is sliced where another one is split.
    """

    name: str
    inputs: tuple[tuple[str | None, ...], ...]
    output: tuple[str, ...]
    linear: str = ""
    whole: tuple[str, ...] = ()
    slices: bool = True

    def infer(
        self, operands: Sequence[DimAxes], shapes: Sequence[Sizes] = (), sizes: Mapping | None = None
    ) -> Inferred:
        """(operands as the kernel takes them, result); raises Illegal. Sizes count in a Reshape alone."""
        split: dict[str, Axes] = {}
        for at, labels in zip(operands, self.inputs, strict=True):
            for label, axes in zip(labels, at.dims, strict=True):
                if label is None or (self.slices and not axes):
                    continue
                if split.setdefault(label, axes) != axes:
                    self._refuse_split(label, split[label], axes)
        for label, axes in split.items():
            if label in self.whole and axes:
                raise Illegal(
                    f"{self.name} runs along a dim that is split over {format_axes(axes)}",
                    f"{self.name} needs the whole dim on each device",
                )
            own = (at.dims[d.index(label)] for at, d in zip(operands, self.inputs, strict=True) if label in d)
            if label not in self.output and any(each != axes for each in own):
                self._refuse_split(label, axes, ())
        used = [axis for axes in split.values() for axis in axes]
        self._check_sums([{*at.unreduced} for at in operands], used)
        for axis in used:
            if used.count(axis) > 1:
                raise Illegal(
                    f"two dims of the operands are split over {axis}, and not the same one",
                    f"case 4: each device along {axis} would hold only the diagonal blocks of the result",
                    f"all_gather one operand over {axis} first",
                )
        return self._inferred(split, [at.unreduced for at in operands])

    def legal(self, axes: Axes, may: Sequence[Axes]) -> Iterator[Inferred]:
        """Every (operands as the kernel takes them, result) over the axes; operand i may be unreduced over `may[i]`."""
        labels = tuple(dict.fromkeys(d for own in self.inputs for d in own if d is not None and d not in self.whole))
        every = tuple(range(len(self.inputs)))
        carriers = {"each": [(i,) for i in every], "all": [every], "first": [(0,)], "": []}[self.linear]
        for split in arrangements(axes, len(labels)):
            idle = sorted({*axes}.difference(*split))
            choices = [[(), *(who for who in carriers if all(axis in may[i] for i in who))] for axis in idle]
            for chosen in itertools.product(*choices):  # of each idle axis, the operands that are unreduced over it
                sums = [tuple(axis for axis, who in zip(idle, chosen, strict=True) if i in who) for i in every]
                yield self._inferred(dict(zip(labels, split, strict=True)), sums)

    def _inferred(self, split: Mapping[str, Axes], sums: Sequence[Axes]) -> Inferred:
        """Of labels split so, and of operands that are unreduced so."""
        needed = tuple(
            DimAxes(tuple(split.get(label, ()) if label else () for label in labels), own)
            for labels, own in zip(self.inputs, sums, strict=True)
        )
        summed = [axis for label, axes in split.items() if label not in self.output for axis in axes]
        unreduced = tuple(sorted({*summed, *itertools.chain(*sums)}))
        return needed, DimAxes(tuple(split.get(label, ()) for label in self.output), unreduced)

    def _refuse_split(self, label: str, ours: Axes, theirs: Axes) -> NoReturn:
        """Two operands have a dim, and not the same parts of it."""
        over = [f"over {format_axes(axes)}" if axes else "not at all" for axes in (ours, theirs)]
        dim = f"dim {label}" if self.name.startswith("einsum") else "a dim"
        raise Illegal(
            f"{dim} is split {over[0]} in one operand and {over[1]} in the other",
            f"{'case 2: ' if label not in self.output else ''}operands are split alike along a dim that they share",
            f"all_gather one of them over {format_axes(ours or theirs)}, or shard the other",
        )

    def _check_sums(self, sums: Sequence[set[str]], used: Sequence[str]) -> None:
        """Whether the kernel may be given operands that are unreduced over these axes; `used` split dims."""
        every = sorted(set().union(*sums))
        over = format_axes(every)
        if not every:
            return
        if not self.linear:
            raise Illegal(f"an operand is unreduced over {over}", f"{self.name} of a sum is not the sum of {self.name}")
        if self.linear == "all" and any(sums[0] != other for other in sums):
            raise Illegal(
                f"one operand is a sum over {over} and another one is not",
                f"added to each device's term, the other one would count once for each device along {over}",
            )
        if self.linear == "each" and sum(map(len, sums)) > len(every):
            rule = "a product of sums is not the sum of the products"
            raise Illegal(f"both operands are unreduced over {over}", rule, REDUCE)
        if self.linear == "first" and any(sums[1:]):
            raise Illegal(f"the second operand is unreduced over {over}", f"{self.name} is linear in its first operand")
        if meets := [axis for axis in every if axis in used]:
            raise Illegal(
                f"one operand is unreduced over {over}, over which the other is split",
                f"a partial sum over {meets[0]} may only meet what is replicated over {meets[0]}",
                f"all_reduce or reduce_scatter it over {meets[0]} first",
            )


def result_type(line: str | Line) -> Spec:
    """The type that the operands' product has, with the dims of the result; ShardingError if there is none."""
    line = parse_line(line)
    names, dims = line.result.dim_names, [spec.dim_names for spec in line.operands]
    for dim in names:
        if not any(dim in own for own in dims):
            rule = "every dim of the result comes from an operand"
            refuse_product(line, f"dim {dim} is in no operand", rule, "leave it out, or name it in an operand")
    product = LabelledOp("einsum", tuple(dims), names, "each", slices=False)
    try:
        return retyped(line.result, product.infer([layout(spec) for spec in line.operands])[1])
    except Illegal as illegal:
        refuse_product(line, illegal.what, illegal.rule, illegal.fix)


def product_type(a: Spec, b: Spec, kept: Sequence[str], name: str = "") -> Spec:
    """The type of the product of two shards, with the result dims `kept`; ShardingError if they may not multiply."""
    return result_type(Line((a, b), Spec(name, tuple((dim, ()) for dim in kept))))


def check_product(line: "str | Line") -> Line:
    """The line, or a ShardingError unless it is a product that sends nothing."""
    line = parse_line(line)
    if len(line.operands) > 2:
        raise ShardingError(
            f"{line}\n  einsum multiplies two operands at a time\n  fix: write one line for each product"
        )
    dims = [set(spec.dim_names) for spec in line.operands]
    for dim in line.contract:
        if not all(dim in names for names in dims) or dim in line.result.dim_names:
            what, rule = f"*_{dim} says that {dim} is contracted", "both operands have it and the result does not"
            refuse_product(line, what, rule, "name such a dim after *_, or none")
    natural = result_type(line)
    if natural.same_sharding(line.result):
        return line
    if missing := [axis for axis in natural.unreduced if axis not in line.result.unreduced]:
        over = format_axes(missing)
        carried = [axis for spec in line.operands for axis in spec.unreduced]
        rule = f"case 3: contracting a dim that is split over {over} leaves the result unreduced"
        refuse_product(line, f"each device along {over} holds only a partial sum of the result",
                "a product with a partial sum is a partial sum" if set(missing) & set(carried) else rule,
                f"write {natural}, then reduce_scatter or all_reduce it")  # fmt: skip
    rule = "a product is split as its operands are: einsum sends nothing"
    refuse_product(line, f"the product of these operands is {natural}", rule, "reshard the operands or the result")


def refuse_product(line, what: str, rule: str, fix: str) -> NoReturn:
    refuse(f"einsum: {line}", what, rule, fix)


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
