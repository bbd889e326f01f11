"""The judge's knowledge of an array: the type of its memory, which any view reads by its sizes and strides.

Memory consists of pieces: (stride, size, name of the dim, axes), the largest stride first. A dim of a view is the
pieces that it covers, so permuted, merged, split, sliced and expanded arrays need no extra rules. A name or axes that
are not known are None, and match everything. `broken_rule` compares a known type with the type that a line declares.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from scaling.check.findings import fault_text
from scaling.spec import Line, Spec, format_axes


class DimPart(NamedTuple):
    """A dim, or a part of a merged one.

    If arrays of different sizes were joined in it, `joints` are the places at which the second and later ones begin.
    The devices' blocks are then not in order.
    """

    size: int
    name: "str | None" = None
    axes: "tuple[str, ...] | None" = None
    joints: tuple[int, ...] = ()


Dim = tuple[DimPart, ...]  # from major to minor; a dim that was not merged is one piece
Pieces = tuple[tuple[int, DimPart], ...]
JOINED = "(array)"  # the major part of a dim in which arrays were joined that are split alike
LOOK_UP = "a look-up in what is split over"
KEPT = 1 << 16  # answers that are cached, since layers and steps repeat the questions


class HeldType(NamedTuple):
    """The type of an array, as the judge knows it.

    Attributes:
        dims: the dims.
        unreduced: the axes over which it is unreduced; None matches all axes, as for zeros.
        parts: how the parts make the whole: "sum", "mean", "max" or "min".
        made: "untyped" if no typed array went into it, "seed" for the cotangent that a derivative begins with.
        name: the array's name in the line that made it.
        place: the place of this line.
        shares: the numbers by which a whole array was divided, so that as many devices may add their shares.
        through: the function, not known to be linear, that an untyped array went through.
    """

    dims: tuple[Dim, ...]
    unreduced: "frozenset[str] | None" = frozenset()
    parts: str = ""
    made: str = ""
    name: str = ""
    place: str = ""
    shares: frozenset[int] = frozenset()
    through: str = ""

    def __str__(self) -> str:
        return str(self.type)

    @property
    def type(self) -> Spec:
        """The type in a line's notation; a dim whose name is not known is a "?"."""
        dims = tuple((name_along(dim) or "?", axes_along(dim) or ()) for dim in self.dims)
        return Spec(self.name, dims, tuple(sorted(self.unreduced or ())))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims."""
        return tuple(map(size_along, self.dims))

    @property
    def axes(self) -> set[str]:
        """The axes that split any dim."""
        return {axis for dim in self.dims for axis in axes_along(dim) or ()}

    @property
    def is_untyped(self) -> bool:
        """Whether no typed array went into it."""
        return self.made == "untyped"


@lru_cache(KEPT)
def untyped(shape: Sequence[int], zero: bool = False) -> HeldType:
    """Return the type of an array that no typed array went into, so that the first line may declare its type."""
    return HeldType(tuple(map(any_dim, shape)), None if zero else frozenset(), made="untyped")


def look_up_over(axes: Iterable[str]) -> str:
    """Return the `through` of rows looked up by number in an array whose rows are split over these axes."""
    return f"{LOOK_UP} {', '.join(sorted(axes))}"


def triangle_of(shape: Sequence[int]) -> str:
    """Return the `through` of a mask made by tril or triu of this shape, whose first row is row 0 on each device."""
    return f"a triangle of {shape[-2]} rows and {shape[-1]} columns"


def any_dim(size: int) -> Dim:
    """Return a dim whose name and axes are not known."""
    return (DimPart(int(size)),)


def name_along(dim: Dim) -> "str | None":
    """Return the name of an array's dim, or None if several dims were merged into it or its name is not known."""
    return dim[0].name if len(dim) == 1 else None


def axes_along(dim: Dim) -> "tuple[str, ...] | None":
    """Return the axes of a dim, major first, also if it is merged; None if the axes of one piece are not known."""
    if len(dim) == 1:
        return dim[0].axes
    if any(piece.axes is None and piece.name != JOINED for piece in dim):
        return None
    return tuple(axis for piece in dim for axis in piece.axes or ())


def size_along(dim: Dim) -> int:
    """Return the size of a dim."""
    return dim[0].size if len(dim) == 1 else prod(piece.size for piece in dim)


