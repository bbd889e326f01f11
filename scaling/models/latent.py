"""Lines of multi-head latent attention that training, one device and serving share, and their backward.

In DeepSeek-V2 (arxiv.org/abs/2405.04434, section 2.1) and V3 (2412.19437) queries pass through a low rank R, and keys
and values together through another, C: only the latents of rank C and the shared key would have to be cached. Positions
rotate `rope` dims of each query, and of one key that all heads share:

    y[B, T, D] -> C_Q[B, T, R], normed  -> Q[B, T, N, A]        A = nope + rope
               -> C_KV[B, T, C], normed -> KV[B, T, N, W]       W = nope + value
               -> K_R[B, T, rope]                               shared by all heads; beside C_KV, M = C + rope

A latent is much narrower than the residual stream: R and M = C + rope against D. So the products with W_DQ and W_DKV,
which are whole on every rank, are computed on this rank's part of the stream, T_CY of the sequence, and the latents are
gathered over Y instead of the stream. K_R is replicated over Y when it is used. By the law of cotangents its gradient
is then unreduced, the sum over this rank's heads alone, and is reduced once, together with the latents' gradients.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.collectives import all_gather, reduce_scatter, wait
from scaling.configs import Config
from scaling.models.layer import Context, Values, weight_gradient
from scaling.models.pointwise import gained_norm_vjp
from scaling.models.rope import magnitude, rotate

EPS = 1e-6  # of the two norms of latents, independently of `config.eps` (DeepSeek's own code)


def make_latents(W: dict, values: Values, at: Context) -> Values:
    """Add C_Q[B_PXZE, T_C, R] and C_KV[B_PXZE, T_C, M] to the values, with the arrays that backward needs for them.

    The last `rope` entries of C_KV are K_R. The values have the stream x[B_PXZE, T_CY, D], or its norm, y. Latents are
    narrower than y, so they are gathered over Y, and y is not.
    """
    latent: Any = at.config.latent
    if "y" not in values:
        y, r = at.norm(values["x"], W["norm_attn"], at.config.eps)
        values = values | {"y": y, "r": r}
    if "A_Q" not in values:
        A_Q = values["y"]  # without a rank of queries
        if "W_DQ" in W:
            A_Q = at.einsum("y[B_PXZE, T_CY, D] * W_DQ[D, R] -> A_Q[B_PXZE, T_CY, R]", A_Q, W["W_DQ"])
        A_KV = at.einsum("y[B_PXZE, T_CY, D] * W_DKV[D, M] -> A_KV[B_PXZE, T_CY, M]", values["y"], W["W_DKV"])
        values = values | {"A_Q": A_Q, "A_KV": A_KV}
    if "C_Q" in values:
        return values
    C_Q, r_Q = at.norm(values["A_Q"], W["norm_CQ"], EPS) if "norm_CQ" in W else (values["A_Q"], None)
    C_KV, K_R = values["A_KV"].tensor_split([latent.kv_rank], -1)
    C_KV, r_KV = at.norm(C_KV, W["norm_CKV"], EPS)
    C_Q = all_gather("C_Q[B_PXZE, T_CY, R] -> C_Q[B_PXZE, T_C, R]", C_Q, at.mesh)  # on the critical path
    C_KV = torch.cat([C_KV, K_R], -1)
    C_KV = all_gather("C_KV[B_PXZE, T_CY, M] -> C_KV[B_PXZE, T_C, M]", C_KV, at.mesh)  # on the critical path
    return values | {"C_Q": C_Q, "C_KV": C_KV, "r_CQ": r_Q, "r_CKV": r_KV}


def attend_latents(W: dict, values: Values, at: Context) -> Values:
    """Add O[B_PXZE, T_C, N_Y, H] and "attend_vjp" to the values of `make_latents`."""
    values, latent = make_latents(W, values, at), cast(Any, at.config.latent)
    if "O" in values:
        return values
    C_KV, K_R = values["C_KV"].tensor_split([latent.kv_rank], -1)
    if "Q" not in values:
        Q = at.einsum("C_Q[B_PXZE, T_C, R] * W_UQ[R, N_Y, A] -> Q[B_PXZE, T_C, N_Y, A]", values["C_Q"], W["W_UQ"])
        KV = at.einsum("C_KV[B_PXZE, T_C, C] * W_UKV[C, N_Y, W] -> KV[B_PXZE, T_C, N_Y, W]", C_KV, W["W_UKV"])
        values = values | {"Q": Q, "KV": KV}

    def heads(Q: Tensor, KV: Tensor, K_R: Tensor) -> Tensor:
        return attended(Q, KV, K_R, at.attend, at.rope, at.config)

    O, attend_vjp = at.vjp(heads, values["Q"], values["KV"], K_R)  # each head alone: nothing is sent
    return values | {"O": O, "attend_vjp": attend_vjp}


def attended(Q: Tensor, KV: Tensor, K_R: Tensor, attend: Callable, rope: tuple, config: Config) -> Tensor:
    """Return O[B, T, N, value] of Q[B, T, N, A], the latents' KV[B, T, N, W] and the rotary K_R[B, T, rope].

    Each head is computed alone, so this holds for whole arrays and for shards of the heads. The softmax of
    attend(Q, K, V) has the scale 1/sqrt(A); the queries that it gets are already multiplied by yarn's scale.
    """
    K_R = turned(K_R[:, :, None], rope, config)
    return over_heads(attend, turned_queries(Q, rope, config), KV, K_R, config)


def over_heads(attend: Callable, Q: Tensor, KV: Tensor, K_R: Tensor, config: Config) -> Tensor:
    """Return O[B, T, N, value] of turned queries Q[B, T, N, A], keys K_R[B, S, 1, rope], and of KV[B, S, N, W]."""
    latent: Any = config.latent
    K_N, V = KV.split([latent.nope, latent.value], -1)
    K = torch.cat([K_N, K_R.expand(*K_N.shape[:-1], latent.rope)], -1)
    return attend(Q, K, V)


def padded(attend: Callable, Q: Tensor, K: Tensor, V: Tensor, **options: Any) -> Tensor:
    """Attend with values padded to the keys' width: kernels that hold no scores take heads of one width."""
    return attend(Q, K, F.pad(V, (0, max(0, K.shape[-1] - V.shape[-1]))), **options)[..., : V.shape[-1]]


