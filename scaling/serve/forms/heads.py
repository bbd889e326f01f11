"""Heads over Y (Part 7, "Generation"): the split of Megatron; weights and caches stay, activations are reduced.

    KV[2, B_Z, S, K_Y, H], W_Q[D, N_Y, H], W_O[N_Y, H, D], W_in[D, F_Y], W_out[F_Y, D], x[B_Z, T, D]
Along Z (and E) the weights are replicas, each with rows of the batch of its own. Experts are split over E, or over Z
where there is no E (Part 7, Question 6): their tokens go to them and come back.
"""

from torch import Tensor

from scaling.collectives import einsum
from scaling.models.pointwise import rms_norm
from scaling.models.transformer import activated, headed
from scaling.serve.cache import At
from scaling.serve.types import experts_axis
from scaling.strategies.axes import all_gather, all_reduce, masked
from scaling.strategies.expert import experts_of, moe


def embed(x: Tensor, here: Tensor, at: At) -> Tensor:
    """x[B_ZE, T, D] of rows of E[V_Y, D]; `here`: whether they are of this rank's part."""
    x = masked("x[B_ZE, T, D] {U_Y}", x, here, at.mesh)
    return all_reduce("x[B_ZE, T, D] {U_Y} -> x[B_ZE, T, D]", x, at.mesh)


def attention(W: dict, x: Tensor, at: At, l: int) -> Tensor:
    """x[B_ZE, T, D] -> Attn[B_ZE, T, D]. Its keys and values are written to the cache."""
    y = rms_norm(x, gain=W["norm_attn"], eps=at.config.eps)
    Q = einsum("y[B_ZE, T, D] * W_Q[D, N_Y, H] -> Q[B_ZE, T, N_Y, H]", y, W["W_Q"])
    K = einsum("y[B_ZE, T, D] * W_K[D, K_Y, H] -> K[B_ZE, T, K_Y, H]", y, W["W_K"])
    V = einsum("y[B_ZE, T, D] * W_V[D, K_Y, H] -> V[B_ZE, T, K_Y, H]", y, W["W_V"])
    Q, K, V = headed(W, Q, K, V, at.rope, at.config.eps)
    O = at.slots.attend(l, Q, K, V, at.config.windows[l])
    Attn = einsum("O[B_ZE, T, N_Y, H] * W_O[N_Y, H, D] -> Attn[B_ZE, T, D] {U_Y}", O, W["W_O"])
    Attn = all_reduce("Attn[B_ZE, T, D] {U_Y} -> Attn[B_ZE, T, D]", Attn, at.mesh)
    return Attn + W["b_O"] if "b_O" in W else Attn


def mlp(W: dict, x: Tensor, at: At) -> Tensor:
    """x[B_ZE, T, D] -> Out[B_ZE, T, D]. Of experts, each its own rows."""
    y = rms_norm(x, gain=W["norm_mlp"], eps=at.config.eps)
    if "router" in W:
        axis = experts_axis(at.mesh, "heads")
        return moe(experts_of(W, at.config), y, at.config, at.mesh, axis, tensor="Y", spec="y[B_ZE, T, D]")[0]
    Tmp = einsum("y[B_ZE, T, D] * W_in[D, F_Y] -> Tmp[B_ZE, T, F_Y]", y, W["W_in"])
    Gate = einsum("y[B_ZE, T, D] * W_gate[D, F_Y] -> Gate[B_ZE, T, F_Y]", y, W["W_gate"]) if "W_gate" in W else None
    Tmp = activated(Tmp, Gate, at.config.nonlinearity)
    Out = einsum("Tmp[B_ZE, T, F_Y] * W_out[F_Y, D] -> Out[B_ZE, T, D] {U_Y}", Tmp, W["W_out"])
    return all_reduce("Out[B_ZE, T, D] {U_Y} -> Out[B_ZE, T, D]", Out, at.mesh)


def head(params: dict, x: Tensor, at: At) -> Tensor:
    """x[B_ZE, T, D] -> logits[B, T, V]. They are whole on every rank."""
    x = rms_norm(x, gain=params["norm"], eps=at.config.eps)
    if "unembed" in params:
        logits = einsum("x[B_ZE, T, D] * U[D, V_Y] -> logits[B_ZE, T, V_Y]", x, params["unembed"])
    else:
        logits = einsum("E[V_Y, D] * x[B_ZE, T, D] -> logits[B_ZE, T, V_Y]", params["embed"], x)
    return all_gather("logits[B_ZE, T, V_Y] -> logits[B, T, V]", logits, at.mesh)
