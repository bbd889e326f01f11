"""The same layer with its backward written out, line by line (Part 5): what runs wherever there are no experts.

Forward as in `layer`. Backward: every line is the transpose of one there, from the last to the first, by the law of
cotangents. A product Out = A W has two: dA = dOut W^T, on the critical path, and dW = A^T dOut, which can wait: here
dW is computed while the ReduceScatter of dy is under way. Weight gradients are left unreduced over the tokens' axes.
Attention itself, whatever its form, is differentiated by its own backward.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaling.collectives import einsum, wait
from scaling.models.pointwise import gained_norm, gained_norm_vjp
from scaling.models.rope import rotate
from scaling.models.transformer import ACTIVATIONS
from scaling.strategies.axes import all_gather, reduce_scatter
from scaling.strategies.tape import vjp
from scaling.strategies.transformer.layer import Context, own_heads

Heads = tuple[Tensor, Tensor, Tensor]  # Q[B_PXE, T_C, N_Y, H], K[B_PXE, T_C, K_Y, H], V
NOWHERE: Mapping[str, Tensor] = {}
VJPS = {  # (dy, x) -> dx of each activation, in one kernel
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": lambda dy, x: dy * (x > 0),
}


def layer_vjp(W: dict, x: Tensor, at: Context, window: int | None, remat: str = "none") -> tuple[Any, Callable]:
    """(x[B_PXE, T_CY, D], pull): pull(W, dx, into) -> (dW, dx), dW typed as W and unreduced over the tokens' axes.

    `into`: preallocated outputs, by name, for the gradients of matrices; with `add` they are added to what is there.
    `remat`: what pull finds saved, beside x, and what it computes again. "none" and "gather": nothing (W itself is not
    saved here); "attention": dot-product attention; "matmuls": all but the matmuls; "block": this call is the second
    one already, whose result, None, nobody reads.
    """
    Attn, pull_attention = attention_vjp(W, x, at, window, remat)
    x = x + at.drop(Attn, "attention")
    Out, pull_mlp = mlp_vjp(W, x, at, remat)

    def pull(W: dict, dx: Tensor, into: Mapping[str, Tensor] = NOWHERE, add: bool = False) -> tuple[dict, Tensor]:
        dW_mlp, dMid = pull_mlp(W, at.drop(dx, "mlp"), into, add)
        dMid = dMid.add_(dx)
        dW, dIn = pull_attention(W, at.drop(dMid, "attention"), into, add)
        dW = dW | dW_mlp
        return {name: dW[name] for name in W}, dIn.add_(dMid)

    return None if Out is None else x + at.drop(Out, "mlp"), pull


def _normed(x: Tensor, gain: Tensor, at: Context) -> tuple[Tensor, Tensor]:
    """(y[B_PXE, T_C, D]: the stream x[B_PXE, T_CY, D] normed and gathered; 1 / its root mean square)."""
    y, r = gained_norm(x, gain, at.config.eps)
    return all_gather("y[B_PXE, T_CY, D] -> y[B_PXE, T_C, D]", y, at.mesh), r  # on the critical path


def attended(W: dict, plain: Heads, at: Context, window: int | None) -> tuple[Tensor, Callable, tuple]:
    """(O[B_PXE, T_C, N_Y, H], pull of the heads as rotated, what their norms divided by) of Q, K, V."""
    (Q, K, V), (cos, sin), scales = plain, at.rope, ()
    if "norm_Q" in W:
        (Q, r_Q), (K, r_K) = (gained_norm(x, W[n], at.config.eps) for x, n in ((Q, "norm_Q"), (K, "norm_K")))
        scales = r_Q, r_K
    return *vjp(lambda *qkv: at.attend(*qkv, window), rotate(Q, cos, sin), rotate(K, cos, sin), V), scales


def attention_vjp(W: dict, x: Tensor, at: Context, window: int | None, remat: str) -> tuple[Tensor, Callable]:
    """(Attn[B_PXE, T_CY, D], pull) of the residual stream; heads over Y."""
    mesh, (cos, sin) = at.mesh, at.rope
    y: Any  # this and the next: None, where pull computes it again
    r: Any
    y, r = _normed(x, W["norm_attn"], at)
    Q = einsum("y[B_PXE, T_C, D] * W_Q[D, N_Y, H] -> Q[B_PXE, T_C, N_Y, H]", y, W["W_Q"])
    K = einsum("y[B_PXE, T_C, D] * W_K[D, K_Y, H] -> K[B_PXE, T_C, K_Y, H]", y, own_heads(W["W_K"], at, 1))
    V = einsum("y[B_PXE, T_C, D] * W_V[D, K_Y, H] -> V[B_PXE, T_C, K_Y, H]", y, own_heads(W["W_V"], at, 1))
    if "b_Q" in W:
        Q, K, V = Q + W["b_Q"], K + own_heads(W["b_K"], at, 0), V + own_heads(W["b_V"], at, 0)
    plain: Any = Q, K, V
    del Q, K, V
    pull_attend: Any
    scales: Any
    O, pull_attend, scales = attended(W, plain, at, window)
    Attn = einsum("O[B_PXE, T_C, N_Y, H] * W_O[N_Y, H, D] -> Attn[B_PXE, T_C, D] {U_Y}", O, W["W_O"])
    Attn = reduce_scatter("Attn[B_PXE, T_C, D] {U_Y} -> Attn[B_PXE, T_CY, D]", Attn, mesh)  # on the critical path
    Attn = Attn + W["b_O"] if "b_O" in W else Attn
    again = remat in ("attention", "matmuls")
    if again:
        O = pull_attend = scales = None
    elif "norm_Q" not in W:
        plain = None  # what rotates them is on attention's tape
    if remat == "matmuls":
        y = r = None

    def pull(W: dict, dAttn: Tensor, into: Mapping[str, Tensor] = NOWHERE, add: bool = False) -> tuple[dict, Tensor]:
        nonlocal y, r, O, pull_attend, scales
        if y is None:
            y, r = _normed(x, W["norm_attn"], at)
        if again:
            O, pull_attend, scales = attended(W, plain, at, window)
        W_K, W_V = own_heads(W["W_K"], at, 1), own_heads(W["W_V"], at, 1)
        dW = {"b_O": dAttn.sum((0, 1))} if "b_O" in W else {}
        dAttn = all_gather("dAttn[B_PXE, T_CY, D] -> dAttn[B_PXE, T_C, D]", dAttn, mesh)  # on the critical path
        dO = einsum("dAttn[B_PXE, T_C, D] * W_O[N_Y, H, D] -> dO[B_PXE, T_C, N_Y, H]", dAttn, W["W_O"])
        dQ, dK, dV = pull_attend(dO)
        dQ, dK = rotate(dQ, cos, -sin), rotate(dK, cos, -sin)  # back by the same angle
        if "norm_Q" in W:
            dQ, dW["norm_Q"] = gained_norm_vjp(plain[0], W["norm_Q"], scales[0], dQ)
            dK, dW["norm_K"] = gained_norm_vjp(plain[1], W["norm_K"], scales[1], dK)
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


def mlp_vjp(W: dict, x: Tensor, at: Context, remat: str) -> tuple[Any, Callable]:
    """(Out[B_PXE, T_CY, D], pull) of the residual stream; features over Y."""
    mesh, act, act_vjp = at.mesh, ACTIVATIONS[at.config.nonlinearity], VJPS[at.config.nonlinearity]
    y: Any
    r: Any
    y, r = _normed(x, W["norm_mlp"], at)
    Tmp = einsum("y[B_PXE, T_C, D] * W_in[D, F_Y] -> Tmp[B_PXE, T_C, F_Y]", y, W["W_in"])
    Gate = Open = None
    if "W_gate" in W:
        Gate = einsum("y[B_PXE, T_C, D] * W_gate[D, F_Y] -> Gate[B_PXE, T_C, F_Y]", y, W["W_gate"])

    def activated(Tmp: Tensor, Gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(Act[B_PXE, T_C, F_Y], of a gate how far it is open)."""
        if Gate is None:
            return act(Tmp), None
        Open = act(Gate)
        return Open * Tmp, Open

    Act, Open = activated(Tmp, Gate)
    Out = None
    if remat != "block":
        Out = einsum("Act[B_PXE, T_C, F_Y] * W_out[F_Y, D] -> Out[B_PXE, T_C, D] {U_Y}", Act, W["W_out"])
        Out = reduce_scatter("Out[B_PXE, T_C, D] {U_Y} -> Out[B_PXE, T_CY, D]", Out, mesh)  # on the critical path
    if remat == "matmuls":
        y = r = Act = Open = None

    def pull(W: dict, dOut: Tensor, into: Mapping[str, Tensor] = NOWHERE, add: bool = False) -> tuple[dict, Tensor]:
        nonlocal y, r, Act, Open
        if y is None:
            (y, r), (Act, Open) = _normed(x, W["norm_mlp"], at), activated(Tmp, Gate)
        dOut = all_gather("dOut[B_PXE, T_CY, D] -> dOut[B_PXE, T_C, D]", dOut, mesh)  # on the critical path
        dAct = einsum("dOut[B_PXE, T_C, D] * W_out[F_Y, D] -> dAct[B_PXE, T_C, F_Y]", dOut, W["W_out"])
        dTmp = dAct * Open if Open is not None else act_vjp(dAct, Tmp)
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
