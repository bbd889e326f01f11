"""Rotary positions: each head's dims as the coordinates of H/2 planes, each turned by position times its frequency.

The first half of H holds the first coordinates, the second half the second (Su et al. 2021, arxiv.org/abs/2104.09864).
"""

import math

import torch
from torch import Tensor

from scaling.configs import RopeScaling
from scaling.models.types import SCALINGS


def frequencies(H: int, theta: float, scaling: RopeScaling | None = None, device=None) -> Tensor:
    """Radians per position of each plane, float64[H/2]: theta^(-2i/H), changed by `scaling`. ValueError if unknown."""
    f = theta ** (-torch.arange(0, H, 2, device=device, dtype=torch.float64) / H)
    if scaling is None:
        return f
    if scaling.kind == "linear":
        return f / scaling.factor
    if scaling.kind == "llama3":  # turns within the original context: kept above `high`, slowed below `low`
        kept = ((scaling.original * f / (2 * math.pi) - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        return f * (kept + (1 - kept) / scaling.factor)
    raise ValueError(
        f"rope_scaling of type {scaling.kind!r} is not computed here; {', '.join(SCALINGS)} are"
        "\n  fix: choose one of these, or none"
    )


def tables(positions: Tensor, H: int, theta: float, scaling: RopeScaling | None = None, dtype=None):
    """(cos, sin)[..., T, H] of positions[..., T], worked out in float64 and then rounded to `dtype`.

    Plane i has its cosine at i and i + H/2, its sine there with the signs -, +: what `rotate` multiplies by.
    """
    angles = positions[..., None] * frequencies(H, theta, scaling, positions.device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x[B, T, heads, H] turned by tables [T, H], or [B, T, H] where the sequences' positions differ."""
    return torch.addcmul(x * cos[..., None, :], x.roll(x.shape[-1] // 2, -1), sin[..., None, :])


def restarted(segments: Tensor) -> Tensor:
    """Positions[B, T] that start again from 0 with every document of segments[B, T], the ids of packed documents."""
    here = torch.arange(segments.shape[-1], device=segments.device).expand_as(segments)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
    return here - torch.where(starts, here, 0).cummax(-1).values
