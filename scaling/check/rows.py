"""The rules of functions that take rows, write them, or put dims in another shape; and of attention."""

from dataclasses import replace

from scaling.check.alike import (
    RuleBroken,
    of_nothing,
    partly_alike,
    parts_left,
    refuse_sums,
    summed_over,
    summed_type,
)
from scaling.check.held import DimPart, HeldType, any_dim, axes_along, meeting_dim, size_along


def _takes(name, args, kwargs, operands, shapes):
    """Rows by number: what stands there is taken to be what the next line says."""
    x, index = operands[0], operands[1:]
    refuse_sums(index, "nonlinear", "partial sums decide")
    if name == "index_select":
        at = args[1] % len(x.dims)
        before, taken, after = x.dims[:at], index[0].dims, x.dims[at + 1 :]
        gone = [x.dims[at]]
    elif name == "index":
        gone = [dim for dim, i in zip(x.dims, args[1], strict=False) if i is not None]
        at = next(i for i, each in enumerate(args[1]) if each is not None)
        widest = max(index, key=lambda i: len(i.dims), default=None)
        taken = widest.dims if widest else ()
        before = tuple(d for d, i in zip(x.dims[:at], args[1][:at], strict=True) if i is None)
        after = tuple(d for n, d in enumerate(x.dims) if n >= at and (n >= len(args[1]) or args[1][n] is None))
    else:
        return [partly_alike(x, shapes[0])]
    dims = (*before, *taken, *after)
    if tuple(map(size_along, dims)) != shapes[0]:
        return [summed_type(tuple(map(any_dim, shapes[0])), x.unreduced, x.parts)]
    split = any(axes_along(dim) for dim in gone)
    return [summed_type(dims, None if split and not x.unreduced else x.unreduced, x.parts)]


def _permutes(name, args, kwargs, operands, shapes):
    return [partly_alike(operands[0], shapes[0])]


def _reshapes(name, args, kwargs, operands, shapes):
    """One that copies: the memory of the operand is read as if it were contiguous."""
    pieces = [piece for dim in operands[0].dims for piece in dim]
    dims, left = [], list(pieces)
    for n in shapes[0]:
        taken, have = [], 1
        while have < n and left and n % (have * left[0].size) == 0:
            piece = left.pop(0)
            if piece.size > 1:
                taken.append(piece)
            have *= piece.size
        if have < n and left and left[0].size % (n // have) == 0 and not taken:
            first = left.pop(0)
            taken.append(DimPart(n, None, first.axes))
            left.insert(0, DimPart(first.size // n, None, None if first.axes is None else ()))
            have = n
        if have != n:
            return [summed_type(tuple(map(any_dim, shapes[0])), operands[0].unreduced, operands[0].parts)]
        dims.append(tuple(taken) or any_dim(n))
    return [summed_type(tuple(dims), operands[0].unreduced, operands[0].parts)]


def attention_type(name, operands, shapes):
    refuse_sums(operands if "backward" not in name else operands[1:4], "nonlinear", "attention of {}")
    if "backward" not in name:
        Q = operands[0]
        found = []
        for shape in shapes:
            dims = Q.dims[: len(shape)] if len(shape) >= 3 else ()
            found.append(
                summed_type(dims if tuple(map(size_along, dims)) == shape else tuple(map(any_dim, shape)), frozenset())
            )
        return found
    dO, Q, K, V = operands[:4]
    rows, keys = frozenset(axes_along(Q.dims[2]) or ()), frozenset(axes_along(K.dims[2]) or ())
    old = dO.unreduced or frozenset()
    return [summed_type(x.dims, old | more, "sum") for x, more in ((Q, keys), (K, rows), (V, rows))]


def _embedding(name, args, kwargs, operands, shapes):
    W, ids = operands[:2]
    split = axes_along(W.dims[0])
    found = summed_type((*ids.dims, *W.dims[1:]), None if split else W.unreduced, W.parts)
    return [replace(found, through="a look-up in a table that is split") if split else found]


def _embedding_back(name, args, kwargs, operands, shapes):
    dx, _ids = operands[:2]
    axes = frozenset(axis for dim in dx.dims[:-1] for axis in axes_along(dim) or ())
    unreduced = None if dx.unreduced is None else dx.unreduced | axes
    return [summed_type((any_dim(shapes[0][0]), dx.dims[-1]), unreduced, "sum")]


def _nll_loss(name, args, kwargs, operands, shapes):
    """Minus the log-probabilities of the targets, of classes in dim 1; over the rows not at all, a mean or a sum."""
    x, rows = operands[0], [i for i in range(len(operands[0].dims)) if i != 1]
    if axes := axes_along(x.dims[1]):
        what = f"{name} of classes that are split over {', '.join(axes)}"
        raise RuleBroken("split", what, 0, "all_gather them, or mask what other devices have, and reduce")
    refuse_sums(operands[1:], "nonlinear", "partial sums decide")
    how = {1: "mean", 2: "sum"}.get(args[3], "")
    if how:
        found = summed_type((), summed_over(x, rows), parts_left(x, rows, how))
    else:
        found = summed_type(tuple(x.dims[i] for i in rows), x.unreduced, x.parts)
    return [found, *(of_nothing(shape) for shape in shapes[1:])]


def _nll_loss_backward(name, args, kwargs, operands, shapes):
    dL, x = operands[:2]
    return [summed_type(x.dims, dL.unreduced, dL.parts)]


def _gather(name, args, kwargs, operands, shapes):
    x, index = operands[:2]
    at = args[1] % len(x.dims)
    dims = tuple(
        i if n == at else meeting_dim(d, i) or i for n, (d, i) in enumerate(zip(x.dims, index.dims, strict=True))
    )
    return [summed_type(dims, None if axes_along(x.dims[at]) else x.unreduced, x.parts)]


def _grows(name, args, kwargs, operands, shapes):
    """The cotangent of a view of a part: the part in its place among zeros."""
    return [partly_alike(operands[0], shapes[0])]


def axes_known(x: HeldType) -> bool:
    return all(axes_along(dim) is not None for dim in x.dims)


def _scatter(name, args, kwargs, operands, shapes):
    """Rows written or added by number."""
    x, source = operands[0], operands[-1]
    rows = frozenset(axis for dim in operands[1].dims for axis in axes_along(dim) or ())
    kept = {axis for dim in x.dims for axis in axes_along(dim) or ()}
    anywhere = any(axes_along(dim) is None and size_along(dim) > 1 for dim in operands[1].dims)
    unreduced = None if source.unreduced is None or rows - kept or anywhere else source.unreduced
    if x.unreduced is not None and x.made != "of nothing" and x.unreduced != unreduced:
        raise RuleBroken("partial-plus-whole", f"{name} of {source} into {x}", 0)
    return [summed_type(x.dims if axes_known(x) else tuple(map(any_dim, shapes[0])), unreduced, "sum")]


BY_KIND_OF_ROWS = {"takes": _takes, "permutes": _permutes, "reshapes": _reshapes}
BY_NAME_OF_ROWS = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_back,
    "gather": _gather,
    "nll_loss_forward": _nll_loss,
    "nll_loss2d_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "nll_loss2d_backward": _nll_loss_backward,
    "select_backward": _grows,
    "slice_backward": _grows,
    "index_put": _scatter,
    "index_add": _scatter,
    "scatter_add": _scatter,
    "scatter": _scatter,
    "index_copy": _scatter,
    "unsafe_index": _takes,
    "select_scatter": _grows,
    "slice_scatter": _grows,
}
