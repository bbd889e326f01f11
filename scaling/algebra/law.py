"""The law: how an operation maps the types of its operands to the type of its result.

An operation has labels like the letters of an einsum, one for each dim of each operand and of the result. From the
types of the operands, `infer` derives the types that the kernel takes on each device and the type of the result, or
says why there are no such types; `legal` lists every legal combination. Over each mesh axis a dim is split or whole,
and an array is a partial sum or not. None marks axes that are not known, and matches every type. An operation sends
nothing: a replicated operand is sliced if another one is split, and a sum over a split dim is unreduced. The lines of
`scaling.collectives.einsum` and the judge follow the same law, except that they slice nothing. The types of shard_map
do not mention dims, so it asks `kept_over`. Plain Python.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from scaling.algebra.layouts import Axes, DimAxes, arrangements, layout, retyped
from scaling.algebra.ops import Groups, op_kind
from scaling.algebra.rules import check_scales
from scaling.spec import Line, Spec, format_axes, parse_line, refuse

Sizes = tuple[int, ...]
Inferred = tuple[tuple[DimAxes, ...], DimAxes]  # the operands as the kernel takes them, and the result
REDUCE = "all_reduce or reduce_scatter one of them first"


@dataclass(eq=False)
class Illegal(Exception):
    """An operation that no device can compute from its parts of the operands.

    Attributes:
        what: the mistake.
        rule: the rule that it breaks, in words.
        fix: how to repair it.
        name: the judge's name for the rule.
        operand: the number of the operand that is wrong.
        twice: the axes that would occur twice in a product's type. A caller may compute such a product on a ring.
        differ: the axes over which only one of two operands is split in a dim that they share.
    """

    what: str
    rule: str
    fix: str = ""
    name: str = "split"
    operand: int = 0
    twice: Set[str] = frozenset()
    differ: Set[str] = frozenset()


class LabelledOp(NamedTuple):
    """An operation, described by the labels of its dims.

    Attributes:
        name: the function's name, used in messages and to look up its kind.
        inputs: the labels of each operand's dims; None for a dim of size 1 that is broadcast.
        output: the labels of the result. A label that the result lacks is summed over.
        sums: groups of operands. The members of one group may be partial sums, all of them together.
        whole: the labels of dims that the kernel needs unsplit (softmax).
        slices: whether a replicated operand is sliced if another one is split.
    """

    name: str
    inputs: tuple[tuple[str | None, ...], ...]
    output: tuple[str, ...]
    sums: Groups = ()
    whole: tuple[str, ...] = ()
    slices: bool = True

    def infer(
        self, operands: Sequence[DimAxes], shapes: Sequence[Sizes] = (), sizes: Mapping | None = None
    ) -> Inferred:
        """Return (operands as the kernel takes them, result); raise Illegal if the operation has no type for them.

        The shapes tell only which dims of unknown axes have one element; a Reshape needs them and the mesh's sizes.
        """
        split: dict[str, Axes] = {}
        unknown: set[str] = set()  # labels of dims whose axes are unknown
        for number, (at, labels) in enumerate(zip(operands, self.inputs, strict=True)):
            for i, (label, axes) in enumerate(zip(labels, at.dims, strict=True)):
                if label is None:
                    continue
                if axes is None:
                    unknown |= {label} if not shapes or shapes[number][i] > 1 else set()
                elif (axes or not self.slices) and split.setdefault(label, axes) != axes:
                    self._refuse_split(label, split[label], axes, number)
        for label, axes in split.items():
            if label in self.whole and axes:
                raise Illegal(
                    f"{self.name} runs along a dim that is split over {format_axes(axes)}",
                    f"{self.name} needs the whole dim on each device",
                    f"all_gather it over {format_axes(axes)} first",
                    twice={*axes} if op_kind(self.name) == "attends" else set(),
                )
            own = (at.dims[d.index(label)] for at, d in zip(operands, self.inputs, strict=True) if label in d)
            if label not in self.output and any(each not in (axes, None) for each in own):
                self._refuse_split(label, axes, ())
        used = [axis for axes in split.values() for axis in axes]
        sums = kept_over(self.name, self.sums, [at.unreduced for at in operands], used)
        for axis in used:
            if used.count(axis) > 1:
                raise Illegal(
                    f"two dims of the operands are split over {axis}, and not the same one",
                    f"case 4: each device along {axis} would hold only the diagonal blocks of the result",
                    f"all_gather one operand over {axis} first",
                    twice={axis} if len(self.sums) > 1 else set(),
                )
        needed, result = self._inferred(split, [at.unreduced for at in operands])
        dropped = unknown.difference(split, self.output, self.whole)
        lost = sums is None or (dropped and not result.unreduced)
        known: Any = tuple(split.get(label, None if label in unknown else ()) for label in self.output)
        over: Any = None if lost else result.unreduced
        return needed, DimAxes(known, over)

    def legal(self, axes: Axes, may: Sequence[Axes]) -> Iterator[Inferred]:
        """Yield each legal (operands as the kernel takes them, result); operand i may be unreduced over `may[i]`."""
        labels = tuple(dict.fromkeys(d for own in self.inputs for d in own if d is not None and d not in self.whole))
        every = range(len(self.inputs))
        for split in arrangements(axes, len(labels)):
            idle = sorted({*axes}.difference(*split))
            choices = [[(), *(who for who in self.sums if all(axis in may[i] for i in who))] for axis in idle]
            for chosen in itertools.product(*choices):  # for each idle axis, the operands unreduced over it
                sums = [tuple(axis for axis, who in zip(idle, chosen, strict=True) if i in who) for i in every]
                yield self._inferred(dict(zip(labels, split, strict=True)), sums)

    def _inferred(self, split: Mapping[str, Axes], sums: Sequence[Axes]) -> Inferred:
        """Return (operands, result) for labels split like this and operands unreduced over these axes."""
        needed = tuple(
            DimAxes(tuple(split.get(label, ()) if label else () for label in labels), own)
            for labels, own in zip(self.inputs, sums, strict=True)
        )
        summed = [axis for label, axes in split.items() if label not in self.output for axis in axes]
        unreduced = tuple(sorted({*summed, *itertools.chain(*filter(None, sums))}))
        return needed, DimAxes(tuple(split.get(label, ()) for label in self.output), unreduced)

    def _refuse_split(self, label: str, ours: Axes, theirs: Axes, operand: int = 0) -> NoReturn:
        """Raise Illegal: two operands share a dim but hold different parts of it."""
        over = [f"over {format_axes(axes)}" if axes else "not at all" for axes in (ours, theirs)]
        dim = f"dim {label}" if self.name.startswith("einsum") else "a dim"
        raise Illegal(
            f"{dim} is split {over[0]} in one operand and {over[1]} in the other",
            f"{'case 2: ' if label not in self.output else ''}operands are split alike along a dim that they share",
            f"all_gather one of them over {format_axes(ours or theirs)}, or shard the other",
            operand=operand,
            differ={*ours} ^ {*theirs},
        )


def kept_over(name: str, groups: Groups, sums: Sequence[Axes | None], used: Collection[str]) -> Axes | None:
    """Return the axes over which a function's result is unreduced because its operands are.

    Args:
        name: the function's name.
        groups: the groups of operands whose partial sums it keeps, as `ops.kept_sums` returns them.
        sums: the axes over which each operand is unreduced, None if they are not known.
        used: the axes over which the devices hold different parts of some operand.

    Raises:
        Illegal: the function of these partial sums is not a partial sum itself.
    """
    every = sorted({axis for own in sums for axis in own or ()})
    over, kind = format_axes(every), op_kind(name)
    for i, own in enumerate(sums):
        if own and not any(i in group for group in groups):
            if kind in ("adds", "writes") and len(sums) == 1:
                raise Illegal(
                    f"a number is added to a sum over {over} by every device",
                    f"it would count once for each device along {over}",
                    "all_reduce or reduce_scatter it first",
                    "partial-plus-whole",
                    i,
                )
            which, rule = "an", f"{name} of a sum is not the sum of {name}"
            if groups:
                which, rule = "the second" if i == 1 else "a later", f"{name} is linear in its first operand"
            fix = "all_reduce or reduce_scatter it first"
            raise Illegal(f"{which} operand is unreduced over {over}", rule, fix, "nonlinear", i)
    carried = []
    for group in groups:
        found = {sums[i] for i in group} - {None}
        if len(found) > 1:
            raise Illegal(
                f"one operand is a sum over {over} and another one is not",
                f"added to each device's term, the other one would count once for each device along {over}",
                REDUCE,
                "partial-plus-whole",
                next(i for i in group if sums[i]),
            )
        carried += [axes for axes in found if axes]
    if sum(map(len, carried)) > len({*itertools.chain(*carried)}):
        rule = "a product of sums is not the sum of the products"
        raise Illegal(f"both operands are unreduced over {over}", rule, REDUCE, "product-of-sums")
    if meets := [axis for axis in every if axis in used]:
        raise Illegal(
            f"one operand is unreduced over {over}, over which the other is split",
            f"a partial sum over {meets[0]} may only meet what is replicated over {meets[0]}",
            f"all_reduce or reduce_scatter it over {meets[0]} first",
            twice={*meets} if len(groups) > 1 else set(),
        )
    fits_all = any(group and all(sums[i] is None for i in group) for group in groups)
    return None if fits_all and not carried else tuple(every)


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


def result_type(line: str | Line) -> Spec:
    """Return the type of the operands' product, with the dims of the result; raise ShardingError if it is illegal."""
    line = parse_line(line)
    names, dims = line.result.dim_names, [spec.dim_names for spec in line.operands]
    for dim in names:
        if not any(dim in own for own in dims):
            rule = "every dim of the result comes from an operand"
            refuse_product(line, f"dim {dim} is in no operand", rule, "leave it out, or name it in an operand")
    product = LabelledOp("einsum", tuple(dims), names, tuple((i,) for i in range(len(dims))), slices=False)
    try:
        return retyped(line.result, product.infer([layout(spec) for spec in line.operands])[1])
    except Illegal as illegal:
        refuse_product(line, illegal.what, illegal.rule, illegal.fix)


def product_type(a: Spec, b: Spec, kept: Sequence[str], name: str = "") -> Spec:
    """Return the type of the product of two shards, with the result dims `kept`; raise ShardingError if illegal."""
    return result_type(Line((a, b), Spec(name, tuple((dim, ()) for dim in kept))))


def check_product(line: "str | Line") -> Line:
    """Return the parsed line; raise ShardingError unless it is a product that sends nothing."""
    line = check_scales(parse_line(line))
    if len(line.operands) > 2:
        rule = "einsum multiplies two operands at a time"
        refuse_product(line, f"{len(line.operands)} operands", rule, "write one line for each product")
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
    """Raise the ShardingError of a product that breaks a rule."""
    refuse(f"einsum: {line}", what, rule, fix)
