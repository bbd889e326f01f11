"""Label the dims of a call: which dims of its arrays correspond, which are summed over, which must be whole.

`labelled` turns a call of a torch function, or of the aten op behind it, into the operation that `law` infers types
for. Some functions only view their operand or reduce over its dims. For these, `probe` runs the function on an array
without data whose dims can be told apart, by their strides or by their sizes. This module does not import torch.
"""

import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from scaling.algebra.law import LabelledOp, Sizes
from scaling.algebra.layouts import letters
from scaling.algebra.ops import ELEMENTWISE, op_kind
from scaling.spec import ShardingError

LETTERS = string.ascii_uppercase
Labels = tuple[str, ...]
Probe = Callable[..., Any]  # (shape, strides) -> the function's result on one array like this, without data

ALONG = {  # the dims that functions of a name, or else a kind, run along: the argument's position, keyword, default
    "scans": (1, "dim", -1),
    "along": (1, "dim", -1),
    "orders": (1, "dim", -1),
    "topk": (2, "dim", -1),
    "flip": (1, "dims", -1),
    "roll": (2, "dims", None),
    "repeat_interleave": (2, "dim", None),
    "narrow": (1, "dim", None),
}
ATTENTION = tuple("BHTD"), tuple("BHSD"), tuple("BHSE")  # the labels of queries, keys and values


def labelled(name: str, args: Sequence, kwargs: Mapping, shapes: list[Sizes], shape: Sizes, probe: Probe) -> LabelledOp:
    """Return the labels of a call's dims. `sums`, the operands that may be partial sums, is left empty.

    Args:
        name: the function's name.
        args: the positional arguments of the call.
        kwargs: its keyword arguments.
        shapes: the shapes of the arrays among the arguments.
        shape: the shape of the result.
        probe: runs the function on one array of a given shape and strides, without data.

    Raises:
        ShardingError: the table of operations does not have the function.
    """
    kind, labels = op_kind(name), letters(len(shapes[0]) if shapes else 0)
    if kind in ELEMENTWISE:
        return elementwise_op(name, shapes, shape)
    if name == "einsum":
        return einsum_op(args[0])
    if kind == "contracts":
        return matmul_op(*(shapes[::-1] if name == "rmatmul" else shapes))
    if kind in ("sums", "reduces"):
        return _reduced(name, labels, probe, kind == "reduces")
    if kind == "joins":
        return _joined(name, labels, shapes, len(shape), int(argument(args, kwargs, 1, "dim", 0)))
    if kind in ("zeros", "constants"):
        return LabelledOp(name, (labels,), labels)
    if kind in ("broadcasts", "permutes", "parts") or name in ("getitem", "select", "diagonal"):
        return _viewed(name, probe, labels, shapes)
    if kind == "picks":
        return _picked(name, args, kwargs, labels, shapes)
    if kind == "scores":
        return _scored(name, args, shapes)
    if name == "embedding_dense_backward":
        return LabelledOp(name, (labels, labels[:-1]), ("V", labels[-1]))
    if kind == "grows":
        return LabelledOp(name, (labels,), labels if len(labels) == len(shape) else letters(len(shape), 0))
    if kind == "attends" and "backward" not in name:
        inputs = [tuple(d if i != 1 or s[1] == shapes[0][1] else None for i, d in enumerate(own))
                  for own, s in zip(ATTENTION, shapes, strict=False)]  # fmt: skip
        causal = argument(args, kwargs, 6 if "efficient" in name else 4, "is_causal", False)  # counted from row 0
        whole = ("D", "S", "T") if causal else ("D", "S")
        return LabelledOp(name, tuple(inputs), tuple("BHTE")[: len(shape)], whole=whole)
    return _along(name, kind, args, kwargs, labels, shape)


def elementwise_op(name: str, shapes: Sequence[Sizes], shape: Sizes) -> LabelledOp:
    """Return the labels of an elementwise function, whose operands are broadcast against each other."""
    out, inputs = letters(len(shape)), []
    for s in shapes:
        own = zip(s, shape[len(out) - len(s) :], out[len(out) - len(s) :], strict=True)
        inputs.append(tuple(None if n == 1 != m else d for n, m, d in own))
    return LabelledOp(name, tuple(inputs), out)


