"""ZeRO-1 and ZeRO-2 (Part 5, Fully-Sharded Data Parallelism; Rajbhandari et al. 2020):

    In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D]

Data parallelism in which each rank keeps only a shard of the optimizer state (ZeRO-1) and of the gradients (ZeRO-2).
DP's AllReduce of a gradient becomes a ReduceScatter before the update and an AllGather of the params after it: the same
bytes. ZeRO-3, which shards the params as well, is `scaling.strategies.fsdp`.
"""

import torch

from scaling import tree
from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.strategies import data_parallel
from scaling.strategies.block import act_vjp, normed, normed_vjp, slot, wait_all
from scaling.strategies.data_parallel import forward, partial_sums

__all__ = ["SHARDS", "SPECS", "backward", "forward", "init", "partial_sums", "update"]

SPECS = data_parallel.SPECS
SHARDS = {"W_in": "W_in[L, D_X, F]", "W_out": "W_out[L, F_X, D]"}  # of gradients and optimizer state


def backward(dOut, saved, params, mesh, partial=None, reduce=True, stage=2):
    """dOut[B_X, D] -> (dIn[B_X, D], grads typed as SHARDS).

    stage 2: each gradient is reduce-scattered as soon as it is there, and its whole is thrown away; stage 1: all of
    them at the end. `partial` and `reduce` are for microbatches, as in `data_parallel.backward`.
    """
    if stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage}: stage 3 is scaling.strategies.fsdp")
    if stage == 1 or not reduce:
        dIn, whole = data_parallel.backward(dOut, saved, params, mesh, partial, reduce=False)
        return dIn, scatter_grads(whole, mesh) if reduce else whole
    grads, late = shards_like(params, mesh), []
    for l in reversed(range(len(saved.layers))):
        In, Tmp, Act = saved.layers[l]
        dW_out = einsum(
            "Act[B_X, F] * dOut[B_X, D] -> dW_out[F, D] {U_X}", Act, dOut, **slot(partial, "W_out", l)
        )  # 2.
        shard = grads["W_out"][l]
        late.append(
            reduce_scatter("dW_out[F, D] {U_X} -> dW_out[F_X, D]", dW_out, mesh, async_op=True, out=shard)
        )  # 3.
        dAct = einsum("dOut[B_X, D] * W_out[F, D] -> dAct[B_X, F]", dOut, params["W_out"][l])  # 4.
        dTmp = act_vjp(Tmp, dAct, saved.activation)
        Hid, into = normed(In, saved.norm), slot(partial, "W_in", l)
        dW_in = einsum("Hid[B_X, D] * dTmp[B_X, F] -> dW_in[D, F] {U_X}", Hid, dTmp, **into)  # 5.
        shard = grads["W_in"][l]
        late.append(reduce_scatter("dW_in[D, F] {U_X} -> dW_in[D_X, F]", dW_in, mesh, async_op=True, out=shard))  # 6.
        dHid = einsum("dTmp[B_X, F] * W_in[D, F] -> dHid[B_X, D]", dTmp, params["W_in"][l])  # 7.
        dIn = normed_vjp(In, dHid, saved.norm)
        dOut = dOut + dIn if saved.residual else dIn
        late = wait_all(late, leave=2)
    wait_all(late)
    return dOut, grads


def scatter_grads(whole, mesh):
    """{U_X} -> SHARDS, layer by layer."""
    grads = shards_like(whole, mesh)
    late = []
    for dW_in, dW_out, in_shard, out_shard in zip(
        whole["W_in"], whole["W_out"], grads["W_in"], grads["W_out"], strict=True
    ):
        late.append(reduce_scatter("dW_out[F, D] {U_X} -> dW_out[F_X, D]", dW_out, mesh, async_op=True, out=out_shard))
        late.append(reduce_scatter("dW_in[D, F] {U_X} -> dW_in[D_X, F]", dW_in, mesh, async_op=True, out=in_shard))
    wait_all(late)
    return grads


def shards_like(params, mesh):
    """Empty tensors of this rank's shards' shapes."""
    X = mesh.sizes["X"]
    return {name: W.new_empty((W.shape[0], W.shape[1] // X, W.shape[2])) for name, W in params.items()}


def init(optimizer, params, mesh):
    """The optimizer's state for this rank's shards."""
    return optimizer.init(tree.shard(params, SHARDS, mesh))


def update(optimizer, grads, state, params, mesh, donate=False):
    """Update this rank's shards of the params and gather them: (params, state). `donate` gives both away."""
    shards, state = optimizer.update(grads, state, tree.shard(params, SHARDS, mesh), donate=donate)
    new = params if donate else {name: torch.empty_like(W) for name, W in params.items()}
    late = []
    for W_in, W_out, in_whole, out_whole in zip(
        shards["W_in"], shards["W_out"], new["W_in"], new["W_out"], strict=True
    ):
        late.append(all_gather("W_in[D_X, F] -> W_in[D, F]", W_in, mesh, async_op=True, out=in_whole))
        late.append(all_gather("W_out[F_X, D] -> W_out[F, D]", W_out, mesh, async_op=True, out=out_whole))
    wait_all(late)
    return new, state
