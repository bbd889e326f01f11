"""Multi-head latent attention on one device (DeepSeek-V2, arxiv.org/abs/2405.04434, section 2.1; V3, 2412.19437).

Queries pass through a low rank R, and keys and values together through another, C: only the latents of rank C and the
shared key would have to be cached. Positions rotate `rope` dims of each query, and of one key that all heads share:

    y[B, T, D] -> C_Q[B, T, R], normed  -> Q[B, T, N, A]        A = nope + rope
               -> C_KV[B, T, C], normed -> KV[B, T, N, W]       W = nope + value
               -> K_R[B, T, rope]                               shared by all heads; beside C_KV, M = C + rope
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaling.configs import Config
from scaling.models.pointwise import rms_norm
from scaling.models.remat import matmul_weight
from scaling.models.rope import magnitude, rotate

EPS = 1e-6  # of the two norms of latents, independently of `config.eps` (DeepSeek's own code)


def attended(Q: Tensor, KV: Tensor, K_R: Tensor, attend: Callable, rope: tuple, config: Config) -> Tensor:
    """O[B, T, N, value] of Q[B, T, N, A], KV[B, T, N, W] and K_R[B, T, rope].

    Each head is computed alone, so this also holds on shards of heads. The softmax of attend(Q, K, V) has the scale
    1/sqrt(A); the queries that it gets are already multiplied by yarn's scale.
    """
    latent: Any = config.latent
    K_N, V = KV.split([latent.nope, latent.value], -1)
    K_R = turned(K_R[:, :, None], rope, config)
    K = torch.cat([K_N, K_R.expand(*K_N.shape[:-1], latent.rope)], -1)
    return attend(turned_queries(Q, rope, config), K, V)


def turned_queries(Q: Tensor, rope: tuple, config: Config) -> Tensor:
    """Return Q[B, T, N, A] with its last `rope` dims rotated, times yarn's scale."""
    latent: Any = config.latent
    Q_N, Q_R = Q.tensor_split([Q.shape[-1] - latent.rope], -1)
    return torch.cat([Q_N, turned(Q_R, rope, config)], -1) * magnitude(config.rope_scaling) ** 2


def turned(x: Tensor, rope: tuple, config: Config) -> Tensor:
    """Rotate x[B, T, heads, rope] by its positions.

    In an interleaved model the two coordinates of a plane are neighbours. All first coordinates are then moved before
    the second ones, which changes no product of a query and a key.
    """
    latent: Any = config.latent
    return rotate(x.unflatten(-1, (-1, 2)).mT.flatten(-2) if latent.interleaved else x, *rope)


def latent_block(layer: dict, x: Tensor, attend: Callable, rope: tuple, config: Config, matmul=matmul_weight) -> Tensor:
    """Attn[B, T, D] of x[B, T, D], without the residual. attend(Q, K, V) -> O[B, T, N, value]."""
    latent: Any = config.latent
    y = rms_norm(x, gain=layer["norm_attn"], eps=config.eps)
    C_Q = rms_norm(matmul(y, layer["W_DQ"]), gain=layer["norm_CQ"], eps=EPS)
    C_KV, K_R = matmul(y, layer["W_DKV"]).split([latent.kv_rank, latent.rope], -1)
    C_KV = rms_norm(C_KV, gain=layer["norm_CKV"], eps=EPS)
    Q, KV = matmul(C_Q, layer["W_UQ"]), matmul(C_KV, layer["W_UKV"])
    O = attended(Q, KV, K_R, attend, rope, config)
    return matmul(O.flatten(-2), layer["W_O"].flatten(0, 1))
