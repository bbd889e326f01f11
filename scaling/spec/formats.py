"""Formats of arrays with scales, as data: `W[D_X, F] {Q_D}` is held as values and scales (Part 12).

A type says along which dims values share a scale; a format says how many of them do, and in which dtypes values and
scales are. So one listing serves all formats.
"""

from typing import NamedTuple

from scaling.spec.reader import Dims, ShardingError
from scaling.spec.sizes import dtype_bytes


class Format(NamedTuple):
    """The dtypes of an array with scales, by the names of `DTYPE_BYTES`, and the size of its blocks.

    Attributes:
        name: The format's name.
        values: The dtype of the values q.
        scales: The dtypes of the scales s and, if there are two, of t, the one scale of the whole array above them.
        block: The number of values along each dim of `{Q_...}` that share a scale s; 0 is the whole dim.
        per_byte: The number of values in a byte.
        whole: Whether the array has one scale, so that its type says `{Q}`.
        ceil: Whether a power of two is rounded up, so that the largest value is not clamped (RCEIL); else down (OCP).
    """

    name: str
    values: str
    scales: tuple[str, ...] = ("float32",)
    block: int = 0
    per_byte: int = 1
    whole: bool = False
    ceil: bool = False


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FORMATS = {
    each.name: each
    for each in (
        Format("fp8-tensor", E4M3, whole=True),
        Format("fp8-tensor-e5m2", E5M2, whole=True),
        Format("fp8-row", E4M3),
        Format("fp8-row-e5m2", E5M2),
        Format("fp8-128", E4M3, block=128),  # {Q_D}: 1 x 128; {Q_D,F}: 128 x 128
        Format("mxfp8", E4M3, ("float8_e8m0fnu",), 32),
        Format("mxfp8-rceil", E4M3, ("float8_e8m0fnu",), 32, ceil=True),
        Format("mxfp8-e5m2", E5M2, ("float8_e8m0fnu",), 32),
        Format("nvfp4", "float4_e2m1fn", (E4M3, "float32"), 16, 2),
        Format("int8", "int8"),
        Format("int8-128", "int8", block=128),
        Format("int4-32", "int4", block=32, per_byte=2),
    )
}


def format_of(name: "str | Format") -> Format:
    """Return the format of this name; a Format itself, such as `FORMATS["int4-32"]._replace(block=64)`, stays."""
    if isinstance(name, Format):
        return name
    if not isinstance(name, str) or name not in FORMATS:
        raise ShardingError(f"unknown format {name!r:.60}\n  fix: use one of {', '.join(FORMATS)}")
    return FORMATS[name]


def parts_of(dims: Dims, scaled: tuple[str, ...], f: Format) -> tuple[Dims, ...]:
    """Return the dims of the values, of their scales and of the scale above them, if the format has one.

    `D/32` has one entry for each 32 entries of D; a dim whose entries all share one scale is missing.
    """
    if f.whole and len(scaled) < len(dims):
        raise ShardingError(
            f"{{Q_{','.join(scaled)}}}: {f.name} has one scale, and not one for each place of the other dims\n"
            "  rule: {Q_...} names the dims that share a scale\n  fix: write {Q}, or take fp8-row"
        )

    def one_for_each(n: dict[str, int]) -> Dims:
        return tuple((f"{dim}/{n[dim]}" if n.get(dim, 1) > 1 else dim, axes) for dim, axes in dims if n.get(dim, 1))

    found = one_for_each({scaled[-1]: f.per_byte}), one_for_each(dict.fromkeys(scaled, f.block))
    return found if len(f.scales) == 1 else (*found, ())


def bytes_of_parts(f: Format) -> tuple[float, ...]:
    """Return the bytes of one element of each part: of the packed values, and of each scale."""
    return dtype_bytes(f.values) * f.per_byte, *map(dtype_bytes, f.scales)
