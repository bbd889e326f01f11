"""A chapter's arrays by their types: whole ones with data, the same on every rank, or shards without any.

    whole = drawn({"x": "x[B_X, D]", "W": "W[D, F_Y]"}, {"B": 8, "D": 4, "F": 16}, seed=0)
    whole, own = operands({"x": "x[B_X, D]"}, {"B": 8, "D": 4}, mesh, seed=0)
    shards = empty({"W": "W[D, F_Y]"}, {"D": 4, "F": 16}, AbstractMesh({"Y": 2}))

Types may be any tree of them, and the arrays are a tree of the same structure.
"""

from typing import Any

import torch

from scaling import tree
from scaling.spec import parse


def drawn(types, sizes: dict[str, int], seed: int, scale: float = 1.0) -> Any:
    """Whole arrays of these types, normal numbers times `scale` in float64: the same on every rank."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (parse(text).global_shape(sizes) for text in tree.leaves(types))
    return tree.unflatten(types, [scale * torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes])


def operands(types, sizes: dict[str, int], mesh, seed: int, scale: float = 1.0) -> tuple:
    """(arrays as `drawn` gives them, on the mesh's device; this rank's shards of them)."""
    whole = tree.map(lambda x: x.to(mesh.device), drawn(types, sizes, seed, scale))
    return whole, tree.shard(whole, types, mesh)


def empty(types, sizes: dict[str, int], mesh, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A rank's shards of arrays of these types, without data: what an abstract mesh takes."""
    shapes = [parse(text).local_shape(sizes, mesh) for text in tree.leaves(types)]
    return tree.unflatten(types, [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes])
