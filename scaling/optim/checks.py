"""Check an update's arguments: refuse unlike trees, partial sums, and donated tensors that share memory."""

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives.operands import extent, overlap, overlaps_itself
from scaling.common.torch_private import constant
from scaling.spec import ShardingError, parse


def refuse_partial(where: str, spec) -> None:
    """Raise ShardingError, which names the leaf, if its type is unreduced."""
    if parse(spec).unreduced:
        reduced = parse(spec).with_unreduced(())
        what = "each rank holds a partial sum, and neither their norms nor their updates add up"
        raise ShardingError(f"{where}: {parse(spec)} is unreduced: {what}\n  fix: reduce it to {reduced} first")


def check_reduced(grads, specs, mesh) -> None:
    """Raise ShardingError, which names the leaf, unless the gradients have these types and none is unreduced."""
    if torch.compiler.is_compiling():
        _check_constant_specs(specs, None if mesh is None else dict(mesh.sizes))
        return
    for where, grad, spec in tree.paired(grads, specs, "grads"):
        refuse_partial(where, spec)
        if mesh is not None:
            spec.check_axes(mesh)
        if grad.dim() != len(spec.dims):
            what = f"{where}: {spec} has {len(spec.dims)} dims, but the gradient {tuple(grad.shape)}"
            raise ShardingError(f"{what}\n  fix: give each gradient its own type")


@constant
def _check_constant_specs(specs, sizes) -> None:
    for where, spec in tree.named_leaves(specs, "grads").items():
        refuse_partial(where, spec)
        if sizes is not None:
            parse(spec).check_axes(sizes)


def check_like(params, **trees) -> None:
    """Raise ValueError, which names the leaf, if one of these trees is not like `params` or has other than floats.

    Names, shapes and devices must be equal. Without this check torch would cast the values silently, and copy from a
    meta tensor, which has no values.
    """
    places = _places if torch.compiler.is_compiling() else tree.structure
    (wanted, device), shape = _kinds(params, "params"), places(params)
    for what, found in trees.items():
        if _kinds(found, what) != (wanted, device) or places(found) != shape:
            _refuse_unlike(found, params, what)


def _kinds(part, what: str) -> tuple[list, list]:
    """Return the shapes and the devices of a tree's leaves, which must be tensors of floats."""
    tree.check_floats(part, what)
    leaves = tree.leaves(part)
    return [leaf.shape for leaf in leaves], [leaf.device for leaf in leaves]


def _places(part):
    """Return a tree's structure without its leaves, by plain Python that torch.compile can trace."""
    if isinstance(part, dict):
        return {key: _places(value) for key, value in part.items()}
    return [_places(value) for value in part] if isinstance(part, (list, tuple)) else None


def _refuse_unlike(found, params, what: str) -> None:
    """Raise the error, unless only the kinds of nodes differ, such as a list and a tuple."""
    found, wanted = tree.named_leaves(found, what), tree.named_leaves(params, what)
    for where in wanted | found:
        g, p = (tuple(side[where].shape) if where in side else "nothing" for side in (found, wanted))
        if g != p:
            raise ValueError(
                f"{where} has shape {g}, its param {p}\n  fix: give gradients and a state made for these params"
            )
        device, target = found[where].device, wanted[where].device
        if device != target:
            raise ValueError(f"{where} is on {device}, its param on {target}\n  fix: move it, .to({str(target)!r})")


def check_apart(params, state, grads) -> None:
    """Raise ValueError, which names the leaves, if a leaf that will be written shares memory with another leaf.

    Tied params do. Gradients, which are only read, may share theirs with each other.
    """
    written = len(tree.leaves((params, state)))
    leaves = tree.leaves((params, state, grads))
    if not written or leaves[0].is_meta:
        return

    def name(i: int) -> str:
        trees = {"params": params, "state": state, "grads": grads}
        return [where for what, part in trees.items() for where in tree.named_leaves(part, what)][i]

    spans = []
    for i, x in enumerate(leaves):
        whole = x.is_contiguous()
        if i < written and not whole and overlaps_itself(x):
            raise ValueError(f"{name(i)}: elements share their memory: it cannot be donated\n  fix: give a copy of it")
        spans.append((x.data_ptr(), x.data_ptr() + (x.nbytes if whole else extent(x)), i))
    begun: list[tuple[int, int]] = []  # (end, index) of the spans that are open where the next one starts
    for start, end, i in sorted(spans):
        begun = [one for one in begun if one[0] > start]
        for _, j in begun:
            first, second = min(i, j), max(i, j)
            if first < written and overlap(leaves[first], leaves[second]):
                what = "donated, one would be written over while the other is read or updated"
                fix = "keep one leaf of tied params, or donate=False"
                raise ValueError(f"{name(first)} and {name(second)} share memory: {what}\n  fix: {fix}")
        begun.append((end, i))


def check_state(state, kept, moments: tuple[str, ...]) -> None:
    """Raise ValueError unless the state's step is an int64 scalar and the moments have the dtypes of `kept`."""
    dtypes, step = [p.dtype for p in tree.leaves(kept)], state["step"]
    for name in moments:
        if [m.dtype for m in tree.leaves(state[name])] != dtypes:
            raise ValueError(f'state["{name}"] has other dtypes than the params\n  fix: give a state made for these')
    if not isinstance(step, Tensor) or step.dtype != torch.int64 or step.dim():
        raise ValueError(f'state["step"] = {step!r:.60}: is an int64[]\n  fix: give the state that init or update made')
