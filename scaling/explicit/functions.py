"""torch's functions as operations: what `torch.einsum("bd,df->bf", In, W)` does to dims, and how a device computes it.

One table serves the explicit and the auto mode. A function is known by its name; shapes are the whole arrays'.
"""

import math
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from scaling.algebra.layouts import DimAxes
from scaling.collectives.multiply import einsum
from scaling.explicit.known import (
    ALONG,
    EXTREME,
    LINEAR,
    PERMUTING,
    POINTWISE,
    PRODUCTS,
    QUOTIENTS,
    RESHAPING,
    SUMS,
    VALUES,
    function_name,
    refuse_unknown,
    refuse_values,
)
from scaling.explicit.ops import LabelledOp, Reshape, Sizes
from scaling.spec import ShardingError, Spec

LETTERS = string.ascii_uppercase


class LocalPlan(NamedTuple):
    """What a device computes with: the operands' layouts, the result's layout and its shape on this device."""

    needed: tuple[DimAxes, ...]
    result: DimAxes
    shape: Sizes


class TypedCall(NamedTuple):
    """A function called on arrays: the operation, its operands, the whole result's shape and dtype, and
    `run(op, shards, local)`, which computes the result's shard. `flops`: of the whole product, 0 of what is none."""

    op: "LabelledOp | Reshape"
    operands: list
    shape: Sizes
    dtype: torch.dtype
    run: Callable[..., Tensor]
    flops: int = 0


def read_call(func: Callable, args: tuple, kwargs: dict, is_array: Callable[[Any], bool]) -> TypedCall:
    """The call of a torch function (or a method of Tensor) on arrays that have `.shape` and `.dtype`.

    Raises ShardingError for a function that this mode does not know, and torch's own error where the shapes do not fit.
    """
    everything: Any = (args, kwargs)
    flat, structure = optree.tree_flatten(everything, is_leaf=is_array, none_is_leaf=True)
    at = [i for i, x in enumerate(flat) if is_array(x)]
    operands, name = [flat[i] for i in at], function_name(func)
    if (written := getattr(func, "__name__", "")).endswith("_") and not written.endswith("__"):
        raise ShardingError(f"{written}: changes its argument\n  rule: arrays are not changed\n  fix: {name}")
    for x in flat:
        if isinstance(x, Tensor) and not is_array(x) and x.dim():
            raise ShardingError(
                f"{name}: a plain tensor of shape {tuple(x.shape)} among arrays\n"
                f"  rule: arrays carry their type\n  fix: explicit.array(x, type, mesh)"
            )

    if name in VALUES and written not in ("float", "int", "bool"):  # x.float() is a conversion
        refuse_values(name)

    def call(values: Sequence[Tensor]) -> Any:
        filled = list(flat)
        for i, value in zip(at, values, strict=True):
            filled[i] = value
        given, named = optree.tree_unflatten(structure, filled)
        return func(*given, **named)

    shapes = [tuple(x.shape) for x in operands]
    try:
        made = _typed(name, args, kwargs, call, operands, shapes)
    except ShardingError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        given = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in operands)
        rule = "what torch would not take of one device has no type either"
        raise ShardingError(
            f"{name}({given})\n  {str(error).splitlines()[0]}\n  rule: {rule}\n  fix: mend the shapes or the arguments"
        ) from None
    return made


def _typed(name: str, args, kwargs, call: Callable, operands: list, shapes: list[Sizes]) -> TypedCall:
    """As `read`, of a function that is called by `call`, on the operands alone."""
    if pointwise := name in POINTWISE | LINEAR | SUMS | PRODUCTS | QUOTIENTS:  # some have slow meta kernels
        whole = call([torch.ones((1,) * len(x.shape), dtype=x.dtype) for x in operands])
    else:
        whole = call([torch.empty(x.shape, dtype=x.dtype, device="meta") for x in operands])
    if not isinstance(whole, Tensor):
        refuse_unknown(name)
    if name in RESHAPING and whole.dtype != operands[0].dtype:
        refuse_unknown(f"{name}({whole.dtype})")
    shape = tuple(torch.broadcast_shapes(*shapes) if pointwise else whole.shape)
    op, run = _read(name, args, kwargs, shapes, shape)
    if isinstance(op, LabelledOp) and op.linear and not _keeps_sums(whole.dtype, operands, kwargs):
        op = op._replace(linear="")
    flops = _flops(op, shapes) if isinstance(op, LabelledOp) and run is _product else 0
    return TypedCall(op, operands, shape, whole.dtype, run or (lambda op, shards, local: call(shards)), flops)


