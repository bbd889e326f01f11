"""Read and check the sizes of a mesh (`X=4,Y=2` is {"X": 4, "Y": 2}), and look up a dtype's bytes, without torch."""

import re
from collections.abc import Mapping

from scaling.common.arguments import shortened
from scaling.spec.reader import ShardingError

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
