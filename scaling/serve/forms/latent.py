"""Multi-head latent attention in serving (DeepSeek-V2, arXiv:2405.04434, section 2.1): the cache holds latents.

    KV[I, L, B_ZE, S, J, M], W_DQ[D, R], W_UQ[R, N_Y, A], W_DKV[D, M], W_UKV[C, N_Y, W], W_O[N_Y, H, D]
    I = J = 1, P = nope, A = P + rope, W = P + H

For each token M = C + rope numbers are cached, whatever the number of heads: the normed latent of its keys and values,
and the rotary part of its keys, already turned. All heads read the same numbers, so each rank along Y holds all of
them.

Attention has two forms, which give the same result. In the absorbed form, a head's score Q_N (C_KV W_UK) is computed as
(Q_N W_UK) C_KV, so the weight multiplies the query. Attention then sums up latents, and W_UV multiplies the sums. The
cache is read directly, as keys and values of one head, M wide. In the plain form, keys and values of all cached tokens
are computed again, head by head. This takes fewer FLOPs if many queries of a row share them, as in a prompt.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaling.collectives import all_gather, all_reduce, all_to_all, einsum, reduce_scatter, shard
from scaling.configs import Latent
from scaling.models.latent import EPS, over_heads, padded, turned, turned_queries
from scaling.models.layer import Context
from scaling.models.pointwise import rms_norm
from scaling.serve.forms.sequence import places


def heads(W: dict, x: Tensor, at: Context, l: int) -> Tensor:
    """x[B_ZE, T_C, D] -> Attn[B_ZE, T_C, D], heads over Y, as in `heads.attention`, also under "experts".

    A prompt that is split over C gathers its latents, M wide.
    """
    y = rms_norm(x, gain=W["norm_attn"], eps=at.config.eps)
    C_Q = y
    if "W_DQ" in W:
        C_Q = einsum("y[B_ZE, T_C, D] * W_DQ[D, R] -> C_Q[B_ZE, T_C, R]", y, W["W_DQ"])
        C_Q = rms_norm(C_Q, gain=W["norm_CQ"], eps=EPS)
    A_KV = einsum("y[B_ZE, T_C, D] * W_DKV[D, M] -> A_KV[B_ZE, T_C, M]", y, W["W_DKV"])
    Q = einsum("C_Q[B_ZE, T_C, R] * W_UQ[R, N_Y, A] -> Q[B_ZE, T_C, N_Y, A]", C_Q, W["W_UQ"])
    C = all_gather("C[B_ZE, T_C, M] -> C[B_ZE, T, M]", latent_of(W, A_KV, at), at.mesh)  # on the critical path
    O = attend(W, Q, C, at, l)
    Attn = einsum("O[B_ZE, T_C, N_Y, H] * W_O[N_Y, H, D] -> Attn[B_ZE, T_C, D] {U_Y}", O, W["W_O"])
    return all_reduce("Attn[B_ZE, T_C, D] {U_Y} -> Attn[B_ZE, T_C, D]", Attn, at.mesh)  # on the critical path


def heads_batch(W: dict, x: Tensor, at: Context, l: int) -> Tensor:
    """x[B, T, D] -> Attn[B, T, D], heads over Y and Z, the cache's batch over Z.

    Absorbed queries, M wide, are sent to the ranks that hold the caches, and sums of latents come back.
    """
    y = rms_norm(x, gain=W["norm_attn"], eps=at.config.eps)
    Q = absorbed_queries(W, y, at)
    Q = all_to_all("Q[B, T, N_YZ, M] -> Q[B_Z, T, N_Y, M]", Q, at.mesh)  # on the critical path
    y = shard("y[B, T, D] -> y[B_Z, T, D]", y, at.mesh)
    A_KV = einsum("y[B_Z, T, D] * W_DKV[D, M] -> A_KV[B_Z, T, M]", y, W["W_DKV"])
    O = over_latents(turned_queries(Q, at.rope, at.config), latent_of(W, A_KV, at), at, l)  # turned by this rank's rows
    O = all_to_all("O[B_Z, T, N_Y, C] -> O[B, T, N_YZ, C]", O, at.mesh)  # on the critical path
    return _out(W, O, at)


def sequence(W: dict, x: Tensor, at: Context, l: int) -> Tensor:
    """x[B, T, D] -> Attn[B, T, D], heads over Y and Z, the cache's sequence over Z.

    The ranks' softmaxes over latents are combined as in `sequence.attention`.
    """
    y = rms_norm(x, gain=W["norm_attn"], eps=at.config.eps)
    Q = absorbed_queries(W, y, at)
    Q = all_gather("Q[B, T, N_YZ, M] -> Q[B, T, N_Y, M]", Q, at.mesh)  # on the critical path
    A_KV = einsum("y[B, T, D] * W_DKV[D, M] -> A_KV[B, T, M]", y, W["W_DKV"])
    at.slots.append(l, latent_of(W, A_KV, at)[:, :, None])
    q, (C,), seen = places(turned_queries(Q, at.rope, at.config), l, at)
    q, C, seen = q[:, :, 0], C[:, :, 0], seen[:, :, 0]
    A = einsum("Q[B, T, N_Y, M] * C[B, S_Z, M] -> A[B, T, N_Y, S_Z]", q, C).masked_fill(~seen, -torch.inf)
    m = all_reduce("m[B, T, N_Y] {U_Z} -> m[B, T, N_Y]", A.amax(-1), at.mesh, op="max")  # on the critical path
    P = (A - m[..., None]).exp()
    O = einsum("P[B, T, N_Y, S_Z] * C[B, S_Z, C] -> O[B, T, N_Y, C] {U_Z}", P, C[..., : _latent(at).kv_rank])
    L = reduce_scatter("L[B, T, N_Y] {U_Z} -> L[B, T, N_YZ]", P.sum(-1), at.mesh)
    O = reduce_scatter("O[B, T, N_Y, C] {U_Z} -> O[B, T, N_YZ, C]", O, at.mesh)  # on the critical path
    return _out(W, O / L[..., None], at)


ATTENTION = {"heads": heads, "experts": heads, "heads_batch": heads_batch, "sequence": sequence}


def _latent(at: Context) -> Latent:
    """Return the config's latent dims, which are known not to be None."""
    latent: Any = at.config.latent
    return latent


