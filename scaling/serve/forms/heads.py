"""Heads over Y (Part 7, "Generation"): the split of Megatron; weights and caches stay, activations are reduced.

    KV[2, B_Z, S, K_Y, H], W_Q[D, N_Y, H], W_O[N_Y, H, D], W_in[D, F_Y], W_out[F_Y, D], x[B_Z, T_C, D]

Along Z (and E) the weights are replicas, each with its own rows of the batch. Experts are split over E, or over Z if
there is no E (Part 7, Question 6): tokens go to their experts and come back. A prompt may be split over C (Part 7,
"Prefill"). Each rank along C then computes some of the tokens, and gathers the keys and values of all, which it caches
anyway, 2 B T K H / Y per layer. Its queries see the tokens before them, so the last rank along C has the most work. In
a step with one token per row, all ranks along C do the same, and the axis drops out of every line.
"""

from functools import partial

import torch
from torch import Tensor

from scaling.collectives import all_gather, all_reduce, einsum, masked
from scaling.models.layer import Context, activate_features, attend_heads, biased, normed, rms
from scaling.models.linear import attend_linear, split_gate
from scaling.serve.types import experts_axis
from scaling.strategies.expert import experts_of, moe
from scaling.strategies.expert.routing import ExpertAxes


def embed(x: Tensor, here: Tensor, at: Context) -> Tensor:
    """x[B_ZE, T_C, D] of rows of E[V_Y, D]; `here`: whether a row is in this rank's part."""
    x = masked("x[B_ZE, T_C, D] {U_Y}", x, here, at.mesh)
    return all_reduce("x[B_ZE, T_C, D] {U_Y} -> x[B_ZE, T_C, D]", x, at.mesh)


def attention(W: dict, x: Tensor, at: Context, l: int) -> Tensor:
    """x[B_ZE, T_C, D] -> Attn[B_ZE, T_C, D]; its keys and values are written to the cache."""
    y, _ = normed(W, "norm_attn", x, at.config, rms)
    O = attend_heads(W, {"y": y}, at._replace(attend=partial(over_cache, at, l)))["O"]
    Attn = einsum("O[B_ZE, T_C, N_Y, H] * W_O[N_Y, H, D] -> Attn[B_ZE, T_C, D] {U_Y}", O, W["W_O"])
    Attn = all_reduce("Attn[B_ZE, T_C, D] {U_Y} -> Attn[B_ZE, T_C, D]", Attn, at.mesh)
    return biased(Attn, W, "b_O")


def over_cache(at: Context, l: int, Q: Tensor, K: Tensor, V: Tensor, sinks: Tensor | None = None) -> Tensor:
    """O[B_ZE, T_C, N_Y, H] over the cache, to which K and V[B_ZE, T_C, K_Y, H] of all ranks are written."""
    K = all_gather("K[B_ZE, T_C, K_Y, H] -> K[B_ZE, T, K_Y, H]", K, at.mesh)  # on the critical path
    V = all_gather("V[B_ZE, T_C, K_Y, H] -> V[B_ZE, T, K_Y, H]", V, at.mesh)
    return at.slots.attend(l, Q, K, V, at.config, sinks)


def linear_attention(W: dict, x: Tensor, at: Context, l: int) -> Tensor:
    """x[B_ZE, T_C, D] -> Attn[B_ZE, T_C, D], reading and updating layer l's states of the rows.

    S[l, B_ZE, n_Y, h, v] is in float32 or wider, and tail[l, B_ZE, t, k_Y, c] has the last t = w - 1 tokens before the
    convolution. Prefill runs the rule in chunks, and a decode step is a chunk of one token. A row without tokens in the
    cache starts with zeros. Padded tokens neither decay a state nor write to it. A state takes no token back.
    """
    S, tail, new, rows = at.slots.cache["S"][l], at.slots.cache["tail"][l], at.slots.new, at.slots.states
    y, _ = normed(W, "norm_attn", x, at.config, rms)
    real = torch.arange(x.shape[1], device=x.device) < new[:, None]
    kept = ((at.slots.begun > 0) | (new == 0))[:, None, None, None]
    values = {"y": y, "S": S[rows] * kept, "tail": tail[rows].to(x.dtype) * kept, "real": real[..., None]}
    values = attend_linear(W, values, at)
    whole = torch.cat([values["tail"], split_gate(values["QKVZ"], at.config)[0]], 1)
    last = new[:, None] + torch.arange(tail.shape[1], device=x.device)  # the last real tokens' indices in `whole`
    tail[rows] = whole[torch.arange(len(whole), device=x.device)[:, None], last].to(tail.dtype)
    S[rows] = values["S_out"].to(S.dtype)
    line = "O[B_ZE, T_C, n_Y, v] * W_O[n_Y, v, D] -> Attn[B_ZE, T_C, D] {U_Y}"
    Attn = einsum(line, values["O"], W["W_O"])
    return all_reduce("Attn[B_ZE, T_C, D] {U_Y} -> Attn[B_ZE, T_C, D]", Attn, at.mesh)


def mlp(W: dict, x: Tensor, at: Context) -> Tensor:
    """x[B_ZE, T_C, D] -> Out[B_ZE, T_C, D]; experts get their own rows."""
    y, _ = normed(W, "norm_mlp", x, at.config, rms)
    if "router" in W:
        return routed(W, y, at, experts_axis(at.mesh, "heads"), "y[B_ZE, T_C, D]", "Y")
    Act = activate_features(W, {"y": y}, at)["Act"]
    Out = einsum("Act[B_ZE, T_C, F_Y] * W_out[F_Y, D] -> Out[B_ZE, T_C, D] {U_Y}", Act, W["W_out"])
    Out = all_reduce("Out[B_ZE, T_C, D] {U_Y} -> Out[B_ZE, T_C, D]", Out, at.mesh)
    return biased(Out, W, "b_out")


def routed(W: dict, y: Tensor, at: Context, axis: ExpertAxes, spec: str, tensor: ExpertAxes = None) -> Tensor:
    """Return Out, typed like y, of a layer's experts over `axis`; every expert computes all tokens of a fixed step."""
    experts, fixed = experts_of(W), at.slots.extent.fixed
    return moe(experts, y, at.config, at.mesh, axis, tensor=tensor, spec=spec, fixed=fixed)[0]


def normed_result(W: dict, name: str, Out: Tensor, at: Context) -> Tensor:
    """Return a block's result Out[.., D], normed in a model with norms after its blocks; its rows are whole."""
    return normed(W, name, Out, at.config, rms)[0]


def head(params: dict, x: Tensor, at: Context) -> Tensor:
    """x[B_ZE, T, D] -> logits[B, T, V], whole on every rank."""
    x, _ = normed(params, "norm", x, at.config, rms)
    if "unembed" in params:
        logits = einsum("x[B_ZE, T, D] * U[D, V_Y] -> logits[B_ZE, T, V_Y]", x, params["unembed"])
    else:
        logits = einsum("E[V_Y, D] * x[B_ZE, T, D] -> logits[B_ZE, T, V_Y]", params["embed"], x)
    return all_gather("logits[B_ZE, T, V_Y] -> logits[B, T, V]", biased(logits, params, "b_unembed"), at.mesh)
