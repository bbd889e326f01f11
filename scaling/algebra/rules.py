"""The rules of the collectives: how each may change a type (Part 3).

Every ShardingError of `scaling.collectives` quotes one of them. In a type a mesh axis splits a dim, or is in {U}, or is
not mentioned. A collective takes axes from one of these three positions to another, and adds them to a dim or removes
them from it as its last (minor) axes. All other axes stay where they are.

The rules of arrays with scales (notation.md) follow from two facts. A scale belongs to all values that share it, so a
line that moves an array moves both. And values with different scales cannot be added, so a product takes the scales
out of its sum, and any other sum is of dequantized values.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, NoReturn

from scaling.spec import Format, Line, Spec, format_axes, parse, parse_line, refuse

DIM, SUM, NONE = "a dim", "{U}", "no dim"


class Rule(NamedTuple):
    """The rule of one collective.

    Attributes:
        source: The position that it takes axes from: DIM, SUM or NONE.
        target: The position that it puts them in.
        says: The rule in words, for errors.
        rooted: Whether it has a root.
    """

    source: str
    target: str
    says: str
    rooted: bool = False


_MINOR = "the minor (last) axes of a dim; otherwise the blocks would be interleaved"
_SUMS = ". It neither adds up partial sums nor makes any"
_SCATTERS = "turns {U_X} into a subscript X: the same axes leave {U} and enter one dim, as its minor (last) axes"
_NOTHING = "the others, who get zeros, add nothing"
_ROOT = ": only the root's part counts, the others are zeros"
RULES = {
    "AllGather": Rule(DIM, NONE, f"removes {_MINOR}{_SUMS}"),
    "Slice": Rule(NONE, DIM, f"adds {_MINOR}{_SUMS}"),
    "ReduceScatter": Rule(SUM, DIM, _SCATTERS),
    "AllReduce": Rule(SUM, NONE, "only removes axes from {U}: A[I] {U_X} -> A[I]"),
    "AllToAll": Rule(
        DIM, DIM, "takes the minor axes of one dim and makes them the minor axes of another: A[I_X, J] -> A[I, J_X]"
    ),
    "Broadcast": Rule(SUM, NONE, f"is A[I] {{U_X}} -> A[I]{_ROOT}", rooted=True),
    "Reduce": Rule(SUM, SUM, f"is A[I] {{U_X}} -> A[I] {{U_X}}{_ROOT}", rooted=True),
    "Scatter": Rule(SUM, DIM, _SCATTERS, rooted=True),
    "Gather": Rule(DIM, SUM, f"is A[I_X] -> A[I] {{U_X}}: the root gets the whole dim, and {_NOTHING}", rooted=True),
}
_DOES = {  # (from, to): the function to use instead of a collective that cannot move axes this way
    (DIM, NONE): "all_gather",
    (NONE, DIM): "shard",
    (SUM, DIM): "reduce_scatter",
    (SUM, NONE): "all_reduce",
    (DIM, DIM): "all_to_all",
    (NONE, SUM): "reshard, which makes the terms of a sum over {X}: all but one are zero",
}


@dataclass(frozen=True)
class CollectiveStep:
    """One collective over one group: types before and after, the axes, and the dims it grows or splits (by position).

    `dim` as in `scaling.collectives.op.Op`; `to` the dim that an AllToAll splits; `splits` the dim that
    must divide, if any does.
    """

    before: Spec
    after: Spec
    axes: tuple[str, ...]
    dim: int = 0
    to: int = 0
    splits: int | None = None

    def stacked(self, dim: str) -> "CollectiveStep":
        """Return the step for arrays with one more dim in front."""
        splits = None if self.splits is None else self.splits + 1
        before, after = self.before.stacked(dim), self.after.stacked(dim)
        return replace(self, before=before, after=after, dim=self.dim + 1, to=self.to + 1, splits=splits)


CALLS = {
    "all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce", "shard": "Slice",
    "all_to_all": "AllToAll", "broadcast": "Broadcast", "reduce": "Reduce", "scatter": "Scatter", "gather": "Gather",
}  # the function of scaling.collectives that runs each kind by its line  # fmt: skip


@lru_cache(maxsize=4096)
def collective_steps(kind: str, line: str) -> tuple[CollectiveStep, ...]:
    """Return the steps of `line` as a collective of this kind; raise a ShardingError that names the rule it breaks."""
    parsed, rule, call = parse_line(line), RULES[kind], f"{kind}: {line}"
    if len(parsed.operands) != 1:
        says = "a collective has one operand; einsum multiplies"
        refuse(call, f"{len(parsed.operands)} operands", says, "write a line for each, or use einsum")
    before, after = parsed.operands[0], parsed.result
    if before.dim_names != after.dim_names:
        says = "a collective moves axes, it does not change or reorder the dims"
        refuse(call, "the dims differ", says, "write the same dims on both sides, in the same order")

    def broken(what: str, fix: str) -> NoReturn:
        refuse(call, what, f"{kind} {rule.says}", fix)

    if before.scaled != after.scaled:
        what = f"{before} -> {after}: the scales change"
        refuse(call, what, "a collective that moves an array moves its values and its scales",
                    "write the same {Q_...} on both sides; quantize and dequantize are lines of their own")  # fmt: skip

    for axis in dict.fromkeys(before.named_axes + after.named_axes):
        (was, of), (now, to) = _place(axis, before), _place(axis, after)
        if (was, of) != (now, to) and (was, now) != (rule.source, rule.target):
            fix = f"use {_DOES.get((was, now), 'reshard')}".format(X=axis)
            if was == NONE and rule.source == SUM:
                fix += f"; or write {{U_{axis}}} on the operand if it is a partial sum"
            broken(f"{axis} goes from {of} to {to}", fix)
    dims = []  # (position, its axes afterwards, the axes that it gains or loses)
    for position, ((dim, was), (_, now)) in enumerate(zip(before.dims, after.dims, strict=True)):
        short, long = sorted((was, now), key=len)
        if long[: len(short)] != short:
            what = f"dim {dim} goes from {format_axes(was)} to {format_axes(now)}"
            broken(what, "check the axes of the type; reshard does what takes more than one step")
        dims += [(position, now, long[len(short) :])] if was != now else []
    if DIM not in (rule.source, rule.target):
        axes = tuple(axis for axis in before.unreduced if rule.target == SUM or axis not in after.unreduced)
        if not axes:
            broken("nothing is reduced", "write {U_X} on the operand if it is a partial sum")
        return (CollectiveStep(before, after, axes),)
    if not dims:
        broken("no dim changes", "drop the line")
    if rule.source == rule.target:
        source, *others = sorted(dims, key=lambda dim: len(dim[1]) - len(before.dims[dim[0]][1]))
        if [axes for _, _, axes in others] != [source[2]]:
            broken("not the move of axes, in their order, from one dim to one other", "use reshard")
        return (CollectiveStep(before, after, source[2], source[0], others[0][0], splits=others[0][0]),)
    if rule.rooted and len(dims) > 1:
        says = f"{kind} has one root, and so changes one dim"
        refuse(call, "several dims change", says, "write a line for each dim")
    steps = []
    for position, now, axes in dims:
        sums = {*before.unreduced} ^ {*axes} if SUM in (rule.source, rule.target) else before.unreduced
        to = replace(before, unreduced=tuple(sorted(sums))).with_axes(before.dim_names[position], now)
        steps.append(CollectiveStep(before, to, axes, position, splits=position if rule.target == DIM else None))
        before = to
    return tuple(steps)


def _place(axis: str, spec: Spec) -> tuple[str, str]:
    """Return where an axis is in a type: DIM, SUM or NONE, and in words, such as "dim I"."""
    if axis in spec.unreduced:
        return SUM, SUM
    return next(((DIM, f"dim {dim}") for dim, axes in spec.dims if axis in axes), (NONE, NONE))


def check_scales(line: Line) -> Line:
    """Return the line; refuse a product whose scales cannot be taken out of its sum, or whose result has scales."""
    for spec in line.operands:
        for dim in spec.dim_names if spec.scaled else ():
            if dim not in spec.scaled and dim not in line.result.dim_names:
                refuse(f"einsum: {line}", f"{spec} has a scale for each place of {dim}, which is summed over",
                        "scales are taken out of the sum: every summed dim is in {Q_...} of each scaled operand",
                        f"quantize it again from the master copy, along {dim}: scales along one dim do not follow from "
                        "those along another")  # fmt: skip
    if line.result.scaled:
        what, rule = f"the result {line.result} has scales", "a product is accumulated in float32, without scales"
        refuse(f"einsum: {line}", what, rule, "write the result without {Q}, and quantize it by a line of its own")
    return line


def check_quantize(line: "str | Line", back: bool = False) -> Line:
    """Return the parsed line of a quantize, `W[D_X, F] -> W[D_X, F] {Q_D}`, or with `back` of a dequantize."""
    line, what = parse_line(line), "dequantize" if back else "quantize"
    before, after = line.operands[0], line.result
    wide, scaled = (after, before) if back else (before, after)
    if before.unreduced or after.unreduced:
        refuse(f"{what}: {line}", f"{before} is a partial sum" if before.unreduced else f"{after} is a partial sum",
               "a sum is not quantized: terms with scales of their own cannot be added",
               "reduce it first; or all_to_all its quantized terms, dequantize and add them")  # fmt: skip
    if len(line.operands) > 1 or before.dims != after.dims or wide.scaled or not scaled.scaled:
        refuse(f"{what}: {line}", "more than {Q} changes, or it does not",
               "W[D_X, F] -> W[D_X, F] {Q_D} changes how an array is held, not where its elements are",
               "write the same dims and axes on both sides, {Q_...} on one")  # fmt: skip
    return line


def parse_plain(text: "str | Spec") -> Spec:
    """Return the parsed type; refuse one with scales, whose parts a plan would have to move each by its own steps."""
    spec = parse(text)
    if spec.scaled:
        refuse(spec, "its array has scales", "plans and derived programs are of plain arrays",
               f"write its lines, or plan the parts: parse({str(spec)!r}).parts(format)")  # fmt: skip
    return spec


def lines_of_parts(kind: str, line: str, format: "str | Format") -> list[tuple[str, str]]:
    """Return (kind, line) of a collective for each part of an array with scales; ("", "") for one that stays.

    A part that lacks a dim is whole along it: an AllToAll then gathers it, or takes each rank's slice.
    """
    parsed, found = parse_line(line), []
    for was, now in zip(parsed.operands[0].parts(format), parsed.result.parts(format), strict=True):
        lost, gained = {*was.axes} - {*now.axes}, {*now.axes} - {*was.axes}
        own = "AllGather" if lost and not gained else "Slice" if gained and not lost else kind
        stays = was.dims == now.dims and kind != "CollectivePermute"
        found.append(("", "") if stays else (own, f"{was} -> {now}"))
    return found
