"""The oracle of collectives: it knows what each device contributes, and reads what each gets off types."""

import torch
from misuse.draw import Draw, typed

from scaling.algebra.rules import collective_steps
from scaling.spec import ShardingError, Spec

OP_OF = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce", "shard": "Slice"}
OP_OF |= {"all_to_all": "AllToAll", "broadcast": "Broadcast", "reduce": "Reduce", "scatter": "Scatter"}
OP_OF |= {"gather": "Gather"}


def contributions(draw: Draw, spec: Spec, local: list[int], dtype) -> torch.Tensor:
    """[*axes of the mesh, *whole shape]: of each device the part of the array that it contributes, alike where the type
    says that devices hold replicas. Small whole numbers: sums are exact in every dtype."""
    mesh = draw.mesh
    shape = [size * mesh.size(axes) for size, (_, axes) in zip(local, spec.dims, strict=True)]
    sizes = [n if axis in spec.unreduced else 1 for axis, n in mesh.sizes.items()]
    x = draw.whole_numbers(4, *sizes, *shape).expand(*mesh.sizes.values(), *shape)
    return torch.complex(x.double(), x.double() + 1).to(dtype) if dtype.is_complex else x.to(dtype)


def block(x: torch.Tensor, spec: Spec, mesh, coord) -> torch.Tensor:
    """What the device at coord holds of the whole array x, whatever its dims are called."""
    return x[typed((f"D{i}", axes) for i, (_, axes) in enumerate(spec.dims)).slices(tuple(x.shape), mesh, coord)]


def held(parts: torch.Tensor, before: Spec, after: Spec, mesh, by: str = "sum") -> torch.Tensor:
    """What this rank holds of `after`, where the parts that `before` is unreduced over have been put together."""
    for axis in mesh.sizes:
        if axis in before.unreduced and axis not in after.unreduced:
            parts = reduced(parts, by)
        else:
            parts = parts[mesh.coord[axis]]
    return block(parts, after, mesh, mesh.coord)


def reduced(parts: torch.Tensor, by: str) -> torch.Tensor:
    if by in ("max", "min"):
        return parts.amax(0) if by == "max" else parts.amin(0)
    total = parts.sum(0, dtype=parts.dtype)
    return total / len(parts) if by == "mean" else total


def group_of(axes, mesh) -> int:
    """The number of this device's block along axes, the first of them major."""
    index = 0
    for axis in axes:
        index = index * mesh.sizes[axis] + mesh.coord[axis]
    return index


def device_at(axes, index: int, mesh) -> tuple[int, ...]:
    """The coordinate of the device of this one's group over axes that holds block `index`."""
    coord = dict(mesh.coord)
    for axis in reversed(axes):
        index, coord[axis] = divmod(index, mesh.sizes[axis])
    return tuple(coord[axis] for axis in mesh.sizes)


def expected(kind, parts, before: Spec, after: Spec, mesh, by: str, root: int, axes=(), pairs=()):
    """What this rank is to get, or None where the types say nothing of it."""

    def of_device(at, spec=before):
        return block(parts[at], spec, mesh, dict(zip(mesh.sizes, at, strict=True)))

    here = tuple(mesh.coord.values())
    if kind == "ppermute":
        sources = [s for s, t in pairs if t == group_of(axes, mesh)]
        return of_device(device_at(axes, sources[0], mesh)) if sources else torch.zeros_like(of_device(here))
    if kind == "reduce":
        y = held(parts, before, Spec(after.name, after.dims), mesh, by)
        return y if group_of(before.unreduced, mesh) == root else torch.zeros_like(y)
    if kind == "broadcast":
        return of_device(device_at([axis for axis in before.unreduced if axis not in after.unreduced], root, mesh))
    if kind in ("scatter", "gather"):
        longer, shorter = (after, before) if kind == "scatter" else (before, after)
        pairs_of = zip(longer.dims, shorter.dims, strict=True)
        moved = [a[len(b) :] for (_, a), (_, b) in pairs_of if len(a) > len(b)]
        if len(moved) != 1:
            return None
        if kind == "scatter":
            return block(parts[device_at(moved[0], root, mesh)], after, mesh, mesh.coord)
        y = of_device(here, after)
        return y if group_of(moved[0], mesh) == root else torch.zeros_like(y)
    if set(after.unreduced) - set(before.unreduced):
        return None
    return held(parts, before, after, mesh, by)


def is_legal(kind: str, line: str, before: Spec, after: Spec) -> bool:
    """Whether the rules, which other tests hold against outsiders, allow a line."""
    if kind not in OP_OF or (kind == "shard" and before.same_sharding(after)):
        return True
    try:
        return bool(collective_steps(OP_OF[kind], line))
    except ShardingError:
        return False