def _keeps_sums(dtype: torch.dtype, operands: list, kwargs: dict) -> bool:
    """Whether a function that is linear in numbers is so in these dtypes: not where fractions are cut off."""
    rounds = not (dtype.is_floating_point or dtype.is_complex) and any(x.dtype.is_floating_point for x in operands)
    return not rounds and dtype is not torch.bool and not kwargs.get("rounding_mode")


def _flops(op: LabelledOp, shapes: Sequence[Sizes]) -> int:
    """2 for each multiply-add, 1 where nothing is summed, 0 with one operand."""
    sizes = {d: n for labels, s in zip(op.inputs, shapes, strict=True) for d, n in zip(labels, s, strict=True)}
    return math.prod(sizes.values()) * (2 if len(sizes) > len(op.output) else 1) * (len(shapes) == 2)


def _read(name: str, args, kwargs, shapes: list[Sizes], shape: Sizes) -> tuple["LabelledOp | Reshape", Callable | None]:
    """The operation, and how shards are computed with where that is not by the function itself."""
    if name in POINTWISE | LINEAR | SUMS | PRODUCTS | QUOTIENTS:
        return _pointwise(name, args, shapes, shape), None
    labels = letters(len(shapes[0]) if shapes else 0)
    if name == "einsum":
        return _einsum(args[0]), _product
    if name in ("matmul", "mm", "bmm"):
        return _matmul(*shapes), _product
    if name == "rmatmul":
        return _matmul(*shapes[::-1]), _product
    if name in ("sum", "mean"):
        return _sum(name, args, kwargs, labels, shapes[0], shape)
    if name in EXTREME:
        dims = dims_of(_argument(args, kwargs, 1, "dim", None), len(labels), every=True)
        return LabelledOp(name, (labels,), _kept(labels, dims, shape), "", tuple(labels[i] for i in dims)), None
    if name in ALONG:
        given = _argument(args, kwargs, 1, "dims" if name == "flip" else "dim", -1)
        dims = dims_of((-2, -1) if name in ("tril", "triu") else given, len(labels))
        linear = "" if "softmax" in name else "each"
        return LabelledOp(name, (labels,), labels, linear, tuple(labels[i] for i in dims)), None
    if name in PERMUTING:
        return LabelledOp(name, (labels,), _permuted(name, args, kwargs, labels), "each"), None
    if name in RESHAPING:
        return Reshape(shape, name), lambda op, shards, local: shards[0].reshape(local.shape)
    if name == "getitem":
        return _index(args[1], labels, shapes[0]), None
    if name in ("cat", "concatenate"):
        along = labels[int(_argument(args, kwargs, 1, "dim", 0))]
        return LabelledOp(name, (labels,) * len(shapes), labels, "all", (along,)), None
    refuse_unknown(name)


def letters(n: int, start: int = 8) -> tuple[str, ...]:
    """Names of n dims: I, J, K, ..."""
    return tuple(LETTERS[(start + i) % 26] for i in range(n))


def dims_of(dim, n: int, every: bool = False) -> tuple[int, ...]:
    """Positions from a dim, several, or None for all of n; of a reduction (`every`) no dims mean all, too."""
    given = (dim,) if isinstance(dim, int) else range(n) if dim is None or (every and not len(dim)) else tuple(dim)
    return tuple(i % n for i in given) if n else ()


def _argument(args, kwargs, position: int, name: str, default) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, kwargs.get("axis", default))


def _pointwise(name: str, args, shapes: list[Sizes], shape: Sizes) -> LabelledOp:
    out = letters(len(shape))
    inputs = []
    for s in shapes:
        own = out[len(out) - len(s) :]
        inputs.append(
            tuple(None if n == 1 != m else d for n, m, d in zip(s, shape[len(out) - len(s) :], own, strict=True))
        )
    linear = "each" if name in LINEAR | PRODUCTS else "first" if name in QUOTIENTS else ""
    if name in SUMS and (len(shapes) == 2 or any(type(x) in (int, float) and x == 0 for x in args)):
        linear = "all"
    return LabelledOp(name, tuple(inputs), out, linear)


