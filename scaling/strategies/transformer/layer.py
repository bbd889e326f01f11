"""One layer of a Transformer, line by line, forward and backward (Parts 4 and 5): tensor and sequence parallel over Y.

Between the blocks the residual stream x[B_PXE, T_CY, D] is split along the sequence over Y as well: norms and
residuals are computed once, not |Y| times (sequence parallelism, Korthikanti et al. 2022, arXiv:2205.05198). Weights
come gathered over X. Axes that the mesh lacks drop out.

Backward: every line is the transpose of one of the forward, from the last to the first, by the law of cotangents. A
product Out = A W has two: dA = dOut W^T, on the critical path, and dW = A^T dOut, which can wait: here dW is computed
while the ReduceScatter of dy is under way. Weight gradients are left unreduced over the tokens' axes.

What the backward needs is `saved`, two dicts of named values, of attention and of the MLP. Rematerialization
(Part 4, "Gradient checkpointing") is a set of names that are not kept: the same lines then compute them again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.collectives import all_gather, einsum, reduce_scatter, wait
from scaling.configs import Config
from scaling.models.pointwise import gained_norm, gained_norm_vjp, vjp
from scaling.models.rope import rotate
from scaling.models.transformer import ACTIVATIONS
from scaling.strategies.transformer.experts import experts, experts_backward
from scaling.strategies.transformer.latent import latent_attention, latent_attention_backward

Values = dict[str, Any]
Halves = tuple[Values, Values]  # what is saved of attention, and of the MLP

ROWS = "x[B_PXE, T_CY, D]"  # the residual stream
ATTENDED = frozenset({"O", "pull", "r_Q", "r_K"})  # dot-product attention
LATENTS = frozenset({"C_Q", "C_KV", "r_CQ", "r_CKV"})  # normed and gathered
BETWEEN = ATTENDED | LATENTS | {"y", "r", "Act", "Open"}  # and all else that lies between the matmuls
REMAT = {  # what is not kept for the backward, by policy: the further down, the less is kept
    "none": frozenset(),
    "attention": ATTENDED,
    "matmuls": BETWEEN,
    "block": BETWEEN | {"Q", "K", "V", "KV", "A_Q", "A_KV", "mid", "Tmp", "Gate"},  # all but the layer's input
}
VJPS = {  # (dy, x) -> dx of each activation, in one kernel
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": lambda dy, x: dy * (x > 0),
}


def all_kept(x: Tensor, branch: str, layer: int = 0) -> Tensor:
    """No dropout."""
    return x


class Context(NamedTuple):
    """What the layers of one microbatch share: the model, the mesh, and where this rank's tokens lie.

    `rope`: (cos, sin) of the positions of this rank's T_C tokens. `attend(Q, K, V, window)` -> O[B, T_C, N_Y, H].
    `drop(x, branch, layer=l)`: of x[B_PXE, T_CY, D], which a branch is about to add to the stream, some elements.
    """

    config: Config
    mesh: Any
    rope: tuple[Tensor, Tensor]
    attend: Callable
    drop: Callable = all_kept

    def of_layer(self, l: int) -> "Context":
        """The same for layer l: with its window, attend(Q, K, V), and its own dropout, drop(x, branch)."""
        attend = partial(self.attend, window=self.config.windows[l])
        return self._replace(attend=attend, drop=partial(self.drop, layer=l))


def dropped(remat: str, config: Config) -> frozenset[str]:
    """The names of `saved` that this policy does not keep."""
    names = REMAT[remat]
    on_tape = "pull" not in names and not config.qk_norm  # as attention's own operands
    return names | ({"Q", "K", "V", "KV"} if on_tape else set())


def layer(W: dict, x: Tensor, at: Context, gone: frozenset[str] = REMAT["none"]) -> tuple[Tensor, Any, Halves]:
    """x[B_PXE, T_CY, D] -> (x, the experts' terms Loss[] {U_PXECY} or None, saved without the names in `gone`)."""
    Attn, a = (latent_attention if at.config.latent else attention)(W, {"x": x}, at)
    mid = x + at.drop(Attn, "attention")
    Out, extra, m = experts(W, {"mid": mid}, at) if "router" in W else mlp(W, {"mid": mid}, at)
    a, m = ({name: value for name, value in values.items() if name not in gone} for values in (a, m))
    return mid + at.drop(Out, "mlp"), extra, (a, m)


def layer_backward(W: dict, dx: Tensor, saved: Halves, at: Context, scale: float = 1.0) -> tuple[Tensor, dict]:
    """dx[B_PXE, T_CY, D] -> (dx, dW typed as W and unreduced over the tokens' axes).

    `scale`: the cotangent of the experts' terms.
    """
    a, m = saved
    if "mid" not in m:
        Attn, a = (latent_attention if at.config.latent else attention)(W, a, at)
        m = m | {"mid": a["x"] + at.drop(Attn, "attention")}
    dOut = at.drop(dx, "mlp")
    dMid, dW_mlp = experts_backward(W, dOut, scale, m, at) if "router" in W else mlp_backward(W, dOut, m, at)
    dMid = dMid.add_(dx)
    back = latent_attention_backward if at.config.latent else attention_backward
    dIn, dW = back(W, at.drop(dMid, "attention"), a, at)
    dW = dW | dW_mlp
    return dIn.add_(dMid), {name: dW[name] for name in W}


def normed_stream(x: Tensor, gain: Tensor, at: Context) -> Values:
    """y[B_PXE, T_C, D]: the stream x[B_PXE, T_CY, D] normed and gathered; r[..., 1]: 1 / its root mean square."""
    y, r = gained_norm(x, gain, at.config.eps)
    y = all_gather("y[B_PXE, T_CY, D] -> y[B_PXE, T_C, D]", y, at.mesh)  # on the critical path
    return {"y": y, "r": r}


def attended_heads(W: dict, s: Values, at: Context) -> Values:
    """What attention_backward needs, from x[B_PXE, T_CY, D]: what is in `s` already is not computed again."""
    s = s if "y" in s else s | normed_stream(s["x"], W["norm_attn"], at)
    if "O" in s:
        return s
    if "Q" not in s:
        W_K, W_V = own_heads(W["W_K"], at, 1), own_heads(W["W_V"], at, 1)
        Q = einsum("y[B_PXE, T_C, D] * W_Q[D, N_Y, H] -> Q[B_PXE, T_C, N_Y, H]", s["y"], W["W_Q"])
        K = einsum("y[B_PXE, T_C, D] * W_K[D, K_Y, H] -> K[B_PXE, T_C, K_Y, H]", s["y"], W_K)
        V = einsum("y[B_PXE, T_C, D] * W_V[D, K_Y, H] -> V[B_PXE, T_C, K_Y, H]", s["y"], W_V)
        Q, K, V = biased_heads(W, Q, K, V, at)
        s = s | {"Q": Q, "K": K, "V": V}
    Q, K, scales = normed_heads(W, s["Q"], s["K"], at)
    Q, K = rotate(Q, *at.rope), rotate(K, *at.rope)
    O, pull = vjp(at.attend, Q, K, s["V"])  # each head by itself: nothing is sent
    return s | scales | {"O": O, "pull": pull}


def attention(W: dict, s: Values, at: Context) -> tuple[Tensor, Values]:
    """(Attn[B_PXE, T_CY, D], s) of the residual stream s["x"]; heads over Y."""
    s = attended_heads(W, s, at)
    Attn = einsum("O[B_PXE, T_C, N_Y, H] * W_O[N_Y, H, D] -> Attn[B_PXE, T_C, D] {U_Y}", s["O"], W["W_O"])
    Attn = reduce_scatter("Attn[B_PXE, T_C, D] {U_Y} -> Attn[B_PXE, T_CY, D]", Attn, at.mesh)  # on the critical path
    return Attn + W["b_O"] if "b_O" in W else Attn, s


def attention_backward(W: dict, dAttn: Tensor, s: Values, at: Context) -> tuple[Tensor, dict]:
    """dAttn[B_PXE, T_CY, D] -> (dx[B_PXE, T_CY, D], dW)."""
    mesh, (cos, sin) = at.mesh, at.rope
    s, dW = attended_heads(W, s, at), {"b_O": dAttn.sum((0, 1))} if "b_O" in W else {}
    dAttn = all_gather("dAttn[B_PXE, T_CY, D] -> dAttn[B_PXE, T_C, D]", dAttn, mesh)  # on the critical path
    dO = einsum("dAttn[B_PXE, T_C, D] * W_O[N_Y, H, D] -> dO[B_PXE, T_C, N_Y, H]", dAttn, W["W_O"])
    dQ, dK, dV = s["pull"](dO)
    dQ, dK = rotate(dQ, cos, -sin), rotate(dK, cos, -sin)  # back by the same angle
    dQ, dK, dgains = normed_heads_backward(W, dQ, dK, s)
    dW |= dgains | biased_heads_backward(W, dQ, dK, dV, at)
    dy = einsum("dQ[B_PXE, T_C, N_Y, H] * W_Q[D, N_Y, H] -> dy[B_PXE, T_C, D] {U_Y}", dQ, W["W_Q"])
    own = {name: own_heads(W[name], at, 1) for name in ("W_K", "W_V")}
    for dHead, W_own in zip((dK, dV), own.values(), strict=True):
        line = "dK[B_PXE, T_C, K_Y, H] * W_K[D, K_Y, H] -> dy[B_PXE, T_C, D] {U_Y}"
        dy = einsum(line, dHead, W_own, out=dy, add=True)
    dy = reduce_scatter("dy[B_PXE, T_C, D] {U_Y} -> dy[B_PXE, T_CY, D]", dy, mesh, async_op=True)  # critical
    line = "dAttn[B_PXE, T_C, D] * O[B_PXE, T_C, N_Y, H] -> dW_O[N_Y, H, D] {U_PXEC}"  # D, scattered next, outermost
    dW["W_O"] = einsum(line, dAttn, s["O"])
    line = "y[B_PXE, T_C, D] * dQ[B_PXE, T_C, N_Y, H] -> dW_Q[D, N_Y, H] {U_PXEC}"
    dW["W_Q"] = einsum(line, s["y"], dQ)
    for dHead, name in ((dK, "W_K"), (dV, "W_V")):
        line = "y[B_PXE, T_C, D] * dK[B_PXE, T_C, K_Y, H] -> dW_K[D, K_Y, H] {U_PXEC}"
        dW[name] = in_place(einsum(line, s["y"], dHead), W[name], at, 1)
    dx, dW["norm_attn"] = gained_norm_vjp(s["x"], W["norm_attn"], s["r"], wait(dy))
    return dx, dW


def activated_features(W: dict, s: Values, at: Context) -> Values:
    """What mlp_backward needs, from mid[B_PXE, T_CY, D]: what is in `s` already is not computed again."""
    act = ACTIVATIONS[at.config.nonlinearity]
    s = s if "y" in s else s | normed_stream(s["mid"], W["norm_mlp"], at)
    if "Tmp" not in s:
        s = s | {"Tmp": einsum("y[B_PXE, T_C, D] * W_in[D, F_Y] -> Tmp[B_PXE, T_C, F_Y]", s["y"], W["W_in"])}
        if "W_gate" in W:
            s["Gate"] = einsum("y[B_PXE, T_C, D] * W_gate[D, F_Y] -> Gate[B_PXE, T_C, F_Y]", s["y"], W["W_gate"])
    if "Act" in s:
        return s
    if "W_gate" not in W:
        return s | {"Act": act(s["Tmp"])}
    Open = act(s["Gate"])  # how far the gate is open
    return s | {"Open": Open, "Act": Open * s["Tmp"]}


def mlp(W: dict, s: Values, at: Context) -> tuple[Tensor, None, Values]:
    """(Out[B_PXE, T_CY, D], None, s) of the residual stream s["mid"]; features over Y."""
    s = activated_features(W, s, at)
    Out = einsum("Act[B_PXE, T_C, F_Y] * W_out[F_Y, D] -> Out[B_PXE, T_C, D] {U_Y}", s["Act"], W["W_out"])
    Out = reduce_scatter("Out[B_PXE, T_C, D] {U_Y} -> Out[B_PXE, T_CY, D]", Out, at.mesh)  # on the critical path
    return Out, None, s


def mlp_backward(W: dict, dOut: Tensor, s: Values, at: Context) -> tuple[Tensor, dict]:
    """dOut[B_PXE, T_CY, D] -> (dMid[B_PXE, T_CY, D], dW)."""
    mesh, act_vjp = at.mesh, VJPS[at.config.nonlinearity]
    s, dW = activated_features(W, s, at), {}
    dOut = all_gather("dOut[B_PXE, T_CY, D] -> dOut[B_PXE, T_C, D]", dOut, mesh)  # on the critical path
    dAct = einsum("dOut[B_PXE, T_C, D] * W_out[F_Y, D] -> dAct[B_PXE, T_C, F_Y]", dOut, W["W_out"])
    dTmp = dAct * s["Open"] if "W_gate" in W else act_vjp(dAct, s["Tmp"])
    dy = einsum("dTmp[B_PXE, T_C, F_Y] * W_in[D, F_Y] -> dy[B_PXE, T_C, D] {U_Y}", dTmp, W["W_in"])
    if "W_gate" in W:
        dGate = act_vjp(dAct.mul_(s["Tmp"]), s["Gate"])
        line = "dGate[B_PXE, T_C, F_Y] * W_gate[D, F_Y] -> dy[B_PXE, T_C, D] {U_Y}"
        dy = einsum(line, dGate, W["W_gate"], out=dy, add=True)
    dy = reduce_scatter("dy[B_PXE, T_C, D] {U_Y} -> dy[B_PXE, T_CY, D]", dy, mesh, async_op=True)  # critical
    line = "y[B_PXE, T_C, D] * dTmp[B_PXE, T_C, F_Y] -> dW[D, F_Y] {U_PXEC}"
    dW["W_in"] = einsum(line, s["y"], dTmp)
    if "W_gate" in W:
        dW["W_gate"] = einsum(line, s["y"], dGate)
    line = "dOut[B_PXE, T_C, D] * Act[B_PXE, T_C, F_Y] -> dW_out[F_Y, D] {U_PXEC}"
    dW["W_out"] = einsum(line, dOut, s["Act"])
    dMid, dW["norm_mlp"] = gained_norm_vjp(s["mid"], W["norm_mlp"], s["r"], wait(dy))
    return dMid, dW


# What some models have between the products Q, K, V and attention: biases, norms of heads, and fewer KV heads than Y.
# All of it works head by head, so it is the same on shards of heads. Each does nothing to a model without it.


def biased_heads(W: dict, Q: Tensor, K: Tensor, V: Tensor, at: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V, with the biases of a model that has them."""
    if "b_Q" not in W:
        return Q, K, V
    return Q + W["b_Q"], K + own_heads(W["b_K"], at, 0), V + own_heads(W["b_V"], at, 0)


def biased_heads_backward(W: dict, dQ: Tensor, dK: Tensor, dV: Tensor, at: Any) -> dict[str, Tensor]:
    """The biases' gradients, {U_PXEC}."""
    if "b_Q" not in W:
        return {}
    b_Q, b_K, b_V = (d.sum((0, 1)) for d in (dQ, dK, dV))
    return {"b_Q": b_Q, "b_K": in_place(b_K, W["b_K"], at, 0), "b_V": in_place(b_V, W["b_V"], at, 0)}


def normed_heads(W: dict, Q: Tensor, K: Tensor, at: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(Q, K, {what they were multiplied by beside the gains}): each head normed in a model that does so."""
    if "norm_Q" not in W:
        return Q, K, {}
    Q, r_Q = gained_norm(Q, W["norm_Q"], at.config.eps)
    K, r_K = gained_norm(K, W["norm_K"], at.config.eps)
    return Q, K, {"r_Q": r_Q, "r_K": r_K}


def normed_heads_backward(W: dict, dQ: Tensor, dK: Tensor, s: dict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(dQ, dK, the gains' gradients {U_PXECY}); s has Q and K as they were, and what `normed_heads` returned."""
    if "norm_Q" not in W:
        return dQ, dK, {}
    dQ, norm_Q = gained_norm_vjp(s["Q"], W["norm_Q"], s["r_Q"], dQ)
    dK, norm_K = gained_norm_vjp(s["K"], W["norm_K"], s["r_K"], dK)
    return dQ, dK, {"norm_Q": norm_Q, "norm_K": norm_K}


def own_heads(W: Tensor, at: Any, dim: int) -> Tensor:
    """Of KV heads that are replicated over Y, those that this rank's query heads see; W[.., K_Y, H] as it is.

    `at`: what has the model as `config`, and the `mesh`.
    """
    config, Y = at.config, at.mesh.sizes.get("Y", 1)
    if config.K % Y == 0:
        return W
    N = config.N // Y
    first = at.mesh.coord["Y"] * N // config.G
    return W.narrow(dim, first, max(1, N // config.G))


def in_place(part: Tensor, whole: Tensor, at: Any, dim: int) -> Tensor:
    """The transpose of `own_heads`: the gradient of the heads used, in their place among zeros."""
    if part.shape == whole.shape:
        return part
    padded = torch.zeros_like(whole)
    own_heads(padded, at, dim).copy_(part)
    return padded
