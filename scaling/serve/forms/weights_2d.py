"""2D weight-stationary (Part 7, Question 7 and Appendix B; Pope et al. 2022, arXiv:2211.05102): weights over D as well.

    KV[2, B_XZ, S, K_Y, H], W_Q[D_X, N_YZ, H], W_O[N_YZ, H, D_X], W_in[D_X, F_YZ], W_out[F_YZ, D_X], x[B, T, D_XYZ]

A rank's block of a weight is nearly square, so the activations that it sends shrink with the number of ranks: D/X of
the stream, F/(YZ) within a block. Attention has its heads over Y and Z. The cache's batch is split over X and Z, and so
are the queries, by a ReduceScatter and an AllToAll.
"""

import torch
from torch import Tensor

from scaling.collectives import all_gather, all_reduce, all_to_all, einsum, masked, reduce_scatter, shard
from scaling.models.layer import Context, biased, biased_features, finish_heads, gate_features, norm_operands
from scaling.models.pointwise import mean_square, rms_norm


def embed(x: Tensor, here: Tensor, at: Context) -> Tensor:
    """x[B, T, D_XYZ], as in `heads`, from rows of E[V_YZ, D_X]."""
    x = masked("x[B, T, D_X] {U_YZ}", x, here, at.mesh)
    return reduce_scatter("x[B, T, D_X] {U_YZ} -> x[B, T, D_XYZ]", x, at.mesh)


def normed_result(W: dict, name: str, x: Tensor, at: Context) -> Tensor:
    """x[B, T, D_XYZ] -> y[B, T, D_XYZ]: a norm that the model has, by means over the whole of D."""

    def centered(x: Tensor) -> Tensor:
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return y - all_reduce("m[B, T, 1] {U_XYZ} -> m[B, T, 1]", y.mean(-1, keepdim=True), at.mesh, op="mean")

    y, gain = norm_operands(W, name, x, at.config, centered)
    if gain is None:
        return x
    square = all_reduce("s[B, T, 1] {U_XYZ} -> s[B, T, 1]", mean_square(y), at.mesh, op="mean")
    return biased(rms_norm(y, square, gain=gain, eps=at.config.eps), W, f"b_{name}").to(x.dtype)


def _normed(W: dict, name: str, x: Tensor, at: Context) -> Tensor:
    """x[B, T, D_XYZ] -> y[B, T, D_X]: normed, and gathered over Y and Z."""
    y = normed_result(W, name, x, at)
    return all_gather("y[B, T, D_XYZ] -> y[B, T, D_X]", y, at.mesh)  # on the critical path


def attention(W: dict, x: Tensor, at: Context, l: int) -> Tensor:
    """x[B, T, D_XYZ] -> Attn[B, T, D_XYZ]; the keys and values of this rank's rows are written to the cache."""
    y = _normed(W, "norm_attn", x, at)
    Q = einsum("y[B, T, D_X] * W_Q[D_X, N_YZ, H] -> Q[B, T, N_YZ, H] {U_X}", y, W["W_Q"])
    Q = reduce_scatter("Q[B, T, N_YZ, H] {U_X} -> Q[B_X, T, N_YZ, H]", Q, at.mesh)  # on the critical path
    Q = all_to_all("Q[B_X, T, N_YZ, H] -> Q[B_XZ, T, N_Y, H]", Q, at.mesh)  # on the critical path
    K = einsum("y[B, T, D_X] * W_K[D_X, K_Y, H] -> K[B, T, K_Y, H] {U_X}", y, W["W_K"])
    V = einsum("y[B, T, D_X] * W_V[D_X, K_Y, H] -> V[B, T, K_Y, H] {U_X}", y, W["W_V"])
    K = reduce_scatter("K[B, T, K_Y, H] {U_X} -> K[B_X, T, K_Y, H]", K, at.mesh)
    V = reduce_scatter("V[B, T, K_Y, H] {U_X} -> V[B_X, T, K_Y, H]", V, at.mesh)
    K = shard("K[B_X, T, K_Y, H] -> K[B_XZ, T, K_Y, H]", K, at.mesh)
    V = shard("V[B_X, T, K_Y, H] -> V[B_XZ, T, K_Y, H]", V, at.mesh)
    Q, K, V = finish_heads(W, Q, K, V, at)
    O = at.slots.attend(l, Q, K, V, at.config, W.get("sinks"))
    O = all_to_all("O[B_XZ, T, N_Y, H] -> O[B_X, T, N_YZ, H]", O, at.mesh)  # on the critical path
    O = all_gather("O[B_X, T, N_YZ, H] -> O[B, T, N_YZ, H]", O, at.mesh)  # on the critical path
    if "W_G" in W:
        G = einsum("y[B, T, D_X] * W_G[D_X, N_YZ, H] -> G[B, T, N_YZ, H] {U_X}", y, W["W_G"])
        O = O * all_reduce("G[B, T, N_YZ, H] {U_X} -> G[B, T, N_YZ, H]", G, at.mesh).sigmoid()
    Attn = einsum("O[B, T, N_YZ, H] * W_O[N_YZ, H, D_X] -> Attn[B, T, D_X] {U_YZ}", O, W["W_O"])
    Attn = reduce_scatter("Attn[B, T, D_X] {U_YZ} -> Attn[B, T, D_XYZ]", Attn, at.mesh)  # on the critical path
    return biased(Attn, W, "b_O")


def mlp(W: dict, x: Tensor, at: Context) -> Tensor:
    """x[B, T, D_XYZ] -> Out[B, T, D_XYZ]: the lines of Question 7."""
    In = _normed(W, "norm_mlp", x, at)  # 1.
    Tmp = einsum("In[B, T, D_X] * W_in[D_X, F_YZ] -> Tmp[B, T, F_YZ] {U_X}", In, W["W_in"])  # 2.
    Tmp = all_reduce("Tmp[B, T, F_YZ] {U_X} -> Tmp[B, T, F_YZ]", Tmp, at.mesh)  # 3. on the critical path
    Gate = None
    if "W_gate" in W:
        Gate = einsum("In[B, T, D_X] * W_gate[D_X, F_YZ] -> Gate[B, T, F_YZ] {U_X}", In, W["W_gate"])
        Gate = all_reduce("Gate[B, T, F_YZ] {U_X} -> Gate[B, T, F_YZ]", Gate, at.mesh)  # on the critical path
    Act = gate_features(W, *biased_features(W, Tmp, Gate), at.config)["Act"]
    Out = einsum("Act[B, T, F_YZ] * W_out[F_YZ, D_X] -> Out[B, T, D_X] {U_YZ}", Act, W["W_out"])  # 4.
    Out = reduce_scatter("Out[B, T, D_X] {U_YZ} -> Out[B, T, D_XYZ]", Out, at.mesh)  # 5. on the critical path
    return biased(Out, W, "b_out")


def head(params: dict, x: Tensor, at: Context) -> Tensor:
    """x[B, T, D_XYZ] -> logits[B, T, V], whole on every rank."""
    x = _normed(params, "norm", x, at)
    if "unembed" in params:
        logits = einsum("x[B, T, D_X] * U[D_X, V_YZ] -> logits[B, T, V_YZ] {U_X}", x, params["unembed"])
    else:
        logits = einsum("E[V_YZ, D_X] * x[B, T, D_X] -> logits[B, T, V_YZ] {U_X}", params["embed"], x)
    logits = all_reduce("logits[B, T, V_YZ] {U_X} -> logits[B, T, V_YZ]", logits, at.mesh)
    return all_gather("logits[B, T, V_YZ] -> logits[B, T, V]", biased(logits, params, "b_unembed"), at.mesh)
