"""What each collective may do to a type (Part 3): the rules behind every ShardingError of `scaling.collectives`."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NoReturn

from scaling.spec import ShardingError, Spec, format_axes, parse_line, refuse


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
        """The same on arrays with one more dim in front."""
        splits = None if self.splits is None else self.splits + 1
        before, after = self.before.stacked(dim), self.after.stacked(dim)
        return replace(self, before=before, after=after, dim=self.dim + 1, to=self.to + 1, splits=splits)


def refuse_rule(line: str, kind: str, what: str, rule: str, fix: str) -> NoReturn:
    refuse(f"{kind}: {line}", what, rule, fix)


@lru_cache(maxsize=4096)
def collective_steps(kind: str, line: str) -> tuple[CollectiveStep, ...]:
    """The steps of `line` as a collective of this kind, or a ShardingError that names the rule it breaks."""
    parsed = parse_line(line)
    if len(parsed.operands) != 1:
        rule = "a collective has one operand; einsum multiplies"
        refuse_rule(line, kind, f"{len(parsed.operands)} operands", rule, "write a line for each, or use einsum")
    before, after = parsed.operands[0], parsed.result
    if before.dim_names != after.dim_names:
        rule = "a collective moves axes, it does not change or reorder the dims"
        refuse_rule(line, kind, "the dims differ", rule, "write the same dims on both sides, in the same order")
    return _RULES[kind](line, kind, before, after)


def _gather_or_slice(line, kind, before, after):
    grows = kind == "AllGather"
    if before.unreduced != after.unreduced:
        does = "an AllGather only concatenates: it" if grows else "a local slice"
        rule = f"{does} neither adds up partial sums nor makes any"
        refuse_rule(line, kind, "{U} is not the same on both sides", rule, _changes_sums(before, after))
    return _one_by_one(before, _moved(line, kind, before, after, grows), grows)


def _changes_sums(before, after) -> str:
    """What to use in place of a collective that leaves {U} as it is."""
    if gained := [axis for axis in after.unreduced if axis not in before.unreduced]:
        return f"use reshard, which makes the terms of a sum over {format_axes(gained)}: all but one are zero"
    return f"use reduce_scatter or all_reduce over {format_axes(sorted(set(before.unreduced) - set(after.unreduced)))}"


def _reduce_scatter(line, kind, before, after):
    added = _moved(line, kind, before, after, grows=False)
    summed = [axis for axis in before.unreduced if axis not in after.unreduced]
    scattered = [axis for _, axes in added for axis in axes]
    if sorted(summed) != sorted(scattered) or set(after.unreduced) - set(before.unreduced):
        what = f"it sums over {format_axes(summed) or 'nothing'} and splits over {format_axes(scattered)}"
        rule = f"{kind} turns {{U_X}} into a subscript X: the same axes leave {{U}} and enter one dim"
        refuse_rule(
            line, kind, what, rule, "write {U_" + format_axes(scattered) + "} on the operand if it is a partial sum"
        )
    return _one_by_one(before, added, grows=False)


def _all_reduce(line, kind, before, after):
    summed = tuple(axis for axis in before.unreduced if axis not in after.unreduced)
    if before.dims != after.dims:
        refuse_rule(
            line,
            kind,
            "the subscripts differ",
            "AllReduce only removes axes from {U}",
            "to split the sum: reduce_scatter",
        )
    if set(after.unreduced) - set(before.unreduced) or not summed:
        what = f"nothing is reduced: {before} has no {{U}} that {after} lacks"
        gains = not summed and before.unreduced != after.unreduced
        fix = _changes_sums(before, after) if gains else "write {U_X} on the operand if it is a partial sum"
        refuse_rule(line, kind, what, "AllReduce turns A[I] {U_X} into A[I]", fix)
    return (CollectiveStep(before, after, summed),)


def _all_to_all(line, kind, before, after):
    rule = "AllToAll takes the minor axes of one dim and makes them the minor axes of another: A[I_X, J] -> A[I, J_X]"
    changed = [i for i, (b, a) in enumerate(zip(before.dims, after.dims, strict=True)) if b != a]
    if before.unreduced != after.unreduced or len(changed) != 2:
        refuse_rule(line, kind, "not the move of axes from one dim to one other", rule, "use reshard")
    for source, target in (changed, changed[::-1]):
        was, now = before.dims[source][1], after.dims[source][1]
        moved = was[len(now) :]
        if moved and was[: len(now)] == now and after.dims[target][1] == before.dims[target][1] + moved:
            return (CollectiveStep(before, after, moved, source, target, splits=target),)
    refuse_rule(line, kind, "the axes that move are not the minor ones of both dims", rule, "use reshard")


def _rooted(line, kind, before, after):
    """Broadcast, Reduce: {U_X} with all but the root's part to be taken as (or made) zero."""
    axes = before.unreduced if kind == "Reduce" else tuple(a for a in before.unreduced if a not in after.unreduced)
    wanted = "A[I] {U_X} -> A[I]" if kind == "Broadcast" else "A[I] {U_X} -> A[I] {U_X}"
    legal = set(after.unreduced) <= set(before.unreduced) and (
        kind == "Broadcast" or before.unreduced == after.unreduced
    )
    if before.dims != after.dims or not axes or not legal:
        rule = f"{kind} is {wanted}: only the root's part counts, the others are zeros"
        refuse_rule(line, kind, "the types do not fit", rule, "write them so; the other dims stay as they are")
    return (CollectiveStep(before, after, axes),)


