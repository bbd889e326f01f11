"""A planned program: its steps as a listing in the notation, what they send, and how they run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import optree
from torch import Tensor

from scaling.algebra.law import LabelledOp
from scaling.algebra.layouts import DimAxes, Setting, layout
from scaling.algebra.planner import ChosenWay
from scaling.algebra.resharding import PlannedArray, exact_steps
from scaling.algebra.steps import COLLECTIVES, Step
from scaling.auto.planning import Chosen
from scaling.collectives.plans import run_step
from scaling.explicit.arrays import Array
from scaling.explicit.functions import LocalPlan
from scaling.explicit.labels import letters
from scaling.explicit.tracing import Graph
from scaling.spec import Spec

ValueLayout = tuple[int, DimAxes]  # a value in one of the layouts that it is held in


class ListingLine(NamedTuple):
    """One line: a collective (`step`), or a computation, by its text. `run(shards)` gives the shard of `made`."""

    text: str
    takes: tuple[ValueLayout, ...]
    made: ValueLayout
    run: Callable[[Sequence[Tensor]], Tensor]
    step: Step | None = None


@dataclass(frozen=True)
class Lowered:
    """A program with its collectives put in. `listing` is its text, `lines` its lines, `steps` its collectives;
    `planned` the bytes that the plan says each device sends."""

    lines: tuple[ListingLine, ...]
    graph: Graph
    inputs: tuple[ValueLayout, ...]
    outputs: tuple[ValueLayout, ...]
    mesh: Any
    planned: float

    @property
    def listing(self) -> str:
        return "\n".join(f"{number}. {line.text}" for number, line in enumerate(self.lines, 1))

    @property
    def steps(self) -> tuple[Step, ...]:
        """The collectives, in order."""
        return tuple(line.step for line in self.lines if line.step is not None and line.step.op in COLLECTIVES)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends."""
        sent = 0.0
        for line in self.lines:
            if line.step is not None:
                node = self.graph.nodes[line.made[0]]
                sent += line.step.wire_bytes(node.shape, self.mesh, node.dtype)
        return sent

    def run(self, arrays: Sequence[Array]) -> Any:
        """The tree of results, as arrays, from the arguments' arrays, which have the types asked for."""
        held = dict(zip(self.inputs, (x.local for x in arrays), strict=True))
        last = {key: number for number, line in enumerate(self.lines) for key in line.takes}
        for number, line in enumerate(self.lines):
            held[line.made] = line.run([held[key] for key in line.takes])
            for key in line.takes:
                if last[key] == number and key not in self.outputs:
                    held.pop(key, None)
        results = [Array(held[n, at], at, self.graph.nodes[n].shape, self.mesh) for n, at in self.outputs]
        return optree.tree_unflatten(self.graph.structure, results)


def lower(graph: Graph, names: Sequence[Spec], types: Sequence[DimAxes], outputs, chosen: Chosen, mesh) -> Lowered:
    """The lines of a plan. `names`: the arguments' names and dims; `types`: their layouts; `outputs`: Specs or None of
    the results; `chosen`: what `plan` found."""
    writer, choices = Writer(graph, mesh, chosen.within), chosen.choices
    for number, (spec, at) in enumerate(zip(names, types, strict=True)):
        writer.specs[number] = spec
        writer.held[number] = [at]
    asked = {n: spec for n, spec in zip(graph.outputs, outputs, strict=True) if spec is not None and spec.name}
    for number in range(len(names), len(graph.nodes)):
        writer.compute(number, choices[number - len(names)], asked.get(number))
    ends = [
        writer.bring(number, start, way.result)
        for number, ((start,), way) in zip(graph.outputs, choices[len(graph.nodes) - len(names) :], strict=True)
    ]
    inputs = tuple((number, at) for number, at in enumerate(types))
    return Lowered(tuple(writer.lines), graph, inputs, tuple(ends), mesh, chosen.nbytes)


