"""Compare the known type of an array with the type that a line declares for it."""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from scaling.check.findings import said
from scaling.check.held import Dim, DimPart, HeldType, axes_along, name_along, size_along, triangle_of
from scaling.spec import Spec, format_axes

PODS = "P"  # the slow axis: a line without it is the program of each pod
RAGGED = "R"  # a dim without axes whose size differs by rank: the rows of an expert


def over_pods(spec: Spec, dims: Collection[str], partial: bool) -> Spec:
    """Return the type with these dims split over pods too, and unreduced over pods if it is `partial`."""
    split = tuple((dim, (PODS, *axes) if dim in dims else axes) for dim, axes in spec.dims)
    return replace(spec, dims=split, unreduced=(PODS, *spec.unreduced) if partial else spec.unreduced)


def at_hand(held: HeldType, axes: Collection[str], whole: bool = False) -> HeldType:
    """Return a block that a ring passes along these axes: it may come from any device, and be part of a sum.

    With `whole`, dims without axes are not known to be whole either.
    """

    def of(piece: DimPart) -> DimPart:
        any_place = whole if not piece.axes else bool({*piece.axes} & {*axes})
        return piece._replace(axes=None) if any_place else piece

    return held._replace(dims=tuple(tuple(map(of, dim)) for dim in held.dims), unreduced=None)


def dims_said(sizes: Sequence[int], spec: Spec) -> tuple[Dim, ...]:
    """Return the dims of a type, with these sizes."""
    return tuple(
        (DimPart(n, dim, None if dim == RAGGED and not axes else axes),)
        for n, (dim, axes) in zip(sizes, spec.dims, strict=True)
    )


def broken_rule(
    held: HeldType, declared: Spec, line: str, by: str, params: Collection[str], ones: Collection[str]
) -> "tuple[str, str] | None":
    """Return (rule, the finding's text) for an array that a line declares to have another type; None if it fits."""
    if held.name != declared.name and {held.name, declared.name} <= {*params}:
        return "wrong-name", said(f"it is {held.name}", "wrong-name", f"give {declared.name}")
    dims = held.dims[len(held.dims) - len(declared.dims) :]
    named, names = [name_along(dim) for dim in dims], {*re.split(r"[^A-Za-z0-9]+", line.replace("_", " "))}
    there: dict[str | None, str | None] = dict(zip(declared.dim_names, named, strict=True))
    for dim, name, wanted in zip(dims, named, declared.dim_names, strict=True):
        sure = there.get(name, wanted) is not None  # else it may belong here too: a square layer has both names
        if name != wanted and sure and name in names and size_along(dim) > 1 and named.count(name) == 1:
            what = f"the dims differ: {[name or '?' for name in named]} and {list(declared.dim_names)}"
            fix = "give the operands in the order of their types, and transpose what must be"
            return "dims", said(what, "dims", fix)
    if held.through and declared.unreduced and not (held.dims[1:] and held.through == triangle_of(held.shape)):
        fix = f"reduce it over {format_axes(declared.unreduced)} before {held.through}"
        return "nonlinear", said(f"{held.through} is not known to be linear", "nonlinear", fix)
    blocks = {axis for dim, (_, axes) in zip(dims, declared.dims, strict=True) if size_along(dim) == 1 for axis in axes}
    if not held.of_nothing and held.unreduced is not None and (sums := _broken_sums(held, declared, by, blocks, ones)):
        return sums
    for dim, (name, says) in zip(dims, declared.dims, strict=True):
        was = axes_along(dim)
        if was is None or was == says or name in (RAGGED, "1"):
            continue
        moved = size_along(dim) > 1 and name_along(dim) != name  # out of a dim of one element, which no view shows
        unseen = moved and set(was) != set(says) and set(was) ^ set(says) <= {*ones}
        if not unseen and not (set(says) & blocks and set(says) & (held.unreduced or set())):
            a, b = format_axes(was), format_axes(says)
            what = f"split over {a}, not over {b}" if was and says else f"split over {a}" if was else "whole"
            typed = "" if was and says else f", and the type splits it over {b}" if says else ", and whole in the type"
            fix = "let the type say how the array is split, or all_gather, reduce_scatter or shard it first"
            return "split", said(f"{name} is {what}{typed}", "split", fix)
    return None


def _broken_sums(
    held: HeldType, declared: Spec, by: str, blocks: set[str], ones: Collection[str]
) -> "tuple[str, str] | None":
    """Return the rule that the unreduced axes break, and the finding's text, as `broken_rule` does."""
    unreduced = held.unreduced or frozenset()
    over, gone = unreduced - {*declared.unreduced} - blocks, {*declared.unreduced} - unreduced
    if held.made not in ("line", "seed"):  # no view shows that a dim of one element was summed over
        gone -= {*ones}
    if over:
        axes = format_axes(sorted(over))
        detail = f"a partial sum stays {{U_{axes}}} until it is reduced"
        fix = f"reduce_scatter or all_reduce it over {axes}"
        return "unreduced", said(f"it is still unreduced over {axes}", "unreduced", fix, detail)
    if gone and held.made == "seed":
        what = f"the derivative of what is summed over {format_axes(sorted(gone))} already"
        return "loss", said(what, "loss", "differentiate the sum's own terms, and reduce the value afterwards")
    if gone:
        what = f"it is not unreduced over {format_axes(sorted(gone))}"
        return "reduced-twice", said(what, "reduced-twice", "drop the reduction, or the {U} of this type")
    if by and held.parts and unreduced and by != held.parts and "root" not in (held.parts, by):
        return "how-reduced", said(f"its parts make a {held.parts}, and op={by!r}", "how-reduced", f"op={held.parts!r}")
    return None
