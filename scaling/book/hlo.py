"""Read and lay out the shapes in XLA's programs (Part 9).

XLA writes a shape as `bf16[32,32,4096]{2,1,0:T(8,128)(2,1)S(1)}`: it has a dtype and the logical sizes; in braces the
order of the dims in memory, the minor one first; tiles; and the memory space, where S(1) is VMEM. `T(8,128)` cuts the
two minor dims into tiles, padded at the end and stored in sequence; `(2,1)` cuts each tile again. XLA stores a tile's
dims after the others, tile by tile:
https://openxla.org/xla/tiled_layout
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from scaling.spec import dtype_bytes

NAMES = {"f64": "fp64", "f32": "fp32", "f16": "fp16", "bf16": "bf16", "f8e4m3fn": "fp8", "f8e5m2": "fp8"}
WHOLE = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8}
SPACES = {0: "HBM", 1: "VMEM"}
SHAPE = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d,]*)\](?:\{(?P<order>[\d,]*)(?::(?P<rest>[^}]*))?\})?")
REST = re.compile(r"(?:T(?P<tiles>(?:\([\d,]+\))+))?(?:S\((?P<space>\d+)\))?")


@dataclass(frozen=True)
class Shape:
    """An array in memory. `order`: its dims, minor to major; `tiles`: outer first; `space`: 0 is HBM, 1 VMEM."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...] = ()
    space: int = 0

    def __str__(self) -> str:
        tiles = "".join(f"({','.join(map(str, tile))})" for tile in self.tiles)
        rest = ("T" + tiles if tiles else "") + (f"S({self.space})" if self.space else "")
        layout = ",".join(map(str, self.order)) + (":" + rest if rest else "")
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{{{layout}}}"

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return WHOLE[self.dtype] if self.dtype in WHOLE else int(dtype_bytes(NAMES[self.dtype]))

    @property
    def physical(self) -> tuple[int, ...]:
        """The sizes in memory's order, major first, without padding."""
        return tuple(self.shape[dim] for dim in reversed(self.order))

    @property
    def padded(self) -> tuple[int, ...]:
        """The sizes in memory's order, padded to whole tiles; a tile with more dims than the array adds ones."""
        sizes = list(self.physical)
        if self.tiles:
            outer = self.tiles[0]
            sizes = [1] * (len(outer) - len(sizes)) + sizes
            for i, tile in enumerate(reversed(outer), 1):
                sizes[-i] = -(-sizes[-i] // tile) * tile
        return tuple(sizes)

    @property
    def nbytes(self) -> int:
        """The bytes without padding."""
        return math.prod(self.shape) * self.itemsize

    @property
    def padded_bytes(self) -> int:
        """The bytes in memory, with padding."""
        return math.prod(self._laid_out((0,) * len(self.shape))[1]) * self.itemsize

    def _laid_out(self, index: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return an element's index and the sizes in memory, major first, after cutting all tiles."""
        at, sizes = [index[dim] for dim in reversed(self.order)], list(self.physical)
        for tile in self.tiles:
            at, sizes = _tiled(at, sizes, tile)
        return at, sizes

    def offset(self, *index: int) -> int:
        """Return an element's offset in bytes. Raise an IndexError for an index outside the shape."""
        if len(index) != len(self.shape) or not all(0 <= i < n for i, n in zip(index, self.shape, strict=True)):
            raise IndexError(f"{index} lies outside {self}")
        place = 0
        for i, n in zip(*self._laid_out(index), strict=True):
            place = place * n + i
        return place * self.itemsize


def _tiled(at: list[int], sizes: list[int], tile: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return an index and the sizes after cutting the last dims into tiles: the tile's index, then the index in it."""
    missing = max(0, len(tile) - len(sizes))
    at, sizes = [0] * missing + at, [1] * missing + sizes
    front = len(sizes) - len(tile)
    which = [i // t for i, t in zip(at[front:], tile, strict=True)]
    inside = [i % t for i, t in zip(at[front:], tile, strict=True)]
    counts = [-(-n // t) for n, t in zip(sizes[front:], tile, strict=True)]
    return at[:front] + which + inside, sizes[:front] + counts + list(tile)


def parse_shape(text: str) -> Shape:
    """Read a shape with its layout, row-major if it has none. Raise a ValueError for any other text."""
    match = SHAPE.fullmatch(text.strip())
    rest = REST.fullmatch((match["rest"] or "") if match else "")
    if match is None or rest is None or match["dtype"] not in NAMES | WHOLE:
        raise ValueError(f"{text!r} is not a shape with a layout\n  fix: write it as f32[3,5]{{1,0:T(2,2)}}")
    shape = _numbers(match["shape"])
    order = tuple(reversed(range(len(shape)))) if match["order"] is None else _numbers(match["order"])
    tiles = tuple(_numbers(tile) for tile in re.findall(r"\(([\d,]+)\)", rest["tiles"] or ""))
    if sorted(order) != list(range(len(shape))) or any(0 in tile for tile in tiles):
        raise ValueError(
            f"{text!r}: the layout names each of the {len(shape)} dims once, and no tile is empty"
            "\n  fix: write a layout of XLA's"
        )
    return Shape(match["dtype"], shape, order, tiles, int(rest["space"] or 0))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


@dataclass(frozen=True)
class HloOperation:
    """One line of an XLA program: `%name = result op(operands), key=value`."""

    name: str
    result: Shape
    op: str
    operands: tuple[tuple[str, Shape | None], ...]
    attributes: tuple[tuple[str, str], ...]


TYPED = r"(?:\w+\[[\d,]*\](?:\{[^}]*\})?\s+)?"


def operation(line: str) -> HloOperation:
    """Read a line such as `%fusion.3 = bf16[32,4096]{1,0} fusion(bf16[32,8192]{1,0} %fusion.32), kind=kCustom`."""
    match = re.fullmatch(
        rf"\s*(?:ROOT\s+)?%(\S+)\s*=\s*({TYPED})([\w-]+)\(((?:{TYPED}%?[^,()]*,?\s*)*)\)\s*,?\s*(.*?),?\s*", line
    )
    if not match or not match[2]:
        raise ValueError(
            f"{line.strip()!r} is not an operation\n  fix: write it as %name = f32[2]{{0}} op(f32[2]{{0}} %x)"
        )
    operands = []
    for typed, name in re.findall(rf"({TYPED})%?([\w.-]+)", match[4]):
        operands.append((name, parse_shape(typed) if typed else None))
    attributes = re.findall(r"(\w+)=((?:\{.*?\}(?=,|$)|[^,{]+))", match[5])
    return HloOperation(match[1], parse_shape(match[2]), match[3], tuple(operands), tuple(attributes))
