"""The layouts of every value of a program that send the least bytes in all (Part 10, auto mode).

A program is a list of stages: its operations, then its results' types. The stages are walked once. A state says in
which layouts the values that are still needed are held; a stage leads from it to others, one for each way in which it
is legal, and what it costs to reshard its operands is added. A value that was resharded is held in both layouts. Of
states alike the cheapest is kept, by bytes sent, then work, then collectives.

Where many values are alive there are too many states: the `BEAM` best are kept, by what they have sent and what each
value still costs at the least, on its own (`Planner.later`, found backwards first).
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scaling.algebra.law import Inferred
from scaling.algebra.layouts import DimAxes, divides
from scaling.auto.tracing import Graph, Node
from scaling.explicit.cheapest import all_layouts, legal_ways, ways_from
from scaling.spec import ShardingError

BEAM = 200

HeldLayouts = frozenset  # layouts in which a value is held
ProgramCost = tuple[float, float, int]  # bytes sent by each device, work, collectives


class PlannedOp(NamedTuple):
    """An operation: its operands and result (of a program's result, None) and the ways to compute it, with the work."""

    operands: tuple[int, ...]
    result: int | None
    ways: list[tuple[Inferred, float]]


class SearchState(NamedTuple):
    """What it took to come here, what is held, and the choice that led here from the state before."""

    cost: ProgramCost
    held: tuple[tuple[int, HeldLayouts], ...]
    before: "SearchState | None" = None
    chosen: Inferred | None = None


class Chosen(NamedTuple):
    """For each node after the arguments what its operands are resharded to and its result; then for each output.
    `nbytes`: what each device sends in all; `axes`: those over which arrays are resharded, with their sizes."""

    stages: list[Inferred]
    nbytes: float
    axes: tuple[tuple[str, int], ...]


def plan(graph: Graph, inputs: Sequence[DimAxes], outputs: Sequence[DimAxes | None], constraints, mesh) -> Chosen:
    """The plan that sends the least.

    `inputs`, `outputs`: their layouts; None is whichever sends the least, but not unreduced. `constraints`: {node:
    layout}. Raises ShardingError if some operation is legal in no layout.
    """
    named = {axis for at in (*inputs, *outputs, *constraints.values()) if at is not None for axis in at.used}
    axes = tuple(axis for axis, size in mesh.sizes.items() if size > 1 or axis in named)
    stages = []
    for number in range(len(inputs), len(graph.nodes)):
        node = graph.nodes[number]
        ways = _ways(graph, node, constraints.get(number), axes, mesh)
        if not ways:
            raise ShardingError(
                f"{node.call.op.name if node.call else 'reshard'}: no layout makes it legal on {mesh.sizes}"
                "\n  fix: change an operand's type, or reduce or gather it before"
            )
        stages.append(PlannedOp(node.operands, number, ways))
    for number, at in zip(graph.outputs, outputs, strict=True):
        ends = all_layouts(graph.nodes[number].shape, mesh, axes) if at is None else [at]
        stages.append(PlannedOp((number,), None, [(((to,), to), 0.0) for to in ends]))
    return Planner(graph, inputs, stages, axes, mesh).plan()


class Planner:
    """The search: `stages` in order, of a graph whose arguments have the layouts `inputs`."""

    def __init__(self, graph: Graph, inputs: Sequence[DimAxes], stages: list[PlannedOp], axes, mesh):
        self.graph, self.inputs, self.stages, self.mesh = graph, inputs, stages, mesh
        self.axes = tuple((axis, mesh.sizes[axis]) for axis in axes)
        self.tables: dict[tuple[int, DimAxes], dict[DimAxes, float]] = {}
        self.last = {n: i for i, stage in enumerate(stages) for n in stage.operands}
        self.later: dict[int, dict[DimAxes, float]] = {}
        for number in range(len(graph.nodes) - 1, len(inputs) - 1, -1):
            every = all_layouts(graph.nodes[number].shape, mesh, axes, axes)
            self.later[number] = dict.fromkeys(every, 0.0)
            for stage in stages:
                if number in stage.operands:
                    self._look_back(number, stage)

    def _look_back(self, number: int, stage: PlannedOp) -> None:
        """Raise what a value costs later to what this stage costs at the least; its other operands share the costs."""
        sharing = len({n for n in stage.operands if n >= len(self.inputs)})
        cheapest: dict[tuple[DimAxes, ...], float] = {}
        for (needed, result), _ in stage.ways:
            rest = 0.0 if stage.result is None else self.later[stage.result][result]
            own = []
            for n, to in zip(stage.operands, needed, strict=True):
                if n == number:
                    own.append(to)
                elif n < len(self.inputs):
                    rest += self.sent(n, self.inputs[n], to)
            key = tuple(dict.fromkeys(own))
            cheapest[key] = min(cheapest.get(key, math.inf), rest / sharing)
        later = self.later[number]
        for at, least in later.items():
            costs = (sum(self.sent(number, at, to) for to in own) + rest for own, rest in cheapest.items())
            later[at] = max(least, min(costs))

    def sent(self, number: int, at: DimAxes, to: DimAxes) -> float:
        """Bytes that each device sends to bring a value from a layout into another; inf where it cannot be."""
        if (number, at) not in self.tables:
            node, whole = self.graph.nodes[number], self.mesh.size() ** 2
            nbytes = math.prod(node.shape) * node.dtype.itemsize
            found = ways_from(at, node.shape, self.axes, self.mesh)
            self.tables[number, at] = {to: reached.key[0] * nbytes / whole for to, reached in found.items()}
        return self.tables[number, at].get(to, math.inf)

    def plan(self) -> Chosen:
        """The cheapest plan found."""
        held = tuple((i, HeldLayouts({at})) for i, at in enumerate(self.inputs) if i in self.last)
        states = [SearchState((0.0, 0.0, 0), held)]
        for number, stage in enumerate(self.stages):
            states = sorted(self._after(states, number, stage), key=self._promise)[:BEAM]
        chosen, state = [], states[0]
        nbytes = state.cost[0]
        while state.before is not None:
            chosen.append(state.chosen)
            state = state.before
        return Chosen(chosen[::-1], nbytes, self.axes)

    def _promise(self, state: SearchState) -> tuple[float, ProgramCost]:
        """What a state has sent and will send at the least."""
        later = sum(min(self.later[n][at] for at in held) for n, held in state.held if n in self.later)
        return state.cost[0] + later, state.cost

    def _after(self, states: Iterable[SearchState], number: int, stage: PlannedOp) -> Iterable[SearchState]:
        """The states after a stage, the cheapest of those alike."""
        best: dict[tuple, SearchState] = {}
        outcomes: dict[tuple, list] = {}
        for state in states:
            held = dict(state.held)
            own = tuple(held[n] for n in stage.operands)
            rest = tuple((n, h) for n, h in state.held if n not in stage.operands)
            if own not in outcomes:
                outcomes[own] = self._outcomes(dict(zip(stage.operands, own, strict=True)), number, stage)
            for cost, more, chosen in outcomes[own]:
                key, reached = rest + more, _sum(state.cost, cost)
                if key not in best or reached < best[key].cost:
                    best[key] = SearchState(reached, key, state, chosen)
        return best.values()

    def _outcomes(
        self, own: dict[int, HeldLayouts], number: int, stage: PlannedOp
    ) -> list[tuple[ProgramCost, tuple, Inferred]]:
        """(cost, what is held then, choice) of a stage's ways from operands held so: the best of those alike."""
        best: dict[tuple, tuple] = {}
        for chosen, work in stage.ways:
            nbytes, steps, held = 0.0, 0, dict(own)
            for n, to in zip(stage.operands, chosen[0], strict=True):
                if to not in held[n]:
                    sent = min(self.sent(n, at, to) for at in held[n])
                    nbytes, steps = nbytes + sent, steps + 1
                    held[n] = held[n] | {to} if sent else held[n]
            if stage.result in self.last:
                held[stage.result] = HeldLayouts({chosen[1]})
            key = tuple((n, h) for n, h in held.items() if self.last[n] > number)
            cost = nbytes, work, steps
            if nbytes < math.inf and (key not in best or cost < best[key][0]):
                best[key] = cost, key, chosen
        return list(best.values())


def _ways(graph: Graph, node: Node, constraint: DimAxes | None, axes, mesh) -> list[tuple[Inferred, float]]:
    """Every way in which a node may be computed, with each device's work."""
    if node.call is None:
        return [(((constraint,), constraint), 0.0)] if constraint else []
    shapes, op, found = [graph.nodes[n].shape for n in node.operands], node.call.op, {}
    for needed, result in legal_ways(op, shapes, axes, [axes] * len(shapes), mesh):
        if divides(result, node.shape, mesh.sizes):
            used = {axis for at in needed for axis in itertools.chain(*at.dims)}
            found[needed, result] = (node.call.flops or math.prod(node.shape)) / mesh.size(used)
    return list(found.items())


def _sum(a: ProgramCost, b: ProgramCost) -> ProgramCost:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]
