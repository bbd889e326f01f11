"""The rules of functions of elements, sums, products and joins: (name, args, kwargs, operands, shapes of the results)
-> types of the results, for each kind of the table of ops, and for some ops by name."""

from dataclasses import replace

from torch import Tensor

from scaling.check.alike import (
    RuleBroken,
    dims_left,
    dims_named,
    fill_value,
    meeting_dims,
    met_dim,
    of_nothing,
    once_an_axis,
    partly_alike,
    parts_left,
    refuse_sums,
    split_apart,
    summed_over,
    summed_type,
)
from scaling.check.held import Dim, DimPart, any_dim, axes_along, meeting_dim, name_along, size_along

SUMS = {"sum": "sum", "mean": "mean", "nansum": "sum"}
ORDERS = {"amax": "max", "amin": "min", "max": "max", "min": "min", "any": "max", "all": "min"}


def _linear(name, args, kwargs, operands, shapes):
    (x,) = operands[:1]
    return [replace(x, name="", made="")]


def _adds(name, args, kwargs, operands, shapes):
    if len(operands) == 1 and any(args[1:2]):  # a number other than 0
        refuse_sums(operands, "partial-plus-whole", "a number is added to partial sums, by every device")
    dims = meeting_dims(name, operands, shapes[0])
    if any(x.made == "ring" for x in operands):  # the sums so far: how many are still to come, no type shows
        return [replace(summed_type(dims, None), made="ring")]
    parts, unreduced = "", None
    for i, x in enumerate(operands):
        if x.unreduced is None:
            continue
        if unreduced is not None and unreduced != x.unreduced:
            what = f"{name} of {operands[0]} and {operands[-1]}"
            raise RuleBroken("partial-plus-whole", what, i if x.unreduced else 0)
        unreduced, parts = x.unreduced, x.parts
    if parts in ("max", "min") and len(operands) == 2 and all(x.unreduced for x in operands):
        raise RuleBroken("nonlinear", f"{name} of parts of a maximum", 0)
    return [summed_type(dims, unreduced, parts)]


def _multiplies(name, args, kwargs, operands, shapes):
    dims = meeting_dims(name, operands, shapes[0])
    partial = [x for x in operands if x.unreduced]
    if len(partial) > 1:
        raise RuleBroken("product-of-sums", f"{name} of {operands[0]} and {operands[1]}", 0)
    zero = any(x.unreduced is None for x in operands)
    unreduced = partial[0].unreduced if partial else None if zero else frozenset()
    return [summed_type(dims, unreduced, partial[0].parts if partial else "")]


def _divides(name, args, kwargs, operands, shapes):
    if len(operands) > 1 or not isinstance(args[0], Tensor):
        refuse_sums(operands[1 if len(operands) > 1 else 0 :], "nonlinear", f"{name} by partial sums")
    dims = meeting_dims(name, operands, shapes[0])
    return [summed_type(dims, operands[0].unreduced, operands[0].parts)]


def _nonlinear(name, args, kwargs, operands, shapes):
    if name == "where" and len(operands) == 3:
        refuse_sums(operands[:1], "nonlinear", "partial sums decide")
        found = _adds(name, args, kwargs, operands[1:], shapes)
        return [replace(found[0], dims=meeting_dims(name, operands, shapes[0]))]
    if name == "masked_fill" and not fill_value(args, 2):
        refuse_sums(operands[1:2], "nonlinear", "partial sums decide")
        return [summed_type(meeting_dims(name, operands, shapes[0]), operands[0].unreduced, operands[0].parts)]
    linear_in = 1 if name.endswith("_backward") else 0
    refuse_sums(operands[linear_in:], "nonlinear", f"{name} of {{}}")
    dims = meeting_dims(name, operands, shapes[0])
    return [summed_type(dims, operands[0].unreduced if linear_in else frozenset())]


