"""The mesh that runs: this process joins the run as one of its ranks, and makes the process groups along its axes."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from scaling.common.torchrun import this_host, this_rank, world_size
from scaling.mesh.abstract import AbstractMesh, Group
from scaling.mesh.lost import Members, hold_members
from scaling.mesh.meeting import MESHES, Intent, Meeting, MeetingByMessages, hold_meeting, made_alone, meeting
from scaling.mesh.page import SharedPage, share_page
from scaling.spec import ShardingError, block_index
from scaling.spec.sizes import format_sizes

TIMEOUT = 120.0  # seconds that a collective waits for the other ranks before it raises
LONGER = 5  # a call that has begun fails after this many timeouts; its group is then lost


def check_device(device) -> None:
    """Raise a ShardingError for a device that this machine, or this torch, does not have."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ShardingError(f"device {device}: torch finds no GPU here\n  fix: leave the device out, to run on the CPU")


def join_world(device, timeout: float = TIMEOUT, store=None, rank: int = -1, world: int = -1) -> None:
    """Join the run's process group: gloo on CPU, NCCL on CUDA. Without a store, torchrun's environment says where."""
    device = torch.device(device)
    backend = "gloo"
    if device.type == "cuda":
        local = rank if store is not None else this_rank().local_rank
        if local >= torch.cuda.device_count():
            have = torch.cuda.device_count()
            raise ValueError(
                f"rank {local} needs its own GPU, but there are {have}\n  fix: use fewer ranks, or the cpu"
            )
        torch.cuda.set_device(local)
        backend = "nccl"
    where = {"store": store, "rank": rank, "world_size": world} if store is not None else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **where)


class Mesh(AbstractMesh):
    """The ranks of this run along named axes, e.g. `Mesh({"X": 4, "Y": 2})`; every rank must make it alike.

    Ranks come from `scaling.launch` or from torchrun; a mesh of one device needs no process group.

    Args:
        sizes: the size of each axis; their product is the number of ranks.
        device: where the arrays are, "cpu" or "cuda".
        checked: whether the ranks of a group compare their calls before each collective, or before its result is used,
            so that differing ranks raise instead of hanging.
        timeout: seconds that a collective waits for the other ranks.
        ranks: the run's ranks that form the mesh, ascending, for instance range(0, 4); all by default. All ranks of the
            run make the mesh alike. On a rank outside it `member` is False, there is no `coord`, and a collective takes
            and returns None.

    Raises:
        ShardingError: the sizes do not multiply to the number of ranks.
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
        elif self.size() > 1:  # torch names a group by a count: all ranks make equally many
            for _ in range(1 + sum(self.size(some) < self.size() for some in sets)):
                self._new_group([rank])
        self._view("optional", drops=True)  # a compiler cannot make this view when it meets it

    def _check_ranks(self, world: int) -> None:
        known = all(0 <= rank < world for rank in self.ranks)
        if not known or list(self.ranks) != sorted(set(self.ranks)) or len(self.ranks) != self.size():
            raise ShardingError(
                f"the mesh {format_sizes(self.sizes)} over the ranks {list(self.ranks)} of {world}\n"
                f"  rule: its ranks are {self.size()} different ones of the run, ascending"
                "\n  fix: give as many ranks of the run as the mesh has devices, in ascending order"
            )

    def _sets(self) -> list[tuple[str, ...]]:
        """Return all sets of axes along which something can be sent."""
        axes = [axis for axis, size in self.sizes.items() if size > 1]
        return [some for n in range(1, len(axes) + 1) for some in combinations(axes, n)]

    def _meet(self, sets: Sequence[tuple[str, ...]], mine: str) -> None:
        """Make the process groups along all sets of axes, and on a checked mesh what compares their members' calls.

        All ranks make all groups now, because at a group's first use its ranks might be waiting in different groups.
        """
        messages, memory = [(mine, this_host())], None
        everyone: Any = dist.group.WORLD
        if self.size() < dist.get_world_size():
            everyone = self._new_group(self.ranks)
        if dist.get_backend() != "fake":  # torch's stand-in for a transport, with this process as its only rank
            messages, memory = self._share_page(everyone, len(sets), mine)
        made, hosts = zip(*messages, strict=True)
        if len(set(made)) > 1:
            lines = "".join(f"  rank {rank}: {each}\n" for rank, each in enumerate(made))
            raise ShardingError(
                f"the ranks do not make the same mesh\n{lines}  rule: {MESHES}\n  fix: give all the same sizes"
            )
        if self.checked and meeting(everyone):
            # a call on another mesh that not all ranks have come to would get in the way of this mesh's calls
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
                if len(set(hosts)) == 1:
                    pg.set_timeout(timedelta(seconds=LONGER * self.timeout))
                hold_meeting(Meeting(page, number, some, self.timeout), pg)
            if len(hosts) == self.size():
                of_run, on = [self.ranks[rank] for rank in ranks], [hosts[rank] for rank in ranks]
                hold_members(pg, Members(of_run, on, self.checked, ranks, page))
            self._process_groups[some] = ranks, pg

    def _groups_along(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the ranks of each group along these axes."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size()):
            coord = self.coord_of(rank)
            groups.setdefault(tuple(coord[axis] for axis in self.sizes if axis not in axes), []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]

    def _share_page(self, everyone, sets: int, mine: str) -> tuple[list, Any]:
        try:
            return share_page(everyone, SharedPage.nbytes(self.size(), sets), self.checked, (mine, this_host()))
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise
            raise made_alone(self.rank, mine) from error

    def _new_group(self, ranks: Sequence[int]) -> Any:
        """Make a process group; only its members take part. It does not inherit the world's timeout."""
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
        """This mesh as a torch DeviceMesh, on the same process groups, for DTensor and torch's own strategies."""
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
