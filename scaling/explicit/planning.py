"""Calls on whole arrays as stages for the planner: of a program, or of one call whose result's type is given.

What a call that was refused would take, for its error's fix, is `legal_layouts`.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from scaling.algebra.law import Illegal, Inferred, Sizes
from scaling.algebra.layouts import DimAxes, Setting, divides, spec_of
from scaling.algebra.planner import ChosenWay, PlannedOp, Way, all_layouts, cheapest, legal_ways, ways_of
from scaling.algebra.resharding import PlannedArray, every_axis
from scaling.explicit.functions import TypedCall
from scaling.spec import ShardingError

BEAM = 200  # states that are kept where many values are alive


@dataclass(frozen=True)
class Node:
    """A value: an argument, the result of a `call`, or its operand in the type that a `constraint` says."""

    shape: Sizes
    dtype: torch.dtype
    operands: tuple[int, ...] = ()
    call: TypedCall | None = None
    constraint: str = ""

    @property
    def planned(self) -> PlannedArray:
        """The array for the planner: what it sends is counted in bytes."""
        spec = spec_of(DimAxes(((),) * len(self.shape)))
        return PlannedArray(spec, self.shape, math.prod(self.shape) * self.dtype.itemsize)


@dataclass
class Graph:
    """The nodes in order, arguments first; `outputs` are numbers of nodes, which `structure` puts together."""

    nodes: list[Node] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    structure: Any = None


class Chosen(NamedTuple):
    """How each node after the arguments is computed, then each output; `nbytes`: what each device sends in all;
    `within`: the axes in play."""

    choices: list[ChosenWay]
    nbytes: float
    within: Setting


class Choice(NamedTuple):
    """Layouts to bring operands into, and what is inferred from them."""

    layouts: tuple[DimAxes, ...]
    inferred: Inferred


def one_call(call: TypedCall) -> Graph:
    """A call as a program."""
    arguments = [Node(tuple(x.shape), x.dtype) for x in call.operands]
    operands = tuple(range(len(arguments)))
    return Graph([*arguments, Node(call.shape, call.dtype, operands, call)], (len(arguments),))


def plan(
    graph: Graph, inputs: Sequence[DimAxes], outputs: Sequence[DimAxes | None], constraints: Mapping, mesh
) -> Chosen:
    """The plan that sends the least.

    `inputs`, `outputs`: their layouts; None is whichever sends the least, but not unreduced. `constraints`: {node:
    layout}. Raises ShardingError if some operation is legal in no layout.
    """
    within = every_axis([at for at in (*inputs, *outputs, *constraints.values()) if at is not None], mesh.sizes)
    stages = []
    for number, node in enumerate(graph.nodes):
        if number < len(inputs):
            continue
        if node.call is None:
            ways = [Way((to,), to) for to in [constraints[number]]]
        elif not (ways := _ways(graph, node, node.call, within)):
            _refuse_all(node.call, mesh)
        stages.append(PlannedOp(node.operands, number, ways))
    for number, at in zip(graph.outputs, outputs, strict=True):
        ends = all_layouts(graph.nodes[number].shape, within.sizes, tuple(within.sizes)) if at is None else [at]
        stages.append(PlannedOp((number,), None, [Way((to,), to) for to in ends]))
    arrays = [node.planned for node in graph.nodes]
    (sent, *_), choices = cheapest(arrays, dict(enumerate(inputs)), stages, within, BEAM)
    return Chosen(choices, sent / within.whole, within)


def _ways(graph: Graph, node: Node, call: TypedCall, within: Setting) -> list[Way]:
    """Every way in which a node may be computed, with each device's work."""
    shapes, axes = [graph.nodes[n].shape for n in node.operands], tuple(within.sizes)
    ways = ways_of(call.op, shapes, [axes] * len(shapes), within, call.flops or math.prod(node.shape))
    return [way for way in ways if divides(way.result, node.shape, within.sizes)]


def legal_layouts(call: TypedCall, operands: Sequence[DimAxes], mesh) -> Choice:
    """The layouts that make a call legal at the least bytes, and of those the fewest that change."""
    graph, ways, kept = one_call(call), [], {}
    shapes, axes = (
        [node.shape for node in graph.nodes[:-1]],
        tuple(dict.fromkeys(a for at in operands for a in at.used)),
    )
    for inferred in legal_ways(call.op, shapes, axes, [at.unreduced for at in operands], mesh.sizes):
        layouts = kept[inferred] = _as_they_are(call.op, operands, inferred, shapes, mesh)
        changed = sum(at != to for at, to in zip(operands, layouts, strict=True))
        work = math.prod(1 / mesh.size(at.used) for at in inferred[0])  # less than one operand that changes
        ways.append(Way(*inferred, (0, changed + work / 2, 0)))
    arrays, stage = [node.planned for node in graph.nodes], PlannedOp(graph.nodes[-1].operands, None, ways)
    _, choices = cheapest(arrays, dict(enumerate(operands)), [stage], every_axis(operands, mesh.sizes))
    if not choices:
        _refuse_all(call, mesh)
    needed, result, _ = choices[0].way
    return Choice(kept[needed, result], (needed, result))


def _as_they_are(op, operands: Sequence[DimAxes], inferred: Inferred, shapes, mesh) -> tuple[DimAxes, ...]:
    """The layouts that the kernel takes, but of an operand that it only slices the one that it has."""
    layouts = list(inferred[0])
    for i, at in enumerate(operands):
        with contextlib.suppress(Illegal):
            tried = (*layouts[:i], at, *layouts[i + 1 :])
            if op.infer(tried, shapes, mesh.sizes) == inferred:
                layouts[i] = at
    return tuple(layouts)


def _refuse_all(call: TypedCall, mesh) -> NoReturn:
    raise ShardingError(
        f"{call.op.name}: no layout makes it legal on {mesh.sizes}\n"
        "  fix: change an operand's type, or reduce or gather it before"
    )
