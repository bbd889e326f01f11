"""Tensor parallelism (Part 5, Tensor Parallelism):  In[B, D_Y] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D_Y].

Weights are split along F and never move; activations are split along D between layers, gathered before each layer and
reduce-scattered after it, both on the critical path. The numbers are the book's steps.
"""

import torch

from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.strategies import data_parallel
from scaling.strategies.block import Layer, Saved, act, act_vjp, normed, normed_vjp

SPECS = {"In": "In[B, D_Y]", "W_in": "W_in[D, F_Y]", "W_out": "W_out[F_Y, D]", "Out": "Out[B, D_Y]"}
ENDS = {"embed": "E[K, V, D_Y]", "head": "W_head[D_Y, V]"}  # of the byte model around the blocks


def forward(params, In, mesh, activation="gelu", residual=False, norm=False, keep=True):
    """In[B, D_Y] -> (Out[B, D_Y], saved), through L layers: W_in[L, D, F_Y], W_out[L, F_Y, D].

    `keep`: keep each gathered In[B, D] for the backward; otherwise that gathers it again (the book's step 5).
    """
    layers = []
    for W_in, W_out in zip(params["W_in"], params["W_out"], strict=True):
        In_D = all_gather("In[B, D_Y] -> In[B, D]", In, mesh)  # 1. on the critical path
        Hid = normed(In_D, norm)
        Tmp = einsum("Hid[B, D] * W_in[D, F_Y] -> Tmp[B, F_Y]", Hid, W_in)  # 2.
        Act = act(Tmp, activation)
        # W_out first: D is then the outer dim in memory, and its blocks need no copy to be scattered
        Out = einsum("W_out[F_Y, D] * Act[B, F_Y] -> Out[B, D] {U_Y}", W_out, Act)  # 3.
        Out = reduce_scatter("Out[B, D] {U_Y} -> Out[B, D_Y]", Out, mesh)  # 4. on the critical path
        layers.append(Layer(In_D if keep else In, Tmp, Act))
        In = In + Out if residual else Out
    return In, Saved(layers, activation, residual, norm, keep)


def backward(dOut, saved, params, mesh, partial=None, reduce=True, donate=False):
    """dOut[B, D_Y] -> (dIn[B, D_Y], grads typed as params: the batch is whole, so they need no reduction).

    `partial`: the gradients of earlier microbatches (given away), which are added to; `reduce` has nothing to do here.
    `donate`: `saved` is given away, and each layer's activations are freed once they have been used.
    """
    grads = partial or {name: torch.empty_like(W) for name, W in params.items()}
    for l in reversed(range(saved.depth(params))):
        In, Tmp, Act = saved.take(l, donate)
        into = {name: {"out": grad[l], "add": partial is not None} for name, grad in grads.items()}
        dOut_D = all_gather("dOut[B, D_Y] -> dOut[B, D]", dOut, mesh)  # 2. on the critical path
        dAct = einsum("dOut[B, D] * W_out[F_Y, D] -> dAct[B, F_Y]", dOut_D, params["W_out"][l])  # 4.
        dTmp = act_vjp(Tmp, dAct, saved.activation)
        In_D = In if saved.keep else all_gather("In[B, D_Y] -> In[B, D]", In, mesh)  # 5. skipped if it was kept
        dHid = einsum("W_in[D, F_Y] * dTmp[B, F_Y] -> dHid[B, D] {U_Y}", params["W_in"][l], dTmp)  # 7.
        dIn_D = normed_vjp(In_D, dHid, saved.norm)
        dIn = reduce_scatter("dIn[B, D] {U_Y} -> dIn[B, D_Y]", dIn_D, mesh, async_op=True)  # 8. during 3. and 6.
        einsum("Act[B, F_Y] * dOut[B, D] -> dW_out[F_Y, D]", Act, dOut_D, **into["W_out"])  # 3.
        Hid = normed(In_D, saved.norm)
        einsum("Hid[B, D] * dTmp[B, F_Y] -> dW_in[D, F_Y]", Hid, dTmp, **into["W_in"])  # 6.
        dOut = dOut + dIn.wait() if saved.residual else dIn.wait()
    return dOut, grads


partial_sums = data_parallel.partial_sums  # W_in[L, D, F_Y], W_out[L, F_Y, D]
