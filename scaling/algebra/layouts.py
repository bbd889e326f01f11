"""The types of one array as a graph: layouts are its nodes, and steps (`steps`) its edges (Part 3).

A layout is a type without names: each mesh axis splits a dim (and the axes of a dim have an order), or is unreduced, or
is idle. `moves` lists the steps that lead from one layout to others.
"""

import itertools
import math
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from scaling.algebra.steps import Step, common_prefix, moved, sent_share, splitting
from scaling.spec import Spec, mesh_sizes

NOMINAL = 4  # devices along an axis whose size is not given
FEW = 3  # axes: between layouts over at most this many, results are cached from plan to plan

Axes = tuple[str, ...]


class DimAxes(NamedTuple):
    """The axes of each dim, and the unreduced axes, sorted; in the judge's own types None marks unknown ones."""

    dims: tuple[Axes, ...]
    unreduced: Axes = ()

    @property
    def used(self) -> Axes:
        """Return every axis that splits a dim or is unreduced."""
        return (*itertools.chain(*self.dims), *self.unreduced)

    def put(self, dim: int, axes: Axes) -> "DimAxes":
        """Return the layout with these axes on one dim instead."""
        return DimAxes((*self.dims[:dim], axes, *self.dims[dim + 1 :]), self.unreduced)

    def summing(self, more: Axes = (), less: Axes = ()) -> "DimAxes":
        """Return the layout unreduced over more axes, or over fewer."""
        return DimAxes(self.dims, tuple(sorted(axis for axis in self.unreduced + more if axis not in less)))


class Edge(NamedTuple):
    """An edge: a step's op, its axes, and the layout that it leads to."""

    op: str
    axes: Axes
    after: DimAxes


@dataclass(frozen=True)
class Setting:
    """The conditions that a plan depends on, apart from types.

    Attributes:
        axes: the mesh axes that steps may use, with their sizes.
        known: whether the sizes are the mesh's; otherwise they are nominal.
        partial: the axes that may become unreduced on the way, such as the axes over which only the target is.
        cost: the length of a step, if it is not the bytes sent.
    """

    axes: tuple[tuple[str, int], ...]
    known: bool
    partial: Axes = ()
    cost: "Callable[[Step], float] | None" = None

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes, by name."""
        return dict(self.axes)

    @cached_property
    def whole(self) -> int:
        """The units in a whole array: so many that every local size, and (n-1)/n of it, is a whole number of units."""
        return math.prod(self.sizes.values()) ** 2

    def count(self, axes) -> int:
        """Return the number of devices along several axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def held(self, at: DimAxes) -> int:
        """Return how many of an array's `whole` units one device holds."""
        return self.whole // self.count(itertools.chain(*at.dims))

    def sent(self, at: DimAxes, move: Edge) -> int:
        """Return how many of an array's `whole` units one device sends in a move."""
        if move.op == "CollectivePermute" and splitting(at.dims, self.sizes) == splitting(move.after.dims, self.sizes):
            return 0
        sent, of = sent_share(move.op, self.count(move.axes))
        return self.held(at) * sent // of

    def missing(self, at: DimAxes, target: DimAxes) -> int:
        """Return the part of the target that some device lacks, a lower bound for the amount to be sent.

        If the axes of a dim diverge, some device holds nothing that it needs; otherwise one part contains the other.
        """
        if self.partial:  # a term of a sum may be zero, so nothing may have to be sent
            return 0
        wanted, common = self.held(target), 1
        for ours, theirs in zip(splitting(at.dims, self.sizes), splitting(target.dims, self.sizes), strict=True):
            if ours[: len(theirs)] != theirs[: len(ours)]:
                return wanted
            common *= self.count(ours[len(theirs) :])
        return wanted - wanted // common


def layout(spec: Spec) -> DimAxes:
    """Return the layout of a type: the axes of its dims and its unreduced axes, without names."""
    return DimAxes(tuple(axes for _, axes in spec.dims), spec.unreduced)


