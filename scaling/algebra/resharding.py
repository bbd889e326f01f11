"""The cheapest plan between two types of one array (Part 3).

Layouts are the nodes of a graph and steps its edges (`layouts`). The length of an edge is the exact number of bytes
that a device sends, or the `cost` of the step. Dijkstra's algorithm, guided by the bytes that a device still lacks as
A* is, finds a plan that no other sequence of these steps beats.

The graph grows faster than exponentially with the number of axes. So a plain plan is made first, from the few steps
that lead straight to the target. If it is one step, no plan sends less. If not, a better one is searched for, but the
search stops after a number of steps looked at: then the plan carries a note that says so.

Amounts are counted as integers: a whole array has as many units as the square of the product of the axis sizes, so
that every local size and every (n-1)/n of it is an integer. Plans are compared as (cost, FLOPs, steps), least first; a
collective counts as more steps than all the steps that send nothing.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from scaling.algebra.layouts import FEW, DimAxes, Edge, Setting, divides, layout, moves, retyped, setting
from scaling.algebra.rules import parse_plain
from scaling.algebra.steps import FREE, Plan, Step
from scaling.spec import ShardingError, Spec, mesh_sizes

BOUND = 30_000  # steps looked at in the search for a plan that beats the plain one: about a second
NOTE = "more axes than can be searched: a cheaper plan may exist"

COLLECTIVE = 1000  # a collective counts as this many steps that send nothing
Key = tuple[float, float, int]  # cost, FLOPs, steps
START: Key = (0, 0, 0)  # the key of a value that exists from the start


class Reached(NamedTuple):
    """The cheapest way to reach a layout: its key, the layout before it and the step from there, if any."""

    key: Key
    previous: DimAxes | None = None
    move: Edge | None = None


Reach = Mapping[DimAxes, Reached]


class PlannedArray(NamedTuple):
    """An array: its name and dims, its shape (None if not known), and the weight of its costs (bytes or elements)."""

    spec: Spec
    shape: tuple[int, ...] | None
    weight: int = 1


def shortest(
    sources: Mapping[DimAxes, Key],
    array: PlannedArray,
    within: Setting,
    target: DimAxes | None = None,
    most: Key | None = None,
    bound: float = math.inf,
    plain: bool = False,
) -> dict[DimAxes, Reached]:
    """Run Dijkstra from several layouts of the array to every other layout, or until `target` is reached.

    Args:
        sources: the layouts to start from, and the cost so far of each.
        array: the array.
        within: the Setting.
        target: the layout to reach.
        most: a limit; plans that cost as much are not looked for.
        bound: the number of steps to look at, after which the search ends and finds nothing.
        plain: whether only the steps of plain plans count.
    """
    done: dict[DimAxes, Reached] = {}
    best: dict[DimAxes, Reached] = {}
    heap: list[tuple[Key, int, DimAxes]] = []
    missing: dict[DimAxes, int] = {}
    ties, looked = itertools.count(), 0

    def offer(at: DimAxes, reached: Reached) -> None:
        key = reached.key
        if at in done or (at in best and key >= best[at].key) or not divides(at, array.shape, within.sizes):
            return
        if target is not None and within.cost is None:  # at the least, all missing bytes are still to be sent
            if at not in missing:
                missing[at] = within.missing(at, target) * array.weight
            key = (key[0] + missing[at], key[1], key[2] + (at != target))
        if most is None or key < most:
            best[at] = reached
            heapq.heappush(heap, (key, next(ties), at))

    for at, key in sources.items():
        offer(at, Reached(key))
    while heap:
        at = heapq.heappop(heap)[2]
        if at in done:
            continue
        done[at] = best[at]
        if at == target:
            break
        for move, sent in _edges(at, within, target if plain else None):
            looked += 1
            if looked > bound:
                return {}
            if move.after not in done:
                length = sent * array.weight if within.cost is None else within.cost(_step(array.spec, at, move))
                step = length, 0, 1 if move.op in FREE else COLLECTIVE
                offer(move.after, Reached(key_sum(done[at].key, step), at, move))
    return done


def _step(spec: Spec, at: DimAxes, move: Edge) -> Step:
    return Step(move.op, move.axes, retyped(spec, at), retyped(spec, move.after))


def key_sum(a: Key, b: Key) -> Key:
    """Add two keys, component by component."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _edges(at: DimAxes, within: Setting, goal: DimAxes | None) -> Iterable[tuple[Edge, int]]:
    """Return the moves from a layout, each with the bytes it sends; cached if the axes are few."""
    if goal is None and len(within.axes) <= FEW:
        return _kept_edges(at, within)
    return ((move, within.sent(at, move)) for move in moves(at, within, goal))


@lru_cache(maxsize=4096)
def _kept_edges(at: DimAxes, within: Setting) -> tuple[tuple[Edge, int], ...]:
    return tuple((move, within.sent(at, move)) for move in moves(at, within))


@lru_cache(maxsize=65536)
def _kept_ways(at: DimAxes, shape: tuple[int, ...] | None, within: Setting) -> Reach:
    return shortest({at: START}, PlannedArray(Spec("", ()), shape), within)


