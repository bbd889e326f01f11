"""The types of an aten op's results, by the law of `algebra` and by the place of the values.

The law says how a result is split and over which axes it is a partial sum. This module adds the rest of an abstract
run's knowledge: the names and pieces of dims, how the parts of a sum make the whole, rows that are looked up by number,
and values that no typed array went into. The judge accepts more than the law in some cases, since a program of shards
may mean each device's own part; docs/rules.md lists them.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.algebra.labels import ALONG, argument, labelled, strides_in_order
from scaling.algebra.law import Illegal, LabelledOp, Sizes
from scaling.algebra.layouts import DimAxes
from scaling.algebra.ops import ELEMENTWISE, kept_sums, op_kind
from scaling.check.findings import RULES
from scaling.check.held import (
    JOINED,
    Dim,
    DimPart,
    HeldType,
    any_dim,
    axes_along,
    dims_of_view,
    look_up_over,
    meeting_dim,
    name_along,
    pieces_of,
    size_along,
    triangle_of,
    untyped,
)
from scaling.spec import ShardingError, format_axes

PRODUCTS = {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv", "addcmul": "mul", "addcdiv": "div"}  # plus operand 0
PARTS = {"mean": "mean"}  # how the parts of a reduction over a split dim make the whole, if not as a sum
PARTS |= {"amax": "max", "max": "max", "any": "max", "amin": "min", "min": "min", "all": "min"}
TRIANGLES = ("tril", "triu")
OWN_PARTS = ("sort", "topk")  # a device may order its own rows, which is reported
CROSSES = {"diagonal": (0, 1), "unfold": (0,)}  # views whose elements leave their dim
UNSET = ("empty", "new_empty", "empty_strided", "new_empty_strided")
ZEROS = ("zeros", "new_zeros", "zeros_like", "empty_like", "zero")


class NotInferred(Exception):
    """An op is not judged, for the reason in the text."""


class ArrayMeta(NamedTuple):
    """An array as an op sees it; `first` is the position of the first operand that is the same array."""

    shape: Sizes
    strides: Sizes
    dtype: Any
    held: HeldType
    first: int = 0

    def tensor(self) -> Tensor:
        """Return a tensor on the meta device like this array."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def result_types(
    name: str, args: tuple, kwargs: dict, arrays: Sequence[ArrayMeta], shapes: list[Sizes], made: Any, probe: Callable
) -> list[HeldType]:
    """Return the types of the results of aten's op `name`.

    Args:
        name: the op.
        args: its positional arguments, with an ArrayMeta for each array.
        kwargs: its keyword arguments.
        arrays: the arrays among the arguments.
        shapes: the shapes of the results.
        made: the first result's dtype.
        probe: runs the op on one array of another shape and strides.

    Raises:
        Illegal: the operands give no type.
        NotInferred: no table has the op.
    """
    kind, operands = op_kind(name), [x.held for x in arrays]
    if kind in ("makes", "zeros", "constants"):
        if name == "ones_like":
            return [operands[0]._replace(unreduced=frozenset(), parts="", made="seed", name="")]
        new = untyped(shapes[0], name in ZEROS)
        return [new._replace(dims=operands[0].dims) if name.endswith("_like") or name == "zero" else new]
    if all(x.is_untyped for x in operands):
        keeps = kind in ("linear", "adds", "multiplies", "divides", "sums")
        new = untyped((), keeps and all(x.unreduced is None for x in operands))
        triangle = name in TRIANGLES and not argument(args, kwargs, 1, "diagonal", 0)
        new = new._replace(through=triangle_of(shapes[0]) if triangle else _through(name, kind, args, operands))
        return [new._replace(dims=tuple(map(any_dim, shape))) for shape in shapes]
    if name in PRODUCTS:
        (product,) = result_types(PRODUCTS[name], args[1:], kwargs, arrays[1:], shapes, made, probe)
        terms = [arrays[0], ArrayMeta(shapes[0], strides_in_order(shapes[0]), made, product)]
        return result_types("add", (), kwargs, terms, shapes, made, probe)
    if kind == "attends" and "backward" in name:
        return _attention_backward(name, operands)
    if kind == "puts":
        return [_written(operands, operands[1], name)]
    sums = kept_sums(name, args, kwargs, len(arrays), [x.dtype for x in arrays if x.held.unreduced], made)
    if kind == "reshapes":  # a copy, which reads its operand in order
        (x,) = operands[:1]
        memory = pieces_of(x.shape, strides_in_order(x.shape), x.dims)
        dims, _ = dims_of_view(memory, shapes[0], strides_in_order(shapes[0]))
        return [x._replace(dims=dims, name="", made="")]
    if kind is None:
        raise NotInferred("not in the table of ops")
    try:
        op = labelled(name, args, kwargs, [x.shape for x in operands], shapes[0], probe)
    except ShardingError as error:
        raise NotInferred(str(error).splitlines()[0].removeprefix(f"{name}: ")) from None
    op = op._replace(sums=_sums_by_parts(name, kind, operands, sums), slices=False)
    found = _placed(op, kind, operands, shapes[0])
    if kind == "joins" and name != "stack":
        found = _with_blocks(found, operands, argument(args, kwargs, 1, "dim", 0) % len(shapes[0]))
    others = [found._replace(unreduced=frozenset(), parts="") if s == shapes[0] else untyped(s) for s in shapes[1:]]
    return [found, *others]


