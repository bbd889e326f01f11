"""What some models have between the products Q, K, V and attention: biases, norms of heads, and fewer KV heads than Y.

All of it works head by head, so it is the same on shards of heads. Each function that follows a line of
`scaling.strategies.transformer.layer` does nothing to a model without it; its transpose stands below it.
"""

from typing import Any

import torch
from torch import Tensor

from scaling.models.pointwise import gained_norm, gained_norm_vjp


def biased_heads(W: dict, Q: Tensor, K: Tensor, V: Tensor, at: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Q[B_PXE, T_C, N_Y, H], K[B_PXE, T_C, K_Y, H], V plus the biases of a model that has them."""
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