def einsum_op(equation: str) -> LabelledOp:
    """Return the labels of an equation of one or two operands, as torch.einsum and jnp.einsum read it."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or len(terms) > 2 or any(len(set(t)) < len(t) for t in (*terms, right)):
        raise ShardingError(
            f"einsum {equation}: not an equation of one or two operands with an arrow and no letter twice in a term\n"
            f"  fix: write products of more operands one by one"
        )
    return LabelledOp(f"einsum {equation}", tuple(tuple(t.upper()) for t in terms), tuple(right.upper()))


def matmul_op(a: Sizes, b: Sizes) -> LabelledOp:
    """Return the labels of `a @ b`: vectors, matrices, and batches that are equal or belong to one operand only."""
    batch = LETTERS[: max(0, len(a) - 2, len(b) - 2)]
    if len(a) > 2 < len(b) and (len(a) != len(b) or a[:-2] != b[:-2]):
        raise ShardingError(f"matmul: {a} by {b}\n  rule: batch dims are not broadcast here\n  fix: use einsum")
    rows, columns = "Y" * (len(a) > 1), "Z" * (len(b) > 1)
    left, right = batch * (len(a) > 2) + rows + "J", batch * (len(b) > 2) + "J" + columns
    return LabelledOp("matmul", (tuple(left), tuple(right)), tuple(batch + rows + columns))


def strides_in_order(shape: Sequence[int]) -> Sizes:
    """Return the strides of a contiguous array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _reduced(name: str, labels: Labels, probe: Probe, whole: bool) -> LabelledOp:
    """Return the labels of a reduction; a reduced dim that stays in the result, with size 1, gets a new label."""
    sizes = tuple(range(2, len(labels) + 2))
    left = probe(sizes, strides_in_order(sizes))
    left = tuple((left if hasattr(left, "shape") else left[0]).shape)
    dims = [i for i, size in enumerate(sizes) if size not in left]
    kept = len(left) == len(labels)
    after = tuple(f"{d}1" if i in dims else d for i, d in enumerate(labels) if kept or i not in dims)
    return LabelledOp(name, (labels,), after, whole=tuple(labels[i] for i in dims) if whole else ())


def _joined(name: str, labels: Labels, shapes: Sequence[Sizes], dims: int, dim: int) -> LabelledOp:
    """Return the labels of arrays that are joined along a dim, or stacked along a new one."""
    if name == "stack":
        at = dim % (len(labels) + 1)
        return LabelledOp(name, (labels,) * len(shapes), (*labels[:at], "N", *labels[at:]))
    every = letters(dims)
    return LabelledOp(name, tuple(every[dims - len(s) :] for s in shapes), every, whole=(every[dim % dims],))


def _viewed(name: str, probe: Probe, labels: Labels, shapes: Sequence[Sizes]) -> LabelledOp:
    """Return the labels of a view: dims are permuted, copied, dropped or new, and whole if only a part is taken."""
    shape, strides, step = shapes[0], [], 1
    for i, size in reversed([*enumerate(shape)]):  # all different; dims of one element may have any stride
        strides.insert(0, step if size != 1 else 2**40 + i)
        step *= size or 1
    y = None if len(shapes) > 1 else probe(shape, strides)
    if y is None or not y._is_view():
        raise ShardingError(
            f"{name}: an index that is an array\n  rule: what each device would need depends on the values\n"
            "  fix: use a one-hot product, or manual mode"
        )
    place = {key: i for i, key in enumerate(zip(shape, strides, strict=True))}
    inputs: list[str | None] = [None if size == 1 else f"{label}0" for label, size in zip(labels, shape, strict=True)]
    output = []
    for letter, size, stride in reversed([*zip(letters(y.dim()), y.shape, y.stride(), strict=True)]):
        same = place.pop((size, stride), None)  # popped, since a new dim before it may have an equal key
        output.insert(0, letter if same is not None or not stride else f"{letter}1")
        if same is not None:
            inputs[same] = letter
    whole = tuple(label for label in inputs if label is not None and label not in output)
    return LabelledOp(name, (tuple(inputs),), tuple(output), whole=whole)


