"""Heads over Y (Part 7, "Generation"): the split of Megatron; weights and caches stay, activations are reduced.

    KV[2, B_Z, S, K_Y, H], W_Q[D, N_Y, H], W_O[N_Y, H, D], W_in[D, F_Y], W_out[F_Y, D], x[B_Z, T_C, D]
Along Z (and E) the weights are replicas, each with rows of the batch of its own. Experts are split over E, or over Z
where there is no E (Part 7, Question 6): their tokens go to them and come back. A prompt may be split over C (Part 7,
"Prefill"): each rank along C computes some of the tokens, and gathers the keys and values of all, which it caches
anyway, 2 B T K H / Y a layer. Its queries see those before them, so the last rank along C has the most to do. In a
step with one token a row all ranks along C do the same, and the axis drops out of every line.
"""

from torch import Tensor

from scaling.collectives import all_gather, all_reduce, einsum, masked
from scaling.models.pointwise import rms_norm
from scaling.models.transformer import activated, headed
from scaling.serve.cache import At
from scaling.serve.types import experts_axis
from scaling.strategies.expert import experts_of, moe


def embed(x: Tensor, here: Tensor, at: At) -> Tensor:
    """x[B_ZE, T_C, D] of rows of E[V_Y, D]; `here`: whether they are of this rank's part."""
    x = masked("x[B_ZE, T_C, D] {U_Y}", x, here, at.mesh)
    return all_reduce("x[B_ZE, T_C, D] {U_Y} -> x[B_ZE, T_C, D]", x, at.mesh)


def attention(W: dict, x: Tensor, at: At, l: int) -> Tensor:
    """x[B_ZE, T_C, D] -> Attn[B_ZE, T_C, D]. Its keys and values are written to the cache."""
    y = rms_norm(x, gain=W["norm_attn"], eps=at.config.eps)
    Q = einsum("y[B_ZE, T_C, D] * W_Q[D, N_Y, H] -> Q[B_ZE, T_C, N_Y, H]", y, W["W_Q"])
    K = einsum("y[B_ZE, T_C, D] * W_K[D, K_Y, H] -> K[B_ZE, T_C, K_Y, H]", y, W["W_K"])
    V = einsum("y[B_ZE, T_C, D] * W_V[D, K_Y, H] -> V[B_ZE, T_C, K_Y, H]", y, W["W_V"])
    Q, K, V = headed(W, Q, K, V, at.rope, at.config.eps)
    K = all_gather("K[B_ZE, T_C, K_Y, H] -> K[B_ZE, T, K_Y, H]", K, at.mesh)  # on the critical path
    V = all_gather("V[B_ZE, T_C, K_Y, H] -> V[B_ZE, T, K_Y, H]", V, at.mesh)
    O = at.slots.attend(l, Q, K, V, at.config.windows[l])
    Attn = einsum("O[B_ZE, T_C, N_Y, H] * W_O[N_Y, H, D] -> Attn[B_ZE, T_C, D] {U_Y}", O, W["W_O"])
    Attn = all_reduce("Attn[B_ZE, T_C, D] {U_Y} -> Attn[B_ZE, T_C, D]", Attn, at.mesh)
    return Attn + W["b_O"] if "b_O" in W else Attn


def mlp(W: dict, x: Tensor, at: At) -> Tensor:
    """x[B_ZE, T_C, D] -> Out[B_ZE, T_C, D]. Of experts, each its own rows."""
    y = rms_norm(x, gain=W["norm_mlp"], eps=at.config.eps)
    if "router" in W:
        axis = experts_axis(at.mesh, "heads")
        return moe(experts_of(W, at.config), y, at.config, at.mesh, axis, tensor="Y", spec="y[B_ZE, T_C, D]")[0]
    Tmp = einsum("y[B_ZE, T_C, D] * W_in[D, F_Y] -> Tmp[B_ZE, T_C, F_Y]", y, W["W_in"])
    Gate = einsum("y[B_ZE, T_C, D] * W_gate[D, F_Y] -> Gate[B_ZE, T_C, F_Y]", y, W["W_gate"]) if "W_gate" in W else None
    Tmp = activated(Tmp, Gate, at.config.nonlinearity)
    Out = einsum("Tmp[B_ZE, T_C, F_Y] * W_out[F_Y, D] -> Out[B_ZE, T_C, D] {U_Y}", Tmp, W["W_out"])
    return all_reduce("Out[B_ZE, T_C, D] {U_Y} -> Out[B_ZE, T_C, D]", Out, at.mesh)


def head(params: dict, x: Tensor, at: At) -> Tensor:
    """x[B_ZE, T, D] -> logits[B, T, V]. They are whole on every rank."""
    x = rms_norm(x, gain=params["norm"], eps=at.config.eps)
    if "unembed" in params:
        logits = einsum("x[B_ZE, T, D] * U[D, V_Y] -> logits[B_ZE, T, V_Y]", x, params["unembed"])
    else:
        logits = einsum("E[V_Y, D] * x[B_ZE, T, D] -> logits[B_ZE, T, V_Y]", params["embed"], x)
    return all_gather("logits[B_ZE, T, V_Y] -> logits[B, T, V]", logits, at.mesh)
