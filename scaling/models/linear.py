"""Lines of a linear layer, which training, one device and serving share, and their backward: the gated delta rule.

Queries, keys, values and an output gate Z come from one product, and the rule's gates B and A from another. n heads of
values share k heads of queries and keys (`configs.Linear`). Before the rule, queries, keys and values pass a causal
convolution over w tokens, channel by channel, and SiLU; queries and keys then get length 1. After it each head is
normed and multiplied by silu(Z) (Yang et al. 2024, arxiv.org/abs/2412.06464, section 3.4).

    y[B, T, D] -> QKVZ[B, T, k, m], BA[B, T, k, u] -> Q, K[B, T, n, h], V[B, T, n, v], g, beta[B, T, n]
               -> the rule, with its state S[B, n, h, v] -> O[B, T, n, v]

A token needs of earlier ones the state, and the last w - 1 tokens before the convolution, the *tail*. With the
sequence over C each rank gets both from the rank before. A rank's part maps the state before it to R + P S, so ranks
find R and P at the same time, and only products with P wait for each other:

    tail[B_PXE, T_C, k_Y, c]: the last w - 1 tokens of the rank before                  1 CollectivePermute
    S[B_PXE, I_C, n_Y, h, v] <- R + P S of the rank before                              |C| - 1 of them

In the backward the cotangent of a state comes from the rank after. A rank's part takes it to r + P^T dS, with the
forward's P, so ranks find r at the same time here, too, and only the products with P^T wait for each other.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.collectives import all_gather, einsum, ppermute, reduce_scatter, wait
from scaling.collectives.linear import who_watches
from scaling.configs import Config
from scaling.models.delta_rule import delta_rule, delta_rule_backward
from scaling.models.layer import Context, Values, normed_backward
from scaling.models.pointwise import rms_norm
from scaling.spec import present

EPS = 1e-6  # added to the square of a query's or key's length


def attend_linear(W: dict, values: Values, at: Context) -> Values:
    """Compute O[B_PXZE, T_C, n_Y, v] from y[B_PXZE, T_C, D] in `values`; return the values with it.

    They also get the arrays that backward and serving need: "S_out" is the state after the last token, and "mix_vjp"
    and "norm_vjp" differentiate `mix` and the gated norm. If the values lack "tail" and "S", the rank before sends
    them.
    """
    if "O" in values:
        return values
    linear: Any = at.config.linear
    if "QKVZ" not in values:
        y, einsum = values["y"], at.einsum
        QKVZ = einsum("y[B_PXZE, T_C, D] * W_QKVZ[D, k_Y, m] -> QKVZ[B_PXZE, T_C, k_Y, m]", y, W["W_QKVZ"])
        BA = einsum("y[B_PXZE, T_C, D] * W_BA[D, k_Y, u] -> BA[B_PXZE, T_C, k_Y, u]", y, W["W_BA"])
        values = values | {"QKVZ": QKVZ, "BA": BA}
    QKV, Z = split_gate(values["QKVZ"], at.config)
    if "tail" not in values:
        values = values | {"tail": tail_before(QKV[:, 1 - linear.width :], linear.width, at.mesh)}
    convolved, mixed = torch.cat([values["tail"], QKV], 1), partial(mix, config=at.config, places=at.places)
    given = (values["BA"], *(W[name] for name in ("conv_Q", "conv_K", "conv_V", "A_log", "dt")))
    (Q, K, V, g, beta), mix_vjp = at.vjp(mixed, convolved, *given)
    if "real" in values:  # padding neither decays the state nor writes to it
        g, beta = g * values["real"], beta * values["real"]
    rule = Q, K, V, g, beta
    starts = None if at.places is None else at.places == 0
    own_tokens(*rule, starts)
    if "S" not in values:
        values = values | state_before(rule, starts, at.mesh)
    Heads, S, kept = delta_rule(Q, K, V, g, beta, values["S"], starts)
    O, norm_vjp = at.vjp(partial(gate, eps=at.config.eps), Heads.to(Z.dtype), Z, W["gain"])
    return values | {"O": O, "S_out": S, "rule": rule, "kept": kept, "mix_vjp": mix_vjp, "norm_vjp": norm_vjp}


def split_gate(QKVZ: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Split QKVZ[B, T, k, m] into QKV[B, T, k, c], which is then convolved, and the output gate Z[B, T, n, v]."""
    linear: Any = config.linear
    gate = linear.value * linear.values // linear.keys
    QKV, Z = QKVZ.split([QKVZ.shape[-1] - gate, gate], -1)
    return QKV, Z.unflatten(-1, (-1, linear.value)).flatten(2, 3)


