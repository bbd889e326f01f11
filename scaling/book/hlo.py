"""Programs on their way to the machine: the stages in torch, and the shapes in XLA's programs (Part 9).

Where JAX has StableHLO, HLO and LLO, torch has these:

dispatched(f, x)    eager: the operations in the order in which they run
graph(f, x)         make_fx: the operations as a graph, not run; `listing` writes it as XLA writes its own
joint(f, x)         AOTAutograd: two graphs, forward and backward, with the values saved between them
generated(f, x)     inductor: the code that it writes for this machine

XLA writes a shape as `bf16[32,32,4096]{2,1,0:T(8,128)(2,1)S(1)}`: it has a dtype and the logical sizes; in braces the
order of the dims in memory, the minor one first; tiles; and the memory space, where S(1) is VMEM. `T(8,128)` cuts the
two minor dims into tiles, padded at the end and stored in sequence; `(2,1)` cuts each tile again. XLA stores a tile's
dims after the others, tile by tile:
https://openxla.org/xla/tiled_layout
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from scaling.common.torch_private import TorchDispatchMode, aot_graphs, inductor_code
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


# The stages of a program in torch

PRODUCTS = {"bmm", "mm", "addmm", "einsum"}
LAYOUT = {"view", "permute", "unsqueeze", "squeeze", "transpose", "t", "expand", "reshape"}
STORED = Path(__file__).with_name("inductor.txt")  # the result of `generated` for the chapter's program
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float64: "f64", torch.int64: "s64"}


class _Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.append(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))


def dispatched(fn: Callable, *args) -> list[str]:
    """Return the names of the operations that a call runs, in order."""
    with _Names() as names:
        fn(*args)
    return names.found


def graph(fn: Callable, *args) -> torch.fx.Graph:
    """Return the operations as a graph, with each one's operands and its result's shape and dtype."""
    return make_fx(fn, tracing_mode="fake")(*args).graph


def _name_of(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]


def kinds(graph: torch.fx.Graph) -> Counter:
    """Return the number of inputs, products, changes of layout and pointwise operations."""
    found: Counter = Counter()
    for node in graph.nodes:
        name = _name_of(node)
        if node.op == "placeholder":
            found["input"] += 1
        elif node.op == "call_function":
            found["product" if name in PRODUCTS else "layout" if name in LAYOUT else "pointwise"] += 1
    return found


def listing(graph: torch.fx.Graph) -> str:
    """Return the graph as text, an operation a line: `%bmm = f32[1,16,128] bmm(%view, %view_1)`."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {', '.join(f'%{source.name}' for source in node.all_input_nodes)}")
            continue
        value = node.meta.get("val")
        shape = "" if value is None else f"{DTYPES[value.dtype]}[{','.join(map(str, value.shape))}] "
        operands = ", ".join(f"%{a.name}" if isinstance(a, torch.fx.Node) else str(a) for a in node.args)
        what = "parameter()" if node.op == "placeholder" else f"{_name_of(node)}({operands})"
        lines.append(f"%{node.name} = {shape}{what}")
    return "\n".join(lines)


def joint(fn: Callable, *args) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    """Return AOTAutograd's graphs of the forward and the backward pass; args[0] is differentiated."""
    first, *rest = args
    return aot_graphs(fn, first.detach().clone().requires_grad_(), *rest)


def generated(fn: Callable, *args) -> str:
    """Return the kernels and the calls that inductor writes, without the frame that every program has."""
    code = inductor_code(fn, *args)
    kernels = re.findall(r"^(\w+) = async_compile.*?r?'''\n(.*?)^'''", code, re.MULTILINE | re.DOTALL)
    calls = re.search(r"^    def call\(self, args\):\n(.*?)^\s*return ", code, re.MULTILINE | re.DOTALL)
    text = "\n".join(f"# {name}\n{body}" for name, body in kernels)
    return text + "\n# call\n" + (calls[1] if calls else "")
