"""Make a chapter's arrays from their types, whole ones with data or shards without, and find their largest difference.

    whole = drawn({"x": "x[B_X, D]", "W": "W[D, F_Y]"}, {"B": 8, "D": 4, "F": 16}, seed=0)
    whole, own = operands({"x": "x[B_X, D]"}, {"B": 8, "D": 4}, mesh, seed=0)
    shards = empty({"W": "W[D, F_Y]"}, {"D": 4, "F": 16}, AbstractMesh({"Y": 2}))

The types may be any tree of types, and the arrays are a tree of the same structure.
"""

from collections.abc import Iterable
from typing import Any

import torch

from scaling import tree
from scaling.collectives import unshard
from scaling.spec import format_axes, parse


def drawn(types, sizes: dict[str, int], seed: int, scale: float = 1.0) -> Any:
    """Return whole arrays of these types, normal numbers times `scale` in float64, equal on every rank."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (parse(text).global_shape(sizes) for text in tree.leaves(types))
    return tree.unflatten(types, [scale * torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes])


def operands(types, sizes: dict[str, int], mesh, seed: int, scale: float = 1.0) -> tuple:
    """Return (the arrays of `drawn` on the mesh's device, this rank's shards of them)."""
    whole = tree.map(lambda x: x.to(mesh.device), drawn(types, sizes, seed, scale))
    return whole, tree.shard(whole, types, mesh)


def empty(types, sizes: dict[str, int], mesh, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a rank's shards of arrays of these types, without data, as an abstract mesh takes them."""
    shapes = [parse(text).local_shape(sizes, mesh) for text in tree.leaves(types)]
    return tree.unflatten(types, [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes])


def largest(numbers: Iterable[float], mesh=None) -> float:
    """Return the largest number, or NaN if one of them is NaN, which `max` may hide.

    On a mesh it is the largest over all ranks, on every rank, since a copy may be wrong on one rank alone.
    """
    local = max(numbers, key=lambda x: (x != x, x))
    if mesh is None:
        return local
    of_rank = torch.tensor([local], dtype=torch.float64, device=mesh.device)
    return largest(unshard(f"of_rank[R_{format_axes(mesh.sizes)}]", of_rank, mesh).tolist())
