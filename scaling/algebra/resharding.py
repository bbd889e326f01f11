"""The shortest plan between two types of one array (Part 3).

The types of an array over given mesh axes are the nodes of a small graph: each axis splits a dim (and the axes of a dim
have an order), or is unreduced, or is idle. Each step (`steps`) is an edge whose length is the bytes that a device
sends, exactly; so Dijkstra's algorithm finds a plan that no other sequence of these steps beats.

Costs are integers: an array of one element counts as the square of the product of the axis sizes, which every local
size and every (n-1)/n of it divides. They are compared as (cost, FLOPs, steps), least first.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from scaling.algebra.steps import Plan, Step, moved
from scaling.spec import ShardingError, Spec, mesh_sizes, parse

NOMINAL = 4  # devices along an axis whose size is not given


class Layout(NamedTuple):
    """A type without its names: the axes of each dim, and the unreduced axes, sorted."""

    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()

    @property
    def used(self) -> tuple[str, ...]:
        return tuple(axis for axes in self.dims for axis in axes) + self.unreduced


class Setting(NamedTuple):
    """What plans depend on beside types.

    `axes`: those in play, with their sizes, and whether these are `known`. `partial`: the axes that may become
    unreduced on the way: those over which only the target is. `cost`: the length of a step, if not the bytes sent.
    """

    axes: tuple[tuple[str, int], ...]
    known: bool
    partial: tuple[str, ...] = ()
    cost: "Callable[[Step], float] | None" = None

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)


def layout(spec: Spec) -> Layout:
    return Layout(tuple(axes for _, axes in spec.dims), spec.unreduced)


def retyped(spec: Spec, to: Layout) -> Spec:
    """The same array in another layout."""
    return Spec(spec.name, tuple(zip(spec.dim_names, to.dims, strict=True)), to.unreduced)


def setting(specs, mesh=None, partial=(), cost=None) -> Setting:
    """The setting of the axes that the types name; with a `cost`, of all axes of the mesh: idle links may pay then."""
    axes = dict.fromkeys(axis for spec in specs for axis in spec.axes + spec.unreduced)
    if mesh is None:
        return Setting(tuple((axis, NOMINAL) for axis in sorted(axes)), False, tuple(partial), cost)
    for spec in specs:
        spec.check_axes(mesh)
    sizes = mesh_sizes(mesh)
    return Setting(tuple((a, n) for a, n in sizes.items() if cost or a in axes), True, tuple(partial), cost)


@lru_cache(maxsize=4096)
def arrangements(axes: tuple[str, ...], dims: int) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Every way to split `dims` dims over some or none of the axes, in every order: ((), ()), (("X",), ()), ..."""
    if not dims:
        return ((),)
    found = []
    for count in range(len(axes) + 1):
        for first in itertools.permutations(axes, count):
            rest = tuple(axis for axis in axes if axis not in first)
            found += [(first, *others) for others in arrangements(rest, dims - 1)]
    return tuple(found)


@lru_cache(maxsize=4096)
def _alike(axes: tuple[tuple[str, int], ...], known: bool, dims: int) -> Mapping:
    """Arrangements by the blocks they cut the array into: a permutation of whole shards leads from each to each."""
    groups = {}
    for dims_axes in arrangements(tuple(axis for axis, _ in axes), dims):
        groups.setdefault(_cut(dims_axes, dict(axes), known), []).append(dims_axes)
    return groups


def _cut(dims: tuple, sizes: Mapping[str, int], known: bool) -> tuple:
    if known:
        return tuple(math.prod(sizes[axis] for axis in axes) for axes in dims)
    return tuple(tuple(sorted(axes)) for axes in dims)


def _subsets(axes: tuple[str, ...]):
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(1, len(axes) + 1))


def _ordered(axes: tuple[str, ...]):
    return itertools.chain.from_iterable(itertools.permutations(axes, n) for n in range(1, len(axes) + 1))


