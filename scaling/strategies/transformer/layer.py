"""One layer of a Transformer, line by line, forward and backward (Parts 4 and 5): tensor and sequence parallel over Y.

Between the blocks the residual stream x[B_PXE, T_CY, D] is split along the sequence over Y as well: norms and residuals
are computed once, not |Y| times (sequence parallelism, Korthikanti et al. 2022, arXiv:2205.05198). Weights come
gathered over X. Axes that the mesh lacks drop out.

`experts` takes the place of `mlp` in a layer of experts. Its lines, with experts over E and features over Y, are in
`strategies.expert`.

Backward: every line is the transpose of one of the forward, from the last to the first, by the law of cotangents. A
product Out = A W has two: dA = dOut W^T, on the critical path, and dW = A^T dOut, which can wait. Here dW is computed
while the ReduceScatter of dy is in flight, and what was not kept is computed again while the AllGather of dOut is.
Weight gradients are left unreduced over the tokens' axes. Autograd differentiates three things without a weight
matrix: softmax attention (`attend_vjp`), the mixing and the norm of a linear layer (`mix_vjp`, `norm_vjp`), and the
weights of the chosen experts.

The backward reads `saved`, two dicts of named values: one of attention, one of the MLP or the experts.
Rematerialization (Part 4, "Gradient checkpointing") is a set of names that are not kept; the same lines then compute
them again. Every policy keeps "routing", so tokens are routed once. Every policy but "block" keeps the rows that the
AllToAlls brought, "Row" and "Out", so they are sent once.
"""

from typing import Any

import torch
from torch import Tensor

from scaling.collectives import all_gather, reduce_scatter, wait
from scaling.models.latent import attend_latents, latent_attention_backward
from scaling.models.layer import (
    SHARED_NORM,
    Context,
    Values,
    activate_features,
    attend_heads,
    biased,
    in_place,
    normed,
    normed_backward,
    read_norms,
    seen_heads,
    weight_gradient,
)
from scaling.models.linear import attend_linear, linear_attention_backward
from scaling.models.moe import gradient_by_expert, load_of
from scaling.models.pointwise import FUNCTIONS
from scaling.strategies import expert
from scaling.strategies.transformer.lora import expert_factor_gradients
from scaling.trace import open_logs

Halves = tuple[Values, Values]  # the saved values of attention, and of the MLP

ROWS = "x[B_PXE, T_CY, D]"  # the residual stream
ATTENDED = frozenset({"O", "attend_vjp"})  # dot-product attention
LATENTS = frozenset({"C_Q", "C_KV", "r_CQ", "r_CKV"})  # normed and gathered
RULE = frozenset({"tail", "S", "P", "S_out", "rule", "kept", "mix_vjp", "norm_vjp"})  # a linear layer's
BETWEEN = ATTENDED | LATENTS | RULE | {"y", "r", "Act", "Open"}  # and all other values between the matmuls
PRODUCTS = {"Q", "K", "V", "G", "KV", "A_Q", "A_KV", "QKVZ", "BA", "Tmp", "Gate"}  # with weights
EXPERTS = {"logits", "Row", "Out", "shared"}  # the rows of a layer of experts, before and after them
REMAT = {  # the values that each policy does not keep for the backward; the further down, the less is kept
    "none": frozenset(),
    "attention": ATTENDED | RULE,
    "matmuls": BETWEEN,
    "block": BETWEEN | PRODUCTS | EXPERTS | {"mid", "out", "r_out"},  # all but the layer's input and the routing
}


def dropped(remat: str) -> frozenset[str]:
    """Return the names of `saved` that this policy does not keep."""
    on_tape = "attend_vjp" not in REMAT[remat]  # then the saved vjp holds attention's operands
    return REMAT[remat] | ({"Q", "K", "V", "G", "KV"} if on_tape else set())


def layer(W: dict, x: Tensor, at: Context, dropped_names: frozenset[str] = REMAT["none"]) -> tuple[Tensor, Any, Halves]:
    """x[B_PXE, T_CY, D] -> (x, the experts' terms Loss[] {U_PXECY} or None, saved without `dropped_names`)."""
    Attn, a = attention(W, {"x": x}, at)
    if "norm_attn_out" in W:
        Attn, a = normed_result(W, "norm_attn_out", Attn, a, at)
    mid = x + at.drop(Attn, "attention")
    own, stream = W, {"mid": mid}
    if at.config.parallel:  # both blocks read x, and perhaps by one norm
        own, shared = read_norms(W), {} if "norm_mlp" in W else {name: a[name] for name in ("y", "r")}
        stream = {"mid": x} | shared
    Out, extra, m = (experts if "router" in W else mlp)(own, stream, at)
    if "norm_mlp_out" in W:
        Out, m = normed_result(W, "norm_mlp_out", Out, m, at)
    for values in (a, m, m.get("shared", {})):
        for name in dropped_names & values.keys():
            del values[name]
    return mid + at.drop(Out, "mlp"), extra, (a, m)