def is_interleaved(dim: Dim) -> bool:
    """Return whether the blocks of a merged dim are interleaved.

    They are if another dim of several elements precedes a split one, or if arrays were joined in it. Then a device's
    elements are not next to each other in the whole array.
    """
    return any(part.joints for part in dim) or any(
        part.axes and any(before.size > 1 and before.axes is not None for before in dim[:i])
        for i, part in enumerate(dim)
    )


def meeting_dim(a: Dim, b: Dim) -> "Dim | None":
    """Return the dim of the result if two dims meet element by element; None if they are split differently."""
    if a == b:
        return a
    if [p.size for p in a] == [p.size for p in b]:
        if any(p.axes != q.axes and None not in (p.axes, q.axes) for p, q in zip(a, b, strict=True)):
            return a if axes_along(a) == axes_along(b) else None
        return tuple(
            DimPart(
                p.size,
                (p.name or q.name) if p.name == q.name or None in (p.name, q.name) else None,
                axes,
                p.joints or q.joints,
            )
            for p, q, axes in ((p, q, q.axes if p.axes is None else p.axes) for p, q in zip(a, b, strict=True))
        )
    if None in (axes_along(a), axes_along(b)):
        return a if axes_along(b) is None else b
    return (a if len(a) > len(b) else b) if axes_along(a) == axes_along(b) else None


def written_dim(was: Dim, now: Dim) -> Dim:
    """Return a dim after a write. A merged dim keeps its pieces if it is still split over the same axes."""
    return was if len(was) > 1 and {*(axes_along(was) or ())} == {*(axes_along(now) or ())} else now


@lru_cache(KEPT)
def pieces_of(shape: Sequence[int], strides: Sequence[int], dims: tuple[Dim, ...]) -> Pieces:
    """Return the memory of an array with these dims."""
    pieces = []
    for n, stride, dim in zip(shape, strides, dims, strict=True):
        if n == 1 or stride == 0:
            continue
        for piece in reversed(dim if size_along(dim) == n else (DimPart(n, name_along(dim), axes_along(dim)),)):
            pieces.append((stride, piece))
            stride *= piece.size
    return by_stride(pieces)


def by_stride(pieces: Sequence[tuple[int, DimPart]]) -> Pieces:
    """Sort pieces by their stride, the largest first."""
    return tuple(sorted(pieces, key=lambda each: each[0], reverse=True))


@lru_cache(KEPT)
def dims_of_view(pieces: Pieces, shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[Dim, ...], Pieces]:
    """Return (the dims of a view of this shape and these strides, the memory's pieces).

    A piece that contains several dims of the view is cut into several.
    """
    spans = [(s, s * n) for n, s in zip(shape, strides, strict=True)]
    starts = sorted({a for a, b in spans if a and b > a})
    pieces = tuple(part for stride, piece in pieces for part in _split(stride, piece, starts))
    dims = []
    for n, (first, end) in zip(shape, spans, strict=True):
        covered = []
        for stride, piece in pieces if first and n > 1 else ():
            size = min(end, stride * piece.size) // max(first, stride)
            if size > 1:
                covered.append(piece if size == piece.size else DimPart(size, None, piece.axes))
        if covered and prod(p.size for p in covered) != n:
            covered = [DimPart(n, name_along(tuple(covered)), axes_along(tuple(covered)))]
        dims.append(tuple(covered) or any_dim(n))
    return tuple(dims), pieces