class Writer:
    """Writes lines one by one: `specs` has each value's name and dims, `held` the layouts that it is held in."""

    def __init__(self, graph: Graph, mesh, within: Setting):
        self.graph, self.mesh, self.within = graph, mesh, within
        self.lines: list[ListingLine] = []
        self.specs: dict[int, Spec] = {}
        self.held: dict[int, list[DimAxes]] = {}

    def typed(self, number: int, at: DimAxes, dims: Sequence[str] | None = None) -> Spec:
        spec = self.specs[number]
        return Spec(spec.name, tuple(zip(dims or spec.dim_names, at.dims, strict=True)), at.unreduced)

    def bring(self, number: int, start: DimAxes, to: DimAxes) -> ValueLayout:
        """The value in a layout, by collectives from one that it is held in."""
        node = self.graph.nodes[number]
        if to not in self.held[number]:
            now, array = (number, start), PlannedArray(self.specs[number], node.shape)
            for step in exact_steps(array, start, to, self.within):
                made = number, layout(step.after)
                self.lines.append(ListingLine(str(step), (now,), made, partial(run_step, step, mesh=self.mesh), step))
                now = made
                if made[1] not in self.held[number]:
                    self.held[number].append(made[1])
        return number, to

    def compute(self, number: int, chosen: ChosenWay, asked: Spec | None) -> None:
        """A node: its operands are brought into their layouts first. `asked`: the name and dims that it is to have."""
        node, (needed, result, _) = self.graph.nodes[number], chosen.way
        takes = tuple(map(self.bring, node.operands, chosen.starts, needed))
        if node.call is None:  # a type asked for: the same value
            self.specs[number] = self.specs[node.operands[0]]
            self.held[number] = [result]
            text = f"{self.typed(number, result)}: as asked for"
            self.lines.append(ListingLine(text, takes, (number, result), lambda shards: shards[0]))
            return
        op, dims = node.call.op, [self.specs[n].dim_names for n in node.operands]
        name = asked.name if asked else f"T{number - len([n for n in self.graph.nodes if not n.operands]) + 1}"
        if isinstance(op, LabelledOp):
            op, dims, own = renamed(op, dims)
        else:
            own = letters(len(node.shape))
        self.specs[number] = Spec(name, tuple((d, ()) for d in own))
        self.held[number] = [result]
        local = LocalPlan(needed, result, self.typed(number, result).local_shape(node.shape, self.mesh))
        run = partial(node.call.run, op, local=local)
        before = tuple(self.typed(n, at, d) for n, at, d in zip(node.operands, needed, dims, strict=True))
        after = self.typed(number, result)
        if node.call.flops:
            text = str(Step("Einsum", (), before, after))
        else:
            text = f"{after} = {op.name}({', '.join(map(str, before))})"
        self.lines.append(ListingLine(text, takes, (number, result), run))


def renamed(op: LabelledOp, dims: Sequence[Sequence[str]]) -> tuple[LabelledOp, list[tuple[str, ...]], tuple[str, ...]]:
    """The operation with the dims' own names for its labels: (operation, names of each operand, of the result).

    A label takes the name of the first dim that it stands for; two labels of one name are told apart by a number.
    """
    names: dict[str, str] = {}
    for labels, own in zip(op.inputs, dims, strict=True):
        for label, dim in zip(labels, own, strict=True):
            if label is not None and label not in names:
                names[label] = _free(dim, names.values())
    for label in op.output:
        names.setdefault(label, _free(label if label.isalpha() and len(label) == 1 else "One", names.values()))
    written = []
    for labels in op.inputs:
        used = [names[d] for d in labels if d is not None]
        written.append(tuple(names[d] if d is not None else _free("One", used) for d in labels))
    after = tuple(names[d] for d in op.output)
    inputs = tuple(tuple(None if d is None else names[d] for d in labels) for labels in op.inputs)
    return op._replace(inputs=inputs, output=after, whole=tuple(names[d] for d in op.whole)), written, after


def _free(name: str, used) -> str:
    """The name, or with the first number that is not in use."""
    used = set(used)
    return next(n for n in (name, *(f"{name}{i}" for i in range(2, 100))) if n not in used)
