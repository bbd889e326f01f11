"""The shortest plan between two types of one array (Part 3).

Layouts are the nodes of a graph and steps its edges (`layouts`); the length of an edge is the bytes that a device
sends, exactly. Dijkstra's algorithm, led by what a device still lacks (as A* is), finds a plan that no other sequence
of these steps beats.

The graph grows faster than exponentially with the number of axes. So a plain plan is made first, from the few steps
that lead straight to the target. If it is one step, no plan sends less. If not, a better one is searched for, but the
search stops after a number of steps looked at: then the plan carries a note that says so.

Costs are integers: an array of one element counts as the square of the product of the axis sizes, which every local
size and every (n-1)/n of it divides. They are compared as (cost, FLOPs, steps), least first.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from scaling.algebra.layouts import DimAxes, Edge, Setting, divides, layout, moves, retyped, setting
from scaling.algebra.steps import Plan, Step
from scaling.spec import ShardingError, Spec, mesh_sizes, parse

BOUND = 30_000  # steps looked at in the search for a plan that beats the plain one: about a second
FEW = 3  # axes: the steps between so few are kept from plan to plan
NOTE = "more axes than can be searched: a cheaper plan may exist"

Key = tuple[float, int, int]  # cost, FLOPs, steps
START: Key = (0, 0, 0)  # of what is there from the first


class Reached(NamedTuple):
    """How a layout is reached at its least cost: the layout before it and the step from there, if any."""

    key: Key
    previous: DimAxes | None = None
    move: Edge | None = None


def shortest(
    sources: Mapping[DimAxes, Key],
    spec: Spec,
    shape,
    weight: int,
    within: Setting,
    target: DimAxes | None = None,
    most: Key | None = None,
    bound: float = math.inf,
    plain: bool = False,
) -> dict[DimAxes, Reached]:
    """Dijkstra from several layouts of the array, each with what it has cost, to every other (or until `target`).

    `weight`: elements times bytes of one. `most`: plans that cost as much are not looked for. `bound`: after so many
    steps looked at the search ends, with nothing. `plain`: only the steps of plain plans.
    """
    done: dict[DimAxes, Reached] = {}
    best: dict[DimAxes, Reached] = {}
    heap: list[tuple[Key, int, DimAxes]] = []
    missing: dict[DimAxes, int] = {}
    ties, looked = itertools.count(), 0

    def offer(at: DimAxes, reached: Reached) -> None:
        key = reached.key
        if at in done or (at in best and key >= best[at].key) or not divides(at, shape, within.sizes):
            return
        if target is not None and within.cost is None:  # at the least, what is missing is still to be sent
            if at not in missing:
                missing[at] = within.missing(at, target) * weight
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
        cost, flops, steps = done[at].key
        for move, sent in _edges(at, within, target if plain else None):
            looked += 1
            if looked > bound:
                return {}
            if move.after in done:
                continue
            length = sent * weight
            if within.cost is not None:
                length = within.cost(Step(move.op, move.axes, retyped(spec, at), retyped(spec, move.after)))
            offer(move.after, Reached((cost + length, flops, steps + 1), at, move))
    return done


def _edges(at: DimAxes, within: Setting, goal: DimAxes | None) -> Iterable[tuple[Edge, int]]:
    """The moves from a layout, each with what it sends; kept where there are few."""
    if goal is None and len(within.axes) <= FEW:
        return _kept_edges(at, within)
    return ((move, within.sent(at, move)) for move in moves(at, within, goal))


@lru_cache(maxsize=4096)
def _kept_edges(at: DimAxes, within: Setting) -> tuple[tuple[Edge, int], ...]:
    return tuple((move, within.sent(at, move)) for move in moves(at, within))


def path(found: Mapping[DimAxes, Reached], spec: Spec, to: DimAxes) -> tuple[tuple[Step, ...], DimAxes]:
    """The steps that lead to a layout in what `shortest` found, and the source they start from."""
    steps: list[Step] = []
    while (previous := found[to].previous) is not None and (move := found[to].move) is not None:
        steps.append(Step(move.op, move.axes, retyped(spec, previous), retyped(spec, to)))
        to = previous
    return tuple(reversed(steps)), to


def reshard(src, dst, sizes=None, mesh=None, cost=None) -> Plan:
    """The cheapest plan from one type of an array to another of the same array (and the same dims).

    `src`, `dst`: types, as text or Specs; the result keeps `dst`'s name, the steps before it `src`'s. `sizes` (dims)
    rules out steps whose blocks would not divide; `mesh` gives the sizes of the axes. Without a mesh each axis counts
    as 4 devices, and only the names of axes say which shards are alike. `cost` is a function of a Step to be minimised
    in sum in place of the bytes sent; then idle axes of the mesh are used too (Part 3, Question 2, the fun fact), and
    one AllGather over axes of several dims is weighed. Beyond a number of axes the plan may not be the cheapest: its
    `note` says so. Cached: a plan made once costs microseconds. Raises ShardingError if the dims differ or do not
    divide.
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
    steps, note = _steps(src, dst, shape if mesh else None, within)
    if steps and steps[-1].after != dst:
        steps = (*steps[:-1], Step(steps[-1].op, steps[-1].axes, steps[-1].before, dst))
    return Plan((src,), dst, steps, note=note)


def _steps(src: Spec, dst: Spec, shape, within: Setting) -> tuple[tuple[Step, ...], str]:
    """The steps of the cheapest plan, all under the name of `src`, and the note."""
    source, target = layout(src), layout(dst)
    start = {source: START}
    plain = shortest(start, src, shape, 1, within, target, plain=True)
    key = plain[target].key
    if key[2] <= 1 and (within.cost is None or not key[0]):
        return path(plain, src, target)[0], ""
    least = within.cost is None and key[0] == within.missing(source, target)  # only fewer steps may be found
    bound = BOUND // 5 if least or within.cost else BOUND
    better = shortest(start, src, shape, 1, within, target, most=key, bound=bound)
    return path(better if target in better else plain, src, target)[0], "" if least or better else NOTE