def _layout(x: HeldType) -> DimAxes:
    """Return a type as the law sees it; None for axes that are not known. Zeros are part of any array."""
    over = None if x.unreduced is None else tuple(sorted(x.unreduced))
    known: Any = (tuple(None if x.is_untyped and over is None else axes_along(dim) for dim in x.dims), over)
    return DimAxes(*known)


def _sums_by_parts(name: str, kind: str, operands: list[HeldType], sums: tuple) -> tuple:
    """Return whose partial sums an op keeps, given the parts of the operands and the untyped numbers among them."""
    if kind == "reduces" and operands[0].parts and operands[0].parts == PARTS.get(name):
        return ((0,),)
    if name == "where" and len(operands) == 3 and any(x.is_untyped and not x.dims for x in operands[1:]):
        unknown = tuple(i for i in (1, 2) if operands[i].unreduced is None)  # the number may be the 0 of any sum
        return (unknown,) if unknown else sums
    return sums


def _placed(op: LabelledOp, kind: str, operands: list[HeldType], shape: Sizes) -> HeldType:
    """Return the type of an op's result by the law, with the names and pieces of the operands' dims."""
    numbered = op.whole if kind == "picks" else ()  # rows chosen by number may be any device's
    if kind == "joins" and op.whole:
        inputs = tuple(tuple(None if d in op.whole else d for d in own) for own in op.inputs)
        op = op._replace(inputs=inputs)
    if kind in ("picks", "joins") or op.name in (*PARTS, *OWN_PARTS):
        op = op._replace(whole=())
    _refuse_turned(op, operands)
    _refuse_triangle(op, operands)
    free = tuple((None,) * len(x.dims) for x in operands[len(op.inputs) :])
    op = op._replace(inputs=(*op.inputs, *free))
    dims, chosen = dict[str, Dim](), list[str]()
    for x, labels in zip(operands, op.inputs, strict=True):
        for label, dim in zip(labels, x.dims, strict=True):
            if label is not None:
                dims[label] = meeting_dim(dims.get(label, dim), dim) or dim
    for label in numbered:
        chosen += axes_along(dims[label]) or ()
    dropped = {*numbered} | ({*dims}.difference(op.output) if op.name in OWN_PARTS else set())
    layouts = [
        DimAxes(
            tuple(() if d in dropped and axes else axes for d, axes in zip(own, at.dims, strict=True)), at.unreduced
        )
        for own, at in zip(op.inputs, map(_layout, operands), strict=True)
    ]
    _, at = op.infer(layouts, [x.shape for x in operands])
    ring = len(operands) > 1 and len(op.sums) == 1 and any(x.made == "ring" for x in operands)
    unreduced = None if at.unreduced is None else frozenset(at.unreduced)
    if ring or (chosen and not unreduced):  # a ring's sum so far: no type shows how many terms are missing
        unreduced = None
    found = [(dims.get(label, any_dim(n)), n) for label, n in zip(op.output, shape, strict=True)]
    made = tuple(dim if size_along(dim) == n else any_dim(n) for dim, n in found)
    parts = next((x.parts for x in operands if x.unreduced), PARTS.get(op.name, "sum")) if unreduced else ""
    return HeldType(made, unreduced, parts, "ring" if ring else "", through=look_up_over(chosen) if chosen else "")


def _refuse_turned(op: LabelledOp, operands: list[HeldType]) -> None:
    """Raise Illegal if operands pair the same two dims crosswise: A[I, J] with B[J, I], without a transpose."""
    names = [dict(zip(own, map(name_along, x.dims), strict=True)) for own, x in zip(op.inputs, operands, strict=False)]
    for other in names[1:]:
        met = {a: other[label] for label, a in names[0].items() if a is not None and label in other}
        if any(b is not None and met.get(b) == a != b for a, b in met.items()):
            raise Illegal("two dims meet in the other order", RULES["dims"], "transpose one of them first", "dims")


