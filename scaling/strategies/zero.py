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

__all__ = ["SHARDS", "SPECS", "backward", "forward", "init", "partial_sums", "shards", "update"]

SPECS = data_parallel.SPECS
SHARDS = {"W_in": "W_in[D_X, F]", "W_out": "W_out[F_X, D]"}  # of a layer's gradients and optimizer state


def shards(params, mesh):
    """This rank's rows of each layer, as views: {"W_in": [W_in[D_X, F], ...], "W_out": [W_out[F_X, D], ...]}."""
    X, x = mesh.sizes["X"], mesh.coord["X"]
    return {name: [rows.unflatten(0, (X, -1))[x] for rows in W.unbind()] for name, W in params.items()}


def backward(dOut, saved, params, mesh, partial=None, reduce=True, donate=False, stage=2):
    """dOut[B_X, D] -> (dIn[B_X, D], grads typed as `shards`: reduce-scattered over X).

    stage 2: each gradient is reduce-scattered as soon as it is there, and its whole is thrown away; stage 1: all of
    them at the end. `partial` and `reduce` are for microbatches and `donate` gives `saved` away, as in
    `data_parallel.backward`.
    """
    if stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage}: stage 3 is scaling.strategies.fsdp")
    if stage == 1 or not reduce:
        dIn, whole = data_parallel.backward(dOut, saved, params, mesh, partial, reduce=False, donate=donate)
        return dIn, scatter_grads(whole, mesh) if reduce else whole
    late = []
    for l in reversed(range(saved.depth(params))):
        In, Tmp, Act = saved.take(l, donate)
        dW_out = einsum(
            "Act[B_X, F] * dOut[B_X, D] -> dW_out[F, D] {U_X}", Act, dOut, **slot(partial, "W_out", l)
        )  # 2.
        late.append(reduce_scatter("dW_out[F, D] {U_X} -> dW_out[F_X, D]", dW_out, mesh, async_op=True))  # 3.
        dAct = einsum("dOut[B_X, D] * W_out[F, D] -> dAct[B_X, F]", dOut, params["W_out"][l])  # 4.
        dTmp = act_vjp(Tmp, dAct, saved.activation)
        Hid, into = normed(In, saved.norm), slot(partial, "W_in", l)
        dW_in = einsum("Hid[B_X, D] * dTmp[B_X, F] -> dW_in[D, F] {U_X}", Hid, dTmp, **into)  # 5.
        late.append(reduce_scatter("dW_in[D, F] {U_X} -> dW_in[D_X, F]", dW_in, mesh, async_op=True))  # 6.
        dHid = einsum("dTmp[B_X, F] * W_in[D, F] -> dHid[B_X, D]", dTmp, params["W_in"][l])  # 7.
        dIn = normed_vjp(In, dHid, saved.norm)
        dOut = dOut + dIn if saved.residual else dIn
        wait_all(late, leave=2)
    wait_all(late)
    return dOut, {"W_in": [dW.wait() for dW in late[-1::-2]], "W_out": [dW.wait() for dW in late[-2::-2]]}


def scatter_grads(whole, mesh):
    """dW_in[L, D, F] {U_X}, dW_out[L, F, D] {U_X} -> `shards` of the sum, layer by layer."""
    late_in = [reduce_scatter("dW_in[D, F] {U_X} -> dW_in[D_X, F]", dW, mesh, async_op=True) for dW in whole["W_in"]]
    late_out = [
        reduce_scatter("dW_out[F, D] {U_X} -> dW_out[F_X, D]", dW, mesh, async_op=True) for dW in whole["W_out"]
    ]
    return {"W_in": [dW.wait() for dW in late_in], "W_out": [dW.wait() for dW in late_out]}


def init(optimizer, params, mesh):
    """The optimizer's state for this rank's shards."""
    return optimizer.init(shards(params, mesh))


def update(optimizer, grads, state, params, mesh, donate=False):
    """Update this rank's shards of the params and gather them: (params, state). `donate` gives both away."""
    mine, state = optimizer.update(grads, state, shards(params, mesh), donate=donate)
    new, late = params if donate else tree.map(torch.empty_like, params), []
    for l in range(len(new["W_in"])):
        W_in, W_out = mine["W_in"][l], mine["W_out"][l]
        late.append(all_gather("W_in[D_X, F] -> W_in[D, F]", W_in, mesh, async_op=True, out=new["W_in"][l]))
        late.append(all_gather("W_out[F_X, D] -> W_out[F, D]", W_out, mesh, async_op=True, out=new["W_out"][l]))
    wait_all(late)
    return new, state
