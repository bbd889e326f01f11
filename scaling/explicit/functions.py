"""torch's functions as operations: the effect of `torch.einsum("bd,df->bf", In, W)` on dims, and its computation.

One table serves the explicit and the auto mode. A function is known by its name; shapes are the whole arrays'. `plan`
puts a program to the planner, `way_to` one call whose result's type is given, and `legal_layouts` finds the layouts
that the error of a refused call names as the fix.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from scaling.algebra.labels import labelled, refuse_unknown
from scaling.algebra.law import Illegal, LabelledOp, Reshape, Sizes
from scaling.algebra.layouts import DimAxes, Setting, retyped, spec_of, unsplit_spec
from scaling.algebra.ops import ELEMENTWISE, function_name, kept_sums, op_kind
from scaling.algebra.planner import ChosenWay, Value, Way, all_layouts, cheapest, legal_ways, ways_of
from scaling.algebra.resharding import PlannedArray, every_axis
from scaling.collectives.multiply import einsum
from scaling.spec import Line, ShardingError

UNKNOWN = ("fuses", "grows", "puts", "scores", "attends", "makes")  # kinds that only the judge knows
SEVERAL = ("parts", "orders")  # kinds with several results
AnyOperation = LabelledOp | Reshape
OnTensors = Callable[[Sequence[Tensor]], Any]  # calls the function on values in place of the arrays


class LocalPlan(NamedTuple):
    """The layouts and the shape of one device's computation.

    Attributes:
        needed: the operands' layouts.
        result: the result's layout.
        shape: the result's shape on this device.
    """

    needed: tuple[DimAxes, ...]
    result: DimAxes
    shape: Sizes


@dataclass(frozen=True)
class Node:
    """A value: an argument, a function called on arrays, or an array in the type of a `constraint`.

    Attributes:
        shape: the whole array's shape.
        dtype: its dtype.
        operands: the arrays that the function is called on; in a program, their numbers.
        op: the operation, or None.
        flops: the FLOPs of the whole product, 0 for other operations.
        constraint: the type that the array is resharded to.
        run: `run(op, shards, local)` computes the value's shard.
    """

    shape: Sizes
    dtype: torch.dtype
    operands: tuple = ()
    op: Any = None
    flops: int = 0
    constraint: str = ""
    run: Any = field(default=None, compare=False)


def read_call(func: Callable, args: tuple, kwargs: dict, is_array: Callable[[Any], bool]) -> Any:
    """Return the call of a torch function, or a method of Tensor, on arrays that have `.shape` and `.dtype`.

    It is a Node; for a function that gives several arrays, as split does, a tuple with a Node for each.

    Raises:
        ShardingError: this mode does not know the function, or torch refuses the shapes.
    """
    everything: Any = (args, kwargs)
    flat, structure = optree.tree_flatten(everything, is_leaf=is_array, none_is_leaf=True)
    at = [i for i, x in enumerate(flat) if is_array(x)]
    operands, written = [flat[i] for i in at], function_name(func)
    name, kind = written.strip("_"), op_kind(written)
    if name in ("max", "min") and len(operands) > 1:  # torch.max(x, y)
        name, kind = f"{name}imum", "nonlinear"
    if written.endswith("_") and not written.endswith("__"):
        raise ShardingError(f"{written}: changes its argument\n  rule: arrays are not changed\n  fix: {name}")
    for x in flat:
        if isinstance(x, Tensor) and not is_array(x) and x.dim():
            raise ShardingError(
                f"{name}: a plain tensor of shape {tuple(x.shape)} among arrays\n"
                f"  rule: arrays carry their type\n  fix: explicit.array(x, type, mesh)"
            )
    if kind in ("values", "writes"):
        raise ShardingError(
            f"{name}: of an array whose numbers no device has all of\n"
            "  rule: arrays decide nothing in Python, and are not changed\n"
            "  fix: torch.where(mask, x, y); x.whole() first, in explicit mode; or give the number as an argument"
        )

    def call(values: Sequence[Tensor]) -> Any:
        filled = list(flat)
        for i, value in zip(at, values, strict=True):
            filled[i] = value
        given, named = optree.tree_unflatten(structure, filled)
        return func(*given, **named)

    try:
        if kind in ELEMENTWISE:  # some have slow meta kernels
            whole = call([torch.ones((1,) * len(x.shape), dtype=x.dtype) for x in operands])
        else:
            whole = call([torch.empty(tuple(x.shape), dtype=x.dtype, device="meta") for x in operands])
        if kind not in SEVERAL or isinstance(whole, Tensor):
            return _typed(name, args, kwargs, call, operands, whole)
        parts = [partial(_part, call, number) for number in range(len(whole))]
        typed = [_typed(name, args, kwargs, part, operands, x) for part, x in zip(parts, whole, strict=True)]
        return type(whole)(typed)
    except ShardingError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        given = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in operands)
        rule = "what torch would not take of one device has no type either"
        raise ShardingError(
            f"{name}({given})\n  {str(error).splitlines()[0]}\n  rule: {rule}\n  fix: mend the shapes or the arguments"
        ) from None


def each_call(of: Callable[[Node], Any], read: Any) -> Any:
    """Apply `of` to each call that `read_call` returned, in torch's container if there are several."""
    return of(read) if isinstance(read, Node) else type(read)([of(one) for one in read])


