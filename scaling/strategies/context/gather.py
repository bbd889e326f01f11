"""Attention to gathered keys and values (as Llama 3 was trained, arXiv:2407.21783, section 3.3.2): one AllGather.

    Q[B, T_C, N, H], K[B, S_C, K, H], V[B, S_C, K, H] -> O[B, T_C, N, H]

The backward pass gathers again, so that nothing longer than T_C is kept, and reduce-scatters dK and dV.
"""

import torch

from scaling.collectives import all_gather, reduce_scatter
from scaling.spec import format_axes
from scaling.strategies.context import block
from scaling.strategies.context.block import Block
from scaling.strategies.context.layout import chunks
from scaling.strategies.context.ring import Ring


def forward(Q, K, V, segments, at: Ring):
    """(O[B, T_C, N, H], lse[B, T_C, N]) of Q[B, T_C, N, H], K and V[B, S_C, K, H], segments[B, T_C] or None."""
    K, V = gathered("KV", K, V, at)
    seen = block.forward(Q, K, V, whole(segments, at))
    return seen.O.to(Q.dtype), seen.lse


def backward(dO, O, lse, Q, K, V, segments, at: Ring):
    """(dQ, dK, dV); what is sent of the gradients is float32 or wider."""
    C, dtype = format_axes(at.axes), K.dtype
    K, V = gathered("KV", K, V, at)
    dQ, *dKV = block.backward(dO, O, lse, Q, K, V, whole(segments, at))
    line = f"dKV[2, B, S, K, H] {{U_{C}}} -> dKV[2, B, S_{C}, K, H]"
    dK, dV = reduce_scatter(line, torch.stack(dKV), at.mesh)
    return dQ.to(Q.dtype), dK.to(dtype), dV.to(dtype)


def jvp(tQ, tK, tV, O, lse, Q, K, V, segments, at: Ring):
    """The tangent of O."""
    (K, V), (tK, tV) = gathered("KV", K, V, at), gathered("tKV", tK, tV, at)
    A, m = block.jvp(tQ, tK, tV, lse, Q, K, V, whole(segments, at))
    return (A - m[..., None] * O).to(Q.dtype)


def gathered(name: str, K, V, at: Ring):
    C = format_axes(at.axes)
    return all_gather(f"{name}[2, B, S_{C}, K, H] -> {name}[2, B, S, K, H]", torch.stack([K, V]), at.mesh)


def whole(segments, at: Ring) -> Block:
    """This rank's queries meet all keys."""
    C, group = format_axes(at.axes), at.mesh.group(at.axes)
    rows, columns = chunks("gather", at.t, group.size, group.index), (range(at.t * group.size),)
    if segments is not None:
        segments = segments, all_gather(f"segments[B, S_{C}] -> segments[B, S]", segments, at.mesh)
    line = f"Q[B, T_{C}, N, H] * KV[2, B, S, K, H] -> O[B, T_{C}, N, H]"
    return Block(rows, columns, at.mask, at.scale, segments, line)
