"""Round numbers to 8 and 4 bits, and choose the scale of values from the largest of them, amax.

Floats are rounded to the nearest, ties to even, and clamped to the largest finite number.
"""

import torch
from torch import Tensor

from scaling.spec import Format

TOP = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float4_e2m1fn": 6.0, "int8": 127.0, "int4": 7.0}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1
LEAST = 1e-12  # amax is at least this, so that zeros have a scale above 0


def rounded(x: Tensor, f: Format) -> Tensor:
    """Return float32 x, divided by its scales, in the format's dtype; two in a byte are neighbours in the last dim."""
    x = x.clamp(-(top := TOP[f.values]), top)
    if f.values.startswith("int"):
        y = x.round().to(torch.int8)
        return y if f.per_byte == 1 else packed(y.view(torch.uint8) & 15)
    if f.per_byte == 1:
        return x.to(getattr(torch, f.values))
    table, size = torch.tensor(FP4, device=x.device), x.abs().contiguous()
    below = torch.searchsorted(table, size, right=True).sub(1).clamp(min=0)
    above = (below + 1).clamp(max=len(table) - 1)
    twice, between = 2 * size, table[below] + table[above]
    up = (twice > between) | ((twice == between) & (below % 2 == 1))
    return packed(torch.where(up, above, below).to(torch.uint8) | torch.signbit(x).to(torch.uint8) << 3)


def widened(q: Tensor, f: Format) -> Tensor:
    """Return the values as float32."""
    if f.per_byte == 1:
        return q.to(torch.float32)
    code = torch.stack((q & 15, q >> 4), -1).flatten(-2)
    if f.values == "int4":
        return (code.view(torch.int8) << 4 >> 4).to(torch.float32)
    return torch.tensor(FP4, device=q.device)[(code & 7).long()] * (1 - 2 * (code >> 3).to(torch.float32))


def packed(code: Tensor) -> Tensor:
    """Return codes of four bits, two a byte, the first in the low bits."""
    return code[..., ::2] | code[..., 1::2] << 4


def scales_of(amax: Tensor, f: Format, t: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (scale, 1 / scale) for values up to amax: the scale in the dtype that stores it, 1 / scale in float32.

    `t` is the whole array's scale, which multiplies the block's.
    """
    amax = amax.to(torch.float32)
    if f.scales[0] == "float32":
        inverse = (TOP[f.values] / amax.to(torch.float64).clamp(min=LEAST)).to(torch.float32)
        return inverse.reciprocal(), inverse
    if t is None:  # a power of two, E8M0: its code is a biased exponent, 255 is NaN
        least = 2.0 ** round(torch.tensor(TOP[f.values]).log2().floor().item())
        code = (amax / TOP[f.values] if f.ceil else amax / least).contiguous().view(torch.int32)
        code = (code >> 23) + (((code & 0x7FFFFF) > 0) if f.ceil else 0)
        code = torch.where(torch.isfinite(amax), code.clamp(0, 254), 255)
        s = code.to(torch.uint8).view(torch.float8_e8m0fnu)
        return s, torch.exp2(127.0 - torch.where(code == 255, torch.nan, code.to(torch.float32)))
    s = (amax / TOP[f.values] / t).clamp(torch.finfo(torch.float8_e4m3fn).tiny, 448.0).to(torch.float8_e4m3fn)
    return s, (1.0 / t) / s.to(torch.float32)


def outer_scale(amax: Tensor) -> Tensor:
    """Return NVFP4's float32 scale of the whole array, with which the scales of blocks use all of E4M3's range."""
    return amax.to(torch.float32).clamp(min=LEAST) / (448.0 * 6.0)
