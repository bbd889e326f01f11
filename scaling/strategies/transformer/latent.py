"""The backward of multi-head latent attention: ranks whole, heads over Y.

A latent is much narrower than the residual stream: R and M = C + rope against D. So the products with W_DQ and W_DKV,
which are whole on every rank, are computed on the stream as it is split, along the sequence T_CY, and the latents are
gathered over Y instead of the stream. All heads share the rotary part of the keys, K_R, so it is replicated over Y when
it is used. By the law of cotangents its gradient is then unreduced, the sum over this rank's heads alone, and is
reduced once, together with the latents' gradients. `scaling.models.latent` has the forward lines.
"""

from typing import Any

import torch
from torch import Tensor

from scaling.collectives import all_gather, einsum, reduce_scatter, wait
from scaling.models.latent import attend_latents
from scaling.models.layer import weight_gradient
from scaling.models.pointwise import gained_norm_vjp


def latent_attention_backward(W: dict, dAttn: Tensor, s: dict, at: Any) -> tuple[Tensor, dict]:
    """dAttn[B_PXE, T_CY, D] -> (dx[B_PXE, T_CY, D], dW)."""
    mesh, rank = at.mesh, at.config.latent.kv_rank
    dW: dict[str, Any] = {}
    s = attend_latents(W, s, at)
    dAttn = all_gather("dAttn[B_PXE, T_CY, D] -> dAttn[B_PXE, T_C, D]", dAttn, mesh)  # on the critical path
    dO = einsum("dAttn[B_PXE, T_C, D] * W_O[N_Y, H, D] -> dO[B_PXE, T_C, N_Y, H]", dAttn, W["W_O"])
    dQ, dKV, dK_R = s["pull"](dO)  # dK_R[B_PXE, T_C, rope] {U_Y}: of this rank's heads
    dC_Q = einsum("dQ[B_PXE, T_C, N_Y, A] * W_UQ[R, N_Y, A] -> dC_Q[B_PXE, T_C, R] {U_Y}", dQ, W["W_UQ"])
    dC_Q = reduce_scatter("dC_Q[B_PXE, T_C, R] {U_Y} -> dC_Q[B_PXE, T_CY, R]", dC_Q, mesh, async_op=True)
    dC_KV = einsum("dKV[B_PXE, T_C, N_Y, W] * W_UKV[C, N_Y, W] -> dC_KV[B_PXE, T_C, C] {U_Y}", dKV, W["W_UKV"])
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
        dy = einsum("dA_Q[B_PXE, T_CY, R] * W_DQ[D, R] -> dy[B_PXE, T_CY, D]", dA_Q, W["W_DQ"])
        line = "y[B_PXE, T_CY, D] * dA_Q[B_PXE, T_CY, R] -> dW_DQ[D, R] {U_PXECY}"
        dW |= weight_gradient(W, "W_DQ", line, s["y"], dA_Q, at)
    line = "dA_KV[B_PXE, T_CY, M] * W_DKV[D, M] -> dy[B_PXE, T_CY, D]"
    dy = einsum(line, dA_KV, W["W_DKV"], out=dy, add=True)
    line = "y[B_PXE, T_CY, D] * dA_KV[B_PXE, T_CY, M] -> dW_DKV[D, M] {U_PXECY}"
    dW |= weight_gradient(W, "W_DKV", line, s["y"], dA_KV, at)
    dx, dW["norm_attn"] = gained_norm_vjp(s["x"], W["norm_attn"], s["r"], dy)
    return dx, dW