def _refuse_triangle(op: LabelledOp, operands: list[HeldType]) -> None:
    """Raise Illegal if a causal mask, with rows counted from the device's own first one, meets rows that are split."""
    for mask, labels in zip(operands, op.inputs, strict=False):
        if not mask.is_untyped or len(mask.dims) < 2 or mask.through != triangle_of(mask.shape):
            continue
        dims = [each for x, own in zip(operands, op.inputs, strict=False) for each in zip(own, x.dims, strict=True)]
        split = {axis for label, dim in dims if label in labels[-2:] for axis in axes_along(dim) or ()}
        if split:
            over = format_axes(sorted(split))
            what = f"the rows or columns of a causal mask (tril, is_causal) are split over {over}"
            rule = "a triangle counts from the whole array's first row, not from each device's own"
            raise Illegal(what, rule, "compare the rows' own positions, or all_gather them first")


def _through(name: str, kind: "str | None", args: tuple, operands: list[HeldType]) -> str:
    """Return the function, not known to be linear, that untyped numbers went through, unless they were summed since."""
    if kind in ("sums", "contracts", "fuses", "reduces"):
        return ""
    triangles = [x.through for x in operands if len(x.dims) > 1 and x.through == triangle_of(x.shape)]
    if triangles and kind in ELEMENTWISE:
        return triangles[0]
    squared = kind == "multiplies" and len(args) > 1 and args[0] == args[1]
    if kind == "nonlinear" or squared or (kind == "adds" and len(operands) == 1 and any(args[1:2])):  # 0 adds nothing
        return name
    return next((x.through for x in operands if x.through), "")


def own_part(name: str, args: tuple, kwargs: dict, operands: list[HeldType]) -> str:
    """Return why an op along a split dim is not judged, if each device may mean its own part."""
    if name not in OWN_PARTS or not operands or operands[0].is_untyped:
        return ""
    axes = axes_along(operands[0].dims[argument(args, kwargs, *ALONG.get(name, ALONG["orders"]))])
    return f"{name} along a dim that is split over {', '.join(axes)}: each device orders its own part" if axes else ""


def view_error(name: str, args: tuple, kwargs: dict, x: HeldType) -> "Illegal | None":
    """Return the rule that a view breaks if it takes elements across a split dim."""
    for i, default in enumerate(CROSSES.get(name, ())):
        dim = argument(args, kwargs, (2 if name == "diagonal" else 1) + i, f"dim{i + 1}", default)
        if axes := axes_along(x.dims[dim]):
            what = f"{name} of {x}: {name} runs along a dim that is split over {', '.join(axes)}"
            return Illegal(what, f"{name} needs the whole dim on each device", "all_gather it first")
    return None


def _with_blocks(found: HeldType, operands: list[HeldType], at: int) -> HeldType:
    """Return the type of arrays joined in dim `at`. If all split it alike, it is the merged dim (array, position)."""
    own = [x.dims[at] for x in operands if len(x.dims) == len(found.dims)]
    if any(len(dim) > 1 for dim in own) or len({axes_along(dim) for dim in own}) > 1:
        return found
    names, axes = {name_along(dim) for dim in own}, axes_along(own[0])
    dim: Dim = (DimPart(size_along(found.dims[at]), names.pop() if len(names) == 1 else None, axes),)
    if axes and len(own) > 1:
        alike = len({size_along(each) for each in own}) == 1
        joints = tuple(accumulate(map(size_along, own[:-1])))
        dim = (DimPart(len(own), JOINED), *own[0]) if alike else (dim[0]._replace(joints=joints),)
    return found._replace(dims=(*found.dims[:at], dim, *found.dims[at + 1 :]))


def _written(operands: list[HeldType], rows: HeldType, name: str) -> HeldType:
    """Return the type of an array after rows were written or added by number.

    If the rows are split, it is not known which device's rows are written.
    """
    x, source = operands[0], operands[-1]
    strange = any(part.axes is None and part.size > 1 for dim in rows.dims for part in dim) or rows.axes - x.axes
    unreduced = None if strange else source.unreduced
    if x.unreduced is not None and not x.is_untyped and x.unreduced != unreduced:
        raise Illegal(f"{name} of {source} into {x}", RULES["partial-plus-whole"], name="partial-plus-whole")
    known = all(part.axes is not None for dim in x.dims for part in dim)
    return HeldType(x.dims if known else tuple(map(any_dim, x.shape)), unreduced, "sum" if unreduced else "")


def _attention_backward(name: str, operands: list[HeldType]) -> list[HeldType]:
    """Return the gradients' types: dQ is summed over the keys, dK and dV over the queries."""
    dO, Q, K, V = operands[:4]
    inputs = tuple("BHTE"), tuple("BHTD"), ("B", None, None, "D"), ("B", None, None, "E")
    op = LabelledOp(name, inputs, tuple("BHTD"), ((0,),), slices=False)
    _refuse_turned(op, operands[:4])
    op.infer([_layout(x) for x in operands[:4]])
    summed = [(Q, K), (K, Q), (V, Q)]
    over = [(x, frozenset(axes_along(y.dims[2]) or ()) | (dO.unreduced or frozenset())) for x, y in summed]
    return [HeldType(x.dims, axes, "sum" if axes else "") for x, axes in over]
