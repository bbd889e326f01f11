"""The same layer with its backward written out, line by line (Part 5): what runs wherever there are no experts.

Forward as in `layer`. Backward: every line is the transpose of one there, from the last to the first, by the law of
cotangents. A product Out = A W has two: dA = dOut W^T, on the critical path, and dW = A^T dOut, which can wait: here
dW is computed while the ReduceScatter of dy is under way. Weight gradients are left unreduced over the tokens' axes.
Attention itself, whatever its form, is differentiated by its own backward.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from scaling.collectives import einsum, wait
from scaling.models.pointwise import gained_norm, gained_norm_vjp
from scaling.models.rope import rotate
from scaling.models.transformer import ACTIVATIONS
from scaling.strategies.axes import all_gather, reduce_scatter
from scaling.strategies.transformer.layer import Context, own_heads

NOWHERE: Mapping[str, Tensor] = {}
VJPS = {  # (dy, x) -> dx of each activation, in one kernel
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": lambda dy, x: dy * (x > 0),
}


def layer_vjp(W: dict, x: Tensor, at: Context, window: int | None) -> tuple[Tensor, Callable]:
    """(x[B_PXE, T_CY, D], pull): pull(dx, into) -> (dW, dx), dW typed as W and unreduced over the tokens' axes.

    `into`: preallocated outputs, by name, for the gradients of matrices; with `add` they are added to what is there.
    """
    Attn, pull_attention = attention_vjp(W, x, at, window)
    x = x + Attn
    Out, pull_mlp = mlp_vjp(W, x, at)

    def pull(dx: Tensor, into: Mapping[str, Tensor] = NOWHERE, add: bool = False) -> tuple[dict, Tensor]:
        dW_mlp, dMid = pull_mlp(dx, into, add)
        dMid = dMid.add_(dx)
        dW, dIn = pull_attention(dMid, into, add)
        dW = dW | dW_mlp
        return {name: dW[name] for name in W}, dIn.add_(dMid)

    return x + Out, pull


def attention_vjp(W: dict, x: Tensor, at: Context, window: int | None) -> tuple[Tensor, Callable]:
    """(Attn[B_PXE, T_CY, D], pull) of the residual stream; heads over Y."""
    mesh, eps, (cos, sin) = at.mesh, at.config.eps, at.rope
    W_K, W_V = own_heads(W["W_K"], at, 1), own_heads(W["W_V"], at, 1)
    y, r = gained_norm(x, W["norm_attn"], eps)
    y = all_gather("y[B_PXE, T_CY, D] -> y[B_PXE, T_C, D]", y, mesh)  # on the critical path
    Q = einsum("y[B_PXE, T_C, D] * W_Q[D, N_Y, H] -> Q[B_PXE, T_C, N_Y, H]", y, W["W_Q"])
    K = einsum("y[B_PXE, T_C, D] * W_K[D, K_Y, H] -> K[B_PXE, T_C, K_Y, H]", y, W_K)
    V = einsum("y[B_PXE, T_C, D] * W_V[D, K_Y, H] -> V[B_PXE, T_C, K_Y, H]", y, W_V)
    if "b_Q" in W:
        Q, K, V = Q + W["b_Q"], K + own_heads(W["b_K"], at, 0), V + own_heads(W["b_V"], at, 0)
    if "norm_Q" in W:
        plain = Q, K
        (Q, r_Q), (K, r_K) = gained_norm(Q, W["norm_Q"], eps), gained_norm(K, W["norm_K"], eps)
    O, pull_attend = taped(lambda *qkv: at.attend(*qkv, window), rotate(Q, cos, sin), rotate(K, cos, sin), V)
    Attn = einsum("O[B_PXE, T_C, N_Y, H] * W_O[N_Y, H, D] -> Attn[B_PXE, T_C, D] {U_Y}", O, W["W_O"])
    Attn = reduce_scatter("Attn[B_PXE, T_C, D] {U_Y} -> Attn[B_PXE, T_CY, D]", Attn, mesh)  # on the critical path
    Attn = Attn + W["b_O"] if "b_O" in W else Attn

    def pull(dAttn: Tensor, into: Mapping[str, Tensor] = NOWHERE, add: bool = False) -> tuple[dict, Tensor]:
        dW = {"b_O": dAttn.sum((0, 1))} if "b_O" in W else {}
        dAttn = all_gather("dAttn[B_PXE, T_CY, D] -> dAttn[B_PXE, T_C, D]", dAttn, mesh)  # on the critical path
        dO = einsum("dAttn[B_PXE, T_C, D] * W_O[N_Y, H, D] -> dO[B_PXE, T_C, N_Y, H]", dAttn, W["W_O"])
        dQ, dK, dV = pull_attend(dO)
        dQ, dK = rotate(dQ, cos, -sin), rotate(dK, cos, -sin)  # back by the same angle
        if "norm_Q" in W:
            dQ, dW["norm_Q"] = gained_norm_vjp(plain[0], W["norm_Q"], r_Q, dQ)
            dK, dW["norm_K"] = gained_norm_vjp(plain[1], W["norm_K"], r_K, dK)
        if "b_Q" in W:
            dW["b_Q"] = dQ.sum((0, 1))
            dW |= {"b_K": in_place(dK.sum((0, 1)), W["b_K"], at, 0), "b_V": in_place(dV.sum((0, 1)), W["b_V"], at, 0)}
        dy = einsum("dQ[B_PXE, T_C, N_Y, H] * W_Q[D, N_Y, H] -> dy[B_PXE, T_C, D] {U_Y}", dQ, W["W_Q"])
        line = "dK[B_PXE, T_C, K_Y, H] * W_K[D, K_Y, H] -> dy[B_PXE, T_C, D] {U_Y}"
        dy = einsum(line, dK, W_K, out=dy, add=True)
        dy = einsum(line, dV, W_V, out=dy, add=True)
        dy = reduce_scatter("dy[B_PXE, T_C, D] {U_Y} -> dy[B_PXE, T_CY, D]", dy, mesh, async_op=True)  # critical
        line = "O[B_PXE, T_C, N_Y, H] * dAttn[B_PXE, T_C, D] -> dW_O[N_Y, H, D] {U_PXEC}"
        dW["W_O"] = einsum(line, O, dAttn, out=into.get("W_O"), add=add)
        line = "y[B_PXE, T_C, D] * dQ[B_PXE, T_C, N_Y, H] -> dW_Q[D, N_Y, H] {U_PXEC}"
        dW["W_Q"] = einsum(line, y, dQ, out=into.get("W_Q"), add=add)
        line = "y[B_PXE, T_C, D] * dK[B_PXE, T_C, K_Y, H] -> dW_K[D, K_Y, H] {U_PXEC}"
        for name, dHead in (("W_K", dK), ("W_V", dV)):
            if W_K is W["W_K"]:
                dW[name] = einsum(line, y, dHead, out=into.get(name), add=add)
            else:  # some of the heads
                dW[name] = in_place(einsum(line, y, dHead), W[name], at, 1)
        dx, dW["norm_attn"] = gained_norm_vjp(x, W["norm_attn"], r, wait(dy))
        return dW, dx

    return Attn, pull


def mlp_vjp(W: dict, x: Tensor, at: Context) -> tuple[Tensor, Callable]:
    """(Out[B_PXE, T_CY, D], pull) of the residual stream; features over Y."""
    mesh, act, act_vjp = at.mesh, ACTIVATIONS[at.config.nonlinearity], VJPS[at.config.nonlinearity]
    y, r = gained_norm(x, W["norm_mlp"], at.config.eps)
    y = all_gather("y[B_PXE, T_CY, D] -> y[B_PXE, T_C, D]", y, mesh)  # on the critical path
    Tmp = einsum("y[B_PXE, T_C, D] * W_in[D, F_Y] -> Tmp[B_PXE, T_C, F_Y]", y, W["W_in"])
    if "W_gate" in W:
        Gate = einsum("y[B_PXE, T_C, D] * W_gate[D, F_Y] -> Gate[B_PXE, T_C, F_Y]", y, W["W_gate"])
        Open = act(Gate)
    Act = Open * Tmp if "W_gate" in W else act(Tmp)
    Out = einsum("Act[B_PXE, T_C, F_Y] * W_out[F_Y, D] -> Out[B_PXE, T_C, D] {U_Y}", Act, W["W_out"])
    Out = reduce_scatter("Out[B_PXE, T_C, D] {U_Y} -> Out[B_PXE, T_CY, D]", Out, mesh)  # on the critical path

    def pull(dOut: Tensor, into: Mapping[str, Tensor] = NOWHERE, add: bool = False) -> tuple[dict, Tensor]:
        dOut = all_gather("dOut[B_PXE, T_CY, D] -> dOut[B_PXE, T_C, D]", dOut, mesh)  # on the critical path
        dAct = einsum("dOut[B_PXE, T_C, D] * W_out[F_Y, D] -> dAct[B_PXE, T_C, F_Y]", dOut, W["W_out"])
        dTmp = dAct * Open if "W_gate" in W else act_vjp(dAct, Tmp)
        dy = einsum("dTmp[B_PXE, T_C, F_Y] * W_in[D, F_Y] -> dy[B_PXE, T_C, D] {U_Y}", dTmp, W["W_in"])
        if "W_gate" in W:
            dGate = act_vjp(dAct.mul_(Tmp), Gate)
            line = "dGate[B_PXE, T_C, F_Y] * W_gate[D, F_Y] -> dy[B_PXE, T_C, D] {U_Y}"
            dy = einsum(line, dGate, W["W_gate"], out=dy, add=True)
        dy = reduce_scatter("dy[B_PXE, T_C, D] {U_Y} -> dy[B_PXE, T_CY, D]", dy, mesh, async_op=True)  # critical
        line = "y[B_PXE, T_C, D] * dTmp[B_PXE, T_C, F_Y] -> dW[D, F_Y] {U_PXEC}"
        dW = {"W_in": einsum(line, y, dTmp, out=into.get("W_in"), add=add)}
        if "W_gate" in W:
            dW["W_gate"] = einsum(line, y, dGate, out=into.get("W_gate"), add=add)
        line = "Act[B_PXE, T_C, F_Y] * dOut[B_PXE, T_C, D] -> dW_out[F_Y, D] {U_PXEC}"
        dW["W_out"] = einsum(line, Act, dOut, out=into.get("W_out"), add=add)
        dx, dW["norm_mlp"] = gained_norm_vjp(x, W["norm_mlp"], r, wait(dy))
        return dW, dx

    return Out, pull


def in_place(part: Tensor, whole: Tensor, at: Context, dim: int) -> Tensor:
    """The transpose of `own_heads`: the gradient of the heads used, in their place among zeros."""
    if part.shape == whole.shape:
        return part
    padded = torch.zeros_like(whole)
    own_heads(padded, at, dim).copy_(part)
    return padded


def taped(f: Callable, *xs: Tensor) -> tuple[Tensor, Callable]:
    """(f(*xs), pull): pull(dy) -> a cotangent of each x, by autograd's tape of f alone."""
    leaves = [x.detach().requires_grad_() for x in xs]
    with torch.enable_grad():
        y = f(*leaves)
    return y.detach(), lambda dy: torch.autograd.grad(y, leaves, dy)
