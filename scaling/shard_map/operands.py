"""What the collectives of `shard_map` ask of their operands: dense tensors, dims that are there and divide."""

from typing import Any

import torch
from torch import Tensor

from scaling.shard_map.transport import Bound
from scaling.spec import ShardingError


def tensor_of(leaf: Any) -> Tensor:
    """A number or numpy's array as a tensor, a tensor as it is. ShardingError for what holds no numbers."""
    try:
        x = leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf)
    except (TypeError, ValueError, RuntimeError):
        x = None
    if x is None or x.layout is not torch.strided:
        kind = type(leaf).__name__ if x is None else x.layout
        raise ShardingError(f"shard_map: {leaf!r:.60}: a {kind}\n  rule: values are dense tensors\n  fix: convert it")
    return x


def check_dim(name: str, dim: int, dims: int) -> int:
    if not isinstance(dim, int) or not -dims <= dim < dims:
        raise ShardingError(f"{name}: there is no dim {dim!r} among {dims}\n  fix: give an int of {-dims}..{dims - 1}")
    return dim % dims


def check_divides(name: str, x: Tensor, dim: int, axes: tuple[str, ...], bound: Bound, tiled: bool) -> None:
    n = bound.mesh.size(axes)
    if x.shape[dim] % n if tiled else x.shape[dim] != n:
        wanted = f"a multiple of {n}" if tiled else f"{n}, or tiled=True"
        raise ShardingError(
            f"{name} over {', '.join(axes)}: dim {dim} has size {x.shape[dim]}\n"
            f"  rule: it is cut into {n} blocks, one for each device\n  fix: make it {wanted}"
        )
