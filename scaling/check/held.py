"""The judge's knowledge of an array: the type of its memory, which any view reads by its sizes and strides.

Memory consists of pieces: (stride, size, name of the dim, axes), the largest stride first. A dim of a view is the
pieces that it covers, so permuted, merged, split, sliced and expanded arrays need no extra rules. A name or axes that
are not known are None, and match everything.
"""

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from scaling.spec import Spec


class DimPart(NamedTuple):
    """A dim, or a part of a merged one. `mixed`: arrays were joined in it, so the devices' blocks are not in order."""

    size: int
    name: "str | None" = None
    axes: "tuple[str, ...] | None" = None
    mixed: bool = False


Dim = tuple[DimPart, ...]  # from major to minor; a dim that was not merged is one piece
Pieces = tuple[tuple[int, DimPart], ...]
LOOK_UP = "a look-up in what is split over"
KEPT = 1 << 16  # answers that are cached, since layers and steps repeat the questions


class HeldType(NamedTuple):
    """The type of an array, as the judge knows it.

    Attributes:
        dims: the dims.
        unreduced: the axes over which it is unreduced; None matches all axes, as for zeros.
        parts: how the parts make the whole: "sum", "mean", "max" or "min".
        made: "of nothing" if no typed array went into it, "seed" for the cotangent that a derivative begins with.
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
    def of_nothing(self) -> bool:
        """Whether no typed array went into it."""
        return self.made == "of nothing"


@lru_cache(KEPT)
def of_nothing(shape: Sequence[int], zero: bool = False) -> HeldType:
    """Return the type of an array that no typed array went into, so that the first line may declare its type."""
    return HeldType(tuple(map(any_dim, shape)), None if zero else frozenset(), made="of nothing")


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
    """Return the name of a dim, or None if it is merged or not known."""
    return dim[0].name if len(dim) == 1 else None


def axes_along(dim: Dim) -> "tuple[str, ...] | None":
    """Return the axes of a dim, major first, also if it is merged; None if they are not known."""
    if len(dim) == 1:
        return dim[0].axes
    if all(piece.axes is None for piece in dim):
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
    return any(part.mixed for part in dim) or any(
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
                p.mixed or q.mixed,
            )
            for p, q, axes in ((p, q, q.axes if p.axes is None else p.axes) for p, q in zip(a, b, strict=True))
        )
    if None in (axes_along(a), axes_along(b)):
        return a if axes_along(b) is None else b
    return (a if len(a) > len(b) else b) if axes_along(a) == axes_along(b) else None


def written_dim(was: Dim, now: Dim) -> Dim:
    """Return a dim after a write. A merged dim keeps its pieces if it is still split over the same axes."""
    return was if len(was) > 1 and {*(axes_along(was) or ())} == {*(axes_along(now) or ())} else now


def strides_in_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous array."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


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
