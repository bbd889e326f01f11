"""What explicit mode is compared with JAX's on (tests/oracles): every typing of a few operations; and, for gradients,
the programs of tests/auto, each line's type drawn too."""

import itertools
import random
import sys
from pathlib import Path
from typing import NamedTuple

from scaling.algebra.layouts import DimAxes, arrangements, divides, spec_of

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


def planned(call, xs: list, at: list, sizes: dict):
    """What a device computes of a call with operands of these layouts: a LocalPlan. Raises what a layout that is not
    legal raises."""
    from scaling.explicit.functions import LocalPlan  # here: the writer of JAX's table reads this file too
    from scaling.mesh import AbstractMesh

    needed, result = call.op.infer(at, [tuple(x.shape) for x in xs], sizes)
    return LocalPlan(needed, result, spec_of(result).local_shape(call.shape, AbstractMesh(sizes)))


def check_devices(call, xs: list, wanted, local, sizes: dict, terms=(0.5, 0.5)) -> None:
    """What each device alone makes of its shards is its part of the whole result, or the terms of all add up to it; of
    a sum over an axis the devices have `terms`."""
    import torch

    from scaling.mesh import AbstractMesh

    spec, mesh = spec_of(local.result), AbstractMesh(sizes)
    found = torch.zeros(call.shape, dtype=wanted.dtype)
    for coord in (mesh.coord_of(rank) for rank in range(mesh.size())):
        if any(coord[axis] for axis in sizes if axis not in local.result.used):
            continue  # a copy
        shards = []
        for x, given in zip(xs, local.needed, strict=True):
            part = x[spec_of(given).slices(tuple(x.shape), mesh, coord)].contiguous()
            for axis in given.unreduced:
                part = part * terms[coord[axis]]
            shards.append(part)
        found[spec.slices(call.shape, mesh, coord)] += call.run(call.op, shards, local).to(wanted.dtype)
    torch.testing.assert_close(found, wanted.detach().clone(), rtol=1e-12, atol=1e-12)


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


def function(program: Program, types: list[str], einsum, reshard, tanh):
    """The program with its lines' types: `einsum(equation, *operands, out)`, and `reshard(x, type)` before the rest."""

    def run(*arguments):
        made = []
        for (what, operands, detail), type in zip(program.steps, types, strict=True):
            xs = [made[i] if i >= 0 else arguments[-1 - i] for i in operands]
            if what == "einsum":
                made.append(einsum(detail.lower(), *xs, out=type))
                continue
            xs = [reshard(x, type) for x in xs]
            made.append(xs[0] + xs[1] if what == "add" else xs[0] * xs[0] if what == "square" else tanh(xs[0]))
        return made[-1]

    return run


def numbers(count: int, seed: int) -> list[float]:
    """Numbers that every library has to the last bit."""
    return [((i + 1) * 7919 * (seed + 3) % 1009 - 504) / 1024 for i in range(count)]


def digest(values: list[float]) -> list[float]:
    """Two projections of an array, and its largest size: what the table keeps of it."""
    by = [numbers(len(values), seed) for seed in (90, 91)]
    return [*(sum(a * b for a, b in zip(values, row, strict=True)) for row in by), largest(map(abs, values))]
