"""ZeRO-1 and ZeRO-2 (Part 5, Fully-Sharded Data Parallelism; Rajbhandari et al. 2020).

    In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D]

Data parallelism in which each rank keeps only a shard of the optimizer state (ZeRO-1) and of the gradients (ZeRO-2).
DP's AllReduce of a gradient becomes a ReduceScatter before the update and an AllGather of the params after it: the same
bytes. ZeRO-3, which shards the params as well, is `scaling.strategies.fsdp`.
"""

import torch

from scaling import tree
from scaling.collectives import all_gather, reduce_scatter, wait
from scaling.strategies import data_parallel
from scaling.strategies.layers import layers_a_bucket
from scaling.strategies.stack import Strategy

SPECS = data_parallel.SPECS
SHARDS = {"W_in": "W_in[D_X, F]", "W_out": "W_out[F_X, D]"}  # of a layer's gradients and optimizer state


def reduce(dW_in, dW_out, mesh):
    """Reduce-scatter the gradients, instead of the AllReduces 3. and 6. of data parallelism."""
    dW_out = reduce_scatter("dW_out[F, D] {U_X} -> dW_out[F_X, D]", dW_out, mesh, async_op=True)  # 3.
    dW_in = reduce_scatter("dW_in[D, F] {U_X} -> dW_in[D_X, F]", dW_in, mesh, async_op=True)  # 6.
    return dW_in, dW_out


def gather(W_in, W_out, mesh, out_in=None, out_out=None):
    """Gather the params of one layer, or of several at once, after the update."""
    W_in = all_gather("W_in[D_X, F] -> W_in[D, F]", W_in, mesh, async_op=True, out=out_in)
    W_out = all_gather("W_out[F_X, D] -> W_out[F, D]", W_out, mesh, async_op=True, out=out_out)
    return W_in, W_out


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


def _shards(params, mesh):
    """Return this rank's rows of each layer, as views: {"W_in": [W_in[D_X, F], ...], "W_out": [W_out[F_X, D], ...]}."""
    X, x = mesh.sizes["X"], mesh.coord["X"]
    return {name: [rows.unflatten(0, (X, -1))[x] for rows in W.unbind()] for name, W in params.items()}


def init(optimizer, params, mesh):
    """Return the optimizer's state for this rank's shards."""
    return optimizer.init(_shards(params, mesh))


def update(optimizer, grads, state, params, mesh, donate=False, bucket_bytes=0):
    """Update this rank's shards of the params and gather them, in buckets of layers: (params, state).

    With `donate`, params and state are overwritten.
    """
    mine, state = optimizer.update(grads, state, _shards(params, mesh), donate=donate)
    new, L = params if donate else tree.map(torch.empty_like, params), len(params["W_in"])
    count, in_flight = layers_a_bucket(bucket_bytes, params), []
    for first in range(0, L, count):
        if count == 1:  # straight into the results
            slots = new["W_in"][first], new["W_out"][first]
            pending = gather(mine["W_in"][first], mine["W_out"][first], mesh, slots[0], slots[1])
        else:
            bucket = slice(first, first + count)
            slots = new["W_in"][bucket], new["W_out"][bucket]
            pending = gather(torch.stack(mine["W_in"][bucket]), torch.stack(mine["W_out"][bucket]), mesh.stacked("L"))
        in_flight.append((slots, pending))
        if len(in_flight) > 1:
            _place(*in_flight.pop(0))
    _place(*in_flight.pop())
    return new, state


def _place(slots, pending):
    """Wait for pending params, and copy each to its slot in the result unless it was gathered into the slot."""
    for slot, W in zip(slots, map(wait, pending), strict=True):
        if W is not slot:
            slot.copy_(W)
