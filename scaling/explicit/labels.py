"""The labels of a call of torch's: which dims of its arrays are the same, which go, which must be whole."""

import string
from typing import Any, NoReturn

from scaling.algebra.law import LabelledOp, Sizes
from scaling.spec import ShardingError

LETTERS = string.ascii_uppercase


ALONG = {  # the dims that a function of this name, or else kind, runs along: an argument's place, keyword and default
    "reduces": (1, "dim", None),
    "scans": (1, "dim", -1),
    "along": (1, "dim", -1),
    "orders": (1, "dim", -1),
    "parts": (2, "dim", 0),
    "unbind": (1, "dim", 0),
    "topk": (2, "dim", -1),
    "flip": (1, "dims", -1),
    "roll": (2, "dims", None),
    "repeat_interleave": (2, "dim", None),
    **dict.fromkeys(("index_select", "select", "narrow"), (1, "dim", None)),
}


def along_dims(name: str, kind: str | None, args, kwargs, labels, shape: Sizes) -> LabelledOp:
    """What runs along dims that must be whole: they stay, go, or have another size."""
    if kind in ("zeros", "constants"):
        return LabelledOp(name, (labels,), labels)
    if name in ("pad", "constant_pad_nd"):
        pads = argument(args, kwargs, 1, "pad", ())
        dims = tuple(len(labels) - 1 - i // 2 for i in range(0, len(pads), 2) if any(pads[i : i + 2]))
    elif name in ("tril", "triu"):
        dims = dims_of((-2, -1), len(labels))
    elif row := ALONG.get(name, ALONG.get(kind or "")):
        given = argument(args, kwargs, *row)
        dims = dims_of(None if isinstance(given, bool) else given, len(labels), every=True)  # x.var(unbiased)
    else:
        refuse_unknown(name)
    inputs, after = (labels,), [f"{d}1" if i in dims else d for i, d in enumerate(labels)]
    if kind == "reduces":
        after = kept(labels, dims, shape)
    elif name in ("select", "unbind"):
        after = [d for i, d in enumerate(labels) if i not in dims]
    elif kind in ("scans", "along", "orders") and name != "topk":
        after = list(labels) if len(shape) == len(labels) else ["N"]  # a flat one: repeat_interleave without a dim
    if name == "index_select":
        inputs = (labels, (after[dims[0]],))
    return LabelledOp(name, inputs, tuple(after), whole=tuple(labels[i] for i in dims))


def joined(name: str, labels, count: int, dim: int) -> LabelledOp:
    """Arrays one after another in a dim, or stacked in a new one."""
    if name == "stack":
        at = dim % (len(labels) + 1)
        return LabelledOp(name, (labels,) * count, (*labels[:at], "N", *labels[at:]))
    return LabelledOp(name, (labels,) * count, labels, whole=(labels[dim],))


def letters(n: int, start: int = 8) -> tuple[str, ...]:
    """Names of n dims: I, J, K, ..."""
    return tuple(LETTERS[(start + i) % 26] for i in range(n))


def dims_of(dim, n: int, every: bool = False) -> tuple[int, ...]:
    """Positions from a dim, several, or None for all of n; of a reduction (`every`) no dims mean all, too."""
    given = (dim,) if isinstance(dim, int) else range(n) if dim is None or (every and not len(dim)) else tuple(dim)
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
    """An equation as torch.einsum and jnp.einsum read it, with letters alone and one or two operands."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or len(terms) > 2 or any(len(set(t)) < len(t) for t in (*terms, right)):
        raise ShardingError(
            f"einsum {equation}: not an equation of one or two operands with an arrow and no letter twice in a term\n"
            f"  fix: write products of more operands one by one"
        )
    return LabelledOp(f"einsum {equation}", tuple(tuple(t.upper()) for t in terms), tuple(right.upper()))


def matmul_op(a: Sizes, b: Sizes) -> LabelledOp:
    """`a @ b`: vectors, matrices, and batches of matrices whose batch dims are equal or only one operand's."""
    batch = max(len(a), len(b)) - 2
    names = LETTERS[: max(0, batch)]
    if len(a) > 2 < len(b) and (len(a) != len(b) or a[:-2] != b[:-2]):
        raise ShardingError(f"matmul: {a} by {b}\n  rule: batch dims are not broadcast here\n  fix: use einsum")
    left = ((names if len(a) > 2 else "") + "YJ")[-len(a) :] if len(a) > 1 else "J"
    right = (names if len(b) > 2 else "") + "JZ" if len(b) > 1 else "J"
    kept = (names if len(a) > 2 or len(b) > 2 else "") + ("Y" if len(a) > 1 else "") + ("Z" if len(b) > 1 else "")
    return LabelledOp("matmul", (tuple(left), tuple(right)), tuple(kept))


def kept(labels, dims, shape: Sizes) -> tuple[str, ...]:
    """The result's labels of a reduction: where dims are kept with size 1, each has a label of its own."""
    if len(shape) == len(labels) and dims:
        return tuple(f"{d}1" if i in dims else d for i, d in enumerate(labels))
    return tuple(d for i, d in enumerate(labels) if i not in dims)


def permuted_labels(name: str, args, kwargs, labels) -> tuple[str, ...]:
    n = len(labels)
    if name == "permute":
        order = kwargs.get("dims", args[1:] if len(args) > 2 or not isinstance(args[-1], (tuple, list)) else args[1])
        return tuple(labels[i % n] for i in order)
    if name in ("t", "T", "numpy_T"):
        return labels[::-1]
    a, b = (-2, -1) if name == "mT" else (argument(args, kwargs, 1, "dim0", 0), argument(args, kwargs, 2, "dim1", 1))
    order = list(range(n))
    if name in ("movedim", "moveaxis"):
        order.insert(b % n, order.pop(a % n))
    else:
        order[a % n], order[b % n] = order[b % n], order[a % n]
    return tuple(labels[i] for i in order)


def indexed(index, labels, shape: Sizes) -> LabelledOp:
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
    return LabelledOp("getitem", (labels,), tuple(output), whole=tuple(whole))


def refuse_unknown(name: str) -> NoReturn:
    raise ShardingError(
        f"{name}: not a function whose sharding is known\n"
        f"  rule: known are einsum, matmul, elementwise functions, reductions, softmax, reshape, transpose, indexing\n"
        f"  fix: write it with these, or in manual mode"
    )
