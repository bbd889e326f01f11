"""Rotary positions: the dims of a head are coordinates in H/2 planes, each rotated by position times its frequency.

The first half of H holds the first coordinates, the second half the second (Su et al. 2021, arxiv.org/abs/2104.09864).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.configs import Config, RopeScaling
from scaling.models.leaves import SCALINGS


def frequencies(H: int, theta: float, scaling: RopeScaling | None = None, device=None, length: int = 0) -> Tensor:
    """Return the radians per position of each plane, float64[H/2]: theta^(-2i/H), changed by `scaling`.

    longrope also needs the text's length. A scaling that is not computed here is a ValueError.
    """
    f = theta ** (-torch.arange(0, H, 2, device=device, dtype=torch.float64) / H)
    if scaling is None:
        return f
    if scaling.kind == "linear":
        return f / scaling.factor
    if scaling.kind == "llama3":
        return scaling.slowed(f)
    if scaling.kind == "longrope":
        return f / f.new_tensor(scaling.factors(length))
    if scaling.kind == "yarn":  # a ramp from the planes with `high` turns in `original` positions to `low`
        first, last = (
            H * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (scaling.high, scaling.low)
        )
        first, last = (math.floor(first), math.ceil(last)) if scaling.truncate else (first, last)
        start, stop = max(first, 0), min(last, H - 1)
        planes = torch.arange(H // 2, device=device, dtype=torch.float64)
        slowed = ((planes - start) / (stop - start or 0.001)).clamp(0, 1)
        return f * (1 - slowed + slowed / scaling.factor)
    raise ValueError(
        f"rope_scaling of type {scaling.kind!r} is not computed here; {', '.join(SCALINGS)} are"
        "\n  fix: choose one of these, or none"
    )


def tables(
    positions: Tensor,
    H: int,
    theta: float,
    scaling: RopeScaling | None = None,
    dtype=None,
    rotary: int | None = None,
    length: int = 0,
):
    """Return (cos, sin)[..., T, H] of positions[..., T], computed in float64 and then rounded to `dtype`.

    Plane i has its cosine at i and i + H/2, and its sine there with the signs - and +, as `rotate` needs them. Only the
    first rotary/2 planes turn (default: all).
    """
    rotary = H if rotary is None else rotary
    angles = positions[..., None] * frequencies(rotary, theta, scaling, positions.device, length)
    grown, still = _length(scaling) if scaling else 1.0, (0, (H - rotary) // 2)
    cos, sin = F.pad(grown * angles.cos(), still, value=1.0).to(dtype), F.pad(grown * angles.sin(), still).to(dtype)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def table_kinds(
    config: Config, positions: Tensor, dtype: torch.dtype, length: int = 0
) -> dict[str, tuple[Tensor, ...]]:
    """Return the tables of the layers of a model by their kind, "all", "local" or "none", as `layer_tables` says."""
    width = config.latent.rope if config.latent else config.H
    cos, sin = tables(positions, width, config.theta, config.rope_scaling, dtype, config.rotary, length)
    kinds: dict[str, Any] = {"all": (cos, sin)}
    kinds |= {"none": (torch.ones_like(cos), torch.zeros_like(sin))} if config.unrotated else {}
    if config.local_theta is not None:
        kinds["local"] = tables(positions, width, config.local_theta, None, dtype, config.rotary)
    if config.score_scale is not None:
        grown = math.sqrt(config.score_scale * math.sqrt(config.H))
        kinds = {kind: (cos * grown, sin * grown) for kind, (cos, sin) in kinds.items()}
    if config.unrotated and (config.qk_bare or config.query_growth):
        grown = 1 + config.query_growth * ((positions + 1) // config.growth_every).double().log1p()
        kinds["none"] += (grown.to(dtype),)
    return kinds


def layer_tables(
    config: Config, positions: Tensor, dtype: torch.dtype, places: dict | None = None, length: int = 0
) -> tuple[tuple[Tensor, ...], ...]:
    """Return (cos, sin) of each layer of a model; `layer.turned_heads` takes a third table of some layers.

    With `score_scale`, queries and keys are each multiplied by sqrt(score_scale * sqrt(H)), so that attention's scale
    of 1/sqrt(H) becomes `score_scale`. An unrotated layer has cos = 1 and sin = 0, without yarn's factor. Layers with a
    window may have another base. With `places`, the `table_kinds` of all positions from 0 on, the angles are looked up
    there. `length` is the text's number of tokens, by which longrope chooses its factors.
    """
    if places is None:
        kinds = table_kinds(config, positions, dtype, length)
    else:
        kinds = {kind: tuple(x[positions] for x in tables) for kind, tables in places.items()}
    local, found = "all" if config.local_theta is None else "local", []
    for l, window in enumerate(config.windows):
        found.append(kinds["none" if l in config.unrotated else local if window else "all"])
    return tuple(found)


def magnitude(scaling: RopeScaling | None) -> float:
    """Return the factor from `mscale_all` by which latent attention multiplies all dims of queries and of keys.

    DeepSeek's class does so with every scaling, not with yarn alone.
    """
    return _scale(scaling.factor, scaling.mscale_all) if scaling else 1.0


def _length(scaling: RopeScaling) -> float:
    """Return the factor by which yarn and longrope multiply the rotated dims; yarn's is 0.1 ln(factor) + 1 by default.

    Peng et al. 2023, arxiv.org/abs/2309.00071.
    """
    if scaling.attention is not None:
        return scaling.attention
    if scaling.kind == "longrope":
        return math.sqrt(1 + math.log(max(1.0, scaling.factor)) / math.log(scaling.original))
    if scaling.kind != "yarn":
        return 1.0
    if scaling.mscale and scaling.mscale_all:
        return _scale(scaling.factor, scaling.mscale) / _scale(scaling.factor, scaling.mscale_all)
    return _scale(scaling.factor, 1.0)


def _scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x[B, T, heads, H] by tables [T, H], or [B, T, H] if the sequences' positions differ."""
    return torch.addcmul(x * cos[..., None, :], x.roll(x.shape[-1] // 2, -1), sin[..., None, :])


def check_positions(config: Config, length: int, packed: bool) -> None:
    """Raise a ValueError if a sequence of this length has more tokens than the model has learned positions.

    A sequence of documents (`packed`) is refused, too, if longrope could need other factors for one of them.
    """
    if 0 < config.learned_positions < length:
        raise ValueError(
            f"{config.name}: sequences of {length} tokens\n  rule: positions are learned, and there are "
            f"{config.learned_positions}\n  fix: give sequences of at most {config.learned_positions} tokens"
        )
    limit = config.rope_scaling.short_texts if config.rope_scaling and packed else None
    if limit is not None and length > limit:
        raise ValueError(
            f"{config.name}: documents in sequences of {length} tokens\n  rule: longrope has other factors for texts "
            f"of more than {limit} tokens\n  fix: give sequences of at most {limit} tokens, or one document in each"
        )


def restarted(segments: Tensor) -> Tensor:
    """Positions[B, T] that start again from 0 with every document of segments[B, T], the ids of packed documents."""
    here = torch.arange(segments.shape[-1], device=segments.device).expand_as(segments)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
    return here - torch.where(starts, here, 0).cummax(-1).values
