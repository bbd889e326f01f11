"""The planner's problems for calls on whole arrays: a program, or one call whose result's type is given.

For a refused call, `legal_layouts` finds the layouts that its error names as the fix.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from scaling.algebra.law import Illegal
from scaling.algebra.layouts import DimAxes, Setting, spec_of
from scaling.algebra.planner import ChosenWay, Value, Way, all_layouts, cheapest, legal_ways, ways_of
from scaling.algebra.resharding import PlannedArray, every_axis
from scaling.explicit.functions import AnyOperation, Node

BEAM = 200  # states that are kept if many values are alive


@dataclass
class Graph:
    """The nodes in order, arguments first; `outputs` are numbers of nodes, which `structure` puts together."""

    nodes: list[Node] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    structure: Any = None


def weighted_array(node: Node) -> PlannedArray:
    """Return a value's array for the planner, weighted by its bytes."""
    spec = spec_of(DimAxes(((),) * len(node.shape)))
    return PlannedArray(spec, node.shape, math.prod(node.shape) * node.dtype.itemsize)


class Chosen(NamedTuple):
    """The plan: the choice for each node after the arguments, then for each output.

    Attributes:
        choices: the choices.
        nbytes: the bytes that each device sends in all.
        within: the axes in play.
    """

    choices: list[ChosenWay]
    nbytes: float
    within: Setting


def plan(
    graph: Graph,
    inputs: Sequence[DimAxes],
    outputs: Sequence[DimAxes | None],
    constraints: Mapping[int, DimAxes],
    sizes: Mapping[str, int],
    beam: float = BEAM,
) -> Chosen:
    """Plan a program so that it sends the least on a mesh of these sizes.

    Args:
        graph: the program.
        inputs: the arguments' layouts.
        outputs: the results' layouts. None is the layout that sends the least, but not an unreduced one.
        constraints: the layouts of constrained nodes, {node: layout}.
        sizes: the sizes of the mesh's axes.
        beam: the number of states that `cheapest` keeps.
    """
    within = every_axis([at for at in (*inputs, *outputs, *constraints.values()) if at is not None], sizes)
    axes, arrays, values = tuple(within.sizes), [weighted_array(node) for node in graph.nodes], []
    for number, node in enumerate(graph.nodes):
        ways = []
        if node.op is not None:
            may = [within.partial + inputs[n].unreduced if n < len(inputs) else axes for n in node.operands]
            work = node.flops or math.prod(node.shape)
            ways = ways_of(node.op, [arrays[n] for n in node.operands], arrays[number], may, within, work)
        elif number in constraints:
            ways = [Way((constraints[number],), constraints[number])]
        values.append(Value(arrays[number], node.operands, ways))
    for number, at in zip(graph.outputs, outputs, strict=True):
        ends = all_layouts(graph.nodes[number].shape, within.sizes, axes) if at is None else [at]
        values.append(Value(arrays[number], (number,), [Way((to,), to) for to in ends]))
    (sent, *_), choices = cheapest(values, inputs, within, beam)
    return Chosen(choices, sent / within.whole, within)


def nodes_of(call: Node) -> tuple[Node, ...]:
    """Return a call as a program: its operands, then its result."""
    operands = [Node(tuple(x.shape), x.dtype) for x in call.operands]
    return *operands, replace(call, operands=tuple(range(len(operands))))


@lru_cache(maxsize=4096)
def way_to(
    nodes: tuple[Node, ...], operands: tuple[DimAxes, ...], wanted: DimAxes, mesh: tuple[tuple[str, int], ...]
) -> Way:
    """Return the way to compute a call on operands in these layouts if its result is wanted in the given one."""
    graph = Graph([*nodes], (len(operands),))
    # for a single call every state can be kept: after it only the result is live
    return plan(graph, operands, [wanted], {}, dict(mesh), math.inf).choices[0].way


def legal_layouts(op: AnyOperation, nodes: Sequence[Node], operands: Sequence[DimAxes], sizes: Mapping) -> Way:
    """Return the layouts that make an operation legal at the fewest bytes, and then with the fewest changes.

    An operand that the kernel only slices keeps its layout.
    """
    shapes, ways = [node.shape for node in nodes], []
    axes = tuple(dict.fromkeys(axis for at in operands for axis in at.used))
    for needed, result in legal_ways(op, shapes, axes, [at.unreduced for at in operands], sizes):
        layouts = list(needed)
        for i, at in enumerate(operands):
            with contextlib.suppress(Illegal):
                if op.infer((*layouts[:i], at, *layouts[i + 1 :]), shapes, sizes) == (needed, result):
                    layouts[i] = at
        changed = sum(at != to for at, to in zip(operands, layouts, strict=True))
        work = math.prod(1 / sizes[axis] for at in needed for axis in at.used)  # less than one operand that changes
        ways.append(Way(tuple(layouts), result, (0, changed + work / 2, 0)))
    arrays = [weighted_array(node) for node in nodes]
    values = [*map(Value, arrays), Value(arrays[0], tuple(range(len(arrays))), ways)]  # any array: nothing uses it
    _, choices = cheapest(values, operands, every_axis(operands, sizes))
    return choices[0].way
