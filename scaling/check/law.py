"""The judge's law: the type of an op's result, from its labels and its operands' types. A part of a type that is not
known is None, and fits all.
"""

from typing import NamedTuple

from scaling.algebra.law import LabelledOp, Sizes
from scaling.check.held import Dim, HeldType, any_dim, axes_along, look_up_over, meeting_dim, name_along, size_along


class RuleBroken(Exception):
    """A broken rule: its name, what is wrong, which operand, the fix, and the axes that would split two dims of the
    result (`twice`)."""

    def __init__(
        self,
        rule: str,
        what: str,
        operand: int = 0,
        fix: str = "reduce_scatter or all_reduce it first",
        twice: frozenset[str] = frozenset(),
    ):
        super().__init__(what)
        self.rule, self.what, self.operand, self.fix, self.twice = rule, what, operand, fix, twice


class NotInferred(Exception):
    """The reason why an op is not judged."""


class OpRule(NamedTuple):
    """An op by its labels.

    Attributes:
        sums: groups of operands, of which one may be partial sums, all its members together.
        by_number: labels whose elements are chosen by number.
        parts: how the parts of what is summed over make the whole.
        own: whether each device may run the op along its own part of a dim that should be whole.
    """

    op: LabelledOp
    sums: tuple[tuple[int, ...], ...] = ()
    by_number: tuple[str, ...] = ()
    parts: str = "sum"
    own: bool = False


def by_labels(rule: OpRule, operands: list[HeldType], shape: Sizes) -> HeldType:
    """Return the type of the result. RuleBroken if the operands give none."""
    name, dims = rule.op.name, dict[str, Dim]()
    types = " and ".join(map(str, operands))
    if _turned(rule.op, operands):
        raise RuleBroken("dims", f"{name} of {types}", 0, "transpose one of them first")
    for x, labels in zip(operands, rule.op.inputs, strict=False):
        for label, dim in zip(labels, x.dims, strict=True):
            if label is not None and (met := meeting_dim(dims.get(label, dim), dim)) is None:
                what = f"{name} of {types}: {_described(dims[label])} and {_described(dim)}"
                raise RuleBroken("split", what, 0, "all_gather, reduce_scatter or shard one of them first")
            elif label is not None:
                dims[label] = met
    for label in rule.op.whole:
        if (axes := axes_along(dims[label])) and not rule.own:
            what = f"{name} along a dim that is split over {', '.join(axes)}"
            raise RuleBroken("split", what, 0, "all_gather it first")
    unreduced, parts = _sums(rule, operands, types)
    ring = len(operands) > 1 and len(rule.sums) == 1 and any(x.made == "ring" for x in operands)
    unreduced = None if ring else unreduced  # the sums so far: how many are still to come, no type shows
    gone = {label: dim for label, dim in dims.items() if label not in rule.op.output and label not in rule.op.whole}
    chosen = list[str]()  # the axes of what is chosen by number
    for label, dim in gone.items():
        axes = axes_along(dim)
        if label in rule.by_number and axes:
            unreduced, chosen = unreduced or None, [*chosen, *axes]
        elif axes is None and size_along(dim) > 1:
            unreduced = unreduced or None
        elif axes and unreduced is not None:
            unreduced, parts = unreduced | {*axes}, parts or rule.parts
    if rule.op.name == "matmul":  # batch dims that meet may have had two names: heads of queries and of keys
        for label in rule.op.output:
            if all(label in own for own in rule.op.inputs):
                dims[label] = tuple(part._replace(name=None) for part in dims[label])
    found = [(dims.get(label, any_dim(n)), n) for label, n in zip(rule.op.output, shape, strict=True)]
    made = tuple(dim if size_along(dim) == n else any_dim(n) for dim, n in found)
    axes = [axis for dim in made for axis in axes_along(dim) or ()]
    twice = frozenset(axis for axis in axes if axes.count(axis) > 1 or axis in (unreduced or ()))
    if twice and len(rule.sums) > 1:  # of a product; of a sum it shows in the dims that meet
        what = f"{name} of {types}: {', '.join(sorted(twice))} would occur twice in the result"
        raise RuleBroken("split", what, 0, "all_gather one of them first", twice)
    through = look_up_over(chosen) if chosen else ""
    return HeldType(made, unreduced, parts if unreduced else "", "ring" if ring else "", through=through)


def _turned(op: LabelledOp, operands: list[HeldType]) -> bool:
    """Return whether two dims of one operand meet the same two dims of another in the other order."""
    names = [dict(zip(own, map(name_along, x.dims), strict=True)) for own, x in zip(op.inputs, operands, strict=False)]
    for other in names[1:]:
        met = {a: other[label] for label, a in names[0].items() if a is not None and label in other}
        if any(b is not None and met.get(b) == a != b for a, b in met.items()):
            return True
    return False


def _described(dim: Dim) -> str:
    return f"{name_along(dim) or 'a dim'} is split over {', '.join(axes_along(dim) or ()) or 'no axis'}"


def _sums(rule: OpRule, operands: list[HeldType], types: str) -> "tuple[frozenset[str] | None, str]":
    """Return (the axes over which the operands make the result a partial sum, how its parts make the whole)."""
    name, carrying = rule.op.name, []
    for i, x in enumerate(operands):
        if x.unreduced and not any(i in group for group in rule.sums):
            raise RuleBroken("nonlinear", f"{name} of {x}", i)
    for group in rule.sums:
        over = {operands[i].unreduced for i in group} - {None}
        if len(over) > 1:
            first = next(i for i in group if operands[i].unreduced)
            raise RuleBroken("partial-plus-whole", f"{name} of {types}", first)
        carrying += [i for i in group if operands[i].unreduced][:1]
    if len(carrying) > 1:
        raise RuleBroken("product-of-sums", f"{name} of {types}", carrying[0])
    if carrying:
        return operands[carrying[0]].unreduced, operands[carrying[0]].parts
    fits_all = [all(operands[i].unreduced is None for i in group) for group in rule.sums]
    return (None if any(fits_all) else frozenset()), ""
