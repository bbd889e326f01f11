"""FSDP, or ZeRO-3 (Part 5, Fully-Sharded Data Parallelism):

    In[B_X, D] * W_in[D_X, F] * W_out[F, D_X] -> Out[B_X, D]

As data parallelism, but each rank keeps only a shard of every weight, of its gradient and of its optimizer state. The
weights of a layer are gathered ahead of time, during the layer before, and thrown away after use; gradients are
reduce-scattered, which nothing waits for until the optimizer does. The numbers are the book's steps.
"""

import torch

from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.strategies.block import Layer, Saved, act, act_vjp, normed, normed_vjp, slot, wait_all

SPECS = {"In": "In[B_X, D]", "W_in": "W_in[D_X, F]", "W_out": "W_out[F, D_X]", "Out": "Out[B_X, D]"}
ENDS = {"embed": "E[K, V, D_X]", "head": "W_head[D_X, V]"}  # of the byte model around the blocks


def gather_weights(params, l, mesh):
    """Start to gather the weights of layer l: (W_in[D, F], W_out[F, D]), both pending."""
    return (
        all_gather("W_in[D_X, F] -> W_in[D, F]", params["W_in"][l], mesh, async_op=True),
        all_gather("W_out[F, D_X] -> W_out[F, D]", params["W_out"][l], mesh, async_op=True),
    )


def forward(params, In, mesh, activation="gelu", residual=False, norm=False):
    """In[B_X, D] -> (Out[B_X, D], saved), through L layers: W_in[L, D_X, F], W_out[L, F, D_X]."""
    L, layers = len(params["W_in"]), []
    ahead = gather_weights(params, 0, mesh)
    for l in range(L):
        W_in, W_out = ahead  # 1. and 3. done ahead of time
        ahead = gather_weights(params, l + 1, mesh) if l + 1 < L else None
        Hid = normed(In, norm)
        Tmp = einsum("Hid[B_X, D] * W_in[D, F] -> Tmp[B_X, F]", Hid, W_in.wait())  # 2.
        Act = act(Tmp, activation)
        Out = einsum("Act[B_X, F] * W_out[F, D] -> Out[B_X, D]", Act, W_out.wait())  # 4.
        layers.append(Layer(In, Tmp, Act))
        In = In + Out if residual else Out
    return In, Saved(layers, activation, residual, norm)


def backward(dOut, saved, params, mesh, partial=None, reduce=True, donate=False):
    """dOut[B_X, D] -> (dIn[B_X, D], grads typed as params: reduce-scattered over X).

    For microbatches: `partial`, the whole gradients {U_X} of earlier ones (given away), is added to; with
    `reduce=False` nothing is reduced, and the sum so far is returned as the partial of the next microbatch.
    `donate`: `saved` is given away, and each layer's activations are freed once they have been used.
    """
    grads = room(params, partial, reduce)
    L, late = saved.depth(params), []
    ahead = gather_weights(params, L - 1, mesh)
    for l in reversed(range(L)):
        In, Tmp, Act = saved.take(l, donate)
        W_in, W_out = ahead  # 4. and 8. done ahead of time
        ahead = gather_weights(params, l - 1, mesh) if l > 0 else None
        # dOut first: D is then the outer dim in memory, and its blocks need no copy to be scattered
        dW_out = einsum(
            "dOut[B_X, D] * Act[B_X, F] -> dW_out[F, D] {U_X}", dOut, Act, **slot(partial, "W_out", l)
        )  # 2.
        if reduce:
            shard = grads["W_out"][l]
            line = "dW_out[F, D] {U_X} -> dW_out[F, D_X]"
            late.append(reduce_scatter(line, dW_out, mesh, async_op=True, out=shard))  # 3.
        dAct = einsum("dOut[B_X, D] * W_out[F, D] -> dAct[B_X, F]", dOut, W_out.wait())  # 5.
        dTmp = act_vjp(Tmp, dAct, saved.activation)
        Hid = normed(In, saved.norm)
        dW_in = einsum("Hid[B_X, D] * dTmp[B_X, F] -> dW_in[D, F] {U_X}", Hid, dTmp, **slot(partial, "W_in", l))  # 6.
        if reduce:
            shard = grads["W_in"][l]
            line = "dW_in[D, F] {U_X} -> dW_in[D_X, F]"
            late.append(reduce_scatter(line, dW_in, mesh, async_op=True, out=shard))  # 7.
        dHid = einsum("dTmp[B_X, F] * W_in[D, F] -> dHid[B_X, D]", dTmp, W_in.wait())  # 9.
        dIn = normed_vjp(In, dHid, saved.norm)
        dOut = dOut + dIn if saved.residual else dIn
        late = wait_all(late, leave=2)  # so that no more than two layers' whole gradients are held
    wait_all(late)
    return dOut, grads


def room(params, partial, reduce: bool):
    """Where a backward leaves the gradients: new shards, or with `reduce=False` the partial sums, which it needs."""
    if not reduce and partial is None:
        raise ValueError("reduce=False adds to partial: give partial_sums(params, mesh), or an earlier microbatch's")
    return {name: torch.empty_like(W) for name, W in params.items()} if reduce else partial


def partial_sums(params, mesh):
    """Zeros for `partial`: W_in[L, D, F] {U_X}, W_out[L, F, D] {U_X}, D the outer dim in memory."""
    X, (L, d, F) = mesh.sizes["X"], params["W_in"].shape
    zeros = params["W_in"].new_zeros((2, L, X * d, F))
    return {"W_in": zeros[0], "W_out": zeros[1].mT}