def mix(QKV, BA, conv_Q, conv_K, conv_V, A_log, dt, config: Config, places: Tensor | None) -> tuple[Tensor, ...]:
    """Return the rule's Q, K[B, T, n, h], V[B, T, n, v], g, beta[B, T, n] for QKV[B, w - 1 + T, k, c], BA[B, T, k, u].

    places[B, T] are positions in packed documents: a convolution does not reach beyond its document's first token. The
    rule is computed in float32 or wider.
    """
    linear: Any = config.linear
    width, wide = linear.width, torch.promote_types(QKV.dtype, torch.float32)
    Q, K, V = QKV.split([linear.key, linear.key, QKV.shape[-1] - 2 * linear.key], -1)
    V, T = V.unflatten(-1, (-1, linear.value)).flatten(2, 3), BA.shape[1]

    def convolved(x: Tensor, conv: Tensor) -> Tensor:
        taps = [x[:, i : i + T] * tap for i, tap in enumerate(conv.unbind(-1))]
        if places is not None:
            taps = [tap * (places >= width - 1 - i)[..., None, None] for i, tap in enumerate(taps)]
        return F.silu(sum(taps[1:], taps[0])).to(wide)

    def unit(x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
        return x.unsqueeze(3).expand(*x.shape[:3], linear.values // linear.keys, linear.key).flatten(2, 3)

    b, a = BA.chunk(2, -1)
    g = -A_log.to(wide).exp() * F.softplus(a.flatten(2).to(wide) + dt)
    Q, K, V = convolved(Q, conv_Q), convolved(K, conv_K), convolved(V, conv_V)
    return unit(Q) * linear.key**-0.5, unit(K), V, g, b.flatten(2).sigmoid().to(wide)


def gate(O: Tensor, Z: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return O[B, T, n, v], normed head by head, times silu(Z)."""
    wide = torch.promote_types(O.dtype, torch.float32)
    return (rms_norm(O, gain=gain, eps=eps) * F.silu(Z.to(wide))).to(O.dtype)


def tail_before(tail: Tensor, width: int, mesh: Any) -> Tensor:
    """Return the tail of the rank before along C, and zeros before the first token."""
    if mesh.sizes.get("C", 1) == 1:
        return tail.new_zeros(len(tail), width - 1, *tail.shape[2:])
    return handed_on("tail[B_PXZE, T_C, k_Y, c]", tail, mesh)


def handed_on(type: str, x: Tensor, mesh: Any, back: bool = False) -> Tensor:
    """Send x of this type to the next rank along C, or `back` to the one before; a rank that gets nothing has zeros."""
    steps = [(c, c + 1) for c in range(mesh.sizes["C"] - 1)]
    return ppermute(
        str(present(type, mesh)), x.contiguous(), mesh, "C", [pair[::-1] for pair in steps] if back else steps
    )


def own_tokens(*arrays: Tensor | None) -> None:
    """Tell the judge that the rule runs along each rank's own tokens of these arrays: ranks hand on its state."""
    if (watch := who_watches()) is not None:
        for x in arrays:
            watch.own_part(x, "C")


def state_before(rule: tuple[Tensor, ...], starts: Tensor | None, mesh: Any) -> Values:
    """Return the state before this rank's tokens as "S"; with ranks along C, "P" maps it to the last state."""
    Q, K, V, g, beta = rule
    (B, _, n, h), v = K.shape, V.shape[-1]
    S = V.new_zeros(B, n, h, v)
    if (C := mesh.sizes.get("C", 1)) == 1:
        return {"S": S}
    first = torch.cat([S, torch.eye(h, dtype=V.dtype, device=V.device).expand(B, n, h, h)], -1)
    _, last, _ = delta_rule(Q, K, F.pad(V, (0, h)), g, beta, first, starts)  # P: from the identity, V = 0
    R, P = (x.unsqueeze(1) for x in last.split([v, h], -1))
    S = S.unsqueeze(1)
    for _ in range(C - 1):
        S = R + einsum("P[B_PXZE, I_C, n_Y, h, j] * S[B_PXZE, I_C, n_Y, j, v] -> S[B_PXZE, I_C, n_Y, h, v]", P, S)
        S = handed_on("S[B_PXZE, I_C, n_Y, j, v]", S, mesh)
    return {"S": S.squeeze(1), "P": P}


def linear_attention_backward(W: dict, dAttn: Tensor, s: dict, at: Any) -> tuple[Tensor, dict]:
    """dAttn[B_PXE, T_CY, D] -> (dx[B_PXE, T_CY, D], dW). The values `s` have y[B_PXE, T_C, D]."""
    mesh, starts = at.mesh, None if at.places is None else at.places == 0
    coming = all_gather("dAttn[B_PXE, T_CY, D] -> dAttn[B_PXE, T_C, D]", dAttn, mesh, async_op=True)  # critical
    s = attend_linear(W, s, at)  # what was not kept
    dAttn = wait(coming)
    dO = at.einsum("dAttn[B_PXE, T_C, D] * W_O[n_Y, v, D] -> dO[B_PXE, T_C, n_Y, v]", dAttn, W["W_O"])
    dHeads, dZ, dgain = s["norm_vjp"](dO)  # dgain[v] {U_PXECY}
    dHeads = dHeads.to(s["S"].dtype)
    own_tokens(dHeads, starts)
    dS = state_cotangent(dHeads, s, starts, mesh)
    *drule, _ = delta_rule_backward(dHeads, dS, s["kept"], *s["rule"], starts=starts)
    own_tokens(*drule)
    dQKV, dBA, *dmix = s["mix_vjp"](tuple(drule))  # {U_PXEC}
    dQKVZ = torch.cat([tail_added(dQKV, at), dZ.unflatten(2, (dQKV.shape[2], -1)).flatten(3)], -1)
    dy = at.einsum("dQKVZ[B_PXE, T_C, k_Y, m] * W_QKVZ[D, k_Y, m] -> dy[B_PXE, T_C, D] {U_Y}", dQKVZ, W["W_QKVZ"])
    line = "dBA[B_PXE, T_C, k_Y, u] * W_BA[D, k_Y, u] -> dy[B_PXE, T_C, D] {U_Y}"
    dy = at.einsum(line, dBA, W["W_BA"], out=dy, add=True)
    dy = reduce_scatter("dy[B_PXE, T_C, D] {U_Y} -> dy[B_PXE, T_CY, D]", dy, mesh, async_op=True)  # critical
    dW = dict(zip(("conv_Q", "conv_K", "conv_V", "A_log", "dt"), dmix, strict=True)) | {"gain": dgain}
    line = "O[B_PXE, T_C, n_Y, v] * dAttn[B_PXE, T_C, D] -> dW_O[n_Y, v, D] {U_PXEC}"
    dW["W_O"] = at.einsum(line, s["O"], dAttn)
    line = "y[B_PXE, T_C, D] * dQKVZ[B_PXE, T_C, k_Y, m] -> dW_QKVZ[D, k_Y, m] {U_PXEC}"
    dW["W_QKVZ"] = at.einsum(line, s["y"], dQKVZ)
    line = "y[B_PXE, T_C, D] * dBA[B_PXE, T_C, k_Y, u] -> dW_BA[D, k_Y, u] {U_PXEC}"
    dW["W_BA"] = at.einsum(line, s["y"], dBA)
    dx, dgains = normed_backward(W, "norm_attn", s["x"], s["r"], wait(dy), at.config)
    return dx, dW | dgains


def state_cotangent(dHeads: Tensor, s: dict, starts: Tensor | None, mesh: Any) -> Tensor:
    """Return dS[B_PXE, n_Y, h, v] of the state after this rank's tokens: 0 on the last rank, else sent by the next."""
    dS = torch.zeros_like(s["S"])
    if (C := mesh.sizes.get("C", 1)) == 1:
        return dS
    r = delta_rule_backward(dHeads, dS, s["kept"], *s["rule"], starts=starts)[-1].unsqueeze(1)
    dS = dS.unsqueeze(1)
    for _ in range(C - 1):
        line = "P[B_PXE, I_C, n_Y, j, h] * dS[B_PXE, I_C, n_Y, j, v] -> dS[B_PXE, I_C, n_Y, h, v]"
        dS = handed_on("dS[B_PXE, I_C, n_Y, j, v]", r + einsum(line, s["P"], dS), mesh, back=True)
    return dS.squeeze(1)


def tail_added(dQKV: Tensor, at: Any) -> Tensor:
    """Split the tail off dQKV[B, w - 1 + T, k, c] and add it to the rank before; return dQKV[B_PXE, T_C, k_Y, c]."""
    tail = at.config.linear.width - 1
    dtail, dQKV = dQKV.split([tail, dQKV.shape[1] - tail], 1)
    if at.mesh.sizes.get("C", 1) > 1:
        dQKV = dQKV.clone()
        dQKV[:, -tail:] += handed_on("dtail[B_PXE, T_C, k_Y, c]", dtail, at.mesh, back=True)
    return dQKV
