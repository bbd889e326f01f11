"""Heads over Y and Z, the cache's batch over Z (Part 7, "Sharding the KV cache"): for more ranks than KV heads.

    KV[2, B_Z, S, K_Y, H], W_Q[D, N_YZ, H], W_O[N_YZ, H, D], W_in[D, F_YZ], W_out[F_YZ, D], x[B, T, D]

There are two AllToAlls per layer: the queries go from heads to rows of the batch, where the caches are, and the result
of attention goes back. W_K and W_V are small, and replicas along Z. The book's last reshape, of [K_Y, M_Z] to N_YZ, is
right only if a rank has one KV head; here both AllToAlls are written on N.
"""

from torch import Tensor

from scaling.collectives import all_gather, all_reduce, all_to_all, einsum, masked, shard
from scaling.models.layer import Context, biased, biased_features, finish_heads, gate_features, normed, rms
from scaling.serve.forms.heads import normed_result as normed_result
from scaling.serve.forms.heads import routed


def embed(x: Tensor, here: Tensor, at: Context) -> Tensor:
    """x[B, T, D], as in `heads`, from rows of E[V_YZ, D]."""
    x = masked("x[B, T, D] {U_YZ}", x, here, at.mesh)
    return all_reduce("x[B, T, D] {U_YZ} -> x[B, T, D]", x, at.mesh)


def attention(W: dict, x: Tensor, at: Context, l: int) -> Tensor:
    """x[B, T, D] -> Attn[B, T, D]; the keys and values of this rank's rows are written to the cache."""
    y, _ = normed(W, "norm_attn", x, at.config, rms)
    Q = einsum("y[B, T, D] * W_Q[D, N_YZ, H] -> Q[B, T, N_YZ, H]", y, W["W_Q"])
    Q = all_to_all("Q[B, T, N_YZ, H] -> Q[B_Z, T, N_Y, H]", Q, at.mesh)  # on the critical path
    own = shard("y[B, T, D] -> y[B_Z, T, D]", y, at.mesh)
    K = einsum("y[B_Z, T, D] * W_K[D, K_Y, H] -> K[B_Z, T, K_Y, H]", own, W["W_K"])
    V = einsum("y[B_Z, T, D] * W_V[D, K_Y, H] -> V[B_Z, T, K_Y, H]", own, W["W_V"])
    Q, K, V = finish_heads(W, Q, K, V, at)
    O = at.slots.attend(l, Q, K, V, at.config, W.get("sinks"))
    O = all_to_all("O[B_Z, T, N_Y, H] -> O[B, T, N_YZ, H]", O, at.mesh)  # on the critical path
    O = gated(W, O, y)
    Attn = einsum("O[B, T, N_YZ, H] * W_O[N_YZ, H, D] -> Attn[B, T, D] {U_YZ}", O, W["W_O"])
    Attn = all_reduce("Attn[B, T, D] {U_YZ} -> Attn[B, T, D]", Attn, at.mesh)  # on the critical path
    return biased(Attn, W, "b_O")


def gated(W: dict, O: Tensor, y: Tensor) -> Tensor:
    """Return O[B, T, N_YZ, H], with each head multiplied by the sigmoid of its gate in a model with gates of heads."""
    if "W_G" not in W:
        return O
    return O * einsum("y[B, T, D] * W_G[D, N_YZ, H] -> G[B, T, N_YZ, H]", y, W["W_G"]).sigmoid()


def mlp(W: dict, x: Tensor, at: Context) -> Tensor:
    """x[B, T, D] -> Out[B, T, D]; every rank has some features of each expert."""
    y, _ = normed(W, "norm_mlp", x, at.config, rms)
    if "router" in W:
        return routed(W, y, at, None, "y[B, T, D]", "YZ")
    Tmp = einsum("y[B, T, D] * W_in[D, F_YZ] -> Tmp[B, T, F_YZ]", y, W["W_in"])
    Gate = einsum("y[B, T, D] * W_gate[D, F_YZ] -> Gate[B, T, F_YZ]", y, W["W_gate"]) if "W_gate" in W else None
    Act = gate_features(W, *biased_features(W, Tmp, Gate), at.config)["Act"]
    Out = einsum("Act[B, T, F_YZ] * W_out[F_YZ, D] -> Out[B, T, D] {U_YZ}", Act, W["W_out"])
    Out = all_reduce("Out[B, T, D] {U_YZ} -> Out[B, T, D]", Out, at.mesh)  # on the critical path
    return biased(Out, W, "b_out")


def head(params: dict, x: Tensor, at: Context) -> Tensor:
    """x[B, T, D] -> logits[B, T, V], whole on every rank."""
    x, _ = normed(params, "norm", x, at.config, rms)
    if "unembed" in params:
        logits = einsum("x[B, T, D] * U[D, V_YZ] -> logits[B, T, V_YZ]", x, params["unembed"])
    else:
        logits = einsum("E[V_YZ, D] * x[B, T, D] -> logits[B, T, V_YZ]", params["embed"], x)
    return all_gather("logits[B, T, V_YZ] -> logits[B, T, V]", biased(logits, params, "b_unembed"), at.mesh)
