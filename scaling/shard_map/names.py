"""JAX's collectives under JAX's names, for use inside `shard_map`: `psum(x, "Y")`, `axis_index("X")` ...

x is a tensor or a tree of tensors, `axis_name` an axis or a tuple of axes of the mesh, the first the major one. A value
that does not vary over an axis becomes varying first (a psum then multiplies by the axis's size), as in JAX.
"""

import math
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import optree
import torch
from torch import Tensor

from scaling.collectives.calls import pairs_of
from scaling.shard_map.calls import Bound, Call, apply_typed, index_of
from scaling.shard_map.types import described_type, marked, marks, vary, varying
from scaling.spec import ShardingError
from scaling.spec.sizes import format_sizes

AxisNames = str | Sequence[str]
CASTS = {
    "varying": ("invariant", "reduced"),
    "reduced": ("invariant",),
    "unreduced": ("varying",),
}  # {to: the types from which it may come}
NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16)  # dtypes whose sums may overflow
bound_here: ContextVar[Bound] = ContextVar("the mesh of the shard_map under way")


def psum(x: Any, axis_name: AxisNames) -> Any:
    """Sum over the devices along the axes: varying or unreduced -> invariant. Transposes to pvary."""
    return _combined("psum", reducible, x, axis_name)


def pmean(x: Any, axis_name: AxisNames) -> Any:
    """Average over the devices along the axes: a psum, divided by their number."""
    bound, axes = bound_axes("pmean", axis_name)
    wide = each(lambda leaf: leaf.to(torch.int32) if leaf.dtype in NARROW else leaf, x)
    return each(lambda leaf: leaf / bound.mesh.size(axes), psum(wide, axis_name))


def pmax(x: Any, axis_name: AxisNames) -> Any:
    """Take the greatest of the devices' elements: varying -> invariant. It has no derivative, as in JAX."""
    return _combined("pmax", comparable, x, axis_name)


def pmin(x: Any, axis_name: AxisNames) -> Any:
    """Take the least of the devices' elements: varying -> invariant. It has no derivative, as in JAX."""
    return _combined("pmin", comparable, x, axis_name)


def _combined(kind: str, ready, x: Any, axis_name: AxisNames) -> Any:
    """Combine the values of all devices along the axes into one; `ready` prepares each leaf of x, or refuses it."""
    bound, axes = bound_axes(kind, axis_name)
    return each(lambda leaf: collected(ready(kind, leaf, axes, bound), bound, Call(kind, axes)), x) if axes else x


