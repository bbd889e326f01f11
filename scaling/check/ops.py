"""The rule of each aten op, to which all of torch comes down, derivatives too.

The table of ops (`algebra.ops`) has each op's kind; its labels (`explicit.labels`) tell which dims are the same, are
summed over or must be whole. A view needs no rule, because `held` reads it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.algebra.law import LabelledOp, Sizes
from scaling.algebra.ops import ELEMENTWISE, adds_number, keeps_sums, op_kind
from scaling.check.held import (
    Dim,
    DimPart,
    HeldType,
    any_dim,
    axes_along,
    dims_of_view,
    name_along,
    of_nothing,
    pieces_of,
    size_along,
    strides_in_order,
)
from scaling.check.law import NotInferred, OpRule, RuleBroken, by_labels
from scaling.explicit.labels import ALONG, along_dims, argument, dims_of, elementwise_op, letters, matmul_op

PRODUCTS = {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv", "addcmul": "mul", "addcdiv": "div"}  # added to the first
OWN_PARTS = ("sort", "topk")  # a device may order its own rows, which is named
CROSSES = {"diagonal": (0, 1), "unfold": (0,)}  # views whose elements do not stay in their dim
ORDERS = {"amax": "max", "max": "max", "any": "max", "amin": "min", "min": "min", "all": "min"}
TAKES = ("index_select", "index", "unsafe_index", "gather", "embedding")
WRITES = ("index_put", "index_add", "index_copy", "scatter_add", "scatter")
GROWS = ("select_backward", "slice_backward", "select_scatter", "slice_scatter")
ATTENTION = "scaled_dot_product"
NUMBERS = "arange randperm rand randn randint full ones scalar_tensor eye normal tril_indices linspace logspace"
UNSET = ("empty", "new_empty", "empty_strided", "new_empty_strided")
ZEROS = ("zeros", "new_zeros", "zeros_like", "empty_like", "zero")
ALIKE = (
    "new_full new_ones rand_like randn_like bernoulli full_like one_hot uniform exponential fill random randint_like"
)


class ArrayMeta(NamedTuple):
    """An array as an op sees it; `first` is the position of the first operand that is the same array."""

    shape: Sizes
    strides: Sizes
    dtype: Any
    held: HeldType
    first: int = 0

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def infer(
    name: str, args: tuple, kwargs: dict, operands: list[HeldType], dtypes: Sequence, shapes: list[Sizes], made: Any
) -> list[HeldType]:
    """Return the types of the results of aten's op `name`.

    Args:
        dtypes: those of the operands.
        shapes: those of the results.
        made: the first result's dtype.
    """
    kind = op_kind(name)
    if name in NUMBERS.split() or name in UNSET:
        return [of_nothing(shape) for shape in shapes]
    if name == "ones_like":
        return [operands[0]._replace(unreduced=frozenset(), parts="", made="seed", name="")]
    if name in ZEROS or name in ALIKE.split():
        made = of_nothing(shapes[0], name in ZEROS)
        return [made._replace(dims=operands[0].dims) if operands and operands[0].shape == shapes[0] else made]
    if all(x.of_nothing for x in operands):
        keeps = kind in ("linear", "adds", "multiplies", "divides", "sums")
        made = of_nothing((), keeps and all(x.unreduced is None for x in operands))
        made = made._replace(through=_through(name, kind, args, operands))
        return [made._replace(dims=tuple(map(any_dim, shape))) for shape in shapes]
    partial_sums = [dtype for x, dtype in zip(operands, dtypes, strict=True) if x.unreduced]
    linear = keeps_sums(name, args, kwargs, len(operands), partial_sums, made)
    if kind == "linear":
        if partial_sums and not linear:
            raise RuleBroken("nonlinear", f"{name} of {operands[0]} to {str(made).removeprefix('torch.')}")
        return [operands[0]._replace(name="", made="")]
    if name in PRODUCTS:
        product = infer(PRODUCTS[name], args[1:], kwargs, operands[1:], dtypes[1:], shapes, made)
        return infer("add", (), kwargs, [operands[0], *product], [dtypes[0], made], shapes, made)
    if name.startswith(ATTENTION) and "backward" in name:
        return _attention_backward(name, operands)
    if name in WRITES:
        return [_written(operands, operands[1], name)]
    if kind == "reshapes":  # a copy, which reads its operand in order
        (x,) = operands[:1]
        memory = pieces_of(x.shape, strides_in_order(x.shape), x.dims)
        dims, _ = dims_of_view(memory, shapes[0], strides_in_order(shapes[0]))
        return [x._replace(dims=dims, name="", made="")]
    found = by_labels(op_rule(name, kind, args, kwargs, operands, shapes[0], linear), operands, shapes[0])
    if kind == "joins" and name != "stack":
        found = _with_blocks(found, operands, argument(args, kwargs, 1, "dim", 0) % len(shapes[0]))
    others = [found._replace(unreduced=frozenset(), parts="") if s == shapes[0] else of_nothing(s) for s in shapes[1:]]
    return [found, *others]


def _through(name: str, kind: "str | None", args: tuple, operands: list[HeldType]) -> str:
    """The function, not known to be linear, that numbers of nothing went through, unless they were summed since."""
    if kind in ("sums", "contracts", "fuses", "reduces"):
        return ""
    squared = kind == "multiplies" and len(args) > 1 and args[0] == args[1]
    if kind == "nonlinear" or squared or (kind == "adds" and len(operands) == 1 and any(args[1:2])):  # 0 adds nothing
        return name
    return next((x.through for x in operands if x.through), "")


def op_rule(
    name: str, kind: "str | None", args, kwargs, operands: list[HeldType], shape: Sizes, linear: str = ""
) -> OpRule:
    """Return the rule of an op that is `linear` in these operands. NotInferred if no table has it."""
    shapes, n = [x.shape for x in operands], len(operands)
    labels = letters(len(shapes[0]))
    sums = {"each": tuple((i,) for i in range(n)), "all": (tuple(range(n)),), "first": ((0,),)}
    keeps = sums.get(linear, ())
    if name in TAKES:
        return _taken(name, args, operands, labels)
    if name in GROWS:  # the cotangent of a part, among zeros
        output = labels if len(labels) == len(shape) else letters(len(shape), 0)
        return OpRule(LabelledOp(name, (labels,), output), ((0,),))
    if name.startswith(ATTENTION):
        return OpRule(LabelledOp(name, (tuple("BHTD"),), tuple("BHTD")[: len(shape)]))
    if name.startswith("nll_loss"):
        return _nll_loss(name, args, letters(len(shapes["backward" in name])))
    if name == "embedding_dense_backward":
        return OpRule(LabelledOp(name, (labels, labels[:-1]), ("V", labels[-1])), ((0,),))
    if kind in ELEMENTWISE:
        if name.endswith(("_backward", "_backward_data")) or (name == "masked_fill" and not _number(args, 2)):
            keeps = sums["first"]
        elif n == 1 and operands[0].unreduced and adds_number(name, args, kwargs, n):
            raise RuleBroken("partial-plus-whole", "a number is added to partial sums, by every device")
        elif name == "where" and n == 3:
            numbers = [i for i in (1, 2) if operands[i].of_nothing and not operands[i].shape]  # 0 is part of any sum
            unknown = [i for i in (1, 2) if operands[i].unreduced is None]
            keeps = (tuple(unknown),) if numbers and unknown else ((1, 2),)
        elif name == "lerp" and n == 3:
            keeps = ((0, 1),)
        return OpRule(elementwise_op(name, shapes, shape), keeps)
    if kind == "contracts":
        return OpRule(matmul_op(*shapes), sums["each"])
    if kind == "joins":  # of a stack no dims: a stack of the blocks at hand of a ring goes home with the ring's sums
        every, at = letters(len(shape)), argument(args, kwargs, 1, "dim", 0) % len(shape)
        own = tuple(None if i == at or name == "stack" else label for i, label in enumerate(every))
        return OpRule(LabelledOp(name, (own[len(own) - len(labels) :],) * n, every), keeps)
    if kind in ("sums", "reduces"):
        op = _reduced(name, argument(args, kwargs, 2 if "norm" in name else 1, "dim", None), labels, shape)
        how = "mean" if name == "mean" else "sum" if kind == "sums" else ORDERS.get(name, "")
        alike = kind == "sums" or operands[0].parts == how
        return OpRule(op._replace(whole=()), ((0,),) if alike else (), parts=how) if how else OpRule(op)
    if kind in ("scans", "along", "orders"):
        op = along_dims(name, kind, args, kwargs, labels, shape)
        return OpRule(op, keeps, own=name in OWN_PARTS)
    raise NotInferred("not in the table of ops")


def own_part(name: str, args: tuple, kwargs: dict, operands: list[HeldType]) -> str:
    """Return why an op along a split dim is not judged, if each device may mean its own part."""
    if name not in OWN_PARTS or not operands or operands[0].of_nothing:
        return ""
    axes = axes_along(operands[0].dims[argument(args, kwargs, *ALONG.get(name, ALONG["orders"]))])
    return f"{name} along a dim that is split over {', '.join(axes)}: each device orders its own part" if axes else ""


def view_error(name: str, args: tuple, kwargs: dict, x: HeldType) -> "RuleBroken | None":
    """Return the rule that a view breaks if it takes elements across a split dim."""
    for i, default in enumerate(CROSSES.get(name, ())):
        dim = argument(args, kwargs, (2 if name == "diagonal" else 1) + i, f"dim{i + 1}", default)
        if axes := axes_along(x.dims[dim]):
            what = f"{name} along a dim that is split over {', '.join(axes)}"
            return RuleBroken("split", what, 0, "all_gather it first")
    return None


def _number(args: tuple, i: int):
    """A number among the arguments; 0 for a tensor of one on the meta device."""
    return args[i] if len(args) > i and not isinstance(args[i], ArrayMeta) else 0


def _with_blocks(found: HeldType, operands: list[HeldType], at: int) -> HeldType:
    """Arrays one after another in a dim: where it is split alike in all, the blocks lie below each other."""
    own = [x.dims[at] for x in operands if len(x.dims) == len(found.dims)]
    if any(len(dim) > 1 for dim in own) or len({axes_along(dim) for dim in own}) > 1:
        return found
    names, axes = {name_along(dim) for dim in own}, axes_along(own[0])
    dim: Dim = (DimPart(size_along(found.dims[at]), names.pop() if len(names) == 1 else None, axes),)
    if axes and len({size_along(each) for each in own}) == 1 and len(own) > 1:
        dim = (DimPart(len(own)), *own[0])
    return found._replace(dims=(*found.dims[:at], dim, *found.dims[at + 1 :]))


def _reduced(name: str, given, labels: tuple[str, ...], shape: Sizes) -> LabelledOp:
    """Dims go; where they are kept, each has a label of its own."""
    every = given is None or isinstance(given, bool) or given == []
    dims, keep = dims_of(None if every else given, len(labels)), len(shape) == len(labels)
    output = tuple(f"{d}1" if i in dims else d for i, d in enumerate(labels) if keep or i not in dims)
    return LabelledOp(name, (labels,), output, whole=tuple(labels[i] for i in dims))


def _taken(name: str, args, operands: list[HeldType], labels: tuple[str, ...]) -> OpRule:
    """Rows by number: the dims of the indices stand where the first of them stands."""
    if name == "gather":
        rows = tuple(f"{label}1" if i == args[1] % len(labels) else label for i, label in enumerate(labels))
        return OpRule(LabelledOp(name, (labels, rows), rows), ((0,),), (labels[args[1]],))
    at = [args[1] % len(labels)] if name == "index_select" else [0]
    if name in ("index", "unsafe_index"):
        at = [i for i, one in enumerate(args[1]) if one is not None]
    rows = letters(max(len(x.dims) for x in operands[1:]), 0)
    inputs = (labels, *(rows[len(rows) - len(x.dims) :] for x in operands[1:]))
    kept = [label for i, label in enumerate(labels) if i not in at]
    output = (*kept[: at[0]], *rows, *kept[at[0] :])
    return OpRule(LabelledOp(name, inputs, output), ((0,),), tuple(labels[i] for i in at))


def _nll_loss(name: str, args, labels: tuple[str, ...]) -> OpRule:
    """Minus the log-probabilities of the targets, of classes in dim 1; over the rows not at all, a mean or a sum."""
    rows = tuple(label for i, label in enumerate(labels) if i != 1)
    how = {1: "mean", 2: "sum"}.get(args[4 if "backward" in name else 3], "")
    if "backward" in name:
        return OpRule(LabelledOp(name, (() if how else rows, labels, rows), labels), ((0,),))
    return OpRule(LabelledOp(name, (labels, rows), () if how else rows, whole=labels[1:2]), ((0,),), parts=how)


def _written(operands: list[HeldType], rows: HeldType, name: str) -> HeldType:
    """Rows written or added by number: of which device's rows they are made is not known where these are split."""
    x, source = operands[0], operands[-1]
    strange = any(part.axes is None and part.size > 1 for dim in rows.dims for part in dim) or rows.axes - x.axes
    unreduced = None if strange else source.unreduced
    if x.unreduced is not None and not x.of_nothing and x.unreduced != unreduced:
        raise RuleBroken("partial-plus-whole", f"{name} of {source} into {x}", 0)
    known = all(part.axes is not None for dim in x.dims for part in dim)
    return HeldType(x.dims if known else tuple(map(any_dim, x.shape)), unreduced, "sum" if unreduced else "")


def _attention_backward(name: str, operands: list[HeldType]) -> list[HeldType]:
    """The gradient of queries is summed over the keys, those of keys and values over the queries."""
    dO, Q, K, V = operands[:4]
    for i, x in enumerate((Q, K, V), 1):
        if x.unreduced:
            raise RuleBroken("nonlinear", f"{name} of {x}", i)
    summed = [(Q, K), (K, Q), (V, Q)]
    over = [(x, frozenset(axes_along(y.dims[2]) or ()) | (dO.unreduced or frozenset())) for x, y in summed]
    return [HeldType(x.dims, axes, "sum" if axes else "") for x, axes in over]
