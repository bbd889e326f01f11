"""Auto mode (Part 10): a program on whole arrays with a few types given; the planner inserts the collectives.

    step = auto.jit(fn, mesh, ("In[B_X, D_Y]", "W[D_Y, F]"), "Out[B_X, F]")
    print(step.lower(In, W).listing)
    Out = step(In, W)

The function is run once on meta tensors: each result of a torch function, operator or method on the arguments becomes a
node of a graph, and `explicit.reshard`, which asks for a type as JAX's `with_sharding_constraint` does, a constraint.
`explicit.functions` finds the layouts that send the least. A planned program consists of its lines in the notation,
with the bytes they send, and can run them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scaling import tree
from scaling.algebra.law import LabelledOp
from scaling.algebra.layouts import DimAxes, layout, letters, retyped, unsplit_spec
from scaling.algebra.ops import function_name
from scaling.algebra.resharding import PlannedArray, exact_steps
from scaling.algebra.steps import COLLECTIVES, Step
from scaling.collectives.plans import run_step
from scaling.explicit.arrays import Array, array, array_spec, reshard
from scaling.explicit.functions import Chosen, Graph, LocalPlan, Node, each_call, plan, read_call
from scaling.spec import ShardingError, Spec

SHAPE_ONLY = (  # attributes and methods that compute nothing, and are not recorded
    "shape dtype device ndim layout requires_grad is_meta size dim numel len stride is_floating_point is_complex "
    "is_contiguous names grad_fn is_leaf element_size itemsize nbytes format repr"
)
ValueLayout = tuple[int, DimAxes]  # a value in one of its layouts


class Recording(TorchFunctionMode):
    """Adds a node for every function that makes a tensor from tensors."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph, self.of, self.alive = graph, {}, []

    def add(self, x: Tensor, node: Node) -> Tensor:
        """Add a node for x, and return x."""
        self.of[id(x)] = len(self.graph.nodes)
        self.alive.append(x)
        self.graph.nodes.append(node)
        return x

    def number(self, x: Tensor) -> int:
        """Return the number of x's node."""
        if id(x) not in self.of:
            raise ShardingError(
                f"a tensor of shape {tuple(x.shape)} that the program makes or finds by itself\n"
                f"  rule: a program in auto mode knows arrays by its arguments\n  fix: give it as an argument"
            )
        return self.of[id(x)]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is reshard:
            x, type = args
            return self.add(x.clone(), Node(tuple(x.shape), x.dtype, (self.number(x),), constraint=str(type)))
        traced = any(map(_is_traced, tree.leaves((args, kwargs))))
        if not traced or function_name(func).strip("_") in SHAPE_ONLY.split():
            return func(*args, **kwargs)

        def record(call: Node) -> Tensor:
            result = torch.empty(call.shape, dtype=call.dtype, device="meta")
            return self.add(result, replace(call, operands=tuple(map(self.number, call.operands))))

        return each_call(record, read_call(func, args, kwargs, _is_traced))


def _is_traced(x) -> bool:
    return isinstance(x, Tensor) and (x.is_meta or x.dim() > 0)


def graph_of(fn: Callable, args: tuple) -> Graph:
    """Return the graph of fn on trees of arguments of these shapes and dtypes."""
    graph = Graph()
    recording = Recording(graph)

    def meta(x):
        made = torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")
        return recording.add(made, Node(tuple(x.shape), x.dtype))

    metas = tree.map(meta, args)
    with recording:
        result = fn(*metas)
    leaves, graph.structure = tree.leaves(result), tree.structure(result)
    if not leaves or not all(isinstance(x, Tensor) for x in leaves):
        what = f"the program returns {', '.join(type(x).__name__ for x in leaves) or 'nothing'}"
        raise ShardingError(f"{what}\n  rule: one in auto mode returns tensors\n  fix: return them, or a tree of them")
    graph.outputs = tuple(recording.number(x) for x in leaves)
    return graph


class ListingLine(NamedTuple):
    """One line: a collective (`step`), or a computation, by its text. `run(shards)` gives the shard of `made`."""

    text: str
    takes: tuple[ValueLayout, ...]
    made: ValueLayout
    run: Callable[[Sequence[Tensor]], Tensor]
    step: Step | None = None


