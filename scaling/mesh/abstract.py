"""Meshes of sizes only, and the views of a mesh, under which it reads lines differently.

The same functions run on an `AbstractMesh` with meta tensors, to plan for more devices than exist here. Ranks are
row-major: the last axis is the fastest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from scaling.common.torch_private import constant
from scaling.spec import Line, ShardingError, block_index, parse_line, present
from scaling.spec.sizes import check_sizes, format_sizes


@dataclass(frozen=True)
class Group:
    """This rank's process group along some mesh axes: the devices that differ from this one only along these axes.

    `index` is the block that this device holds of a dim split over the axes *in the order asked for*; member i of the
    process group holds block `order[i]`, where () means block i (process groups list their ranks ascending). `backend`
    is gloo, nccl, "single" (one device: every collective is the identity) or "abstract" (shapes only).
    """

    axes: tuple[str, ...]
    size: int
    index: int
    backend: str
    order: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    name: str = ""
    pg: Any = None  # the process group; None if nothing is sent
    checked: bool = False  # whether the members compare their calls before they run them

    def member_of(self, block: int) -> int:
        """Return which member of the process group holds a block."""
        return self.order.index(block) if self.order else block

    @cached_property
    def others(self) -> list[tuple[int, int]]:
        """The (block, member) of every other device, starting with the device after this one."""
        blocks = [(self.index + k) % self.size for k in range(1, self.size)]
        return [(block, self.member_of(block)) for block in blocks]


class AbstractMesh:
    """A mesh of sizes only, e.g. `AbstractMesh({"X": 1024, "Y": 8})`, seen from the device at `coord` (default: all 0).

    Collectives on it take meta tensors and return meta tensors of the right local shape; nothing is moved. With
    `backend="gloo"` they also allocate the buffers that gloo's collectives need, so that the peak of memory is that of
    a run on CPUs.
    """

    checked, member = False, True

    def __init__(self, sizes: Mapping[str, int], coord: Mapping[str, int] | None = None, backend: str = "abstract"):
        check_sizes(sizes)
        self.sizes = dict(sizes)
        self.ranks: Sequence[int] = range(self.size())  # the run's ranks that form this mesh, in its order
        self.coord = dict.fromkeys(self.sizes, 0) | dict(coord or {})
        if not all(0 <= at < self.sizes.get(axis, 0) for axis, at in self.coord.items()):
            raise ShardingError(
                f"the coordinate {self.coord} is not on the mesh {format_sizes(self.sizes)}"
                "\n  fix: give each axis a place from 0 to its size - 1"
            )
        self.device, self.backend = torch.device("meta"), backend
        self.lines: dict = {}  # a cache of lines and constants resolved for this mesh
        self.stack = ""  # the dim in front of every line's dims: see `stacked`
        self.drops = False  # whether lines may name axes that the mesh lacks: see `optional`
        self.slices = False  # whether lines leave out axes that split their arrays: see `sliced`
        self._whole = self  # the mesh behind this view, which has all axes and makes the groups
        self._groups: dict[tuple[str, ...], Group] = {}
        self._views: dict[Any, AbstractMesh] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({format_sizes(self.sizes)})"

    def stacked(self, dim: str) -> "AbstractMesh":
        """Return a view of this mesh on which each collective's line has one more dim in front.

        `all_reduce("dW[D] {U_X} -> dW[D]", dW, mesh.stacked("L"))` reduces dW[L, D], the gradients of several layers,
        in one collective, as under vmap.
        """
        return self._view(("stacked", dim), stack=dim)

    @property
    def optional(self) -> "AbstractMesh":
        """A view of this mesh on which a line may name axes that the mesh lacks or has with size 1: they drop out.

        This holds for all_gather, reduce_scatter, all_reduce, all_to_all, shard and masked, so that one listing serves
        every mesh. On {"X": 2, "Y": 2} the line "y[B_PX, T_CY, D] -> y[B_PX, T_C, D]" is the AllGather "y[B_X, T_Y, D]
        -> y[B_X, T, D]"; on {"X": 4} nothing is left of it, and the collective returns its operand.
        """
        return self if self.drops else self._view("optional", drops=True)

    @property
    def sliced(self) -> "AbstractMesh":
        """A view of this mesh on which a line names only the axes along which it moves data.

        Other axes may split its arrays, too: each slice of the mesh along them runs the line alone. The judge then
        reads the line's types as a slice's.
        """
        return self if self.slices else self._view("sliced", slices=True)

    def without(self, axis: str) -> "AbstractMesh":
        """Return the `optional` view without one axis, along which all devices do the same."""
        sizes, coord = ({a: n for a, n in some.items() if a != axis} for some in (self.sizes, self.coord))
        return (
            self._view(("without", axis), drops=True, sizes=sizes, coord=coord) if axis in self.sizes else self.optional
        )

    def _view(self, which: Any, **changes: Any) -> "AbstractMesh":
        """Return a copy of this mesh, on the same process groups, that reads lines differently; cached."""
        if which not in self._views:
            view = self._views[which] = copy(self)
            view.lines, view._views = {}, {}
            for name, value in changes.items():
                setattr(view, name, value)
        return self._views[which]

    def resolve(self, text: str) -> str:
        """Return a type, or a line from one type to another, as this mesh reads it; "" if the line changes nothing.

        An `optional` mesh drops the axes that it lacks or has with size 1; any other mesh reads the line as written.
        """
        if not self.drops:
            return text
        if torch.compiler.is_compiling():
            return self.constant(_present_line, text)
        found = self.lines.get(text)
        if found is None:
            found = self.lines[text] = _present_line(self, text)
        return found

    @constant
    def constant(self, fn: Callable, *args):
        """Return fn(self, *args), computed once; a compiler takes it as a constant.

        The mesh is `self` here, since torch 2.11 passes a mesh on to a constant function only as self.
        """
        key = (fn, *args)
        if key not in self.lines:
            self.lines[key] = fn(self, *args)
        return self.lines[key]

    @property
    def rank(self) -> int:
        """This device's position in the row-major order of the mesh."""
        return self._whole.rank_at(self._whole.coord)

    def rank_at(self, coord: Mapping[str, int]) -> int:
        """Return the rank of the device at a coordinate."""
        return block_index(list(self.sizes), coord, self.sizes)

    def coord_of(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank: the inverse of `rank_at`."""
        coord = {}
        for axis, size in reversed(self.sizes.items()):
            rank, coord[axis] = divmod(rank, size)
        return {axis: coord[axis] for axis in self.sizes}

    def size(self, axes: Sequence[str] | None = None) -> int:
        """Return the number of devices along `axes` together; of the whole mesh by default."""
        return math.prod([self.sizes[axis] for axis in (self.sizes if axes is None else axes)])

    def group(self, axes: Sequence[str]) -> Group:
        """Return the group over `axes`, in the order given: `("Y", "X")` has Y major."""
        axes = tuple(axes)
        if axes not in self._groups:
            for axis in set(axes) - set(self.sizes):
                raise ShardingError(
                    f"unknown mesh axis {axis}: the mesh has {format_sizes(self.sizes)}"
                    "\n  fix: use an axis of the mesh, or make the mesh with this one"
                )
            self._groups[axes] = self._whole._make_group(axes)
        return self._groups[axes]

    def _make_group(self, axes: tuple[str, ...]) -> Group:
        backend = "single" if self.size(axes) == 1 else self.backend
        return Group(axes, self.size(axes), block_index(axes, self.coord, self.sizes), backend)


def _present_line(mesh: AbstractMesh, text: str) -> str:
    """Return the line, or the type, without the axes that the mesh lacks; "" for a line that changes nothing."""
    if "->" not in text:
        return str(present(text, mesh))
    line = parse_line(text)
    before, after = present(line.operands[0], mesh), present(line.result, mesh)
    return "" if before.same_sharding(after) else str(Line((before,), after))