def psum_scatter(x: Any, axis_name: AxisNames, *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """Sum over the devices, and keep one block of `scatter_dimension` on each: varying or unreduced -> varying.

    Without `tiled` the dim has the size of the axes, and is dropped. Transposes to all_gather.
    """
    bound, axes = bound_axes("psum_scatter", axis_name)

    def of(leaf: Tensor) -> Tensor:
        dim = check_dim("psum_scatter", scatter_dimension, leaf.dim())
        check_divides("psum_scatter", leaf, dim, axes, bound, tiled)
        y = collected(reducible("psum_scatter", leaf, axes, bound), bound, Call("psum_scatter", axes, dim))
        return y if tiled else y.squeeze(dim)

    return each(of, x) if axes else x


def all_gather(x: Any, axis_name: AxisNames, *, axis: int = 0, tiled: bool = False, to: str = "varying") -> Any:
    """Gather all devices' x, concatenated in dim `axis` (`tiled`), or stacked in a new dim there.

    All devices hold equal values, and `to` says how these are typed, as in JAX. The transpose follows from it: for
    "varying" it is psum_scatter, for "invarying" each device's slice, and for "reduced" the psum_scatter of unreduced
    cotangents.
    """
    bound, axes = bound_axes("all_gather", axis_name)
    if to not in ("varying", "invarying", "reduced"):
        rule = "the result is typed varying, invarying or reduced"
        raise ShardingError(f"all_gather(to={to!r})\n  rule: {rule}\n  fix: give one of these")
    kind = "gather" if to == "invarying" else "all_gather"

    def of(leaf: Tensor) -> Tensor:
        if to == "reduced" and not {*axes} <= varying(leaf, bound):
            raise ShardingError(
                f'all_gather over {", ".join(axes)} of {described_type(leaf, bound)}, to="reduced"\n'
                "  rule: what is gathered as reduced varies over the axes\n"
                '  fix: pcast(x, ..., to="reduced") of what is invariant'
            )
        leaf = entering("all_gather", leaf, axes, bound)
        dim = check_dim("all_gather", axis, leaf.dim() + (not tiled))
        y = collected(leaf if tiled else leaf.unsqueeze(dim), bound, Call(kind, axes, dim))
        return marked(y, marks(y)._replace(reduced=marks(y).reduced | {*axes})) if to == "reduced" else y

    return each(of, x) if axes else x


def all_to_all(x: Any, axis_name: AxisNames, split_axis: int, concat_axis: int, *, tiled: bool = False) -> Any:
    """Send block j of dim `split_axis` to device j, and concatenate the received blocks in dim `concat_axis`.

    Without `tiled`, `split_axis` has the size of the axes and is dropped, and a new dim is inserted at `concat_axis`.
    varying -> varying. The transpose sends everything back.
    """
    bound, axes = bound_axes("all_to_all", axis_name)

    def of(leaf: Tensor) -> Tensor:
        cut, put = check_dim("all_to_all", split_axis, leaf.dim()), check_dim("all_to_all", concat_axis, leaf.dim())
        check_divides("all_to_all", leaf, cut, axes, bound, tiled)
        leaf = entering("all_to_all", leaf, axes, bound)
        if not tiled:
            leaf, cut = leaf.movedim(cut, put), put
        return collected(leaf, bound, Call("all_to_all", axes, put, cut))

    return each(of, x)


def ppermute(x: Any, axis_name: AxisNames, perm: Sequence[tuple[int, int]]) -> Any:
    """Send x from source to target for each pair: varying -> varying. The transpose sends it back.

    A device that receives nothing has zeros. As in JAX, the mesh's first axis is the major one, however they are named.
    """
    bound, axes = bound_axes("ppermute", axis_name)
    axes = tuple(axis for axis in bound.mesh.sizes if axis in axes)
    n, pairs = bound.mesh.size(axes), pairs_of("ppermute", perm)
    sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
    if len({*sources}) < len(pairs) or len({*targets}) < len(pairs) or not {*sources, *targets} <= {*range(n)}:
        raise ShardingError(
            f"ppermute over {', '.join(axes)} of size {n}: {pairs}\n  rule: each device sends to one other at most, "
            f"and receives from one at most\n  fix: pairs (source, target) of different numbers in 0..{n - 1}"
        )
    call = Call("ppermute", axes, pairs=pairs)
    return each(lambda leaf: collected(entering("ppermute", leaf, axes, bound), bound, call), x)


def axis_index(axis_name: AxisNames) -> Tensor:
    """Return this device's index along the axes, the first axis the major one: int64[], varying over them."""
    bound, axes = bound_axes("axis_index", axis_name)
    return index_of([bound.places[list(bound.mesh.sizes).index(a)] for a in axes], [bound.mesh.sizes[a] for a in axes])


def axis_size(axis_name: AxisNames) -> int:
    """Return the number of devices along the axes."""
    bound, axes = bound_axes("axis_size", axis_name)
    return math.prod(bound.mesh.sizes[axis] for axis in axes)


def pvary(x: Any, axis_name: AxisNames) -> Any:
    """Make x varying: invariant -> varying. Nothing is sent, and the cotangent is summed (psum)."""
    return pcast(x, axis_name, to="varying")


def pcast(x: Any, axis_name: AxisNames, *, to: str) -> Any:
    """Change the type and keep the values: invariant to varying or reduced, reduced to varying, varying to unreduced.

    The first two transpose to psum (of an unreduced cotangent for the second), the last two to each other.
    """
    bound, axes = bound_axes("pcast", axis_name)

    def of(leaf: Tensor) -> Tensor:
        found, kinds = marks(leaf), {kind_over(leaf, axis, bound) for axis in axes}
        if len(kinds) > 1 or not kinds <= {*CASTS.get(to, ())}:
            raise ShardingError(
                f"pcast(x, {axes}, to={to!r}): x is {described_type(leaf, bound)}\n"
                "  rule: over all the axes, what is invariant becomes varying or reduced, what is reduced varying, and "
                "what varies unreduced\n  fix: name other axes, or give to= one of these"
            )
        after = found.without(axes)
        after = after._replace(**{to: getattr(after, to) | {*axes}}) if to != "varying" else after
        return marked(vary(leaf, axes, bound), after)

    return each(of, x) if axes else x


def kind_over(x: Tensor, axis: str, bound: Bound) -> str:
    """Return the type of x over an axis: invariant, varying, unreduced or reduced."""
    kinds = {**marks(x)._asdict(), "varying": varying(x, bound)}
    return next((kind for kind, axes in kinds.items() if axis in axes), "invariant")


def vma(x: Tensor) -> frozenset[str]:
    """Return the mesh axes over which x varies: JAX's `typeof(x).vma`."""
    return varying(x, bound_axes("vma", ())[0]) - marks(x).axes


def dynamic_slice_in_dim(operand: Tensor, start_index: "int | Tensor", slice_size: int, axis: int = 0) -> Tensor:
    """Take a slice of a dim from `start_index` on, which may differ by device and is clamped to fit, as in JAX."""
    axis = check_dim("dynamic_slice_in_dim", axis, operand.dim())
    last = operand.shape[axis] - slice_size if type(slice_size) is int and slice_size >= 0 else -1
    start = torch.as_tensor(start_index, device=operand.device) if isinstance(start_index, (int, Tensor)) else None
    if last < 0 or start is None or start.dim() or start.is_floating_point() or start.dtype == torch.bool:
        raise ShardingError(
            f"dynamic_slice_in_dim(x, {start_index!r:.60}, {slice_size!r}) of a dim of size {operand.shape[axis]}\n"
            "  rule: a slice of a fixed size, from a place that is a whole number on\n"
            f"  fix: give an int64[] and a size of 0..{operand.shape[axis]}"
        )
    start = start.clamp(0, last)
    return operand.index_select(axis, start + torch.arange(slice_size, device=operand.device))


def bound_axes(name: str, axis_name: AxisNames) -> tuple[Bound, tuple[str, ...]]:
    """Return the mesh bound for the running call, and the axes that the caller names."""
    bound = bound_here.get(None)
    if bound is None:
        rule = "a mesh is bound inside shard_map(fn, ...) alone"
        raise ShardingError(f"{name} outside of shard_map\n  rule: {rule}\n  fix: call it in a function that is mapped")
    axes: tuple[Any, ...] = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if unknown := [axis for axis in axes if axis not in bound.mesh.sizes]:
        has = format_sizes(bound.mesh.sizes)
        raise ShardingError(f"{name}: unknown mesh axis {unknown[0]}: the mesh has {has}\n  fix: name axes of the mesh")
    if len({*axes}) < len(axes):
        raise ShardingError(f"{name} over {', '.join(axes)}\n  rule: an axis is named once\n  fix: leave one out")
    return bound, axes


def each(of, tree: Any) -> Any:
    """Apply `of` to each tensor of a tree; numbers become tensors."""
    return optree.tree_map(lambda leaf: of(tensor_of(leaf)), tree)


def entering(name: str, x: Tensor, axes: tuple[str, ...], bound: Bound) -> Tensor:
    """Return x, varying over all the axes; refuse partial sums and reduced values."""
    if marks(x).axes & {*axes}:
        raise ShardingError(
            f"{name} over {', '.join(axes)} of {described_type(x, bound)}\n  rule: partial sums are reduced first, and "
            "what is reduced becomes varying\n  fix: psum or psum_scatter; or pcast(x, ..., to='varying')"
        )
    return vary(x, axes, bound)


def reducible(name: str, x: Tensor, axes: tuple[str, ...], bound: Bound) -> Tensor:
    """Return x, ready to be summed over the axes: bools as int32."""
    if x.is_floating_point() and x.dtype.itemsize == 1:
        raise ShardingError(f"{name} of {x.dtype}\n  rule: {x.dtype} is not added up\n  fix: convert it, .float()")
    x = x.to(torch.int32) if x.dtype == torch.bool else x
    kinds = {kind_over(x, axis, bound) for axis in axes}
    if len(kinds) > 1 or "reduced" in kinds:
        raise ShardingError(
            f"{name} over {', '.join(axes)} of {described_type(x, bound)}\n"
            "  rule: what is summed is of one type over all the axes: varying, unreduced or invariant\n"
            f"  fix: name only the axes over which it varies, or make it varying first: pvary(x, ...)"
        )
    return vary(x, axes, bound)


def comparable(name: str, x: Tensor, axes: tuple[str, ...], bound: Bound) -> Tensor:
    """Return x, ready for the greatest or least along the axes: varying over them, and not a sum over others."""
    if x.is_complex() or (x.is_floating_point() and x.dtype.itemsize == 1):
        raise ShardingError(f"{name} of {x.dtype}\n  rule: {x.dtype} is not compared\n  fix: convert it to floats")
    return entering(name, x, (*axes, *marks(x).unreduced), bound)


def collected(x: Tensor, bound: Bound, call: Call) -> Tensor:
    """Run a collective on x, and keep the marks that x has over the axes that the collective does not use."""
    return marked(apply_typed(x, bound, call), marks(x).without(call.axes))


def tensor_of(leaf: Any) -> Tensor:
    """Return a number or a numpy array as a tensor, and a tensor unchanged; raise ShardingError for other values."""
    try:
        x = leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf)
    except (TypeError, ValueError, RuntimeError):
        x = None
    if x is None or x.layout is not torch.strided:
        kind = type(leaf).__name__ if x is None else x.layout
        raise ShardingError(f"shard_map: {leaf!r:.60}: a {kind}\n  rule: values are dense tensors\n  fix: convert it")
    return x


def check_dim(name: str, dim: int, dims: int) -> int:
    """Return a dim counted from 0; raise ShardingError if there is no such dim."""
    if not isinstance(dim, int) or not -dims <= dim < dims:
        raise ShardingError(f"{name}: there is no dim {dim!r} among {dims}\n  fix: give an int of {-dims}..{dims - 1}")
    return dim % dims


def check_divides(name: str, x: Tensor, dim: int, axes: tuple[str, ...], bound: Bound, tiled: bool) -> None:
    """Raise ShardingError unless a dim can be cut into a block for each device."""
    n = bound.mesh.size(axes)
    if x.shape[dim] % n if tiled else x.shape[dim] != n:
        wanted = f"a multiple of {n}" if tiled else f"{n}, or tiled=True"
        raise ShardingError(
            f"{name} over {', '.join(axes)}: dim {dim} has size {x.shape[dim]}\n"
            f"  rule: it is cut into {n} blocks, one for each device\n  fix: make it {wanted}"
        )
