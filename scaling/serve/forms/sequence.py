"""The cache's sequence over Z (Part 7, "Sharding the KV cache"), for long contexts of few rows.

    KV[2, B, S_Z, K_Y, H], W_Q[D, N_YZ, H], W_O[N_YZ, H, D], x[B, T, D]; MLP and ends as in `heads_batch`

Every rank along Z has all queries of its heads, and computes their softmax over its own places, as Flash attention does
for its blocks (Part 4, Appendix A). The maximum m is taken over all ranks; denominator L and numerator O are summed.
"""

import math

import torch
from torch import Tensor

from scaling.collectives import all_gather, all_reduce, einsum, reduce_scatter
from scaling.models.layer import Context, biased, finish_heads, normed, rms
from scaling.models.pointwise import soft_cap
from scaling.serve.forms.heads_batch import gated


def attention(W: dict, x: Tensor, at: Context, l: int) -> Tensor:
    """x[B, T, D] -> Attn[B, T, D]. Each rank writes the keys and values of the positions that it holds."""
    y, _ = normed(W, "norm_attn", x, at.config, rms)
    Q = einsum("y[B, T, D] * W_Q[D, N_YZ, H] -> Q[B, T, N_YZ, H]", y, W["W_Q"])
    Q = all_gather("Q[B, T, N_YZ, H] -> Q[B, T, N_Y, H]", Q, at.mesh)  # on the critical path
    K = einsum("y[B, T, D] * W_K[D, K_Y, H] -> K[B, T, K_Y, H]", y, W["W_K"])
    V = einsum("y[B, T, D] * W_V[D, K_Y, H] -> V[B, T, K_Y, H]", y, W["W_V"])
    Q, K, V = finish_heads(W, Q, K, V, at, rows="B")
    at.slots.append(l, K, V)
    q, (K, V), seen = places(Q, l, at)
    A = einsum("Q[B, T, K_Y, G, H] * K[B, S_Z, K_Y, H] -> A[B, T, K_Y, G, S_Z]", q, K)
    A = soft_cap(A, at.config.score_cap).masked_fill(~seen, -torch.inf)
    m = all_reduce("m[B, T, K_Y, G] {U_Z} -> m[B, T, K_Y, G]", A.amax(-1), at.mesh, op="max")  # critical path
    sinks = W["sinks"].view(*m.shape[2:]) if "sinks" in W else None
    m = m if sinks is None else torch.maximum(m, sinks)
    P = (A - m[..., None]).exp()
    O = einsum("P[B, T, K_Y, G, S_Z] * V[B, S_Z, K_Y, H] -> O[B, T, K_Y, G, H] {U_Z}", P, V)
    L = P.sum(-1) if sinks is None else P.sum(-1) + (sinks - m).exp() / at.mesh.sizes.get("Z", 1)  # on each rank a part
    L, O = L.flatten(2), O.flatten(2, 3)
    L = reduce_scatter("L[B, T, N_Y] {U_Z} -> L[B, T, N_YZ]", L, at.mesh)
    O = reduce_scatter("O[B, T, N_Y, H] {U_Z} -> O[B, T, N_YZ, H]", O, at.mesh)  # on the critical path
    O = gated(W, O / L[..., None], y)
    Attn = einsum("O[B, T, N_YZ, H] * W_O[N_YZ, H, D] -> Attn[B, T, D] {U_YZ}", O, W["W_O"])
    Attn = all_reduce("Attn[B, T, D] {U_YZ} -> Attn[B, T, D]", Attn, at.mesh)  # on the critical path
    return biased(Attn, W, "b_O")


def places(Q: Tensor, l: int, at: Context) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return (Q[B, T, K_Y, G, H] / sqrt(H), [K, V][B, S_Z, K_Y, H], visible) for this rank's places of the sequence."""
    slots, window = at.slots, at.config.windows[l]
    used = min(max(slots.extent.most - slots.first, 1), slots.size)
    found = slots.read(l, slice(0, used), Q.dtype)
    seen = slots.visible(slots.first + torch.arange(used, device=Q.device), window)
    Q = Q.unflatten(2, (found[0].shape[2], -1)) / math.sqrt(Q.shape[-1])
    return Q, found, seen[:, :, None, None]
