"""Sizes without torch: of a mesh's axes, of a dtype's elements, and of the parts of an array with scales.

`X=4,Y=2` is the mesh {"X": 4, "Y": 2}. An array of type `W[D_X, F] {Q_D}` is stored as values and scales (Part 12): the
type says along which dims values share a scale, and a format, as data, how many of them do and in which dtypes values
and scales are. So one listing serves all formats.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from scaling.common.arguments import shortened
from scaling.spec.reader import Dims, ShardingError

DTYPE_BYTES = {"int4": 0.5, "fp4": 0.5, "int8": 1, "uint8": 1, "fp8": 1, "bool": 1, "bf16": 2, "bfloat16": 2}
DTYPE_BYTES |= {"fp16": 2, "f16": 2, "float16": 2, "int16": 2, "fp32": 4, "f32": 4, "float32": 4, "int32": 4}
DTYPE_BYTES |= {"fp64": 8, "f64": 8, "float64": 8, "int64": 8}
DTYPE_BYTES |= {"float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "float4_e2m1fn": 0.5}


def format_sizes(sizes: Mapping[str, int]) -> str:
    """Format sizes as text: {"X": 4, "Y": 2} gives "X=4, Y=2"."""
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items()) or "no axes"


def check_axis(axis) -> None:
    """Raise ShardingError if a type cannot hold an axis of this name: `XY`, for example, would be read as X and Y."""
    if not (isinstance(axis, str) and re.fullmatch("[A-Z]|(?![A-Z]+$)[A-Za-z][A-Za-z0-9]*", axis, re.ASCII)):
        raise ShardingError(f"{axis!r} cannot name a mesh axis\n  fix: use one capital letter, or a word such as data")


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise ShardingError unless every axis has a name that types can hold and a size of at least 1."""
    if not isinstance(sizes, Mapping):
        raise ShardingError(
            f'a mesh is given by the sizes of its axes, such as {{"X": 4, "Y": 2}}; got {sizes!r}'
            "\n  fix: give a dict of names and sizes"
        )
    for axis, size in sizes.items():
        check_axis(axis)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ShardingError(f"mesh axis {axis} has size {size!r}\n  fix: give an int of at least 1")


def mesh_sizes(mesh) -> Mapping[str, int]:
    """Return the axis sizes of a mesh, which is given as a mesh or as a plain dict `{"X": 4, "Y": 2}`."""
    sizes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "sizes", None)
    if sizes is None:
        raise ShardingError(
            f'{mesh!r:.60} is no mesh\n  fix: give a Mesh, an AbstractMesh, or sizes, {{"X": 4, "Y": 2}}'
        )
    return sizes


def parse_mesh(text: str) -> dict[str, int]:
    """Read the value of --mesh: `X=4,Y=2` gives {"X": 4, "Y": 2}.

    Raises:
        ShardingError: The text is not a list of axes and their sizes.
    """
    sizes = parse_sizes(text, "--mesh", "axis")
    check_sizes(sizes)
    return sizes


def parse_sizes(text: str, option: str, what: str) -> dict[str, int]:
    """Read the value of an option such as --sizes: `I=4,J=8` gives {"I": 4, "J": 8}.

    Args:
        text: The names and sizes.
        option: The option's name for error messages, such as "--sizes".
        what: The kind of thing that the names name, for error messages, such as "dim".

    Raises:
        ShardingError: The text has another form, or gives a name twice.
    """
    sizes = {}
    for part in text.split(","):
        if not (match := re.fullmatch(r"\s*([A-Za-z][A-Za-z0-9']*)\s*=\s*([0-9]{1,15})\s*", part, re.ASCII)):
            raise ShardingError(f"{option}: cannot read {shortened(part)!r}\n  fix: write axes and sizes as in X=4,Y=2")
        if match[1] in sizes:
            raise ShardingError(
                f"{option} {shortened(text)}: {what} {match[1]} is given twice\n  fix: give each name once"
            )
        sizes[match[1]] = int(match[2])
    return sizes


def dtype_bytes(dtype) -> float:
    """Return the bytes of one element of a dtype, given as a name ("bf16", "int4"), a torch dtype or that number."""
    if isinstance(dtype, (int, float)) and dtype > 0:
        return dtype
    if isinstance(dtype, str) and dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]
    if isinstance(size := getattr(dtype, "itemsize", None), int):
        return size
    raise ShardingError(
        f"unknown dtype {dtype!r}\n  fix: use a torch dtype, a number of bytes, or one of {[*DTYPE_BYTES]}"
    )


# Formats of arrays with scales


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