@dataclass(frozen=True)
class Lowered:
    """A program with its collectives inserted.

    Attributes:
        lines: its lines.
        graph: its operations.
        inputs: the arguments, each with its layout.
        outputs: the results, each with its layout.
        mesh: the mesh.
        planned: the bytes that each device sends according to the plan.
    """

    lines: tuple[ListingLine, ...]
    graph: Graph
    inputs: tuple[ValueLayout, ...]
    outputs: tuple[ValueLayout, ...]
    mesh: Any
    planned: float

    @property
    def listing(self) -> str:
        """The program's text, one numbered line for each line."""
        return "\n".join(f"{number}. {line.text}" for number, line in enumerate(self.lines, 1))

    @property
    def steps(self) -> tuple[Step, ...]:
        """The collectives, in order."""
        return tuple(line.step for line in self.lines if line.step is not None and line.step.op in COLLECTIVES)

    @property
    def wire_bytes(self) -> float:
        """The bytes that each device sends."""
        steps = [(line.step, self.graph.nodes[line.made[0]]) for line in self.lines if line.step is not None]
        return sum(step.wire_bytes(node.shape, self.mesh, node.dtype) for step, node in steps)

    def run(self, arrays: Sequence[Array]) -> Any:
        """Run the program on the arguments' arrays, which have the types of `inputs`; return the tree of results."""
        held = dict(zip(self.inputs, (x.local for x in arrays), strict=True))
        last = {key: number for number, line in enumerate(self.lines) for key in line.takes}
        for number, line in enumerate(self.lines):
            held[line.made] = line.run([held[key] for key in line.takes])
            for key in line.takes:
                if last[key] == number and key not in self.outputs:
                    held.pop(key, None)
        results = [Array(held[n, at], at, self.graph.nodes[n].shape, self.mesh) for n, at in self.outputs]
        return optree.tree_unflatten(self.graph.structure, results)


def lower(graph: Graph, arguments: Sequence[Spec], outputs: Sequence[Spec | None], chosen: Chosen, mesh) -> Lowered:
    """Write the lines of a plan.

    Args:
        graph: the program.
        arguments: the arguments' types.
        outputs: the results' types, or None.
        chosen: the result of `plan`.
        mesh: the mesh.
    """
    specs: list[Spec] = list(arguments)  # each value's name and dims
    inputs = tuple(enumerate(map(layout, arguments)))
    held, lines, choices = dict.fromkeys(inputs), [], iter(chosen.choices)
    asked = {n: spec for n, spec in zip(graph.outputs, outputs, strict=True) if spec is not None and spec.name}

    def bring(number: int, start: DimAxes, to: DimAxes) -> ValueLayout:
        """Return the value in a layout, after the collectives that bring it there from layout `start`."""
        now, array = (number, start), PlannedArray(specs[number], graph.nodes[number].shape)
        for step in exact_steps(array, start, to, chosen.within) if (number, to) not in held else ():
            made = number, layout(step.after)
            lines.append(ListingLine(str(step), (now,), made, partial(run_step, step, mesh=mesh), step))
            held[made] = None
            now = made
        return number, to

    for number, node in enumerate(graph.nodes[len(inputs) :], len(inputs)):
        starts, (needed, result, _) = next(choices)
        takes, made = tuple(map(bring, node.operands, starts, needed)), (number, result)
        held[made] = None
        if node.op is None or node.run is None:  # only the type changes, not the value
            specs.append(specs[node.operands[0]])
            text = f"{retyped(specs[number], result)}: as asked for"
            lines.append(ListingLine(text, takes, made, lambda shards: shards[0]))
            continue
        op, dims = node.op, [specs[n].dim_names for n in node.operands]
        op, dims, own = renamed(op, dims) if isinstance(op, LabelledOp) else (op, dims, letters(len(node.shape)))
        name = asked[number].name if number in asked else f"T{number - len(inputs) + 1}"
        specs.append(unsplit_spec(name, own))
        before = tuple(
            retyped(unsplit_spec(specs[n].name, d), at) for n, d, at in zip(node.operands, dims, needed, strict=True)
        )
        after = retyped(specs[number], result)
        local = LocalPlan(needed, result, after.local_shape(node.shape, mesh))
        text = f"{after} = {op.name}({', '.join(map(str, before))})"
        text = str(Step("Einsum", (), before, after)) if node.flops else text
        lines.append(ListingLine(text, takes, made, partial(node.run, op, local=local)))
    ends = [bring(number, starts[0], way.result) for number, (starts, way) in zip(graph.outputs, choices, strict=True)]
    return Lowered(tuple(lines), graph, inputs, tuple(ends), mesh, chosen.nbytes)