def layer_backward(W: dict, dx: Tensor, saved: Halves, at: Context, scale: float = 1.0) -> tuple[Tensor, dict]:
    """dx[B_PXE, T_CY, D] -> (dx, dW typed as W and unreduced over the tokens' axes).

    Of a layer with adapters, W["lora"], dW has their gradients alone. `scale`: the cotangent of the experts' terms.
    """
    own, (a, m) = W, saved
    if at.config.parallel:
        own, m = read_norms(W), m | {"mid": a["x"]}
    elif "mid" not in m:
        a, m = recomputed(W, saved, at)
    dOut, dW = at.drop(dx, "mlp"), {}
    if "norm_mlp_out" in W:
        dOut, dW = normed_backward(W, "norm_mlp_out", m["out"], m["r_out"], dOut, at.config)
    dMid, dW_mlp = experts_backward(own, dOut, scale, m, at) if "router" in W else mlp_backward(own, dOut, m, at)
    dMid = dMid.add_(dx)
    dAttn = at.drop(dx if at.config.parallel else dMid, "attention")
    if "norm_attn_out" in W:
        dAttn, dgain = normed_backward(W, "norm_attn_out", a["out"], a["r_out"], dAttn, at.config)
        dW |= dgain
    if at.config.latent:
        dIn, dW_attn = latent_attention_backward(W, dAttn, a, at)
    elif "W_QKVZ" in W:
        dIn, dW_attn = linear_attention_backward(W, dAttn, normed_stream(a, a["x"], W, "norm_attn", at), at)
    else:
        dIn, dW_attn = attention_backward(W, dAttn, a, at)
    dW |= dW_mlp | dW_attn
    for name, into in SHARED_NORM.items():  # the gradients of a norm that both blocks share add up
        if name in W and into in dW_mlp and into not in W:
            dW[name] = dW[name] + dW.pop(into)
    return dIn.add_(dMid), {name: dW[name] for name in W["lora"]} if "lora" in W else dW


def recomputed(W: dict, saved: Halves, at: Context, whole: bool = False) -> Halves:
    """Return `saved` after "mid" and the norms of blocks' results are computed again; if `whole`, the MLP's, too."""
    a, m = saved
    Attn, a = attention(W, a, at)
    if "norm_attn_out" in W:
        Attn, a = normed_result(W, "norm_attn_out", Attn, a, at)
    m = m | {"mid": a["x"] if at.config.parallel else a["x"] + at.drop(Attn, "attention")}
    W = read_norms(W)
    if "norm_mlp_out" in W:
        Out, _, m = mlp(W, m, at)
        Out, m = normed_result(W, "norm_mlp_out", Out, m, at)
    elif whole and "router" in W:
        m = experts(W, m, at)[2]
    elif whole:
        m = activate_features(W, normed_stream(m, m["mid"], W, "norm_mlp", at), at)
    return a, m


def normed_result(W: dict, name: str, Out: Tensor, s: Values, at: Context) -> tuple[Tensor, Values]:
    """Return a block's result, normed by a norm after the block, and the values to save."""
    y, r = normed(W, name, Out, at.config)
    return y, s | {"out": Out, "r_out": r}


def normed_stream(s: Values, x: Tensor, W: dict, name: str, at: Context) -> Values:
    """Add to `s` y[B_PXE, T_C, D], the stream x[B_PXE, T_CY, D] normed and gathered, and r = 1 / its root mean square.

    A backward calls this and the functions below again: they compute only values that are not in `s`.
    """
    if "y" in s:
        return s
    y, r = normed(W, name, x, at.config)
    y = all_gather("y[B_PXE, T_CY, D] -> y[B_PXE, T_C, D]", y, at.mesh)  # on the critical path
    return s | {"y": y, "r": r}


def attention(W: dict, s: Values, at: Context) -> tuple[Tensor, Values]:
    """(Attn[B_PXE, T_CY, D], s) of the residual stream s["x"]; heads over Y."""
    if at.config.latent:
        s = attend_latents(W, s, at)
    elif "W_QKVZ" in W:
        s = attend_linear(W, normed_stream(s, s["x"], W, "norm_attn", at), at)
    else:
        s = attend_heads(seen_heads(W, at), normed_stream(s, s["x"], W, "norm_attn", at), at)
    Attn = at.einsum("O[B_PXE, T_C, N_Y, H] * W_O[N_Y, H, D] -> Attn[B_PXE, T_C, D] {U_Y}", s["O"], W["W_O"])
    Attn = reduce_scatter("Attn[B_PXE, T_C, D] {U_Y} -> Attn[B_PXE, T_CY, D]", Attn, at.mesh)  # on the critical path
    return biased(Attn, W, "b_O"), s