def _sums(name, args, kwargs, operands, shapes):
    (x,), gone = operands[:1], dims_named(args, kwargs, operands[0])
    return [
        summed_type(dims_left(x, gone, shapes[0]), summed_over(x, gone), parts_left(x, gone, SUMS.get(name, "sum")))
    ]


def _reduces(name, args, kwargs, operands, shapes):
    x, gone = operands[0], dims_named(args, kwargs, operands[0])
    how = ORDERS.get(name, "")
    if x.unreduced and x.parts != how:
        refuse_sums(operands, "nonlinear", f"{name} of {{}}")
    if not how and summed_over(x, gone):
        axes = summed_over(x, gone) or frozenset()
        if axes - (x.unreduced or frozenset()):
            raise RuleBroken(
                "split", f"{name} over a dim that is split over {', '.join(sorted(axes))}", 0, "all_gather it first"
            )
    found = summed_type(dims_left(x, gone, shapes[0]), summed_over(x, gone), parts_left(x, gone, how))
    return [found, *(of_nothing(shape) for shape in shapes[1:])]


def _contracts(name, args, kwargs, operands, shapes):
    a, b = operands[:2]
    if len([x for x in (a, b) if x.unreduced]) > 1:
        raise RuleBroken("product-of-sums", f"{name} of {a} and {b}", 0)
    k = a.dims[-1]
    l = b.dims[-2] if len(b.dims) > 1 else b.dims[-1]
    if (met := meeting_dim(k, l)) is None:
        raise RuleBroken("split", f"{name} of {a} and {b}: {split_apart(k, l)}", 0, "all_gather one of them first")
    batch = (
        [meeting_dim(p, q) or p for p, q in zip(a.dims[:-2], b.dims[:-2], strict=False)]
        if len(a.dims) == len(b.dims)
        else []
    )
    batch = [tuple(piece._replace(name=None) for piece in dim) for dim in batch]
    dims = [*batch, *([a.dims[-2]] if len(a.dims) > 1 else []), *([b.dims[-1]] if len(b.dims) > 1 else [])]
    old = (a.unreduced or frozenset()) | (b.unreduced or frozenset())
    axes = frozenset(axes_along(met) or ())
    parts = next((x.parts for x in (a, b) if x.unreduced), "") or ("sum" if axes else "")
    zero = None in (a.unreduced, b.unreduced) or (axes_along(met) is None and size_along(met) > 1)
    return [once_an_axis(name, summed_type(tuple(dims), None if zero else old | axes, parts), a, b)]


def _fuses(name, args, kwargs, operands, shapes):
    if name == "linear":  # x W^T + b
        x, W, *bias = operands
        turned = replace(W, dims=(*W.dims[:-2], W.dims[-1], *W.dims[-2:-1]))
        found = _contracts(name, args, kwargs, [replace(x, dims=x.dims[-2:]), turned], shapes)
        found = [replace(found[0], dims=(*x.dims[:-2], *found[0].dims))]
        return _adds(name, args, kwargs, [*bias, *found], shapes) if bias else found
    (product,) = _contracts(name, args, kwargs, operands[1:], shapes)
    return _adds(name, args, kwargs, [operands[0], product], shapes)


def _scans(name, args, kwargs, operands, shapes):
    x = operands[0]
    if tuple(map(size_along, x.dims)) == shapes[0]:
        at = args[1] if name in ("cumsum", "flip") and len(args) > 1 else ()
        for i in (at,) if isinstance(at, int) else at if isinstance(at, (list, tuple)) else ():
            if axes := axes_along(x.dims[i]):
                raise RuleBroken(
                    "split", f"{name} along a dim that is split over {', '.join(axes)}", 0, "all_gather it first"
                )
        return [replace(x, name="")]
    dims = tuple(d if size_along(d) == n else any_dim(n) for d, n in zip(x.dims, shapes[0], strict=False))
    return [summed_type(dims if len(dims) == len(shapes[0]) else tuple(map(any_dim, shapes[0])), x.unreduced, x.parts)]


