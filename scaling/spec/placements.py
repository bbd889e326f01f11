"""DTensor's placements of a type, and the axes that placements mean."""

import math
from collections.abc import Mapping, Sequence

from scaling.spec.reader import ShardingError


def placements_of(dims: Sequence[tuple[str, ...]], unreduced: tuple[str, ...], sizes: Mapping[str, int]) -> tuple:
    """Return the placement of each mesh axis, for dims that are split over these axes."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: dict = {axis: Partial() for axis in unreduced}
    order = list(sizes)
    for position, axes in enumerate(dims):
        for n, axis in enumerate(axes):  # the factor: blocks made by more major axes that come later in the mesh
            factor = math.prod(sizes[major] for major in axes[:n] if order.index(major) > order.index(axis))
            found[axis] = Shard(position) if factor == 1 else _StridedShard(position, split_factor=factor)
    return tuple(found.get(axis, Replicate()) for axis in order)


def axes_of_placements(placements: Sequence, sizes: Mapping[str, int], dims: int) -> tuple[list, tuple[str, ...]]:
    """Return (the axes that each dim is split over, the unreduced axes); ShardingError for what no type says."""
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    unreduced, axes_of = [], [[] for _ in range(dims)]
    for axis, placement in reversed([*zip(sizes, placements, strict=True)]):  # a factor counts later axes' blocks
        kind = type(placement)
        if kind in (Shard, _StridedShard) and -dims <= placement.dim < dims:
            axes = axes_of[placement.dim]
            blocks = [math.prod(sizes[other] for other in axes[:n]) for n in range(len(axes) + 1)]
            if (factor := getattr(placement, "split_factor", 1)) in blocks:
                axes.insert(blocks.index(factor), axis)
                continue
        elif kind is Replicate:
            continue
        elif kind is Partial and placement.reduce_op == "sum":
            unreduced.append(axis)
            continue
        raise ShardingError(
            f"{placement} over {axis}: only Shard of one of the {dims} dims, Replicate and Partial('sum') "
            f"are types of this notation\n  fix: redistribute the DTensor to such a placement first"
        )
    return [*map(tuple, axes_of)], tuple(sorted(unreduced))
