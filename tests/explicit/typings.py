"""What explicit mode is compared with JAX's on (tests/oracles): every typing of a few operations; and, for gradients,
the programs of tests/auto, each line's type drawn too."""

import itertools
import random
import sys
from pathlib import Path
from typing import NamedTuple

from scaling.algebra.layouts import DimAxes, arrangements, divides

sys.path.insert(0, str(Path(__file__).parents[1] / "auto"))
from random_programs import Program, programs, typed

from scaling.book.largest import largest

MESHES = ({"X": 4}, {"X": 4, "Y": 2})
PRODUCTS = {  # equation: the operands' shapes
    "ij,jk->ik": ((16, 8), (8, 24)),
    "ijk,jkl->il": ((16, 8, 24), (8, 24, 32)),
    "ijkl,jklm->im": ((16, 8, 24, 32), (8, 24, 32, 40)),
    "bij,bjk->bik": ((8, 16, 24), (8, 24, 32)),
    "ij,kj->ik": ((16, 8), (24, 8)),
    "i,i->": ((8,), (8,)),
    "i,j->ij": ((8,), (16,)),
}
SUMS = (((8, 16), (8, 16)), ((8, 16), (16,)), ((8, 16), (8, 1)), ((8, 16, 24), (16, 1)), ((8, 1), (1, 16)))
REDUCED = {(8, 16, 24): ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))}
ORDERS = ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
RESHAPES = (
    ((16, 8), (128,)), ((16, 8), (2, 8, 8)), ((16, 8), (8, 2, 8)), ((16, 8), (16, 2, 4)), ((16, 8), (16, 4, 2)),
    ((16, 8), (4, 4, 8)), ((16, 8), (16, 8, 1)), ((16, 8), (1, 16, 8)), ((16, 8), (8, 16)), ((16, 8), (32, 4)),
    ((4, 8), (32,)), ((4, 2, 8), (8, 8)), ((4, 2, 8), (4, 16)), ((8, 16, 24), (128, 24)), ((8, 16, 24), (8, 384)),
    ((8, 16, 24), (3072,)), ((64,), (8, 8)), ((64,), (2, 32)), ((64,), (4, 2, 8)), ((16, 8), (2, 8, 4, 2)),
)  # fmt: skip


class Case(NamedTuple):
    kind: str
    detail: tuple
    mesh: dict
    shapes: tuple
    typing: tuple  # of each operand, the axes of each dim


def splits(shape: tuple, mesh: dict) -> list[tuple]:
    """Every typing of an array: dims of size 1 stay whole, and blocks divide."""
    return sorted(w for w in arrangements(tuple(mesh), len(shape)) if divides(DimAxes(w), shape, mesh))


def cases() -> list[Case]:
    groups = [("einsum", (equation,), shapes) for equation, shapes in PRODUCTS.items()]
    groups += [("add", (), shapes) for shapes in SUMS]
    groups += [(kind, dims, (shape,)) for shape, all in REDUCED.items() for dims in all for kind in ("sum", "amax")]
    groups += [("permute", order, ((8, 16, 24),)) for order in ORDERS]
    groups += [("reshape", new, (shape,)) for shape, new in RESHAPES]
    return [
        Case(kind, detail, mesh, shapes, typing)
        for mesh in MESHES
        for kind, detail, shapes in groups
        for typing in itertools.product(*(splits(shape, mesh) for shape in shapes))
    ]


def written(dims) -> str:
    """The axes of each dim: ((), ("X", "Y")) -> "-,XY"; of a scalar "."."""
    return ",".join("".join(axes) or "-" for axes in dims) or "."


def typed_programs(count: int = 50) -> list[tuple[Program, list[str]]]:
    """(program, the type of each line's result)."""
    found = []
    for seed, program in programs(count):
        rng, dims, types = random.Random(seed), [], []
        for what, operands, detail in program.steps:
            first = dims[operands[0]] if operands[0] >= 0 else program.arguments[-1 - operands[0]]
            dims.append(detail.split("->")[1] if what == "einsum" else first)
            types.append(typed(rng, "T", dims[-1]))
        found.append((program, [*types[:-1], program.out_type]))
    return found


def numbers(count: int, seed: int) -> list[float]:
    """Numbers that every library has to the last bit."""
    return [((i + 1) * 7919 * (seed + 3) % 1009 - 504) / 1024 for i in range(count)]


def digest(values: list[float]) -> list[float]:
    """Two projections of an array, and its largest size: what the table keeps of it."""
    by = [numbers(len(values), seed) for seed in (90, 91)]
    return [*(sum(a * b for a, b in zip(values, row, strict=True)) for row in by), largest(map(abs, values))]
