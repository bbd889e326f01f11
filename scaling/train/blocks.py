"""List the blocks of a whole array that a checkpoint's files hold, and assemble a shard of any type from them.

Ranks may store a dim in another order than the whole array, or padded. `places` maps each stored position of such a dim
to its index in the whole array, or to -1 for padding. Blocks on disk are therefore always in the order of the whole
array and hold no padding.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from scaling.models.params import Places
from scaling.spec import ShardingError, Spec

Range = tuple[tuple[int, int], ...]  # a block's (start, stop) in each dim of the whole array


class SavedBlock(NamedTuple):
    """A block's range in the whole array, and the file, first byte and number of bytes that hold it."""

    at: Range
    file: str
    start: int
    nbytes: int

    @property
    def shape(self) -> list[int]:
        """The block's shape."""
        return [stop - start for start, stop in self.at]


class SavedLeaf(NamedTuple):
    """A whole array as a checkpoint stores it."""

    dtype: torch.dtype
    shape: list[int]
    blocks: list[SavedBlock]


class IndexRun(NamedTuple):
    """Consecutive indices `start` to `stop` of the whole array, which begin at `local` in the shard."""

    start: int
    stop: int
    local: int


def own_blocks(leaf: Tensor, spec: Spec, mesh, places: Places) -> tuple[list[int], list[tuple[Range, Tensor]]]:
    """Plan what this rank writes of a leaf; each block is written by the first rank that holds it.

    Returns:
        The shape of the whole array, and the range and a view of each block that this rank writes.

    Raises:
        ShardingError: The leaf is unreduced.
    """
    if spec.unreduced:
        raise ShardingError(f"{spec} is unreduced: a checkpoint holds whole values\n  fix: reduce it first")
    shape, blocks = whole_shape(leaf, spec, mesh, places), []
    for part in _parts(spec, shape, mesh, mesh.coord, places) if first_replica(spec, mesh.coord, mesh) else ():
        held = tuple(slice(run.local, run.local + run.stop - run.start) for run in part)
        blocks.append((tuple((run.start, run.stop) for run in part), leaf[held]))
    return shape, blocks


def writers(specs: Iterable[Spec], mesh) -> list[int]:
    """Return the ranks that are the first to hold a block of an array of one of these types, in ascending order."""
    found: set[int] = set()
    for axes in {frozenset(spec.axes) for spec in specs}:
        ranks = [0]
        for axis, size in mesh.sizes.items():  # ranks are row-major
            ranks = [rank * size + i for rank in ranks for i in range(size if axis in axes else 1)]
        found.update(ranks)
    return sorted(found)


def whole_shape(leaf: Tensor, spec: Spec, mesh, places: Places) -> list[int]:
    """Return the shape, without padding, of the whole array that `leaf` is a shard of."""
    spec.check_axes(mesh)
    if leaf.dim() != len(spec.dims) or leaf.layout is not torch.strided or leaf.is_meta:
        kind = f"{leaf.layout} {list(leaf.shape)} on {leaf.device}"
        raise ShardingError(
            f"{spec}: a leaf is {kind}\n  rule: leaves are dense, and have the dims of their types\n  fix: mend it"
        )
    stored = [n * mesh.size(axes) for n, (_, axes) in zip(leaf.shape, spec.dims, strict=True)]
    for dim, n in zip(spec.dim_names, stored, strict=True):
        if dim in places:
            check_places(dim, places[dim], n)
    return [1 + max(places[dim]) if dim in places else n for n, dim in zip(stored, spec.dim_names, strict=True)]


def check_places(dim: str, places: Sequence[int], stored: int) -> None:
    """Check that `places` gives each stored position -1 or its own index, and covers all of 0, 1, 2, ...

    Raises:
        ValueError: An index is missing or occurs twice, or the number of positions is not `stored`.
    """
    real = [index for index in places if index != -1]
    if (
        len(places) != stored
        or not all(isinstance(index, int) for index in places)
        or sorted(real) != list(range(len(real)))
    ):
        raise ValueError(
            f"places of {dim}: {list(places)!r:.80} of {stored} stored places\n"
            "  rule: each index of the whole stands once among them, and -1 for padding\n"
            "  fix: give the places as the strategy that stored the leaf made them"
        )