def _einsum(equation: str) -> LabelledOp:
    """An equation as torch.einsum and jnp.einsum read it, with letters alone and one or two operands."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or len(terms) > 2 or any(len(set(t)) < len(t) for t in (*terms, right)):
        raise ShardingError(
            f"einsum {equation}: not an equation of one or two operands with an arrow and no letter twice in a term\n"
            f"  fix: write products of more operands one by one"
        )
    return LabelledOp(f"einsum {equation}", tuple(tuple(t.upper()) for t in terms), tuple(right.upper()), "each")


def _matmul(a: Sizes, b: Sizes) -> LabelledOp:
    """`a @ b`: vectors, matrices, and batches of matrices whose batch dims are equal or only one operand's."""
    batch = max(len(a), len(b)) - 2
    names = LETTERS[: max(0, batch)]
    if len(a) > 2 < len(b) and (len(a) != len(b) or a[:-2] != b[:-2]):
        raise ShardingError(f"matmul: {a} by {b}\n  rule: batch dims are not broadcast here\n  fix: use einsum")
    left = ((names if len(a) > 2 else "") + "YJ")[-len(a) :] if len(a) > 1 else "J"
    right = (names if len(b) > 2 else "") + "JZ" if len(b) > 1 else "J"
    kept = (names if len(a) > 2 or len(b) > 2 else "") + ("Y" if len(a) > 1 else "") + ("Z" if len(b) > 1 else "")
    return LabelledOp("matmul", (tuple(left), tuple(right)), tuple(kept), "each")


def _product(op: LabelledOp, shards: Sequence[Tensor], local: LocalPlan) -> Tensor:
    """The typed product of shards, which a trace sees. It was inferred, so the line is legal."""
    specs = [
        Spec("", tuple(zip(map(str, d), at.dims, strict=True)), at.unreduced)
        for d, at in zip(op.inputs, local.needed, strict=True)
    ]
    result = Spec("", tuple(zip(op.output, local.result.dims, strict=True)), local.result.unreduced)
    return einsum(" * ".join(map(str, specs)) + f" -> {result}", *shards)


def _sum(name: str, args, kwargs, labels, shape: Sizes, after: Sizes) -> tuple[LabelledOp, Callable | None]:
    given = _argument(args, kwargs, 1, "dim", None)
    if len(args) > 2 and all(isinstance(x, int) and not isinstance(x, bool) for x in args[1:]):
        given = args[1:]
    dims = dims_of(given, len(labels), every=True)
    op = LabelledOp(name, (labels,), _kept(labels, dims, after), "each")
    if name == "sum":
        return op, None
    count, keep = math.prod(shape[i] for i in dims), len(after) == len(shape) and bool(dims)
    dtype = kwargs.get("dtype")

    def mean(op, shards, local):
        x = shards[0] if dtype is None else shards[0].to(dtype)
        return x.sum(dims, keepdim=keep) / count if dims else x

    return op, mean


def _kept(labels, dims, shape: Sizes) -> tuple[str, ...]:
    """The result's labels of a reduction: where dims are kept with size 1, each has a label of its own."""
    if len(shape) == len(labels) and dims:
        return tuple(f"{d}1" if i in dims else d for i, d in enumerate(labels))
    return tuple(d for i, d in enumerate(labels) if i not in dims)


def _permuted(name: str, args, kwargs, labels) -> tuple[str, ...]:
    n = len(labels)
    if name == "permute":
        order = kwargs.get("dims", args[1:] if len(args) > 2 or not isinstance(args[-1], (tuple, list)) else args[1])
        return tuple(labels[i % n] for i in order)
    if name in ("t", "T"):
        return labels[::-1]
    a, b = (-2, -1) if name == "mT" else (_argument(args, kwargs, 1, "dim0", 0), _argument(args, kwargs, 2, "dim1", 1))
    order = list(range(n))
    if name == "movedim":
        order.insert(b % n, order.pop(a % n))
    else:
        order[a % n], order[b % n] = order[b % n], order[a % n]
    return tuple(labels[i] for i in order)


def _index(index, labels, shape: Sizes) -> LabelledOp:
    """Whole numbers, slices, None and ...: a dim that is not taken whole must not be split."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index):
        raise ShardingError(
            "getitem: an index that is an array\n  rule: what each device would need depends on the values\n"
            "  fix: use a one-hot product, or manual mode"
        )
    used = sum(i is not None and i is not Ellipsis for i in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    spread = index.index(Ellipsis)
    index = (*index[:spread], *(slice(None),) * (len(labels) - used), *index[spread + 1 :])
    output, whole, dim = [], [], 0
    for i in index:
        if i is None:
            output.append(f"N{len(output)}")
            continue
        if isinstance(i, slice):
            output.append(labels[dim] if i.indices(shape[dim]) == (0, shape[dim], 1) else f"{labels[dim]}1")
        if not (isinstance(i, slice) and i.indices(shape[dim]) == (0, shape[dim], 1)):
            whole.append(labels[dim])
        dim += 1
    return LabelledOp("getitem", (labels,), tuple(output), "each", tuple(whole))
