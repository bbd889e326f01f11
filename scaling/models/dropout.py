"""Dropout whose masks belong to the elements, not to the device: equal on every mesh, and recomputed at will.

Whether an element is kept follows from (seed, layer, branch, sample, position, channel) alone, by the counter-based
random numbers that also initialize params (`scaling.tree`). So nothing is stored for the backward pass, and a layer
that is recomputed, or computed by another stage, drops the same elements.
"""

import torch
from torch import Tensor

from scaling.tree import GOLDEN, hashed, key

FIELDS = 4  # 16-bit fields in each random number, one for each of so many channels
STEPS = 1 << 16  # a rate is a whole number of these


def dropout(
    x: Tensor, branch: str, layer: int = 0, *, rate: float, seed: int, samples: Tensor, positions: Tensor
) -> Tensor:
    """x[B, T, D] with each element 0 by probability `rate`, the others over 1 - rate: linear, and its own transpose.

    samples int64[B] are the indices of the rows in the whole batch; positions int64[T] are the columns' places in the
    sequence.
    """
    rows = (samples.dim(), positions.dim(), x.dim()) == (1, 1, 3) and x.shape[:2] == (len(samples), len(positions))
    if not rows or not x.is_floating_point() or not isinstance(rate, float | int) or not 0 <= rate < 1:
        raise ValueError(
            f"dropout at rate {rate!r} of {x.dtype} {list(x.shape)}, samples {list(samples.shape)}, positions "
            f"{list(positions.shape)}\n"
            "  rule: floats x[B, T, D], a sample for each of B, a position for each of T, a rate in [0, 1)\n"
            "  fix: give the places of these rows and columns"
        )
    dropped = round(rate * STEPS)
    if not dropped:
        return x
    D = x.shape[-1]
    at = hashed(samples * GOLDEN + key(seed, f"dropout {layer} {branch}"))
    at = hashed(at[:, None] + positions * GOLDEN)
    channels = torch.arange(-(-D // FIELDS), device=x.device) * GOLDEN
    fields = hashed(at[..., None] + channels).view(torch.int16)[..., :D]  # uniform in -2^15 .. 2^15 - 1
    return torch.where(fields >= dropped - STEPS // 2, x * (STEPS / (STEPS - dropped)), 0)


def at_step(seed: int, step: int) -> int:
    """Return the seed of one step of a run."""
    return key(seed, f"step {step}")
