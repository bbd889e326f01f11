"""Types as DTensor's placements, one for each axis of a mesh, and back (`Spec.placements`, `Spec.from_placements`).

DTensor splits a dim over mesh axes in the mesh's order, so that `I_XY` is `Shard(0), Shard(0)`. An axis that is minor
to axes behind it in the mesh, as X in `I_YX`, is a strided shard: its factor is in how many blocks they have cut the
dim before. torch is imported where it is needed.
"""

import math
from collections.abc import Mapping, Sequence

from scaling.spec.reader import Dims, ShardingError


def placements_of(dims: Dims, unreduced: Sequence[str], sizes: Mapping[str, int]) -> tuple:
    """The placements of a type on a mesh of these sizes, whose axes include the type's."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    order, found = list(sizes), {axis: Partial() for axis in unreduced}
    for position, (_, axes) in enumerate(dims):
        for axis in axes:
            major = axes[: axes.index(axis)]
            factor = math.prod(sizes[other] for other in major if order.index(other) > order.index(axis))
            found[axis] = Shard(position) if factor == 1 else _StridedShard(position, split_factor=factor)
    return tuple(found.get(axis, Replicate()) for axis in order)


def type_of(placements: Sequence, sizes: Mapping[str, int], dims: Sequence[str]) -> tuple[Dims, tuple[str, ...]]:
    """(dims, unreduced) of the type that placements mean; ShardingError for what the notation does not have."""
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    axes_of: dict[str, list[str]] = {dim: [] for dim in dims}
    unreduced, given = [], list(zip(sizes, placements, strict=True))
    for axis, placement in reversed(given):  # the axes behind are placed first: a factor counts their blocks
        kind = type(placement)
        if kind in (Shard, _StridedShard) and -len(dims) <= placement.dim < len(dims):
            axes = axes_of[list(dims)[placement.dim]]
            factor = getattr(placement, "split_factor", 1)
            blocks = [math.prod(sizes[other] for other in axes[:n]) for n in range(len(axes) + 1)]
            if factor in blocks:
                axes.insert(blocks.index(factor), axis)
                continue
        elif kind is Replicate:
            continue
        elif kind is Partial and placement.reduce_op == "sum":
            unreduced.append(axis)
            continue
        raise ShardingError(
            f"{placement} over {axis}: only Shard of one of the {len(dims)} dims, Replicate and Partial('sum') "
            f"are types of this notation\n  fix: redistribute the DTensor to such a placement first"
        )
    return tuple((dim, tuple(axes)) for dim, axes in axes_of.items()), tuple(sorted(unreduced))
