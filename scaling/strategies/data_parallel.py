"""Data parallelism (Part 5, Data Parallelism):  In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D].

Activations are split along the batch, params are replicated. Communication is in the backward alone: an AllReduce of
each weight's gradient, which nothing waits for until the optimizer does. The numbers are the book's steps.
"""

import torch

from scaling.collectives import all_reduce, einsum
from scaling.strategies.block import Layer, Saved, act, act_vjp, normed, normed_vjp, wait_all

SPECS = {"In": "In[B_X, D]", "W_in": "W_in[D, F]", "W_out": "W_out[F, D]", "Out": "Out[B_X, D]"}
ENDS = {"embed": "E[K, V, D]", "head": "W_head[D, V]"}  # of the byte model around the blocks


def forward(params, In, mesh, activation="gelu", residual=False, norm=False):
    """In[B_X, D] -> (Out[B_X, D], saved), through L layers: W_in[L, D, F], W_out[L, F, D]."""
    layers = []
    for W_in, W_out in zip(params["W_in"], params["W_out"], strict=True):
        Hid = normed(In, norm)
        Tmp = einsum("Hid[B_X, D] * W_in[D, F] -> Tmp[B_X, F]", Hid, W_in)  # 1.
        Act = act(Tmp, activation)
        Out = einsum("Act[B_X, F] * W_out[F, D] -> Out[B_X, D]", Act, W_out)  # 2.
        layers.append(Layer(In, Tmp, Act))
        In = In + Out if residual else Out
    return In, Saved(layers, activation, residual, norm)


def backward(dOut, saved, params, mesh, partial=None, reduce=True, donate=False, bucket_bytes=0):
    """dOut[B_X, D] -> (dIn[B_X, D], grads typed as params: reduced over X).

    `bucket_bytes`: AllReduce as many layers' gradients together as fit; at 0 each by itself, as the book writes it:
    fewer collectives cost less, but a bucket has to wait for the last of its gradients.
    For microbatches: `partial`, the gradients {U_X} of earlier ones (given away), is added to; with `reduce=False`
    nothing is reduced, and the gradients are returned as the partial of the next microbatch. `donate`: `saved` is given
    away, and each layer's activations are freed once they have been used.
    """
    grads = partial or one_buffer(params)
    L, late = saved.depth(params), []
    layer_bytes = sum(W[0].numel() * W.element_size() for W in params.values())
    bucket, last = max(1, bucket_bytes // layer_bytes), L
    for l in reversed(range(L)):
        In, Tmp, Act = saved.take(l, donate)
        into = {name: {"out": grad[l], "add": partial is not None} for name, grad in grads.items()}
        Hid = normed(In, saved.norm)
        dW_out = einsum("Act[B_X, F] * dOut[B_X, D] -> dW_out[F, D] {U_X}", Act, dOut, **into["W_out"])  # 2.
        if reduce and bucket == 1:
            late.append(
                all_reduce("dW_out[F, D] {U_X} -> dW_out[F, D]", dW_out, mesh, async_op=True, donate=True)
            )  # 3.
        dAct = einsum("dOut[B_X, D] * W_out[F, D] -> dAct[B_X, F]", dOut, params["W_out"][l])  # 4.
        dTmp = act_vjp(Tmp, dAct, saved.activation)
        dW_in = einsum("Hid[B_X, D] * dTmp[B_X, F] -> dW_in[D, F] {U_X}", Hid, dTmp, **into["W_in"])  # 5.
        if reduce and bucket == 1:
            late.append(all_reduce("dW_in[D, F] {U_X} -> dW_in[D, F]", dW_in, mesh, async_op=True, donate=True))  # 6.
        elif reduce and (last - l == bucket or l == 0):
            late += reduce_bucket(grads, l, last, mesh)  # 3. and 6. of the layers l to last
            last = l
        dHid = einsum("dTmp[B_X, F] * W_in[D, F] -> dHid[B_X, D]", dTmp, params["W_in"][l])  # 7.
        dIn = normed_vjp(In, dHid, saved.norm)
        dOut = dOut + dIn if saved.residual else dIn
    wait_all(late)
    return dOut, grads


def reduce_bucket(grads, first: int, last: int, mesh) -> list:
    """Start the AllReduce of several layers' gradients, which lie side by side: params are stacked over layers."""
    dW_in, dW_out = grads["W_in"][first:last], grads["W_out"][first:last]
    if side_by_side(dW_in, dW_out):  # all layers, in `one_buffer`
        both = dW_in.as_strided((2, dW_in.numel()), (dW_in.numel(), 1))
        return [all_reduce("dW[M, N] {U_X} -> dW[M, N]", both, mesh, async_op=True, donate=True)]
    return [
        all_reduce("dW_out[L, F, D] {U_X} -> dW_out[L, F, D]", dW_out, mesh, async_op=True, donate=True),
        all_reduce("dW_in[L, D, F] {U_X} -> dW_in[L, D, F]", dW_in, mesh, async_op=True, donate=True),
    ]


def side_by_side(a, b) -> bool:
    """Whether b follows a in one buffer. A compiler, which sees no addresses, is told that it does not."""
    if torch.compiler.is_compiling() or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return b.data_ptr() == a.data_ptr() + a.nbytes


def one_buffer(params):
    """Empty gradients, side by side: one AllReduce can take them all.

    A compiler is given two buffers: writes to layers of one of them, reshaped, would copy the whole of it each time.
    """
    if torch.compiler.is_compiling():
        return {name: torch.empty_like(W) for name, W in params.items()}
    W_in, W_out = params["W_in"], params["W_out"]
    both = W_in.new_empty(2, W_in.numel())
    return {"W_in": both[0].view(W_in.shape), "W_out": both[1].view(W_out.shape)}


def partial_sums(params, mesh):
    """Zeros for `partial`: W_in[L, D, F] {U_X}, W_out[L, F, D] {U_X}."""
    return {name: torch.zeros_like(W) for name, W in params.items()}