@lru_cache(maxsize=65536)
def moves(at: Layout, setting: Setting) -> tuple[tuple[str, tuple[str, ...], Layout, int], ...]:
    """Every step from a layout: (op, axes, next layout, bytes sent per element of the whole array, scaled)."""
    sizes, found = setting.sizes, []
    whole = math.prod(sizes.values()) ** 2
    idle = tuple(axis for axis in sizes if axis not in at.used)

    def count(axes) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def add(op, axes, dims, unreduced, share):
        found.append((op, tuple(axes), Layout(tuple(dims), tuple(sorted(unreduced))), share))

    def put(dim, axes):
        return (*at.dims[:dim], axes, *at.dims[dim + 1 :])

    local = whole // count(axis for axes in at.dims for axis in axes)
    for dim, axes in enumerate(at.dims):
        for kept in range(len(axes)):
            gone = axes[kept:]
            add("AllGather", gone, put(dim, axes[:kept]), at.unreduced, local * (count(gone) - 1))
            if set(gone) <= set(setting.partial):
                add("Pad", gone, put(dim, axes[:kept]), at.unreduced + gone, 0)
        for new in _ordered(at.unreduced):
            left = set(at.unreduced) - set(new)
            add("ReduceScatter", new, put(dim, axes + new), left, local // count(new) * (count(new) - 1))
        for new in _ordered(idle):
            add("Slice", new, put(dim, axes + new), at.unreduced, 0)
    for axes in _subsets(at.unreduced):
        add("AllReduce", axes, at.dims, set(at.unreduced) - set(axes), 2 * local // count(axes) * (count(axes) - 1))
    for source, target in itertools.permutations(range(len(at.dims)), 2):
        for n in range(len(at.dims[source])):
            axes, dims = at.dims[source][n:], list(at.dims)
            dims[source], dims[target] = dims[source][:n], dims[target] + axes
            add("AllToAll", axes, dims, at.unreduced, local // count(axes) * (count(axes) - 1))
    for dims in _alike(setting.axes, setting.known, len(at.dims))[_cut(at.dims, sizes, setting.known)]:
        if dims != at.dims and not {axis for axes in dims for axis in axes} & set(at.unreduced):
            before, after = (Spec("", tuple(zip(map(str, range(len(d))), d, strict=True))) for d in (at.dims, dims))
            axes = dict.fromkeys(axis for side in moved(before, after) for group in side for axis in group)
            add("CollectivePermute", axes, dims, at.unreduced, local)
    for axes in _subsets(tuple(axis for axis in idle if axis in setting.partial)):
        add("Mask", axes, at.dims, at.unreduced + axes, 0)
    return tuple(found)


def divides(at: Layout, shape, sizes: Mapping[str, int]) -> bool:
    """Whether every dim of the shape divides over its axes; with no shape, it is taken to."""
    if shape is None:
        return True
    return all(
        not size % math.prod(sizes[axis] for axis in axes) for size, axes in zip(shape, at.dims, strict=True) if axes
    )


def shortest(sources: Mapping[Layout, tuple], spec: Spec, shape, weight, setting: Setting, target=None) -> dict:
    """Dijkstra from several layouts of the array, each with what it has cost, to every other (or until `target`).

    Returns {layout: (key, previous layout or None, step or None)}; keys are (cost, FLOPs, steps). `weight`: elements
    times bytes of one.
    """
    sizes, best, done = setting.sizes, {}, {}
    heap, ties = [], itertools.count()

    def offer(at, key, previous, step):
        if at not in done and (at not in best or key < best[at][0]) and divides(at, shape, sizes):
            best[at] = (key, previous, step)
            heapq.heappush(heap, (key, next(ties), at))

    for at, key in sources.items():
        offer(at, key, None, None)
    while heap:
        key, _, at = heapq.heappop(heap)
        if at in done:
            continue
        done[at] = best[at]
        if at == target:
            break
        for op, axes, after, sent in moves(at, setting):
            if setting.cost is None:
                length = sent * weight
            else:
                length = setting.cost(Step(op, axes, retyped(spec, at), retyped(spec, after)))
            offer(after, (key[0] + length, key[1], key[2] + 1), at, (op, axes))
    return done


def path(found: dict, spec: Spec, to: Layout) -> tuple[tuple[Step, ...], Layout]:
    """The steps that lead to a layout in what `shortest` found, and the source they start from."""
    steps = []
    while found[to][1] is not None:
        _, previous, (op, axes) = found[to]
        steps.append(Step(op, axes, retyped(spec, previous), retyped(spec, to)))
        to = previous
    return tuple(reversed(steps)), to


def reshard(src, dst, sizes=None, mesh=None, cost=None) -> Plan:
    """The cheapest plan from one type of an array to another of the same array (and the same dims).

    `src`, `dst`: types, as text or Specs; the result keeps `dst`'s name, the steps before it `src`'s. `sizes` (dims)
    rules out steps whose blocks would not divide; `mesh` gives the sizes of the axes. Without a mesh each axis counts
    as 4 devices, and only the names of axes say which shards are alike. `cost` is a function of a Step to be minimised
    in sum in place of the bytes sent; then idle axes of the mesh are used too (Part 3, Question 2, the fun fact).
    Cached: a plan made once costs microseconds. Raises ShardingError if the dims differ or do not divide.
    """
    src, dst = parse(src), parse(dst)
    if src.dim_names != dst.dim_names:
        raise ShardingError(
            f"{src} -> {dst}: a resharding keeps the dims and their order\n"
            f"  fix: name the same dims in {dst.name or 'the target'}, or use an einsum to sum or transpose dims"
        )
    shape = None if sizes is None else src.global_shape(sizes)
    axes = None if mesh is None else tuple(mesh_sizes(mesh).items())
    return _reshard(src, dst, shape, axes, cost)


@lru_cache(maxsize=16384)
def _reshard(src: Spec, dst: Spec, shape, axes, cost) -> Plan:
    mesh = None if axes is None else dict(axes)
    if shape is not None and mesh is not None:
        src.local_shape(shape, mesh)
        dst.local_shape(shape, mesh)
    within = setting((src, dst), mesh, (axis for axis in dst.unreduced if axis not in src.unreduced), cost)
    steps = reshard_steps(src, dst, shape if mesh else None, within)
    if steps and steps[-1].after != dst:
        steps = (*steps[:-1], Step(steps[-1].op, steps[-1].axes, steps[-1].before, dst))
    return Plan((src,), dst, steps)


def reshard_steps(src: Spec, dst: Spec, shape, within: Setting) -> tuple[Step, ...]:
    """The steps of `reshard` in a given setting, all under the name of `src`."""
    source, target = layout(src), layout(dst)
    found = shortest({source: (0, 0, 0)}, src, shape, 1, within, target)
    return path(found, src, target)[0]
