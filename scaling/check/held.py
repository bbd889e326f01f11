"""What the judge knows of an array: the type of its memory, read by the sizes and strides of whatever views it.

HeldMemory holds pieces: (stride, size, name of the dim, axes). A dim of a view is the pieces that it covers, so that
permuted, merged, split, sliced and expanded arrays need no rule of their own. A name or axes that are not known are
None: they fit all.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from scaling.spec import Spec


class DimPart(NamedTuple):
    size: int
    name: "str | None" = None
    axes: "tuple[str, ...] | None" = None


Dim = tuple[DimPart, ...]  # from major to minor; a dim that was not merged is one piece


@dataclass(frozen=True)
class HeldType:
    """`unreduced`: None where it fits all, as zeros do. `parts`: how the parts make the whole, "sum", "mean", "max" or
    "min". `made`: "of nothing" for what no typed array went into, "seed" for the cotangent that a derivative begins
    with. `name`: that of the line that made it; `place`: where."""

    dims: tuple[Dim, ...]
    unreduced: "frozenset[str] | None" = frozenset()
    parts: str = ""
    made: str = ""
    name: str = ""
    place: str = ""
    shares: frozenset[int] = frozenset()  # what a whole array was divided by, so that as many devices may add theirs

    through: str = ""  # the function, not known to be linear, that what is made of nothing went through

    def __str__(self) -> str:
        dims = tuple((name_along(dim) or "?", axes_along(dim) or ()) for dim in self.dims)
        return str(Spec(self.name, dims, tuple(sorted(self.unreduced or ()))))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(size_along, self.dims))

    @property
    def axes(self) -> set[str]:
        return {axis for dim in self.dims for axis in axes_along(dim) or ()}


def any_dim(size: int) -> Dim:
    """A dim of which nothing is known."""
    return (DimPart(int(size)),)


def name_along(dim: Dim) -> "str | None":
    return dim[0].name if len(dim) == 1 else None


def axes_along(dim: Dim) -> "tuple[str, ...] | None":
    """The axes of a merged dim, major first; None if they are not known."""
    if all(piece.axes is None for piece in dim):
        return None
    return tuple(axis for piece in dim for axis in piece.axes or ())


def size_along(dim: Dim) -> int:
    return prod(piece.size for piece in dim)


def meeting_dim(a: Dim, b: Dim) -> "Dim | None":
    """The dim of two arrays whose elements meeting_dim; None if they are not split alike."""
    if [p.size for p in a] == [p.size for p in b]:
        if any(p.axes != q.axes and None not in (p.axes, q.axes) for p, q in zip(a, b, strict=True)):
            return a if axes_along(a) == axes_along(b) else None
        return tuple(
            DimPart(p.size, p.name if p.name == q.name or not q.name else q.name if not p.name else None, _known(p, q))
            for p, q in zip(a, b, strict=True)
        )
    if None in (axes_along(a), axes_along(b)):
        return a if axes_along(b) is None else b
    return (a if len(a) > len(b) else b) if axes_along(a) == axes_along(b) else None


def _known(p: DimPart, q: DimPart) -> "tuple[str, ...] | None":
    return q.axes if p.axes is None else p.axes


def strides_in_order(shape: Sequence[int]) -> list[int]:
    """The strides of an array whose elements lie in order."""
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


@dataclass
class HeldMemory:
    """The pieces of a storage, by stride, the largest first; `unset`: nothing has been written yet; `keep`: the tensor
    that `held` is the type of, so that its memory is not used again."""

    shape: Sequence[int]
    strides: Sequence[int]
    held: HeldType
    pieces: list[tuple[int, DimPart]]
    unset: bool = False
    keep: "Tensor | None" = None

    @staticmethod
    def of(shape: Sequence[int], strides: Sequence[int], held: HeldType, **options: Any) -> "HeldMemory":
        pieces = []
        for n, stride, dim in zip(shape, strides, held.dims, strict=True):
            if n == 1 or stride == 0:
                continue
            if size_along(dim) != n:
                dim = (DimPart(int(n), name_along(dim), axes_along(dim)),)
            for piece in reversed(dim):
                pieces.append((int(stride), piece))
                stride *= piece.size
        return HeldMemory(shape, strides, held, sorted(pieces, key=lambda each: each[0], reverse=True), **options)

    def view(self, shape: Sequence[int], strides: Sequence[int]) -> HeldType:
        """What an array of this shape and these strides, which lies in this memory, holds."""
        if 1 in shape and tuple(shape) == tuple(self.shape) and tuple(strides) == tuple(self.strides):
            return self.held  # a dim of one element has no stride to be found by
        spans = [(int(s), int(s) * int(n)) for n, s in zip(shape, strides, strict=True)]
        self._split(sorted({a for a, b in spans if a and b > a}))
        dims = []
        for n, (first, end) in zip(shape, spans, strict=True):
            covered = []
            for stride, piece in self.pieces if first and n > 1 else ():
                low, high = max(first, stride), min(end, stride * piece.size)
                if low < high:
                    size = max(1, high // low)
                    covered.append(piece if size == piece.size else DimPart(size, None, piece.axes))
            covered = [p for p in covered if p.size > 1]
            if prod(p.size for p in covered) != n:
                covered = [DimPart(int(n), name_along(tuple(covered)), axes_along(tuple(covered)))] if covered else []
            dims.append(tuple(covered) or any_dim(n))
        return replace(self.held, dims=tuple(dims))

    def _split(self, strides: list[int]) -> None:
        """A piece that several dims of a view lie in becomes several: the major one is split as the piece was."""
        found = []
        for stride, piece in self.pieces:
            inner = [s for s in strides if stride <= s < stride * piece.size]
            if len(inner) < 2 or inner[0] != stride or any(b % a for a, b in itertools.pairwise(inner)):
                found.append((stride, piece))
                continue
            ends = [*inner[1:], stride * piece.size]
            for at, end in sorted(zip(inner, ends, strict=True), reverse=True):
                major = end == ends[-1]
                axes = piece.axes if major and piece.axes else () if piece.axes else None
                found.append((at, DimPart(end // at, None, axes)))
        self.pieces = found
