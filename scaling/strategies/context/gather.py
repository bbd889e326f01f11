"""Attention to gathered keys and values (as Llama 3 was trained, arXiv:2407.21783, section 3.3.2): one AllGather.

    Q[B, T_C, N, H], K[B, S_C, K, H], V[B, S_C, K, H] -> O[B, T_C, N, H]

The backward pass gathers again, so that nothing longer than T_C is kept, and reduce-scatters dK and dV.
"""

from typing import Any

import torch
from torch import Tensor

from scaling.collectives import all_gather, reduce_scatter
from scaling.spec import format_axes
from scaling.strategies.context import block
from scaling.strategies.context.layout import chunks
from scaling.strategies.context.ring import Ring
from scaling.strategies.context.tiles import Tile


def forward(Q: Tensor, K: Tensor, V: Tensor, segments: Tensor | None, at: Ring) -> tuple[Tensor, Tensor]:
    """(O[B, T_C, N, H], lse[B, T_C, N]) of Q[B, T_C, N, H], K and V[B, S_C, K, H], segments[B, T_C] or None."""
    seen: Any = block.forward(Q, gathered_keys("KV", K, V, at), _whole(segments, at))
    return seen.O.to(Q.dtype), seen.lse


def backward(
    dO: Tensor, O: Tensor, lse: Tensor, Q: Tensor, K: Tensor, V: Tensor, segments: Tensor | None, at: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV); what is sent of the gradients is float32 or wider."""
    C = format_axes(at.axes)
    dQ, dKV = block.backward(dO, O, lse, Q, gathered_keys("KV", K, V, at), _whole(segments, at))
    line = f"dKV[2, B, S, K, H] {{U_{C}}} -> dKV[2, B, S_{C}, K, H]"
    dK, dV = reduce_scatter(line, dKV, at.mesh).to(K.dtype)
    return dQ.to(Q.dtype), dK, dV


def jvp(
    tQ: Tensor, tK: Tensor, tV: Tensor, O: Tensor, lse: Tensor, Q: Tensor, K: Tensor, V: Tensor, segments, at: Ring
) -> Tensor:
    """The tangent of O."""
    KV, tKV = gathered_keys("KV", K, V, at), gathered_keys("tKV", tK, tV, at)
    A, m = block.jvp(tQ, tKV, lse, Q, KV, _whole(segments, at))
    return (A - m[..., None] * O).to(Q.dtype)


def gathered_keys(name: str, K: Tensor, V: Tensor, at: Ring) -> Tensor:
    """KV[2, B, S, K, H] of K and V[B, S_C, K, H]."""
    C = format_axes(at.axes)
    return all_gather(f"{name}[2, B, S_{C}, K, H] -> {name}[2, B, S, K, H]", torch.stack([K, V]), at.mesh)


def _whole(segments: Tensor | None, at: Ring) -> Tile:
    """This rank's queries meet all keys."""
    C, group = format_axes(at.axes), at.mesh.group(at.axes)
    held = [chunks("gather", at.t, group.size, c) for c in range(group.size)]
    both = None
    if segments is not None:
        both = segments, all_gather(f"segments[B, S_{C}] -> segments[B, S]", segments, at.mesh)
    return Tile(held[group.index], sum(held, ()), at.mask, at.scale, both, at.types[0], "[2, B, S, K, H]")
