"""Compare a program's lines with JAX 0.10's explicit mode, which refuses some of them and sends data for others.

JAX's rules are inferred from its answers to 3,045 lines (`tests/explicit/test_ops.py`). For functions and partial sums
that were not part of these lines, its answer is reported as unknown.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import optree

from scaling.algebra.law import Illegal, LabelledOp, Sizes
from scaling.algebra.layouts import Axes, DimAxes
from scaling.algebra.ops import ELEMENTWISE, op_kind
from scaling.explicit.arrays import Array, read_array_type, type_text
from scaling.explicit.planning import legal_layouts
from scaling.explicit.tracing import graph_of
from scaling.spec import ShardingError

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
            asked = jax_layout(node.op, before, shapes, mesh.sizes)
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


def jax_layout(op, at: Sequence[DimAxes], shapes: Sequence[Sizes], sizes: Mapping[str, int]) -> JaxAnswer:
    """Return the axes of each dim of the result in JAX's explicit mode, or the reason why JAX gives none."""
    kind = op_kind(op.name.split()[0])
    summed = {x.unreduced for x in at} - {()}
    if summed and not (kind == "adds" and len({x.unreduced for x in at}) == 1):
        return "refused, or not known: an operand is unreduced"
    if not isinstance(op, LabelledOp):
        return _reshaped(at[0].dims, shapes[0], op.shape, sizes)
    if kind not in ASKED:
        return "not known: not compared"
    if kind == "joins" and len(set(at)) > 1:
        return "refused: what is joined has one sharding"
    split: dict[str, Axes] = {}
    for labels, x in zip(op.inputs, at, strict=True):
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


def _reshaped(dims: Sequence[Axes], shape: Sizes, new: Sizes, sizes: Mapping[str, int]) -> JaxAnswer:
    """Return JAX's answer to a reshape: it splits one dim, or merges neighbours, at a time."""
    refused, after = "refused: asks for out_sharding", [()] * len(new)
    if not any(dims):
        return tuple(after)
    if [n for n in shape if n > 1] == [n for n in new if n > 1]:
        own = iter(axes for n, axes in zip(shape, dims, strict=True) if n > 1)
        return tuple(next(own) if n > 1 else () for n in new)
    several = 0
    for ours, theirs in _groups(shape, new):
        several += len(ours) > 1 or len(theirs) > 1
        if several > 1 or (len(ours) > 1 and len(theirs) > 1):
            return refused
        axes = [dims[i] for i in ours]
        rest = list(itertools.chain(*axes))
        if any(late and not early for early, late in itertools.pairwise(axes)):
            return refused
        for j in theirs:
            left, own = new[j], []
            while rest and (len(ours) > 1 or left % sizes[rest[0]] == 0):
                left //= sizes[rest[0]]
                own.append(rest.pop(0))
            after[j] = tuple(own)
            if left > 1:
                break
        if rest:
            return refused
    return tuple(after)


def _groups(shape: Sizes, new: Sizes) -> Iterator[tuple[range, range]]:
    """Yield the smallest groups of dims of both shapes, in order, that have equally many elements."""
    ends = [{math.prod(dims[:n]): n for n in range(len(dims), 0, -1)} for dims in (shape, new)]
    i = j = 0
    for elements in sorted(ends[0].keys() & ends[1].keys()):
        yield range(i, i := ends[0][elements]), range(j, j := ends[1][elements])
