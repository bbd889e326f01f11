"""The labels of a call of torch's: which dims of its arrays are the same, which go, which must be whole.

Where a function only views its operand, or sums over dims of it, what it does to them is seen: on a tensor without
numbers whose dims can be told apart, by their strides or by their sizes.
"""

import string
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from scaling.algebra.law import LabelledOp, Sizes
from scaling.algebra.layouts import letters
from scaling.spec import ShardingError

LETTERS = string.ascii_uppercase
Labels = tuple[str, ...]
OnTensors = Callable[[Sequence[Tensor]], Any]  # the function called, on values in place of the arrays

ALONG = {  # the dims that a function of this name, or else kind, runs along: an argument's place, keyword and default
    "scans": (1, "dim", -1),
    "along": (1, "dim", -1),
    "orders": (1, "dim", -1),
    "topk": (2, "dim", -1),
    "flip": (1, "dims", -1),
    "roll": (2, "dims", None),
    "repeat_interleave": (2, "dim", None),
    **dict.fromkeys(("index_select", "narrow"), (1, "dim", None)),
}


def viewed(name: str, call: OnTensors, labels: Labels, shapes: Sequence[Sizes]) -> LabelledOp:
    """Return the labels of a view: dims are permuted, copied, dropped or new, and whole where a part is taken."""
    shape, strides, step = shapes[0], [], 1
    for i, size in reversed([*enumerate(shape)]):  # all different: those of dims of one element are free to choose
        strides.insert(0, step if size != 1 else 2**40 + i)
        step *= size or 1
    y = None if len(shapes) > 1 else call([torch.empty_strided(shape, strides, device="meta")])
    if y is None or not y._is_view():
        raise ShardingError(
            f"{name}: an index that is an array\n  rule: what each device would need depends on the values\n"
            "  fix: use a one-hot product, or manual mode"
        )
    place = {key: i for i, key in enumerate(zip(shape, strides, strict=True))}
    inputs: list[str | None] = [None if size == 1 else f"{label}0" for label, size in zip(labels, shape, strict=True)]
    output = []
    for letter, size, stride in reversed([*zip(letters(y.dim()), y.shape, y.stride(), strict=True)]):
        same = place.pop((size, stride), None)  # a new dim before one of one element has its stride, too
        output.insert(0, letter if same is not None or not stride else f"{letter}1")
        if same is not None:
            inputs[same] = letter
    whole = tuple(label for label in inputs if label is not None and label not in output)
    return LabelledOp(name, (tuple(inputs),), tuple(output), whole=whole)


def reduced_dims(call: OnTensors, labels: Labels, dtype: torch.dtype) -> tuple[tuple[int, ...], Labels]:
    """The dims that a reduction is over, and the result's labels: where they are kept, each has one of its own."""
    sizes = range(2, len(labels) + 2)
    left = call([torch.empty([*sizes], dtype=dtype, device="meta")]).shape
    dims = tuple(i for i, size in enumerate(sizes) if size not in left)
    kept = len(left) == len(labels)
    return dims, tuple(f"{d}1" if i in dims else d for i, d in enumerate(labels) if kept or i not in dims)


def along_dims(name: str, kind: str | None, args, kwargs, labels: Labels, shape: Sizes) -> LabelledOp:
    """Return the labels of a function along dims that must be whole: they stay, or change their size."""
    if name in ("pad", "constant_pad_nd"):
        pads = argument(args, kwargs, 1, "pad", ())
        dims = tuple(len(labels) - 1 - i // 2 for i in range(0, len(pads), 2) if any(pads[i : i + 2]))
    elif name in ("tril", "triu"):
        dims = dims_of((-2, -1), len(labels))
    elif row := ALONG.get(name, ALONG.get(kind or "")):
        dims = dims_of(argument(args, kwargs, *row), len(labels))
    else:
        refuse_unknown(name)
    inputs, after = (labels,), tuple(f"{d}1" if i in dims else d for i, d in enumerate(labels))
    if kind in ("scans", "along", "orders") and name != "topk":
        after = labels if len(shape) == len(labels) else ("N",)  # a flat one: repeat_interleave without a dim
    if name == "index_select":
        inputs = (labels, (after[dims[0]],))
    return LabelledOp(name, inputs, after, whole=tuple(labels[i] for i in dims))


def joined(name: str, labels: Labels, count: int, dim: int) -> LabelledOp:
    """Return the labels of arrays joined in a dim, or stacked in a new one."""
    if name == "stack":
        at = dim % (len(labels) + 1)
        return LabelledOp(name, (labels,) * count, (*labels[:at], "N", *labels[at:]))
    return LabelledOp(name, (labels,) * count, labels, whole=(labels[dim],))


def dims_of(dim, n: int) -> tuple[int, ...]:
    """Return the positions that a dim, several dims, or None for all of n, mean."""
    given = (dim,) if isinstance(dim, int) else range(n) if dim is None else tuple(dim)
    return tuple(i % n for i in given) if n else ()


def argument(args, kwargs, position: int, name: str, default) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, kwargs.get("axis", default))


def elementwise_op(name: str, shapes: list[Sizes], shape: Sizes) -> LabelledOp:
    out = letters(len(shape))
    inputs = []
    for s in shapes:
        own = zip(s, shape[len(out) - len(s) :], out[len(out) - len(s) :], strict=True)
        inputs.append(tuple(None if n == 1 != m else d for n, m, d in own))
    return LabelledOp(name, tuple(inputs), out)


def einsum_op(equation: str) -> LabelledOp:
    """Return the labels of an equation as torch.einsum and jnp.einsum read it: letters, and one or two operands."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or len(terms) > 2 or any(len(set(t)) < len(t) for t in (*terms, right)):
        raise ShardingError(
            f"einsum {equation}: not an equation of one or two operands with an arrow and no letter twice in a term\n"
            f"  fix: write products of more operands one by one"
        )
    return LabelledOp(f"einsum {equation}", tuple(tuple(t.upper()) for t in terms), tuple(right.upper()))


def matmul_op(a: Sizes, b: Sizes) -> LabelledOp:
    """Return the labels of `a @ b`: vectors, matrices, and batches that are equal or only one operand's."""
    batch = LETTERS[: max(0, len(a) - 2, len(b) - 2)]
    if len(a) > 2 < len(b) and (len(a) != len(b) or a[:-2] != b[:-2]):
        raise ShardingError(f"matmul: {a} by {b}\n  rule: batch dims are not broadcast here\n  fix: use einsum")
    rows, columns = "Y" * (len(a) > 1), "Z" * (len(b) > 1)
    left, right = batch * (len(a) > 2) + rows + "J", batch * (len(b) > 2) + "J" + columns
    return LabelledOp("matmul", (tuple(left), tuple(right)), tuple(batch + rows + columns))


def refuse_unknown(name: str) -> NoReturn:
    raise ShardingError(
        f"{name}: not a function whose sharding is known\n"
        f"  rule: known are einsum, matmul, elementwise functions, reductions, softmax, reshape, transpose, indexing\n"
        f"  fix: write it with these, or in manual mode"
    )
