"""The cases that explicit mode is compared with JAX's on: every typing of a few operations (tests/oracles)."""

import itertools
from typing import NamedTuple

from scaling.algebra.layouts import DimAxes, arrangements, divides, spec_of

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