def attention_backward(W: dict, dAttn: Tensor, s: Values, at: Context) -> tuple[Tensor, dict]:
    """dAttn[B_PXE, T_CY, D] -> (dx[B_PXE, T_CY, D], dW)."""
    mesh, own = at.mesh, seen_heads(W, at)
    dW = {"b_O": dAttn.sum((0, 1))} if "b_O" in W else {}
    coming = all_gather("dAttn[B_PXE, T_CY, D] -> dAttn[B_PXE, T_C, D]", dAttn, mesh, async_op=True)  # critical
    s = attend_heads(own, normed_stream(s, s["x"], W, "norm_attn", at), at)  # what was not kept
    dAttn = wait(coming)
    dO = at.einsum("dAttn[B_PXE, T_C, D] * W_O[N_Y, H, D] -> dO[B_PXE, T_C, N_Y, H]", dAttn, W["W_O"])
    dleaves, dQ, dK, dV, *dG = s["attend_vjp"](dO)
    for name, d in dleaves.items():
        dW[name] = in_place(d, W[name], at)
    dy = at.einsum("dQ[B_PXE, T_C, N_Y, H] * W_Q[D, N_Y, H] -> dy[B_PXE, T_C, D] {U_Y}", dQ, W["W_Q"])
    line = "dK[B_PXE, T_C, K_Y, H] * W_K[D, K_Y, H] -> dy[B_PXE, T_C, D] {U_Y}"
    dy = at.einsum(line, dK, own["W_K"], out=dy, add=True)
    line = "dV[B_PXE, T_C, K_Y, H] * W_V[D, K_Y, H] -> dy[B_PXE, T_C, D] {U_Y}"
    dy = at.einsum(line, dV, own["W_V"], out=dy, add=True)
    if "W_G" in W:
        line = "dG[B_PXE, T_C, N_Y, H] * W_G[D, N_Y, H] -> dy[B_PXE, T_C, D] {U_Y}"
        dy = at.einsum(line, dG[0], W["W_G"], out=dy, add=True)
    dy = reduce_scatter("dy[B_PXE, T_C, D] {U_Y} -> dy[B_PXE, T_CY, D]", dy, mesh, async_op=True)  # critical
    line = "dAttn[B_PXE, T_C, D] * O[B_PXE, T_C, N_Y, H] -> dW_O[N_Y, H, D] {U_PXEC}"  # D, scattered next, outermost
    dW |= weight_gradient(W, "W_O", line, dAttn, s["O"], at)
    line = "y[B_PXE, T_C, D] * dQ[B_PXE, T_C, N_Y, H] -> dW_Q[D, N_Y, H] {U_PXEC}"
    dW |= weight_gradient(W, "W_Q", line, s["y"], dQ, at)
    if "W_G" in W:
        line = "y[B_PXE, T_C, D] * dG[B_PXE, T_C, N_Y, H] -> dW_G[D, N_Y, H] {U_PXEC}"
        dW |= weight_gradient(W, "W_G", line, s["y"], dG[0], at)
    for dHead, name in ((dK, "W_K"), (dV, "W_V")):
        line = "y[B_PXE, T_C, D] * dK[B_PXE, T_C, K_Y, H] -> dW_K[D, K_Y, H] {U_PXEC}"
        dW |= weight_gradient(W, name, line, s["y"], dHead, at)
    dx, dgains = normed_backward(W, "norm_attn", s["x"], s["r"], wait(dy), at.config)
    return dx, dW | dgains


def mlp(W: dict, s: Values, at: Context) -> tuple[Tensor, None, Values]:
    """(Out[B_PXE, T_CY, D], None, s) of the residual stream s["mid"], with features split over Y."""
    s = activate_features(W, normed_stream(s, s["mid"], W, "norm_mlp", at), at)
    Out = at.einsum("Act[B_PXE, T_C, F_Y] * W_out[F_Y, D] -> Out[B_PXE, T_C, D] {U_Y}", s["Act"], W["W_out"])
    Out = reduce_scatter("Out[B_PXE, T_C, D] {U_Y} -> Out[B_PXE, T_CY, D]", Out, at.mesh)  # on the critical path
    return biased(Out, W, "b_out"), None, s


