"""The norms of a Transformer's layers: RMSNorm, LayerNorm with and without a bias, and norms over all heads.

LayerNorm is RMSNorm of x minus its mean over D (Ba et al. 2016, arxiv.org/abs/1607.06450). A layer without a norm of
some name leaves its input as it is: OLMo 2 norms what a block adds to the stream, and not what it reads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaling.collectives import all_reduce
from scaling.configs import Config
from scaling.models.pointwise import gained_norm, gained_norm_vjp, mean_square, rms_norm


def centered(x: Tensor) -> Tensor:
    """Return x minus its mean over the last dim, as LayerNorm does."""
    return x - x.mean(-1, keepdim=True)


def normed(W: dict, name: str, x: Tensor, config: Config, norm: Callable = gained_norm) -> tuple[Tensor, Any]:
    """Return (y[.., D], the statistic that `normed_backward` needs), of x[.., D] and the norm `name` of a layer W."""
    if name not in W:
        return x, None
    y, r = norm(centered(x) if config.centered else x, W[name], config.eps)
    return (y + W[f"b_{name}"] if f"b_{name}" in W else y), r


def normed_backward(W: dict, name: str, x: Tensor, r: Any, dy: Tensor, config: Config) -> tuple[Tensor, dict]:
    """Return (dx, the gradients of the norm's gain and bias)."""
    if name not in W:
        return dy, {}
    dx, dgain = gained_norm_vjp(centered(x) if config.centered else x, W[name], r, dy)
    bias = {f"b_{name}": dy.flatten(0, -2).sum(0)} if f"b_{name}" in W else {}
    return centered(dx) if config.centered else dx, {name: dgain} | bias


def rms(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, None]:
    """Return RMSNorm of x, which autograd or nothing differentiates, and no statistic."""
    return rms_norm(x, gain=gain, eps=eps), None


def head_norm(x: Tensor, gain: Tensor, at: Any) -> tuple[Tensor, Any]:
    """x[B_PXZE, T_C, N_Y, H] normed head by head with a gain[H], or all heads together with a gain[N_Y, H]."""
    if gain.dim() == 1:
        return at.norm(x, gain, at.config.eps)
    wide, flat = x.flatten(-2), gain.flatten()
    if at.mesh.sizes.get("Y", 1) == 1:
        y, r = at.norm(wide, flat, at.config.eps)
        return y.view_as(x), r
    square = all_reduce("s[B_PXZE, T_C, I] {U_Y} -> s[B_PXZE, T_C, I]", mean_square(wide), at.mesh, op="mean")
    return rms_norm(wide, square, gain=flat, eps=at.config.eps).view_as(x), torch.rsqrt(square + at.config.eps)


def head_norm_backward(x: Tensor, gain: Tensor, r: Tensor, dy: Tensor, at: Any) -> tuple[Tensor, Tensor]:
    """Return (dx, dgain): of all heads together dx = r gain dy - r^3 x mean(x gain dy), the mean over every head."""
    if gain.dim() == 1:
        return gained_norm_vjp(x, gain, r, dy)
    wide, dy, flat = x.flatten(-2), dy.flatten(-2), gain.flatten()
    along = (wide * dy * flat).to(r.dtype).mean(-1, keepdim=True)
    along = all_reduce("m[B_PXE, T_C, I] {U_Y} -> m[B_PXE, T_C, I]", along, at.mesh, op="mean")
    dgain = (wide * r * dy).flatten(0, -2).sum(0).view_as(gain)
    return (r * flat * dy - r**3 * along * wide).to(x.dtype).view_as(x), dgain.to(gain.dtype)