def _picked(name: str, args: Sequence, kwargs: Mapping, labels: Labels, shapes: Sequence[Sizes]) -> LabelledOp:
    """Return the labels of elements picked by index; the index's dims replace the first dim that it picks from."""
    if name == "gather":
        at = args[1] % len(labels)
        own = [i for i, (n, m) in enumerate(zip(*shapes, strict=True)) if i == at or n != m]  # not the index's too
        rows = tuple(f"{label}1" if i in own else label for i, label in enumerate(labels))
        return LabelledOp(name, (labels, rows), rows, whole=tuple(labels[i] for i in own))
    at = [0]
    if name == "index_select":
        at = [argument(args, kwargs, 1, "dim", 0) % len(labels)]
    elif name in ("index", "unsafe_index"):
        at = [i for i, one in enumerate(args[1]) if one is not None]
    rows = letters(max(len(s) for s in shapes[1:]), 0)
    kept = [label for i, label in enumerate(labels) if i not in at]
    inputs = (labels, *(rows[len(rows) - len(s) :] for s in shapes[1:]))
    return LabelledOp(name, inputs, (*kept[: at[0]], *rows, *kept[at[0] :]), whole=tuple(labels[i] for i in at))


def _scored(name: str, args: Sequence, shapes: Sequence[Sizes]) -> LabelledOp:
    """Return the labels of the targets' negative log-probabilities, one for each row or reduced to a mean or a sum."""
    back = "backward" in name
    labels = letters(len(shapes[back]))
    rows, over = tuple(label for i, label in enumerate(labels) if i != 1), bool(args[4 if back else 3])
    if back:
        return LabelledOp(name, (() if over else rows, labels, rows), labels)
    return LabelledOp(name, (labels, rows), () if over else rows, whole=labels[1:2])


def _along(name: str, kind: str | None, args: Sequence, kwargs: Mapping, labels: Labels, shape: Sizes) -> LabelledOp:
    """Return the labels of a function along dims that must be whole; these dims stay, or change their size."""
    if name in ("pad", "constant_pad_nd"):
        pads = argument(args, kwargs, 1, "pad", ())
        dims = tuple(len(labels) - 1 - i // 2 for i in range(0, len(pads), 2) if any(pads[i : i + 2]))
    elif name in ("tril", "triu"):
        dims = dims_of((-2, -1), len(labels))
    elif row := ALONG.get(name, ALONG.get(kind or "")):
        dims = dims_of(argument(args, kwargs, *row), len(labels))
    else:
        refuse_unknown(name)
    repeats = argument(args, kwargs, 1, "repeats", 0) if name == "repeat_interleave" else None
    if isinstance(repeats, int) and len(shape) == len(labels):
        dims = ()  # the copies of an element stay with it, in its block
    after = tuple(f"{d}1" if i in dims else d for i, d in enumerate(labels))
    if kind in ("scans", "along", "orders") and name != "topk":
        after = labels if len(shape) == len(labels) else ("N",)  # repeat_interleave without a dim gives a flat array
    return LabelledOp(name, (labels,), after, whole=tuple(labels[i] for i in dims))


def dims_of(dim, n: int) -> tuple[int, ...]:
    """Return the positions, of n dims, that are meant by one dim, by several dims, or by None for all of them."""
    given = (dim,) if isinstance(dim, int) else range(n) if dim is None else tuple(dim)
    return tuple(i % n for i in given) if n else ()


def argument(args, kwargs, position: int, name: str, default) -> Any:
    """Return an argument by its position, its name or the keyword `axis`, and the default if it is not given."""
    return args[position] if len(args) > position else kwargs.get(name, kwargs.get("axis", default))


def refuse_unknown(name: str) -> NoReturn:
    """Raise the ShardingError for a function that the table of operations does not have."""
    raise ShardingError(
        f"{name}: not a function whose sharding is known\n"
        f"  rule: known are einsum, matmul, elementwise functions, reductions, softmax, reshape, transpose, indexing\n"
        f"  fix: write it with these, or in manual mode"
    )
