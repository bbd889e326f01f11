"""ZeRO-1 and ZeRO-2 (Part 5, Fully-Sharded Data Parallelism; Rajbhandari et al. 2020).

    In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D]

Data parallelism in which each rank keeps only a shard of the optimizer state (ZeRO-1) and of the gradients (ZeRO-2).
DP's AllReduce of a gradient becomes a ReduceScatter before the update and an AllGather of the params after it: the same
bytes. ZeRO-3, which shards the params as well, is `scaling.strategies.fsdp`.
"""

from typing import Any

import torch

from scaling import tree
from scaling.collectives import all_gather, reduce_scatter, wait
from scaling.spec import parse
from scaling.strategies import data_parallel
from scaling.strategies.stack import Strategy

SPECS = data_parallel.SPECS
SHARDS = {"W_in": "W_in[D_X, F]", "W_out": "W_out[F_X, D]"}  # of a layer's gradients and optimizer state


def reduce(dW_in, dW_out, mesh):
    """Reduce-scatter the gradients, instead of the AllReduces 3. and 6. of data parallelism."""
    dW_out = reduce_scatter("dW_out[F, D] {U_X} -> dW_out[F_X, D]", dW_out, mesh, async_op=True)  # 3.
    dW_in = reduce_scatter("dW_in[D, F] {U_X} -> dW_in[D_X, F]", dW_in, mesh, async_op=True)  # 6.
    return dW_in, dW_out


STRATEGY = Strategy(SPECS, data_parallel.layer_forward, data_parallel.layer_backward, reduce=reduce, GRADS=SHARDS)
forward = STRATEGY.forward


def backward(dOut, saved, params, mesh, partial=None, reduce=True, donate=False, bucket_bytes=0, stage=2):
    """dOut[B_X, D] -> (dIn[B_X, D], grads typed as `shards`: reduce-scattered over X).

    Stage 2 reduce-scatters a bucket's gradients once they are computed, and frees the whole ones. Stage 1
    reduce-scatters all of them at the end. The other options are as in `Strategy.backward`.
    """
    if stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage}\n  fix: for stage 3 use scaling.strategies.fsdp")
    if stage == 2 or not reduce:
        dIn, grads = STRATEGY.backward(dOut, saved, params, mesh, partial, reduce, donate, bucket_bytes)
        return dIn, {name: list(dW.unbind()) for name, dW in grads.items()} if reduce else grads
    dIn, sums = STRATEGY.backward(dOut, saved, params, mesh, partial, reduce=False, donate=donate)
    return dIn, scatter_grads(sums, mesh)


def scatter_grads(sums, mesh):
    """dW_in[D, F] {U_X}, dW_out[F, D] {U_X} -> `shards` of the sum, layer by layer."""
    pending = [reduce(dW_in, dW_out, mesh) for dW_in, dW_out in zip(sums["W_in"], sums["W_out"], strict=True)]
    return {name: [wait(pair[i]) for pair in pending] for i, name in enumerate(STRATEGY.weights)}


class Updated:
    """The part of the params that each rank updates: of every param its shard over X, which the new param is made of.

    Attributes:
        types: The types of the shards, a tree like the params. A param that is updated whole has its own type there.
        mesh: The mesh.
        moved: For each param the dim that X splits, or None, and the line that gathers it after the update.
    """

    def __init__(self, held, types, mesh):
        self.types, self.mesh = types, mesh
        self.moved = mesh.constant(_moves, tuple(tree.leaves(held)), tuple(tree.leaves(types)))

    def shards(self, params) -> Any:
        """Return the shards to update: views of the params, or copies of those that are not in one piece."""
        X, x, own = self.mesh.sizes.get("X", 1), self.mesh.coord.get("X", 0), []
        for W, (dim, _) in zip(tree.leaves(params), self.moved, strict=True):
            own.append(W if dim is None else W.unflatten(dim, (X, -1)).select(dim, x).contiguous())
        return tree.unflatten(params, own)

    def whole(self, shards, params, donate: bool) -> Any:
        """Gather the updated shards leaf by leaf with the next leaf in flight; with `donate`, write into `params`."""
        found, coming = [], []
        for W, old, (dim, line) in zip(tree.leaves(shards), tree.leaves(params), self.moved, strict=True):
            into = old if donate else None
            coming.append(W if dim is None else all_gather(line, W, self.mesh, async_op=True, out=into))
            found += [wait(coming.pop(0))] if len(coming) > 1 else []
        return tree.unflatten(params, [*found, *map(wait, coming)])


def _moves(mesh, held: tuple[str, ...], types: tuple[str, ...]) -> tuple[tuple[int | None, str], ...]:
    found = []
    for before, after in zip(held, types, strict=True):
        dims = zip(parse(before).dims, parse(after).dims, strict=True)
        found.append((next((i for i, (a, b) in enumerate(dims) if a != b), None), f"{after} -> {before}"))
    return tuple(found)


def _layers(params, mesh) -> tuple[Updated, dict[str, list[torch.Tensor]]]:
    """Return the part of each layer's params that a rank updates, and the params layer by layer."""
    layers = {name: [*W.unbind()] for name, W in params.items()}
    held, types = ({name: [specs[name]] * len(layers[name]) for name in params} for specs in (SPECS, SHARDS))
    return Updated(held, types, mesh), layers


def init(optimizer, params, mesh):
    """Return the optimizer's state for this rank's shards."""
    part, layers = _layers(params, mesh)
    return optimizer.init(part.shards(layers))


def update(optimizer, grads, state, params, mesh, donate=False):
    """Update this rank's shards of the params, and gather them layer by layer: (params, state).

    With `donate`, params and state are overwritten.
    """
    part, layers = _layers(params, mesh)
    mine, state = optimizer.update(grads, state, part.shards(layers), donate=donate)
    new = params if donate else tree.map(torch.empty_like, params)
    part.whole(mine, _layers(new, mesh)[1], donate=True)
    return new, state