def latent_of(W: dict, A_KV: Tensor, at: Context) -> Tensor:
    """Return C, which is cached: the normed latents and the turned shared key of A_KV, sharded as A_KV is."""
    C_KV, K_R = A_KV.tensor_split([_latent(at).kv_rank], -1)
    C_KV = rms_norm(C_KV, gain=W["norm_CKV"], eps=EPS)
    return torch.cat([C_KV, turned(K_R[:, :, None], at.rope, at.config)[:, :, 0]], -1)


def absorbed_queries(W: dict, y: Tensor, at: Context) -> Tensor:
    """Q[B, T, N_YZ, M] of y[B, T, D]: the absorbed queries, not yet turned."""
    C_Q = y
    if "W_DQ" in W:
        C_Q = rms_norm(einsum("y[B, T, D] * W_DQ[D, R] -> C_Q[B, T, R]", y, W["W_DQ"]), gain=W["norm_CQ"], eps=EPS)
    Q = einsum("C_Q[B, T, R] * W_UQ[R, N_YZ, A] -> Q[B, T, N_YZ, A]", C_Q, W["W_UQ"])
    Q_N, W_UK = Q[..., : _latent(at).nope], W["W_UKV"][..., : _latent(at).nope]
    return absorbed(einsum("Q_N[B, T, N_YZ, P] * W_UK[C, N_YZ, P] -> Q_C[B, T, N_YZ, C]", Q_N, W_UK), Q, at)