def renamed(op: LabelledOp, dims: Sequence[Sequence[str]]) -> tuple[LabelledOp, list[tuple[str, ...]], tuple[str, ...]]:
    """Rename an operation's labels to the dims' own names; return (operation, each operand's names, the result's).

    A label takes the name of the first dim that it labels; a number distinguishes two labels of one name.
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
    """Return the name, with the first free number if it is in use."""
    used = set(used)
    return next(n for n in (name, *(f"{name}{i}" for i in range(2, 100))) if n not in used)


class JittedProgram:
    """A function with its mesh and types.

    Called with tensors, which are whole, it returns whole ones; called with `Array`s, it reshards them to the given
    types and returns `Array`s of the wanted types. It is differentiated as the function is (`explicit.grad`).
    """

    def __init__(self, fn: Callable, mesh, in_types, out_types):
        self.fn, self.mesh, self.in_types, self.out_types = fn, mesh, in_types, out_types
        self._lowered: dict = {}

    def lower(self, *args) -> Lowered:
        """Plan the program for arguments of these shapes: `.listing`, `.steps`, `.wire_bytes`. Meta tensors suffice."""
        flat, structure = tree.leaves(args), tree.structure(args)
        given: Any = args
        for x in optree.tree_leaves(given, none_is_leaf=True):
            if not isinstance(x, (Tensor, Array)):
                raise ShardingError(
                    f"an argument is a {type(x).__name__}\n  rule: a program in auto mode is of tensors\n"
                    "  fix: torch.as_tensor(x); or a number in the function itself"
                )
        key = tuple((tuple(x.shape), x.dtype) for x in flat), structure
        if key not in self._lowered:
            self._lowered[key] = self._lower(args, flat)
        return self._lowered[key]

    def _lower(self, args, flat) -> Lowered:
        if not hasattr(self.mesh, "sizes"):
            raise ShardingError(f"jit on {self.mesh!r:.40}, which is no mesh\n  fix: give a Mesh or an AbstractMesh")
        one_each = isinstance(self.in_types, (tuple, list)) and len(self.in_types) == len(args)
        types = tree.for_each(tuple(self.in_types) if one_each else (self.in_types,), args, "in_types", True)
        arguments, first = [], 8
        for number, (t, x) in enumerate(zip(types, flat, strict=True), 1):
            dims = letters(len(x.shape), first)
            arguments.append(self._spec(t, x, dims, f"x{number}") or unsplit_spec(f"x{number}", dims))
            first += len(dims)
        graph = graph_of(self.fn, args)
        asked = tree.for_each(self.out_types, optree.tree_unflatten(graph.structure, graph.outputs), "out_types", True)
        outputs = [self._spec(t, graph.nodes[n]) for t, n in zip(asked, graph.outputs, strict=True)]
        asked_of = [(i, self._spec(x.constraint, x)) for i, x in enumerate(graph.nodes) if x.constraint]
        constraints = {i: layout(spec) for i, spec in asked_of if spec}
        ends = [spec and layout(spec) for spec in outputs]
        chosen = plan(graph, list(map(layout, arguments)), ends, constraints, self.mesh.sizes)
        return lower(graph, arguments, outputs, chosen, self.mesh)

    def _spec(self, type: "str | Spec | None", x, dims: Sequence[str] = (), name: str = "") -> Spec | None:
        spec = None if type is None else array_spec(type, x.shape, self.mesh, x.dtype, dims)
        return spec and spec.with_name(spec.name or name)

    def __call__(self, *args):
        """Run the program; Arrays give Arrays, and tensors, which are whole, give whole tensors."""
        lowered, flat = self.lower(*args), tree.leaves(args)
        if any(isinstance(x, Array) and x.mesh is not self.mesh for x in flat):
            raise ShardingError(f"an array is on another mesh than the program\n  fix: make it on {self.mesh}")
        arrays = [
            reshard(x, at) if isinstance(x, Array) else array(x, at, self.mesh)
            for x, (_, at) in zip(flat, lowered.inputs, strict=True)
        ]
        result = lowered.run(arrays)
        return result if any(isinstance(x, Array) for x in flat) else tree.map(Array.whole, result)


def jit(fn: Callable, mesh, in_types, out_types=None) -> JittedProgram:
    """Turn fn on whole arrays into a program with collectives, planned to send the least.

    Args:
        fn: a pure function; it is traced once for each combination of argument shapes and dtypes.
        mesh: the mesh.
        in_types: a type for each argument, `In[B_X, D_Y]` or `[8_X, 2_Y]`, or a tree of them. None means that
            every device has the whole.
        out_types: a type for the result, or a tree; None leaves it to the planner.

    Raises:
        ShardingError: types do not fit, or a function is not known.
    """
    return JittedProgram(fn, mesh, in_types, out_types)