def _split(stride: int, piece: DimPart, starts: Sequence[int]) -> list[tuple[int, DimPart]]:
    """Cut a piece at the starts of the dims that it contains; the axes stay with the major part."""
    inner = [s for s in starts if stride <= s < stride * piece.size]
    if len(inner) < 2 or inner[0] != stride or any(b % a for a, b in itertools.pairwise(inner)):
        return [(stride, piece)]
    ends = [*inner[1:], stride * piece.size]
    axes = [() if piece.axes else None] * (len(inner) - 1) + [piece.axes or None]
    found = [(at, DimPart(end // at, None, own)) for at, end, own in zip(inner, ends, axes, strict=True)]
    return found[::-1]


PODS = "P"  # the slow axis: a line without it is the program of each pod
RAGGED = "R"  # a dim without axes whose size differs by rank: the rows of an expert


def with_slices(spec: Spec, axis: str, dims: Collection[str], partial: bool) -> Spec:
    """Return the type with these dims split over the axis too, and unreduced over it if it is `partial`.

    A `RAGGED` dim without axes may be split over it already.
    """
    split = tuple((dim, (axis, *axes) if dim in dims and (axes or dim != RAGGED) else axes) for dim, axes in spec.dims)
    return replace(spec, dims=split, unreduced=(axis, *spec.unreduced) if partial else spec.unreduced)


def with_unknown(result: HeldType, operand: HeldType, line: Line) -> HeldType:
    """Return a line's result; a dim that the line leaves whole is unknown in it if it is unknown in the operand."""
    before, after = line.operands[0].dims, line.result.dims
    named, made = operand.dims[len(operand.dims) - len(before) :], list(result.dims)
    unknown = {each for each, dim in zip(before, named, strict=True) if not each[1] and axes_along(dim) is None}
    for i, each in enumerate(after, len(made) - len(after)):
        if each in unknown:
            made[i] = tuple(part._replace(axes=None) for part in made[i])
    return result._replace(dims=tuple(made))


def ring_block(held: HeldType, axes: Collection[str], whole: bool = False) -> HeldType:
    """Return the type of a block that a ring passes along these axes, which may be any device's and part of a sum.

    With `whole`, dims without axes are not known to be whole either.
    """

    def of(piece: DimPart) -> DimPart:
        any_place = whole if not piece.axes else bool({*piece.axes} & {*axes})
        return piece._replace(axes=None) if any_place else piece

    return held._replace(dims=tuple(tuple(map(of, dim)) for dim in held.dims), unreduced=None)


def dims_of_type(sizes: Sequence[int], spec: Spec) -> tuple[Dim, ...]:
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
        return "wrong-name", fault_text(f"it is {held.name}", "wrong-name", f"give {declared.name}")
    dims = held.dims[len(held.dims) - len(declared.dims) :]
    named, names = [name_along(dim) for dim in dims], {*re.split(r"[^A-Za-z0-9]+", line.replace("_", " "))}
    there: dict[str | None, str | None] = dict(zip(declared.dim_names, named, strict=True))
    for dim, name, wanted in zip(dims, named, declared.dim_names, strict=True):
        sure = there.get(name, wanted) is not None  # else it may belong here too: a square layer has both names
        if name != wanted and sure and name in names and size_along(dim) > 1 and named.count(name) == 1:
            what = f"the dims differ: {[name or '?' for name in named]} and {list(declared.dim_names)}"
            fix = "give the operands in the order of their types, and transpose what must be"
            return "dims", fault_text(what, "dims", fix)
    if held.through and declared.unreduced and not (held.dims[1:] and held.through == triangle_of(held.shape)):
        fix = f"reduce it over {format_axes(declared.unreduced)} before {held.through}"
        return "nonlinear", fault_text(f"{held.through} is not known to be linear", "nonlinear", fix)
    blocks = {axis for dim, (_, axes) in zip(dims, declared.dims, strict=True) if size_along(dim) == 1 for axis in axes}
    if not held.is_untyped and held.unreduced is not None and (sums := _broken_sums(held, declared, by, blocks, ones)):
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
            return "split", fault_text(f"{name} is {what}{typed}", "split", fix)
    return None


def _broken_sums(
    held: HeldType, declared: Spec, by: str, blocks: set[str], ones: Collection[str]
) -> "tuple[str, str] | None":
    """Return the rule that the unreduced axes break, and the finding's text, as `broken_rule` does."""
    unreduced = held.unreduced or frozenset()
    over, missing = unreduced - {*declared.unreduced} - blocks, {*declared.unreduced} - unreduced
    if held.made not in ("line", "seed"):  # no view shows that a dim of one element was summed over
        missing -= {*ones}
    if over:
        axes = format_axes(sorted(over))
        detail = f"a partial sum stays {{U_{axes}}} until it is reduced"
        fix = f"reduce_scatter or all_reduce it over {axes}"
        return "unreduced", fault_text(f"it is still unreduced over {axes}", "unreduced", fix, detail)
    if missing and held.made == "seed":
        what = f"the derivative of what is summed over {format_axes(sorted(missing))} already"
        return "loss", fault_text(what, "loss", "differentiate the sum's own terms, and reduce the value afterwards")
    if missing:
        what = f"it is not unreduced over {format_axes(sorted(missing))}"
        return "reduced-twice", fault_text(what, "reduced-twice", "drop the reduction, or the {U} of this type")
    if by and held.parts and unreduced and by != held.parts and "root" not in (held.parts, by):
        return "how-reduced", fault_text(
            f"its parts make a {held.parts}, and op={by!r}", "how-reduced", f"op={held.parts!r}"
        )
    return None