def _stored_sizes(spec: Spec, shape: Sequence[int], places: Places) -> list[int]:
    """Return the sizes of the whole array as the ranks store it, with padding."""
    return [len(places.get(dim, range(n))) for n, dim in zip(shape, spec.dim_names, strict=True)]


def _parts(spec: Spec, shape: Sequence[int], mesh, at: Mapping[str, int], places: Places) -> list[tuple[IndexRun, ...]]:
    """Return the parts of a whole array that the rank at `at` holds, each as one `IndexRun` per dim."""
    slices = spec.slices(_stored_sizes(spec, shape, places), mesh, at)
    return [*product(*(_runs(s, places.get(dim)) for s, dim in zip(slices, spec.dim_names, strict=True)))]


def _runs(held: slice, places: Sequence[int] | None) -> list[IndexRun]:
    """Return the runs of consecutive indices of the whole array that the stored positions `held` cover."""
    if places is None:
        return [IndexRun(held.start, held.stop, 0)]
    found: list[IndexRun] = []
    for local, index in enumerate(places[held]):
        if found and index == found[-1].stop and local - found[-1].local == index - found[-1].start:
            found[-1] = found[-1]._replace(stop=index + 1)
        elif index >= 0:
            found.append(IndexRun(index, index + 1, local))
    return found


def assembled(
    name: str,
    saved: SavedLeaf,
    spec: Spec,
    mesh,
    places: Places,
    data: Callable[[str, SavedLeaf, SavedBlock, bool], Tensor],
) -> Tensor:
    """Assemble this rank's shard of a leaf from the saved blocks that overlap it.

    `data(name, saved, block, whole)` fetches a block; `whole` tells it whether all elements of the block are used.

    Raises:
        ValueError: The leaf was saved with another shape, or its blocks do not cover the shape.
        ShardingError: The type is unreduced.
    """
    shape = saved.shape
    if len(shape) != len(spec.dims):
        raise ValueError(f"{name} was saved with shape {shape}, but its type is {spec}\n  fix: name as many dims")
    if spec.unreduced:
        raise ShardingError(f"{name}: {spec} is unreduced: each rank would get the whole\n  fix: leave {{U}} out")
    spec.check_axes(mesh)
    if wrong := [
        dim for n, dim in zip(shape, spec.dim_names, strict=True) if dim in places and 1 + max(places[dim]) != n
    ]:
        raise ValueError(
            f"{name} was saved with shape {shape}, but {wrong[0]} is {1 + max(places[wrong[0]])} here\n"
            "  fix: load it with the config that it was saved with"
        )
    slices = spec.slices(_stored_sizes(spec, shape, places), mesh, mesh.coord)
    shard = torch.zeros([s.stop - s.start for s in slices], dtype=saved.dtype)
    for part in _parts(spec, shape, mesh, mesh.coord, places):
        missing = prod(run.stop - run.start for run in part)
        for block in saved.blocks:
            into, inside = [], []
            for run, (start, stop) in zip(part, block.at, strict=True):
                low, high = max(run.start, start), min(run.stop, stop)
                into.append(slice(run.local + low - run.start, run.local + high - run.start))
                inside.append(slice(low - start, high - start))
            if all(s.start < s.stop for s in into):
                taken = prod(s.stop - s.start for s in into)
                whole = taken == prod(stop - start for start, stop in block.at)
                shard[tuple(into)] = data(name, saved, block, whole)[tuple(inside)]
                missing -= taken
        beyond = any(stop > n for block in saved.blocks for (_, stop), n in zip(block.at, shape, strict=True))
        if missing or beyond:
            what = f"{name}: its blocks do not make up its shape {shape}: the index is damaged"
            raise ValueError(f"{what}\n  fix: load another step")
    return shard.to(mesh.device)


def first_replica(spec: Spec, at: Mapping[str, int], mesh) -> bool:
    """Return whether the rank at `at` is the first of the ranks that hold the same block."""
    return not any(at[axis] for axis in spec.replicated(mesh))