def mlp_backward(W: dict, dOut: Tensor, s: Values, at: Context) -> tuple[Tensor, dict]:
    """dOut[B_PXE, T_CY, D] -> (dMid[B_PXE, T_CY, D], dW)."""
    mesh, (_, act_vjp) = at.mesh, FUNCTIONS[at.config.nonlinearity]
    dW: dict[str, Any] = {"b_out": dOut.sum((0, 1))} if "b_out" in W else {}
    coming = all_gather("dOut[B_PXE, T_CY, D] -> dOut[B_PXE, T_C, D]", dOut, mesh, async_op=True)  # critical
    s = activate_features(W, normed_stream(s, s["mid"], W, "norm_mlp", at), at)  # what was not kept
    dOut = wait(coming)
    dAct = at.einsum("dOut[B_PXE, T_C, D] * W_out[F_Y, D] -> dAct[B_PXE, T_C, F_Y]", dOut, W["W_out"])
    if "alpha_p" in W:
        dTmp, dW["alpha_p"], dW["alpha_n"] = act_vjp(dAct, s["Tmp"], W["alpha_p"], W["alpha_n"])
    else:
        dTmp = dAct * s["Open"] if "W_gate" in W else act_vjp(dAct, s["Tmp"])
    dy = at.einsum("dTmp[B_PXE, T_C, F_Y] * W_in[D, F_Y] -> dy[B_PXE, T_C, D] {U_Y}", dTmp, W["W_in"])
    if "W_gate" in W:
        dGate = act_vjp(dAct.mul_(s["Tmp"]), s["Gate"])
        line = "dGate[B_PXE, T_C, F_Y] * W_gate[D, F_Y] -> dy[B_PXE, T_C, D] {U_Y}"
        dy = at.einsum(line, dGate, W["W_gate"], out=dy, add=True)
    dy = reduce_scatter("dy[B_PXE, T_C, D] {U_Y} -> dy[B_PXE, T_CY, D]", dy, mesh, async_op=True)  # critical
    line = "y[B_PXE, T_C, D] * dTmp[B_PXE, T_C, F_Y] -> dW[D, F_Y] {U_PXEC}"
    dW |= weight_gradient(W, "W_in", line, s["y"], dTmp, at)
    if "W_gate" in W:
        dW |= weight_gradient(W, "W_gate", line, s["y"], dGate, at)
    if "b_in" in W:
        dW |= {"b_in": dTmp.sum((0, 1))} | ({"b_gate": dGate.sum((0, 1))} if "b_gate" in W else {})
    line = "dOut[B_PXE, T_C, D] * Act[B_PXE, T_C, F_Y] -> dW_out[F_Y, D] {U_PXEC}"
    dW |= weight_gradient(W, "W_out", line, dOut, s["Act"], at)
    dMid, dgains = normed_backward(W, "norm_mlp", s["mid"], s["r"], wait(dy), at.config)
    return dMid, dW | dgains


def experts(W: dict, s: Values, at: Context) -> tuple[Tensor, Tensor, Values]:
    """(Out[B_PXE, T_CY, D], the auxiliary terms Loss[] {U_PXECY}, s) of the residual stream s["mid"]."""
    config, mesh = at.config, at.mesh
    if "routing" not in s:
        y, r = normed(W, "norm_mlp", s["mid"], config)
        s = s | {"routing": expert.route_tokens(W, y, config, mesh, "E", tensor="Y", spec=ROWS)}
        for log in open_logs:
            log.loads.append(s["routing"].load)
        y = all_gather("y[B_PXE, T_CY, D] -> y[B_PXE, T_C, D]", y, mesh)  # on the critical path
        s = {"y": y, "r": r} | s
    s = normed_stream(s, s["mid"], W, "norm_mlp", at)
    Out, aux, s = expert.forward(W, s, config, mesh, expert.expert_layout(mesh, config.E, "E", "Y", ROWS), at.einsum)
    return Out, config.aux_coef * aux["balance"] + config.z_coef * aux["z"], s


def experts_backward(W: dict, dOut: Tensor, scale: float, s: Values, at: Context) -> tuple[Tensor, dict]:
    """dOut[B_PXE, T_CY, D] -> (dMid[B_PXE, T_CY, D], dW). `scale`: the cotangent of the auxiliary terms."""
    config, layout = at.config, expert.expert_layout(at.mesh, at.config.E, "E", "Y", ROWS)
    s = normed_stream(s, s["mid"], W, "norm_mlp", at) if "Row" in s else experts(W, s, at)[2]
    dLoss = {"balance": scale * config.aux_coef, "z": scale * config.z_coef}
    gradient = gradient_by_expert if at.adapters is None else expert_factor_gradients
    dy, dW = expert.backward(W, dOut, dLoss, s, config, at.mesh, layout, at.einsum, gradient)
    if at.loads and "bias" in W and not at.mesh.coord.get("Y", 0):  # the ranks along Y have the same tokens
        dW["bias"] = load_of(s["routing"].experts, config.E).to(torch.promote_types(dy.dtype, torch.float32))
    dMid, dgain = normed_backward(W, "norm_mlp", s["mid"], s["r"], dy, config)
    return dMid, dW | dgain
