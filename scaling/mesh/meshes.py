"""The two kinds of meshes.

`Mesh` is the one that runs: this process is one rank of it. `AbstractMesh` has only sizes: the same functions run on it
with meta tensors, to plan for more devices than there are. Ranks are row-major: the last axis is the fastest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from scaling.common.torch_private import constant
from scaling.common.torchrun import world_size
from scaling.mesh.meeting import MESHES, Intent, Meeting, MeetingByMessages, hold_meeting, made_alone, meeting
from scaling.mesh.page import SharedPage, share_page
from scaling.mesh.world import TIMEOUT, check_device, join_world
from scaling.spec import ShardingError, block_index
from scaling.spec.sizes import check_sizes, format_sizes

LONGER = 5  # as long as ranks wait for each other before a call that has begun fails, after which its group is lost


@dataclass(frozen=True)
class Group:
    """This rank's process group along some mesh axes: the devices that differ from this one only along these.

    `index` is the block that this device holds of a dim split over the axes *in the order asked for*; member i of the
    process group holds block `order[i]`, where () means block i (process groups list their ranks ascending).
    `backend` is gloo, nccl, "single" (one device: every collective is the identity) or "abstract" (shapes only).
    """

    axes: tuple[str, ...]
    size: int
    index: int
    backend: str
    order: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    name: str = ""
    pg: Any = None  # the process group; None where nothing is sent
    checked: bool = False  # whether the members compare what they are about to do

    def member_of(self, block: int) -> int:
        return self.order.index(block) if self.order else block

    @cached_property
    def others(self) -> list[tuple[int, int]]:
        """(block, member) of the other devices, the one after this first."""
        blocks = [(self.index + k) % self.size for k in range(1, self.size)]
        return [(block, self.member_of(block)) for block in blocks]


class AbstractMesh:
    """A mesh of sizes only, e.g. `AbstractMesh({"X": 1024, "Y": 8})`, seen from the device at `coord` (default: all 0).

    Collectives on it take meta tensors and return meta tensors of the right local shape; nothing is moved. With
    `backend="gloo"` they also make the buffers that those over gloo make on the way, so that memory is a CPU run's.
    """

    checked, member = False, True

    def __init__(self, sizes: Mapping[str, int], coord: Mapping[str, int] | None = None, backend: str = "abstract"):
        check_sizes(sizes)
        self.sizes = dict(sizes)
        self.ranks: Sequence[int] = range(self.size())  # those of the run that are this mesh's, in its order
        self.coord = dict.fromkeys(self.sizes, 0) | dict(coord or {})
        if not all(0 <= at < self.sizes.get(axis, 0) for axis, at in self.coord.items()):
            raise ShardingError(
                f"the coordinate {self.coord} is not on the mesh {format_sizes(self.sizes)}"
                "\n  fix: give each axis a place from 0 to its size - 1"
            )
        self.device, self.backend = torch.device("meta"), backend
        self.lines: dict = {}  # what was worked out once on this mesh, lines of scaling.collectives above all
        self.stack = ""  # the dim that every line has in front: see `stacked`
        self._groups: dict[tuple[str, ...], Group] = {}
        self._stacked: dict[str, AbstractMesh] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({format_sizes(self.sizes)})"

    def stacked(self, dim: str) -> "AbstractMesh":
        """The same mesh, on which each collective's line has one more dim in front: of several layers' arrays, stacked.

        `all_reduce("dW[D] {U_X} -> dW[D]", dW, mesh.stacked("L"))` reduces dW[L, D], as under vmap, in one collective.
        """
        if dim not in self._stacked:
            other = self._stacked[dim] = copy(self)
            other.stack, other.lines, other._stacked = dim, {}, {}
        return self._stacked[dim]

    @constant
    def constant(self, fn: Callable, *args):
        """fn(self, *args), worked out once, by a compiler too: torch 2.11 passes a mesh on only as self."""
        key = (fn, *args)
        if key not in self.lines:
            self.lines[key] = fn(self, *args)
        return self.lines[key]

    @property
    def rank(self) -> int:
        """This device's position in row-major order of the mesh."""
        return self.rank_at(self.coord)

    def rank_at(self, coord: Mapping[str, int]) -> int:
        return block_index(list(self.sizes), coord, self.sizes)

    def coord_of(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank: `rank_at` the other way."""
        coord = {}
        for axis, size in reversed(self.sizes.items()):
            rank, coord[axis] = divmod(rank, size)
        return {axis: coord[axis] for axis in self.sizes}

    def size(self, axes: Sequence[str] | None = None) -> int:
        """The number of devices along `axes` together; of the whole mesh by default."""
        return math.prod([self.sizes[axis] for axis in (self.sizes if axes is None else axes)])

    def group(self, axes: Sequence[str]) -> Group:
        """The group over `axes`, in the order given: `("Y", "X")` has Y major."""
        axes = tuple(axes)
        if axes not in self._groups:
            for axis in set(axes) - set(self.sizes):
                raise ShardingError(
                    f"unknown mesh axis {axis}: the mesh has {format_sizes(self.sizes)}"
                    "\n  fix: use an axis of the mesh, or make the mesh with this one"
                )
            self._groups[axes] = self._make_group(axes)
        return self._groups[axes]

    def _make_group(self, axes: tuple[str, ...]) -> Group:
        backend = "single" if self.size(axes) == 1 else self.backend
        return Group(axes, self.size(axes), block_index(axes, self.coord, self.sizes), backend)


class Mesh(AbstractMesh):
    """The ranks of this run along named axes, e.g. `Mesh({"X": 4, "Y": 2})`: to be made by every rank alike.

    Ranks come from `scaling.launch` or from torchrun; a mesh of one device needs no process group. `checked`: before
    each collective, or before its result is used, the ranks of its group compare what they do, and differing ranks
    raise instead of hanging. `timeout`: seconds that a collective waits. `ranks`: those of the run that are the mesh's,
    ascending, for instance range(0, 4); all by default. All ranks of the run make it alike; on a rank outside it
    `member` is False, there is no `coord`, and a collective takes and gives None. ShardingError if the sizes do not
    multiply to the number of ranks.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        device="cpu",
        checked: bool = False,
        timeout: float = TIMEOUT,
        ranks: Sequence[int] | None = None,
    ):
        super().__init__(sizes)
        self.device, self.checked, self.timeout = torch.device(device), checked, timeout
        check_device(device)
        if not dist.is_initialized() and world_size() > 1:
            join_world(self.device, timeout)
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if ranks is not None:
            self.ranks = tuple(ranks)
            self._check_ranks(world)
        elif self.size() != world:
            running = "1 rank is" if world == 1 else f"{world} ranks are"
            raise ShardingError(
                f"the mesh {format_sizes(self.sizes)} has {self.size()} devices, but {running} running\n"
                f"  fix: start {self.size()} ranks (scaling.launch.run, torchrun --nproc-per-node {self.size()}), "
                f"or choose sizes whose product is {world}"
            )
        self._process_groups: dict[tuple[str, ...], tuple[tuple[int, ...], dist.ProcessGroup]] = {}
        self.member = rank in self.ranks
        self.coord = self.coord_of(self.ranks.index(rank)) if self.member else {}
        sets, mine = self._sets(), f"{self}, {'checked' if checked else 'unchecked'}, on {self.device.type}"
        if self.size() > 1 and (held := meeting(dist.group.WORLD)):
            held.meet(Intent.of(f"{mine}, over the ranks {[*self.ranks]}"))
        if self.member and self.size() > 1:
            self._meet(sets, mine)
        elif self.size() > 1:  # torch names a group by how many its ranks have made: all ranks make as many
            for _ in range(1 + sum(self.size(some) < self.size() for some in sets)):
                self._new_group([rank])

    def _check_ranks(self, world: int) -> None:
        known = all(0 <= rank < world for rank in self.ranks)
        if not known or list(self.ranks) != sorted(set(self.ranks)) or len(self.ranks) != self.size():
            raise ShardingError(
                f"the mesh {format_sizes(self.sizes)} over the ranks {list(self.ranks)} of {world}\n"
                f"  rule: its ranks are {self.size()} different ones of the run, ascending"
                "\n  fix: give as many ranks of the run as the mesh has devices, in ascending order"
            )

    def _sets(self) -> list[tuple[str, ...]]:
        """All sets of axes along which there is something to send."""
        axes = [axis for axis, size in self.sizes.items() if size > 1]
        return [some for n in range(1, len(axes) + 1) for some in combinations(axes, n)]

    def _meet(self, sets: Sequence[tuple[str, ...]], mine: str) -> None:
        """Make the process groups along all sets of axes, on all ranks alike: at their first use it might be that each
        rank waits for others in another group. Of a checked mesh, also where the groups' members meet."""
        said, memory = [mine], None
        everyone: Any = dist.group.WORLD
        if self.size() < dist.get_world_size():
            everyone = self._new_group(self.ranks)
        if dist.get_backend() != "fake":  # torch's stand-in for a transport, of which this process is the only rank
            said, memory = self._share_page(everyone, len(sets), mine)
        if len(set(said)) > 1:
            lines = "".join(f"  rank {rank}: {each}\n" for rank, each in enumerate(said))
            raise ShardingError(
                f"the ranks do not make the same mesh\n{lines}  rule: {MESHES}\n  fix: give all the same sizes"
            )
        if self.checked and meeting(everyone):
            # what ranks have begun on another mesh, and not all come to, would be in the way of this one's calls
            everyone = self._new_group(self.ranks)
        groups = [self._groups_along(some) for some in sets]
        page = SharedPage(memory, self.size(), self.rank, groups) if memory is not None else None
        for number, some in enumerate(sets):
            (ranks,) = [ranks for ranks in groups[number] if self.rank in ranks]
            pg = everyone
            if len(ranks) < self.size():
                pg = self._new_group([self.ranks[rank] for rank in ranks])
            if page is None and self.checked:
                hold_meeting(MeetingByMessages(pg, some), pg)
            elif page is not None:
                pg.set_timeout(timedelta(seconds=LONGER * self.timeout))
                hold_meeting(Meeting(page, number, some, self.timeout), pg)
            self._process_groups[some] = ranks, pg

    def _groups_along(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """The ranks of each group along these axes."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size()):
            coord = self.coord_of(rank)
            groups.setdefault(tuple(coord[axis] for axis in self.sizes if axis not in axes), []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]

    def _share_page(self, everyone, sets: int, mine: str) -> tuple[list, Any]:
        try:
            return share_page(everyone, SharedPage.nbytes(self.size(), sets), self.checked, mine)
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise
            raise made_alone(self.rank, mine) from error

    def _new_group(self, ranks: Sequence[int]) -> Any:
        """A process group, made by its members alone. It does not inherit the timeout of the world."""
        return dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout), use_local_synchronization=True)

    def _make_group(self, axes: tuple[str, ...]) -> Group:
        if not self.member:
            raise ShardingError(
                f"this rank is not one of the mesh {format_sizes(self.sizes)} over the ranks {list(self.ranks)}\n"
                f"  fix: leave out what runs on it where mesh.member is False, or give collectives None"
            )
        group = super()._make_group(axes)
        if group.size == 1:
            return group
        ranks, pg = self._process_groups[tuple(a for a in self.sizes if a in axes and self.sizes[a] > 1)]
        order = tuple(block_index(axes, self.coord_of(rank), self.sizes) for rank in ranks)
        order = () if order == tuple(sorted(order)) else order
        ranks = tuple(self.ranks[rank] for rank in ranks)
        return Group(axes, group.size, group.index, dist.get_backend(pg), order, ranks, pg.group_name, pg, self.checked)

    @property
    def device_mesh(self):
        """The same mesh as a torch DeviceMesh, on the same process groups: for DTensor and torch's own strategies."""
        if not dist.is_initialized():
            raise ShardingError(
                "a DeviceMesh needs a process group, which one rank does not have\n  fix: start 2 or more"
            )
        alone = {"timeout": timedelta(seconds=self.timeout), "use_local_synchronization": True}
        groups: list[Any] = [
            self.group((axis,)).pg or dist.new_group([dist.get_rank()], **alone) for axis in self.sizes
        ]
        ranks = torch.tensor(self.ranks).view(tuple(self.sizes.values()))
        return dist.device_mesh.DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0],
            self.device.type,
            mesh=ranks if len(groups) > 1 else None,
            mesh_dim_names=tuple(self.sizes),
        )
