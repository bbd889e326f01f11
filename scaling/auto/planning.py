"""A program's stages for the planner: its operations, then its results' types (Part 10, auto mode)."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from scaling.algebra.layouts import DimAxes, Setting, divides
from scaling.algebra.planner import ChosenWay, PlannedOp, Way, all_layouts, cheapest, legal_ways
from scaling.algebra.resharding import every_axis
from scaling.explicit.cheapest import value
from scaling.explicit.tracing import Graph, Node
from scaling.spec import ShardingError

BEAM = 200  # states that are kept where many values are alive


class Chosen(NamedTuple):
    """How each node after the arguments is computed, then each output; `nbytes`: what each device sends in all;
    `within`: the axes in play."""

    choices: list[ChosenWay]
    nbytes: float
    within: Setting


def plan(graph: Graph, inputs: Sequence[DimAxes], outputs: Sequence[DimAxes | None], constraints, mesh) -> Chosen:
    """The plan that sends the least.

    `inputs`, `outputs`: their layouts; None is whichever sends the least, but not unreduced. `constraints`: {node:
    layout}. Raises ShardingError if some operation is legal in no layout.
    """
    within = every_axis([at for at in (*inputs, *outputs, *constraints.values()) if at is not None], mesh.sizes)
    values = [value(node.shape, node.dtype.itemsize) for node in graph.nodes]
    stages = []
    for number in range(len(inputs), len(graph.nodes)):
        node = graph.nodes[number]
        ways = _ways(graph, node, constraints.get(number), within)
        if not ways:
            raise ShardingError(
                f"{node.call.op.name if node.call else 'reshard'}: no layout makes it legal on {mesh.sizes}"
                "\n  fix: change an operand's type, or reduce or gather it before"
            )
        stages.append(PlannedOp(node.operands, number, ways))
    for number, at in zip(graph.outputs, outputs, strict=True):
        ends = all_layouts(graph.nodes[number].shape, within.sizes, tuple(within.sizes)) if at is None else [at]
        stages.append(PlannedOp((number,), None, [Way((to,), to) for to in ends]))
    (sent, *_), choices = cheapest(values, dict(enumerate(inputs)), stages, within, BEAM)
    return Chosen(choices, sent / within.whole, within)


def _ways(graph: Graph, node: Node, constraint: DimAxes | None, within: Setting) -> list[Way]:
    """Every way in which a node may be computed, with each device's work."""
    if node.call is None:
        return [Way((constraint,), constraint)] if constraint else []
    shapes, axes, found = [graph.nodes[n].shape for n in node.operands], tuple(within.sizes), {}
    flops = (node.call.flops or math.prod(node.shape)) * within.count(axes)  # divides into any number of parts
    for needed, result in legal_ways(node.call.op, shapes, axes, [axes] * len(shapes), within.sizes):
        if divides(result, node.shape, within.sizes):
            parts = within.count({axis for at in needed for axis in itertools.chain(*at.dims)})
            found[needed, result] = Way(needed, result, (0, flops // parts, 0))
    return list(found.values())
