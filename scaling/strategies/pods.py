"""Data parallelism over pods, with FSDP and tensor parallelism inside each (Part 5, Scaling Across Pods):

    In[B_PX, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_PX, D_Y]

P is the slow axis, the datacenter's network: each pod holds all the weights and works on its own rows, as in fsdp_tp;
only gradients cross. They are reduce-scattered over X inside the pod first, so that the AllReduce over P moves each
rank's shard alone, a 1/(X Y) of the weights, and all of a pod's links to the outside carry a part. Layers are reduced
from the last one down, in buckets, while the backward goes on below.
"""

import torch

from scaling.collectives import all_reduce, reduce_scatter
from scaling.strategies import fsdp_tp
from scaling.strategies.block import Saved

SPECS = {"In": "In[B_PX, D_Y]", "W_in": "W_in[D_X, F_Y]", "W_out": "W_out[F_Y, D_X]", "Out": "Out[B_PX, D_Y]"}
ENDS = {"embed": "E[K, V, D_Y]", "head": "W_head[D_Y, V]"}

partial_sums = fsdp_tp.partial_sums  # {U_PX}, whole along D


def forward(params, In, mesh, activation="gelu", residual=False, norm=False):
    """In[B_PX, D_Y] -> (Out[B_PX, D_Y], saved): nothing crosses to another pod."""
    return fsdp_tp.forward(params, In, mesh, activation, residual, norm)


def backward(dOut, saved, params, mesh, partial=None, reduce=True, donate=False, layers_per_bucket=1):
    """dOut[B_PX, D_Y] -> (dIn[B_PX, D_Y], grads typed as params: reduced over X, then P).

    `layers_per_bucket`: layers whose gradients cross P together: more of them where the latency of a crossing counts.
    `partial`, `reduce` and `donate` are those of fsdp_tp.backward: with `reduce=False` nothing is reduced.
    """
    if not reduce:
        return fsdp_tp.backward(dOut, saved, params, mesh, partial, reduce=False, donate=donate)
    grads = {name: torch.empty_like(W) for name, W in params.items()}
    late, end = [], saved.depth(params)
    while end > 0:
        layers = slice(max(0, end - layers_per_bucket), end)
        end = layers.start

        def some(arrays, layers=layers):
            return None if arrays is None else {name: array[layers] for name, array in arrays.items()}

        part = Saved(saved.layers[layers], *saved[1:])
        if donate:
            del saved.layers[layers]
        dOut, dW = fsdp_tp.backward(dOut, part, some(params), mesh, some(partial), donate=donate)
        line = "dW_in[L, D_X, F_Y] {U_P} -> dW_in[L, D_X, F_Y]"
        late.append((some(grads)["W_in"], all_reduce(line, dW["W_in"], mesh, async_op=True, donate=True)))
        line = "dW_out[L, F_Y, D_X] {U_P} -> dW_out[L, F_Y, D_X]"
        late.append((some(grads)["W_out"], all_reduce(line, dW["W_out"], mesh, async_op=True, donate=True)))
    for shard, pending in late:
        shard.copy_(pending.wait())
    return dOut, grads


def backward_flat(dOut, saved, params, mesh):
    """The same gradients with the AllReduce over P first, of what is still unreduced over X: X times more bytes cross.

    For comparison only.
    """
    dIn, sums = fsdp_tp.backward(dOut, saved, params, mesh, partial_sums(params, mesh), reduce=False)
    dW_in = all_reduce("dW_in[L, D, F_Y] {U_PX} -> dW_in[L, D, F_Y] {U_X}", sums["W_in"], mesh)
    dW_out = all_reduce("dW_out[L, F_Y, D] {U_PX} -> dW_out[L, F_Y, D] {U_X}", sums["W_out"], mesh)
    dW_in = reduce_scatter("dW_in[L, D, F_Y] {U_X} -> dW_in[L, D_X, F_Y]", dW_in, mesh)
    dW_out = reduce_scatter("dW_out[L, F_Y, D] {U_X} -> dW_out[L, F_Y, D_X]", dW_out, mesh)
    return dIn, {"W_in": dW_in, "W_out": dW_out}