def _out(W: dict, O: Tensor, at: Context) -> Tensor:
    """Attn[B, T, D] of the sums of latents O[B, T, N_YZ, C]."""
    W_UV = W["W_UKV"][..., _latent(at).nope :]
    O = einsum("O[B, T, N_YZ, C] * W_UV[C, N_YZ, H] -> O[B, T, N_YZ, H]", O, W_UV)
    Attn = einsum("O[B, T, N_YZ, H] * W_O[N_YZ, H, D] -> Attn[B, T, D] {U_YZ}", O, W["W_O"])
    return all_reduce("Attn[B, T, D] {U_YZ} -> Attn[B, T, D]", Attn, at.mesh)  # on the critical path


def absorbed(Q_C: Tensor, Q: Tensor, at: Context) -> Tensor:
    """Return queries over latents, M wide, from Q, which are queries over keys, and Q_C, their first part times W_UK.

    Attention will divide scores by sqrt(M), the width of the latents, but the model divides by sqrt(A). So the queries
    are scaled by the ratio. All three are sharded alike.
    """
    latent = _latent(at)
    return torch.cat([Q_C, Q[..., latent.nope :]], -1) * math.sqrt((latent.kv_rank + latent.rope) / Q.shape[-1])


def attend(W: dict, Q: Tensor, C: Tensor, at: Context, l: int) -> Tensor:
    """O[B_ZE, T_C, N_Y, H] of Q[B_ZE, T_C, N_Y, A] over the cache, to which the new C[B_ZE, T, M] is written first.

    The form is absorbed or plain, whichever has fewer FLOPs.
    """
    latent = _latent(at)
    if not absorbs(latent, Q.shape[1]):
        return over_keys(W, turned_queries(Q, at.rope, at.config), C, at, l)
    Q_N, W_UK, W_UV = Q[..., : latent.nope], W["W_UKV"][..., : latent.nope], W["W_UKV"][..., latent.nope :]
    Q_C = einsum("Q_N[B_ZE, T_C, N_Y, P] * W_UK[C, N_Y, P] -> Q_C[B_ZE, T_C, N_Y, C]", Q_N, W_UK)
    O = over_latents(turned_queries(absorbed(Q_C, Q, at), at.rope, at.config), C, at, l)
    return einsum("O[B_ZE, T_C, N_Y, C] * W_UV[C, N_Y, H] -> O[B_ZE, T_C, N_Y, H]", O, W_UV)


def absorbs(latent: Latent, queries: int) -> bool:
    """Return whether the absorbed form takes fewer FLOPs than the plain form for this number of `queries` of a row.

    For each token in the cache and each head, the absorbed form takes 2 queries (2 C + rope) FLOPs over the latents.
    The plain form takes 2 queries (A + value), and 2 C W to compute the token's keys and values.
    """
    more = 2 * latent.kv_rank - latent.nope - latent.value
    return queries * more < latent.kv_rank * (latent.nope + latent.value)


def over_latents(Q: Tensor, C: Tensor, at: Context, l: int) -> Tensor:
    """Return O[B_ZE, T_C, N_Y, C] of Q[B_ZE, T_C, N_Y, M], in the absorbed form."""
    (C,), mask, causal = at.slots.held(l, at.config.windows[l], Q.dtype, C[:, :, None])
    return at.slots.over(Q, C, C, mask, causal)[..., : _latent(at).kv_rank]  # kernels want heads of one width


def over_keys(W: dict, Q: Tensor, C: Tensor, at: Context, l: int) -> Tensor:
    """Return O[B_ZE, T_C, N_Y, H] of Q[B_ZE, T_C, N_Y, A], in the plain form."""
    latent = _latent(at)
    (C,), mask, causal = at.slots.held(l, at.config.windows[l], Q.dtype, C[:, :, None])
    C_KV, K_R = C.split([latent.kv_rank, latent.rope], -1)
    KV = einsum("C_KV[B_ZE, S, C] * W_UKV[C, N_Y, W] -> KV[B_ZE, S, N_Y, W]", C_KV[:, :, 0], W["W_UKV"])
    return over_heads(partial(padded, at.slots.over, mask=mask, causal=causal), Q, KV, K_R, at.config)