def _scatter(line, kind, before, after):
    return _only_one(line, kind, _reduce_scatter(line, kind, before, after))


def _gather(line, kind, before, after):
    try:
        back = _reduce_scatter(line, kind, after, before)
    except ShardingError:
        rule = "Gather is A[I_X] -> A[I] {U_X}: the root gets the whole dim, and the others, who get zeros, add nothing"
        refuse_rule(line, kind, "the types do not fit", rule, "write them so; the other dims stay as they are")
    return tuple(CollectiveStep(s.after, s.before, s.axes, s.dim) for s in _only_one(line, kind, back))


def _only_one(line, kind, steps):
    if len(steps) > 1:
        rule = f"{kind} has one root, and so changes one dim"
        refuse_rule(line, kind, "several dims change", rule, "write a line for each dim")
    return steps


def _moved(line, kind, before, after, grows) -> list[tuple[int, tuple[str, ...]]]:
    """(position, axes) of each dim whose minor axes are removed (grows) or gained, which is all that may change."""
    verb, moved = ("removes" if grows else "adds"), []
    for position, ((dim, was), (_, now)) in enumerate(zip(before.dims, after.dims, strict=True)):
        long, short = (was, now) if grows else (now, was)
        if was == now:
            continue
        if long[: len(short)] != short:
            rule = f"{kind} {verb} the minor (last) axes of a dim; otherwise the blocks would be interleaved"
            have, want = format_axes(was) or "no axes", format_axes(now) or "no axes"
            fix = "check the axes of the type; reshard does what takes more than one step"
            refuse_rule(line, kind, f"dim {dim} goes from {have} to {want}", rule, fix)
        moved.append((position, long[len(short) :]))
    if not moved:
        refuse_rule(
            line, kind, "no dim changes", f"{kind} {verb} axes of a dim, e.g. " + _EXAMPLE[kind], "drop the line"
        )
    return moved


def _one_by_one(before, moved, grows) -> tuple[CollectiveStep, ...]:
    steps = []
    for position, axes in moved:
        dim, was = before.dims[position]
        summed = before.with_unreduced(axis for axis in before.unreduced if axis not in axes)
        after = summed.with_axes(dim, was[: -len(axes)] if grows else was + axes)
        steps.append(CollectiveStep(before, after, axes, position, splits=None if grows else position))
        before = after
    return tuple(steps)


_EXAMPLE = {"AllGather": "A[I_X] -> A[I]", "Slice": "A[I] -> A[I_X]"}
_EXAMPLE |= dict.fromkeys(("ReduceScatter", "Scatter", "Gather"), "A[I] {U_X} -> A[I_X]")
_RULES = {
    "AllGather": _gather_or_slice,
    "Slice": _gather_or_slice,
    "ReduceScatter": _reduce_scatter,
    "AllReduce": _all_reduce,
    "AllToAll": _all_to_all,
    "Broadcast": _rooted,
    "Reduce": _rooted,
    "Scatter": _scatter,
    "Gather": _gather,
}
