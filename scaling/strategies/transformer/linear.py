"""The backward of a linear layer: heads over Y, the sequence over C.

Every line is the transpose of one of `scaling.models.linear`, from the last to the first. The cotangent of a state
comes from the rank after, as the state came from the rank before. A rank's part takes it to r + P^T dS, with the
forward's P, so ranks find r at the same time here, too, and only the products with P^T wait for each other.
"""

from typing import Any

import torch
from torch import Tensor

from scaling.collectives import all_gather, einsum, ppermute, reduce_scatter, wait
from scaling.models.delta_rule import delta_rule_backward
from scaling.models.layer import normed_backward
from scaling.models.linear import attend_linear, own_tokens
from scaling.spec import present


def linear_attention_backward(W: dict, dAttn: Tensor, s: dict, at: Any) -> tuple[Tensor, dict]:
    """dAttn[B_PXE, T_CY, D] -> (dx[B_PXE, T_CY, D], dW). The values `s` have y[B_PXE, T_C, D]."""
    mesh, s = at.mesh, attend_linear(W, s, at)
    starts = None if at.places is None else at.places == 0
    dAttn = all_gather("dAttn[B_PXE, T_CY, D] -> dAttn[B_PXE, T_C, D]", dAttn, mesh)  # on the critical path
    dO = einsum("dAttn[B_PXE, T_C, D] * W_O[n_Y, v, D] -> dO[B_PXE, T_C, n_Y, v]", dAttn, W["W_O"])
    dHeads, dZ, dgain = s["pull_norm"](dO)  # dgain[v] {U_PXECY}
    dHeads = dHeads.to(s["S"].dtype)
    own_tokens(dHeads, starts)
    dS = state_cotangent(dHeads, s, starts, mesh)
    *drule, _ = delta_rule_backward(dHeads, dS, s["kept"], *s["rule"], starts=starts)
    own_tokens(*drule)
    dQKV, dBA, *dmix = s["pull_mix"](tuple(drule))  # {U_PXEC}
    dQKVZ = torch.cat([tail_added(dQKV, at), dZ.unflatten(2, (dQKV.shape[2], -1)).flatten(3)], -1)
    dy = einsum("dQKVZ[B_PXE, T_C, k_Y, m] * W_QKVZ[D, k_Y, m] -> dy[B_PXE, T_C, D] {U_Y}", dQKVZ, W["W_QKVZ"])
    line = "dBA[B_PXE, T_C, k_Y, u] * W_BA[D, k_Y, u] -> dy[B_PXE, T_C, D] {U_Y}"
    dy = einsum(line, dBA, W["W_BA"], out=dy, add=True)
    dy = reduce_scatter("dy[B_PXE, T_C, D] {U_Y} -> dy[B_PXE, T_CY, D]", dy, mesh, async_op=True)  # critical
    dW = dict(zip(("conv_Q", "conv_K", "conv_V", "A_log", "dt"), dmix, strict=True)) | {"gain": dgain}
    line = "O[B_PXE, T_C, n_Y, v] * dAttn[B_PXE, T_C, D] -> dW_O[n_Y, v, D] {U_PXEC}"
    dW["W_O"] = einsum(line, s["O"], dAttn)
    line = "y[B_PXE, T_C, D] * dQKVZ[B_PXE, T_C, k_Y, m] -> dW_QKVZ[D, k_Y, m] {U_PXEC}"
    dW["W_QKVZ"] = einsum(line, s["y"], dQKVZ)
    line = "y[B_PXE, T_C, D] * dBA[B_PXE, T_C, k_Y, u] -> dW_BA[D, k_Y, u] {U_PXEC}"
    dW["W_BA"] = einsum(line, s["y"], dBA)
    dx, dgains = normed_backward(W, "norm_attn", s["x"], s["r"], wait(dy), at.config)
    return dx, dW | dgains


def state_cotangent(dHeads: Tensor, s: dict, starts: Tensor | None, mesh: Any) -> Tensor:
    """Return dS[B_PXE, n_Y, h, v] of the state after this rank's tokens: 0 on the last rank, else sent by the next."""
    dS = torch.zeros_like(s["S"])
    if (C := mesh.sizes.get("C", 1)) == 1:
        return dS
    r = delta_rule_backward(dHeads, dS, s["kept"], *s["rule"], starts=starts)[-1].unsqueeze(1)
    dS = dS.unsqueeze(1)
    moved = str(present("dS[B_PXE, I_C, n_Y, j, v]", mesh))
    for _ in range(C - 1):
        line = "P[B_PXE, I_C, n_Y, j, h] * dS[B_PXE, I_C, n_Y, j, v] -> dS[B_PXE, I_C, n_Y, h, v]"
        dS = ppermute(moved, r + einsum(line, s["P"], dS), mesh, "C", [(c + 1, c) for c in range(C - 1)])
    return dS.squeeze(1)


def tail_added(dQKV: Tensor, at: Any) -> Tensor:
    """Split the tail off dQKV[B, w - 1 + T, k, c] and add it to the rank before; return dQKV[B_PXE, T_C, k_Y, c]."""
    tail, C = at.config.linear.width - 1, at.mesh.sizes.get("C", 1)
    dtail, dQKV = dQKV.split([tail, dQKV.shape[1] - tail], 1)
    if C > 1:
        perm = [(c + 1, c) for c in range(C - 1)]
        dQKV = dQKV.clone()
        line = str(present("dtail[B_PXE, T_C, k_Y, c]", at.mesh))
        dQKV[:, -tail:] += ppermute(line, dtail.contiguous(), at.mesh, "C", perm)
    return dQKV
