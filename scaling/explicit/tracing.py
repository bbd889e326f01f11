"""Trace a program on whole arrays into a list of operations, by running it on meta tensors.

Nothing is computed and no sharding is known yet. Each result of a torch function, operator or method on the arguments
becomes a node; `explicit.reshard` becomes a constraint.

`beside_jax` compares such a program with JAX 0.10's explicit mode, which refuses some lines and sends data for others.
JAX's rules are inferred from its answers to 3,045 lines (`tests/explicit/test_ops.py`). For reshapes, and for functions
and partial sums that were not part of these lines, its answer is reported as unknown.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scaling import tree
from scaling.algebra.law import Illegal, LabelledOp
from scaling.algebra.layouts import Axes, DimAxes
from scaling.algebra.ops import ELEMENTWISE, function_name, op_kind
from scaling.explicit.arrays import Array, read_array_type, reshard, type_text
from scaling.explicit.functions import Graph, Node, each_call, legal_layouts, read_call
from scaling.spec import ShardingError


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
        if function_name(func).strip("_") in SHAPE_ONLY.split() or not any(
            _is_array(x) for x in tree.leaves((args, kwargs))
        ):
            return func(*args, **kwargs)

        def record(call: Node) -> Tensor:
            result = torch.empty(call.shape, dtype=call.dtype, device="meta")
            return self.add(result, replace(call, operands=tuple(map(self.number, call.operands))))

        return each_call(record, read_call(func, args, kwargs, _is_array))


SHAPE_ONLY = (
    "shape dtype device ndim layout requires_grad is_meta size dim numel len stride is_floating_point is_complex "
    "is_contiguous names grad_fn is_leaf element_size itemsize nbytes format repr"
)


def _is_array(x) -> bool:
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


JaxAnswer = tuple[Axes, ...] | str  # the axes of each dim, or why there is no type
ASKED = (*ELEMENTWISE, "contracts", "sums", "reduces", "permutes", "joins")


def beside_jax(fn: Callable, *arrays) -> str:
    """Return the lines of `fn(*arrays)` with this library's types, and the answer of JAX's explicit mode to each line.

    Types are also given in PyTorch's `spmd_types` names over each axis of the mesh. Nothing is computed, so Arrays on
    an AbstractMesh suffice. A line that is refused here is printed with the reshards that its fix names.
    """
    given: list = optree.tree_leaves(arrays)  # type: ignore[arg-type]
    if not given or not all(isinstance(x, Array) for x in given):
        raise ShardingError("beside_jax: arguments are Arrays\n  fix: explicit.array(x, type, mesh)")
    mesh, graph = given[0].mesh, graph_of(fn, arrays)
    at, lines = [x.layout for x in given], []
    for number, node in enumerate(graph.nodes[len(given) :], 1):
        before, operands = [at[n] for n in node.operands], [graph.nodes[n] for n in node.operands]
        name, fixed, theirs = "reshard", "", "the same"
        if node.op is None:
            after = read_array_type(node.constraint, node.shape, mesh, node.dtype)
        else:
            name, shapes = node.op.name, [x.shape for x in operands]
            asked = jax_layout(node.op, before)
            try:
                after = node.op.infer(before, shapes, mesh.sizes)[1]
            except Illegal as error:
                before, after, _ = legal_layouts(node.op, operands, before, mesh.sizes)
                fixed = f"     here: refused, {error.what}; so with operands resharded\n"
            if isinstance(asked, tuple):
                text = type_text(DimAxes(asked), node.shape, node.dtype).replace("_", "@")
                theirs = "the same" if DimAxes(asked) == after and not fixed else f"{text}; what that takes is sent"
            else:
                theirs = asked
        types = [type_text(to, x.shape, x.dtype) for to, x in zip(before, operands, strict=True)]
        lines.append(f"{number}. {type_text(after, node.shape, node.dtype)} = {name}({', '.join(types)})\n{fixed}")
        lines.append(f"     here: {spmd_names(after, mesh.sizes)}\n     JAX:  {theirs}\n")
        at.append(after)
    return "".join(lines)


def spmd_names(at: DimAxes, sizes: Mapping[str, int]) -> str:
    """Return a layout in the names of PyTorch's `spmd_types`, axis by axis: `X: S(0), Y: P, Z: R`."""
    of = {axis: f"S({dim})" for dim, axes in enumerate(at.dims) for axis in axes} | dict.fromkeys(at.unreduced, "P")
    return ", ".join(f"{axis}: {of.get(axis, 'R')}" for axis in sizes)


def jax_layout(op, at: Sequence[DimAxes]) -> JaxAnswer:
    """Return the axes of each dim of the result in JAX's explicit mode, or the reason why JAX gives none."""
    kind = op_kind(op.name.split()[0])
    summed = {x.unreduced for x in at} - {()}
    if summed and not (kind == "adds" and len({x.unreduced for x in at}) == 1):
        return "refused, or not known: an operand is unreduced"
    if kind not in ASKED:
        return "not known: not compared"
    if kind == "joins" and len(set(at)) > 1:
        return "refused: what is joined has one sharding"
    split: dict[str, Axes] = {}
    for labels, x in _leading_first(op, at):
        for label, axes in zip(labels, x.dims, strict=True):
            if label is None:
                continue
            first = split.get(label, ())
            if first and axes and (label not in op.output or first != axes):
                return "refused: ambiguous, asks for out_sharding" if first == axes else "refused: split differently"
            split[label] = first or (() if kind == "contracts" and label in split and label in op.output else axes)
    dims = tuple(split.get(label, ()) for label in op.output)
    used = [axis for axes in dims for axis in axes]
    return dims if len(used) == len({*used}) else "refused: two dims over one axis"


def _leading_first(op: LabelledOp, at: Sequence[DimAxes]) -> list[tuple[tuple[str | None, ...], DimAxes]]:
    """Return (labels, layout) of each operand, first the one whose batch dims JAX gives the result of a product.

    It is the left operand if the result has first the batch dims, then the left operand's other dims, and then the
    right operand's. In any other order it is the right operand.
    """
    pairs = list(zip(op.inputs, at, strict=True))
    if not op.name.startswith("einsum") or len(pairs) < 2:
        return pairs
    left, right = ([d for d in op.output if d in labels] for labels in op.inputs)
    batch = [d for d in left if d in right]
    natural = [*batch, *(d for labels in op.inputs for d in labels if d in op.output and d not in batch)]
    return pairs if [*op.output] == natural else pairs[::-1]
