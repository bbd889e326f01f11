"""What an update refuses: trees that do not belong together, partial sums, donated tensors that share memory."""

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives.buffers import extent, overlap, overlaps_itself
from scaling.collectives.torch_private import constant
from scaling.spec import ShardingError, parse


def refuse_partial(where: str, spec) -> None:
    if parse(spec).unreduced:
        reduced = parse(spec).with_unreduced(())
        what = "each rank holds a partial sum, and neither their norms nor their updates add up"
        raise ShardingError(f"{where}: {parse(spec)} is unreduced: {what}\n  fix: reduce it to {reduced} first")


def check_reduced(grads, specs, mesh) -> None:
    """ShardingError, naming the leaf, unless the gradients have these types, none of them unreduced."""
    if torch.compiler.is_compiling():
        _check_constant_specs(specs, None if mesh is None else dict(mesh.sizes))
        return
    for where, grad, spec in tree.paired(grads, specs, "grads"):
        refuse_partial(where, spec)
        if mesh is not None:
            spec.check_axes(mesh)
        if grad.dim() != len(spec.dims):
            raise ShardingError(f"{where}: {spec} has {len(spec.dims)} dims, but the gradient {tuple(grad.shape)}")


@constant
def _check_constant_specs(specs, sizes) -> None:
    for where, spec in tree.named_leaves(specs, "grads").items():
        refuse_partial(where, spec)
        if sizes is not None:
            parse(spec).check_axes(sizes)


def check_like(found, params, what: str) -> None:
    """ValueError that names the leaf at which a tree is not like `params`, in names and in shapes."""
    pairs = zip(tree.leaves(found), tree.leaves(params), strict=False)
    if tree.same_structure(found, params) and all(g.shape == p.shape for g, p in pairs):
        return
    found, wanted = tree.named_leaves(found, what), tree.named_leaves(params, what)
    for where in wanted | found:
        g, p = (tuple(side[where].shape) if where in side else "nothing" for side in (found, wanted))
        if g != p:
            raise ValueError(f"{where} has shape {g}, its param {p}\n  fix: give what belongs to these params")


def check_apart(params, state, grads) -> None:
    """ValueError if two leaves that are to be written share memory, as tied params do, or if one is read as well."""
    written = tree.named_leaves(params, "params") | tree.named_leaves(state, "state")
    read = tree.named_leaves(grads, "grads")
    for where, x in written.items():
        if not x.is_contiguous() and overlaps_itself(x):
            raise ValueError(f"{where}: elements share their memory: it cannot be donated\n  fix: give a copy of it")
    every = [(x.data_ptr(), where, x) for where, x in (written | read).items() if x.numel() and not x.is_meta]
    begun: list[tuple] = []  # of those that start before x, the ones that end after its start
    for start, where, x in sorted(every, key=lambda one: one[0]):
        begun = [one for one in begun if one[0] > start]
        for _, other, y in begun:
            if (where in written or other in written) and overlap(x, y):
                what = "donated, one would be written over while the other is read or updated"
                fix = "keep one leaf of tied params, or donate=False"
                raise ValueError(f"{other} and {where} share memory: {what}\n  fix: {fix}")
        begun.append((start + extent(x), where, x))


def at_least_zero(**values: "float | Tensor") -> None:
    for name, value in values.items():
        if not value >= 0:  # nor NaN
            raise ValueError(f"{name} must be at least 0; got {value}")