def _part(call: OnTensors, number: int, values: Sequence[Tensor]) -> Tensor:
    return call(values)[number]


def _typed(name: str, args, kwargs, call: OnTensors, operands: list, whole: Any) -> Node:
    """Return the call of a function that `call` runs on the operands, and whose result on meta tensors is `whole`."""
    kind, shapes = op_kind(name), [tuple(x.shape) for x in operands]
    if not isinstance(whole, Tensor) or kind in UNKNOWN or name == "embedding":
        refuse_unknown(name)
    if kind == "reshapes" and whole.dtype != operands[0].dtype:
        refuse_unknown(f"{name}({whole.dtype})")
    shape = tuple(torch.broadcast_shapes(*shapes) if kind in ELEMENTWISE else whole.shape)
    if kind == "reshapes":
        return Node(shape, whole.dtype, tuple(operands), Reshape(shape, name), run=_reshaped)

    def probe(shape: Sizes, strides: Sizes) -> Any:
        return call([torch.empty_strided(shape, strides, dtype=operands[0].dtype, device="meta")])

    op = labelled(name, args, kwargs, shapes, shape, probe)
    partial_sums = [x.dtype for x in operands if _may_be_partial(x)]
    op = op._replace(sums=kept_sums(name, args, kwargs, len(operands), partial_sums, whole.dtype))
    run: Callable[..., Tensor] = lambda op, shards, local: call(shards)  # noqa: E731
    if kind == "contracts":
        run = _product
    elif kind == "broadcasts":
        run = _expanded
    elif name == "mean":
        dims = [i for i, d in enumerate(op.inputs[0]) if d not in op.output]
        run = _mean(shapes[0], dims, len(op.output) == len(shapes[0]), kwargs.get("dtype"))
    flops = _flops(op, shapes) if run is _product else 0
    return Node(shape, whole.dtype, tuple(operands), op, flops, run=run)


def _may_be_partial(x: Any) -> bool:
    """Return whether an operand is, or in auto mode could be, a partial sum."""
    at = getattr(x, "layout", None)
    return bool(at.unreduced) if isinstance(at, DimAxes) else True


def _flops(op: LabelledOp, shapes: Sequence[Sizes]) -> int:
    """Return the FLOPs: 2 for each multiply-add, 1 if nothing is summed, 0 with one operand."""
    sizes = {d: n for labels, s in zip(op.inputs, shapes, strict=True) for d, n in zip(labels, s, strict=True)}
    return math.prod(sizes.values()) * (2 if len(sizes) > len(op.output) else 1) * (len(shapes) == 2)


def _reshaped(op: AnyOperation, shards: Sequence[Tensor], local: LocalPlan) -> Tensor:
    return shards[0].reshape(local.shape)


def _expanded(op: AnyOperation, shards: Sequence[Tensor], local: LocalPlan) -> Tensor:
    return shards[0].expand(local.shape)


def _product(op: LabelledOp, shards: Sequence[Tensor], local: LocalPlan) -> Tensor:
    """Return the product of shards by an einsum line, so that a trace sees it. The line was inferred and is legal."""
    labels = [map(str, d) for d in (*op.inputs, op.output)]
    specs = [retyped(unsplit_spec("", d), at) for d, at in zip(labels, (*local.needed, local.result), strict=True)]
    return einsum(str(Line(tuple(specs[:-1]), specs[-1])), *shards)


def _mean(shape: Sizes, dims: Sequence[int], keep: bool, dtype: torch.dtype | None) -> Callable:
    """Return the mean as a function: a sum divided by the whole array's number of elements."""
    count = math.prod(shape[i] for i in dims)

    def mean(op, shards, local):
        x = shards[0] if dtype is None else shards[0].to(dtype)
        return x.sum(dims, keepdim=keep) / count if dims else x

    return mean


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
