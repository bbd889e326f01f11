"""The sizes of a mesh as text and as data: `X=4,Y=2` is {"X": 4, "Y": 2}. No torch."""

import re
from collections.abc import Mapping

from scaling.spec import ShardingError


def format_sizes(sizes: Mapping[str, int]) -> str:
    """{"X": 4, "Y": 2} -> "X=4, Y=2"."""
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items()) or "no axes"


def check_sizes(sizes: Mapping[str, int]) -> None:
    """ShardingError unless every axis has a name that types can hold and a size of at least 1."""
    for axis, size in sizes.items():
        if not (isinstance(axis, str) and re.fullmatch("[A-Z]|(?![A-Z]+$)[A-Za-z][A-Za-z0-9]*", axis)):
            raise ShardingError(f"{axis!r} cannot name a mesh axis: use one capital letter, or a word such as data")
        if not isinstance(size, int) or size < 1:
            raise ShardingError(f"mesh axis {axis} has size {size!r}: it must be an int of at least 1")


def parse_mesh(text: str) -> dict[str, int]:
    """`X=4,Y=2` -> {"X": 4, "Y": 2}, as given to --mesh. ShardingError for text that is no list of axes and sizes."""
    sizes = {}
    for part in text.split(","):
        if not (match := re.fullmatch(r"\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*([0-9]+)\s*", part)):
            raise ShardingError(f"--mesh {text}: cannot read {part!r}; write axes and sizes as in X=4,Y=2")
        if match[1] in sizes:
            raise ShardingError(f"--mesh {text}: axis {match[1]} is given twice")
        sizes[match[1]] = int(match[2])
    check_sizes(sizes)
    return sizes