def ways_from(at: DimAxes, array: PlannedArray, within: Setting, to: DimAxes | None = None) -> Reach:
    """Return how to bring an array from a layout into every other (or into `to`); bytes are for weight 1."""
    if within.cost is None and len(within.axes) <= FEW:
        devices = math.prod(within.sizes.values())
        shape = None if array.shape is None else tuple(math.gcd(size, devices) for size in array.shape)
        return _kept_ways(at, shape, within)
    return shortest({at: START}, array._replace(weight=1), within, to)


def begins_at(found: Reach, to: DimAxes) -> DimAxes:
    """Return the source layout from which `shortest` reached a layout."""
    while (previous := found[to].previous) is not None:
        to = previous
    return to


def path(found: Reach, spec: Spec, to: DimAxes) -> tuple[Step, ...]:
    """Return the steps that lead to a layout in the result of `shortest`."""
    _, previous, move = found[to]
    return () if previous is None or move is None else (*path(found, spec, previous), _step(spec, previous, move))


def reshard(src, dst, sizes=None, mesh=None, cost=None, idle: bool = False) -> Plan:
    """Plan the cheapest resharding from one type of an array to another with the same dims.

    The result keeps `dst`'s name, and the steps before it `src`'s. If there are too many axes to search, the plan may
    not be the cheapest, and its `note` says so. Plans are cached: a repeated one costs microseconds.

    Args:
        src: the type before, as text or a Spec.
        dst: the type after.
        sizes: the sizes of the dims, which rule out steps whose blocks would not divide.
        mesh: the sizes of the axes. Without a mesh each axis counts as 4 devices, and only the names of axes say which
            shards are alike.
        cost: a function of a Step, to be minimised in sum in place of the bytes sent. Idle axes of the mesh are then
            used too (Part 3, Question 2, the fun fact), and one AllGather over axes of several dims is weighed.
        idle: whether idle axes are used to send fewer bytes, on a mesh of up to four axes.

    Raises:
        ShardingError: the dims differ or do not divide.
    """
    src, dst = parse_plain(src), parse_plain(dst)
    if src.dim_names != dst.dim_names:
        raise ShardingError(
            f"{src} -> {dst}: a resharding keeps the dims and their order\n"
            f"  fix: name the same dims in {dst.name or 'the target'}, or use an einsum to sum or transpose dims"
        )
    shape = None if sizes is None else src.global_shape(sizes)
    return _reshard(src, dst, shape, None if mesh is None else tuple(mesh_sizes(mesh).items()), cost, idle)


@lru_cache(maxsize=16384)
def _reshard(src: Spec, dst: Spec, shape, axes, cost, idle: bool) -> Plan:
    mesh = None if axes is None else dict(axes)
    if shape is not None and mesh is not None:
        src.local_shape(shape, mesh)
        dst.local_shape(shape, mesh)
    within, note = setting((src, dst), mesh, (axis for axis in dst.unreduced if axis not in src.unreduced), cost), ""
    array, every = PlannedArray(src, shape if mesh else None), every_axis((layout(src), layout(dst)), mesh or {})
    if idle and cost is None and len(every.axes) <= FEW + 1:
        steps = exact_steps(array, layout(src), layout(dst), every)
    else:
        steps, note = steps_between(array, layout(src), layout(dst), within)
    if steps and steps[-1].after != dst:
        steps = (*steps[:-1], Step(steps[-1].op, steps[-1].axes, steps[-1].before, dst))
    return Plan((src,), dst, steps, note=note)


def every_axis(named: Sequence[DimAxes], mesh: Mapping[str, int]) -> Setting:
    """Return the setting in which steps may also use idle axes of a mesh, and any axis may become unreduced on the way.

    With four axes, only the axes that some layout is unreduced over may become so; with more, only the axes that a
    layout names are used.
    """
    used, summed = {axis for at in named for axis in at.used}, {axis for at in named for axis in at.unreduced}
    axes = tuple((axis, size) for axis, size in mesh.items() if size > 1 or axis in used)
    few = len(axes) <= FEW
    axes = axes if len(axes) <= FEW + 1 else tuple((axis, size) for axis, size in axes if axis in used)
    return Setting(axes, True, tuple(axis for axis, _ in axes if few or axis in summed))


def exact_steps(array: PlannedArray, start: DimAxes, to: DimAxes, within: Setting) -> tuple[Step, ...]:
    """Return the steps of the cheapest plan of all between two layouts, under the name of the array."""
    return path(ways_from(start, array, within, to), array.spec, to)


def steps_between(
    array: PlannedArray, source: DimAxes, target: DimAxes, within: Setting
) -> tuple[tuple[Step, ...], str]:
    """Search, for at most BOUND steps, for the cheapest plan between two layouts; return its steps and the note."""
    start, array = {source: START}, array._replace(weight=1)
    plain = shortest(start, array, within, target, plain=True)
    key = plain[target].key
    if key[2] <= COLLECTIVE and (within.cost is None or not key[0]):
        return path(plain, array.spec, target), ""
    least = within.cost is None and key[0] == within.missing(source, target)  # only fewer steps may be found
    better = shortest(start, array, within, target, key, BOUND // 5 if least or within.cost else BOUND)
    note = "" if least or better else NOTE
    return path(better if target in better else plain, array.spec, target), note