def retyped(spec: Spec, to: DimAxes) -> Spec:
    """Return the type of the array in another layout."""
    return Spec(spec.name, tuple(zip(spec.dim_names, to.dims, strict=True)), to.unreduced)


def unsplit_spec(name: str, dims: Iterable[str]) -> Spec:
    """Return the type of a whole array."""
    return Spec(name, tuple((dim, ()) for dim in dims))


def letters(n: int, start: int = 8) -> Axes:
    """Return names for n dims: I, J, K, ..."""
    return tuple(string.ascii_uppercase[(start + i) % 26] for i in range(n))


def spec_of(at: DimAxes) -> Spec:
    """Return the type of a layout, with dims named I, J, ..."""
    return retyped(unsplit_spec("", letters(len(at.dims))), at)


def setting(specs, mesh=None, partial=(), cost=None) -> Setting:
    """Return the setting of the axes that the types name; with a `cost` of all axes, since idle links may save time."""
    axes = dict.fromkeys(axis for spec in specs for axis in spec.named_axes)
    if mesh is None:
        return Setting(tuple((axis, NOMINAL) for axis in sorted(axes)), False, tuple(partial), cost)
    for spec in specs:
        spec.check_axes(mesh)
    sizes = mesh_sizes(mesh)
    return Setting(tuple((a, n) for a, n in sizes.items() if cost or a in axes), True, tuple(partial), cost)


def divides(at: DimAxes, shape, sizes: Mapping[str, int]) -> bool:
    """Return whether every dim of the shape divides over its axes; True if the shape is not known."""
    if shape is None:
        return True
    return all(
        not size % math.prod(sizes[axis] for axis in axes) for size, axes in zip(shape, at.dims, strict=True) if axes
    )


@lru_cache(maxsize=256)
def arrangements(axes: Axes, dims: int) -> tuple[tuple[Axes, ...], ...]:
    """Return every way to split `dims` dims over some or none of the axes, in every order: ((), ()), (("X",), ())."""
    if not dims:
        return ((),)
    found = []
    for first in ordered(axes, least=0):
        rest = tuple(axis for axis in axes if axis not in first)
        found += [(first, *others) for others in arrangements(rest, dims - 1)]
    return tuple(found)


def subsets(axes: Axes, least: int = 1) -> Iterator[Axes]:
    """Yield the subsets of the axes with at least `least` members."""
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(least, len(axes) + 1))


def ordered(axes: Axes, least: int = 1) -> Iterator[Axes]:
    """Yield the subsets of the axes with at least `least` members, in every order."""
    return itertools.chain.from_iterable(itertools.permutations(axes, n) for n in range(least, len(axes) + 1))


def moves(at: DimAxes, within: Setting, goal: DimAxes | None = None) -> Iterator[Edge]:
    """Yield every step from a layout; given a goal, only the steps that a plain plan may take.

    In a plain plan a dim gains axes only in the goal's order, and the sums that the goal lacks are reduced together.
    Such steps are few, however many axes a mesh has.
    """
    idle = tuple(axis for axis in within.sizes if axis not in at.used)
    wanted = (None,) * len(at.dims) if goal is None else goal.dims
    for dim, axes in enumerate(at.dims):
        for removed, left in _less_by(at, dim):
            yield Edge("AllGather", removed, left)
            if set(removed) <= set(within.partial):
                yield Edge("Pad", removed, left.summing(more=removed))
        for op, pool in (("ReduceScatter", at.unreduced), ("Slice", idle)):
            for new in _gained(axes, pool, wanted[dim]):
                yield Edge(op, new, at.put(dim, axes + new).summing(less=new))
    for axes in _summed(at, goal):
        yield Edge("AllReduce", axes, at.summing(less=axes))
    for source, target in itertools.permutations(range(len(at.dims)), 2):
        for removed, left in _less_by(at, source):
            new = at.dims[target] + removed
            if goal is None or new == goal.dims[target][: len(new)]:
                yield Edge("AllToAll", removed, left.put(target, new))
    if within.cost is not None:
        yield from _gathers_of_several(at, goal)
    for dims in _cut_alike(at, within, goal):
        shuffled = dict.fromkeys(itertools.chain(*itertools.chain(*moved(at.dims, dims))))
        yield Edge("CollectivePermute", tuple(shuffled), DimAxes(dims, at.unreduced))
    partial = tuple(axis for axis in idle if axis in within.partial)
    for axes in subsets(partial) if goal is None else [partial] if partial else []:
        yield Edge("Mask", axes, at.summing(more=axes))