def turned_queries(Q: Tensor, rope: tuple, config: Config) -> Tensor:
    """Return Q[B, T, N, A] with its last `rope` dims rotated, times yarn's scale."""
    latent: Any = config.latent
    Q_N, Q_R = Q.tensor_split([Q.shape[-1] - latent.rope], -1)
    return torch.cat([Q_N, turned(Q_R, rope, config)], -1) * magnitude(config.rope_scaling) ** 2


def turned(x: Tensor, rope: tuple, config: Config) -> Tensor:
    """Rotate x[B, T, heads, rope] by its positions.

    In an interleaved model the two coordinates of a plane are neighbours. All first coordinates are then moved before
    the second ones, which changes no product of a query and a key.
    """
    latent: Any = config.latent
    return rotate(x.unflatten(-1, (-1, 2)).mT.flatten(-2) if latent.interleaved else x, *rope)


def latent_attention_backward(W: dict, dAttn: Tensor, s: dict, at: Any) -> tuple[Tensor, dict]:
    """dAttn[B_PXE, T_CY, D] -> (dx[B_PXE, T_CY, D], dW)."""
    mesh, rank = at.mesh, at.config.latent.kv_rank
    dW: dict[str, Any] = {}
    coming = all_gather("dAttn[B_PXE, T_CY, D] -> dAttn[B_PXE, T_C, D]", dAttn, mesh, async_op=True)  # critical
    s = attend_latents(W, s, at)  # what was not kept
    dAttn = wait(coming)
    dO = at.einsum("dAttn[B_PXE, T_C, D] * W_O[N_Y, H, D] -> dO[B_PXE, T_C, N_Y, H]", dAttn, W["W_O"])
    dQ, dKV, dK_R = s["attend_vjp"](dO)  # dK_R[B_PXE, T_C, rope] {U_Y}: of this rank's heads
    dC_Q = at.einsum("dQ[B_PXE, T_C, N_Y, A] * W_UQ[R, N_Y, A] -> dC_Q[B_PXE, T_C, R] {U_Y}", dQ, W["W_UQ"])
    dC_Q = reduce_scatter("dC_Q[B_PXE, T_C, R] {U_Y} -> dC_Q[B_PXE, T_CY, R]", dC_Q, mesh, async_op=True)
    dC_KV = at.einsum("dKV[B_PXE, T_C, N_Y, W] * W_UKV[C, N_Y, W] -> dC_KV[B_PXE, T_C, C] {U_Y}", dKV, W["W_UKV"])
    dC_KV = torch.cat([dC_KV, dK_R], -1)
    dC_KV = reduce_scatter("dC_KV[B_PXE, T_C, M] {U_Y} -> dC_KV[B_PXE, T_CY, M]", dC_KV, mesh, async_op=True)
    line = "O[B_PXE, T_C, N_Y, H] * dAttn[B_PXE, T_C, D] -> dW_O[N_Y, H, D] {U_PXEC}"
    dW |= weight_gradient(W, "W_O", line, s["O"], dAttn, at)
    line = "C_Q[B_PXE, T_C, R] * dQ[B_PXE, T_C, N_Y, A] -> dW_UQ[R, N_Y, A] {U_PXEC}"
    dW |= weight_gradient(W, "W_UQ", line, s["C_Q"], dQ, at)
    line = "C_KV[B_PXE, T_C, C] * dKV[B_PXE, T_C, N_Y, W] -> dW_UKV[C, N_Y, W] {U_PXEC}"
    dW |= weight_gradient(W, "W_UKV", line, s["C_KV"][..., :rank], dKV, at)
    dA_Q = wait(dC_Q)
    if "norm_CQ" in W:
        dA_Q, dW["norm_CQ"] = gained_norm_vjp(s["A_Q"], W["norm_CQ"], s["r_CQ"], dA_Q)
    dC_KV, dK_R = wait(dC_KV).tensor_split([rank], -1)
    dA_KV, dW["norm_CKV"] = gained_norm_vjp(s["A_KV"][..., :rank], W["norm_CKV"], s["r_CKV"], dC_KV)
    dA_KV = torch.cat([dA_KV, dK_R], -1)
    dy = dA_Q
    if "W_DQ" in W:
        dy = at.einsum("dA_Q[B_PXE, T_CY, R] * W_DQ[D, R] -> dy[B_PXE, T_CY, D]", dA_Q, W["W_DQ"])
        line = "y[B_PXE, T_CY, D] * dA_Q[B_PXE, T_CY, R] -> dW_DQ[D, R] {U_PXECY}"
        dW |= weight_gradient(W, "W_DQ", line, s["y"], dA_Q, at)
    line = "dA_KV[B_PXE, T_CY, M] * W_DKV[D, M] -> dy[B_PXE, T_CY, D]"
    dy = at.einsum(line, dA_KV, W["W_DKV"], out=dy, add=True)
    line = "y[B_PXE, T_CY, D] * dA_KV[B_PXE, T_CY, M] -> dW_DKV[D, M] {U_PXECY}"
    dW |= weight_gradient(W, "W_DKV", line, s["y"], dA_KV, at)
    dx, dW["norm_attn"] = gained_norm_vjp(s["x"], W["norm_attn"], s["r"], dy)
    return dx, dW