def _along(name, args, kwargs, operands, shapes):
    refuse_sums(operands, "nonlinear", f"{name} of {{}}")
    at = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
    if axes := axes_along(operands[0].dims[at]):
        what = f"{name} along a dim that is split over {', '.join(axes)}"
        raise RuleBroken("split", what, 0, "all_gather it first")
    return [replace(operands[0], name="", unreduced=frozenset(), parts="")]


def _joins(name, args, kwargs, operands, shapes):
    at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(shapes[0])
    sizes = [x for x in operands if len(x.dims) == len(shapes[0])]  # an empty list of rows has one dim
    dims: list[Dim] = [any_dim(n) for n in shapes[0]]
    for x in sizes:
        for i, dim in enumerate(x.dims):
            if i != at:
                dims[i] = met_dim(name, dims[i], dim, x)
    own = [x.dims[at] for x in sizes]
    if all(len(d) == 1 for d in own) and len({axes_along(d) for d in own}) == 1:
        names = {name_along(d) for d in own}
        dims[at] = (DimPart(shapes[0][at], names.pop() if len(names) == 1 else None, axes_along(own[0])),)
        if axes_along(own[0]) and len({size_along(d) for d in own}) == 1 and len(own) > 1:
            dims[at] = (DimPart(len(own)), *own[0])  # blocks below each other
    known = [x for x in operands if x.unreduced is not None]
    if len({x.unreduced for x in known}) > 1:
        raise RuleBroken("partial-plus-whole", f"{name} of {', '.join(map(str, operands))}", 0)
    return [summed_type(tuple(dims), known[0].unreduced if known else None, known[0].parts if known else "")]


def _orders(name, args, kwargs, operands, shapes):
    refuse_sums(operands, "nonlinear", f"{name} of {{}}")
    return [partly_alike(operands[0], shape) for shape in shapes]


def _softmax_backward(name, args, kwargs, operands, shapes):
    refuse_sums(operands[1:], "nonlinear", f"{name} of {{}}")
    return [summed_type(meeting_dims(name, operands, shapes[0]), operands[0].unreduced, operands[0].parts)]


def _norm(name, args, kwargs, operands, shapes):
    refuse_sums(operands, "nonlinear", f"{name} of {{}}")
    x = operands[0]
    given = args[2] if len(args) > 2 else None
    gone = [i % len(x.dims) for i in given] if given else range(len(x.dims))
    axes = {axis for i in gone for axis in axes_along(x.dims[i]) or ()}
    if axes:
        raise RuleBroken(
            "split",
            f"a norm over dims that are split over {', '.join(sorted(axes))}",
            0,
            "sum the squares, all_reduce, then sqrt",
        )
    return [summed_type(dims_left(x, list(gone), shapes[0]), frozenset())]


def _lerp(name, args, kwargs, operands, shapes):
    if len(operands) == 2:
        return _adds(name, args, kwargs, operands, shapes)
    return _nonlinear(name, args, kwargs, operands, shapes)


def _addcmul(name, args, kwargs, operands, shapes):
    product = (_multiplies if "mul" in name else _divides)(name, args, kwargs, operands[1:], shapes)
    return _adds(name, args, kwargs, [operands[0], *product], shapes)


BY_KIND = {
    "adds": _adds,
    "multiplies": _multiplies,
    "divides": _divides,
    "linear": _linear,
    "nonlinear": _nonlinear,
    "sums": _sums,
    "reduces": _reduces,
    "contracts": _contracts,
    "fuses": _fuses,
    "scans": _scans,
    "along": _along,
    "joins": _joins,
    "orders": _orders,
}
BY_NAME = {
    "softmax_backward_data": _softmax_backward,
    "log_softmax_backward_data": _softmax_backward,
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "max": _reduces,
    "min": _reduces,
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcmul,
    "logaddexp": _nonlinear,
    "frexp": _orders,
    "ldexp": _nonlinear,
}