def _less_by(at: DimAxes, dim: int) -> Iterator[tuple[Axes, DimAxes]]:
    """Return each group of minor axes that a dim may lose together, and the layout without them."""
    axes = at.dims[dim]
    return ((axes[kept:], at.put(dim, axes[:kept])) for kept in range(len(axes)))


def _gained(have: Axes, pool: Axes, wanted: Axes | None) -> Iterator[Axes]:
    """Yield the axes of the pool that a dim may gain together, in splitting order; `wanted`: its axes in the goal."""
    if wanted is None:
        yield from ordered(pool)
    elif wanted[: len(have)] == have:
        more = tuple(itertools.takewhile(set(pool).__contains__, wanted[len(have) :]))
        yield from (more[: n + 1] for n in range(len(more)))


def _summed(at: DimAxes, goal: DimAxes | None) -> Iterator[Axes]:
    """Yield the groups of axes that one AllReduce may sum over."""
    if goal is None:
        yield from subsets(at.unreduced)
        return
    pending = tuple(axis for axis in at.unreduced if axis not in goal.unreduced)
    scattered = tuple(axis for axis in pending if axis not in goal.used)  # the others could be scattered
    yield from dict.fromkeys(axes for axes in (pending, scattered) if axes)


def _gathers_of_several(at: DimAxes, goal: DimAxes | None) -> Iterator[Edge]:
    """Yield AllGathers over axes of several dims at once: they send as much as single ones, but over more links."""
    choices = []
    for dim, axes in enumerate(at.dims):
        common = 0 if goal is None else len(common_prefix(axes, goal.dims[dim]))
        choices.append(range(len(axes) + 1) if goal is None else sorted({common, len(axes)}))
    for kept in itertools.product(*choices):
        removed = tuple(axes[n:] for axes, n in zip(at.dims, kept, strict=True))
        if sum(map(bool, removed)) > 1:
            dims = tuple(axes[:n] for axes, n in zip(at.dims, kept, strict=True))
            yield Edge("AllGather", tuple(itertools.chain(*removed)), DimAxes(dims, at.unreduced))


def _cut_alike(at: DimAxes, within: Setting, goal: DimAxes | None) -> Iterator[tuple[Axes, ...]]:
    """Yield the other ways to split the dims into the same blocks, which whole shards reach by changing devices."""
    pool = tuple(axis for axis in within.sizes if axis not in at.unreduced)

    def of_size(pool: Axes, size: int) -> Iterator[Axes]:
        if size == 1:
            yield ()
        for axis in pool:
            if size % within.sizes[axis] == 0:
                rest = of_size(tuple(other for other in pool if other != axis), size // within.sizes[axis])
                yield from ((axis, *more) for more in rest)

    def choose(dims: tuple[Axes, ...], pool: Axes) -> Iterator[tuple[Axes, ...]]:
        if not dims:
            yield ()
            return
        options = of_size(pool, within.count(dims[0])) if within.known else itertools.permutations(dims[0])
        for first in options:
            yield from ((first, *more) for more in choose(dims[1:], tuple(a for a in pool if a not in first)))

    if goal is None:
        yield from (dims for dims in choose(at.dims, pool) if dims != at.dims)
    elif goal.dims != at.dims and not set(itertools.chain(*goal.dims)) & set(at.unreduced):
        alike = within.count if within.known else set
        if all(alike(a) == alike(b) for a, b in zip(at.dims, goal.dims, strict=True)):
            yield goal.dims
