"""torch's functions as operations: the effect of `torch.einsum("bd,df->bf", In, W)` on dims, and its computation.

One table serves the explicit and the auto mode. A function is known by its name; shapes are the whole arrays'.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from scaling.algebra.labels import labelled, refuse_unknown
from scaling.algebra.law import LabelledOp, Reshape, Sizes
from scaling.algebra.layouts import DimAxes, retyped, unsplit_spec
from scaling.algebra.ops import ELEMENTWISE, function_name, kept_sums, op_kind
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

    def probe(shape: Sizes, strides: Sizes | None = None) -> Any:
        strides = torch.empty(shape, device="meta").stride() if strides is None else strides
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
