"""The collectives written out hop by hop, by `ppermute` to the neighbours on a ring, with every link counted (Part 3).

    log = LinkBytes()
    whole = all_gather(x, mesh, "X", ways=2, log=log)       # A[I_X, ...] -> A[I, ...]

`ways` 1 sends round the ring in one direction, 2 in both at once. A link (source, target) has one direction, so that
the two directions are counted separately. All functions work along dim 0. The busiest link carries, of an array of V
bytes on n devices (n even for two ways):

    AllGather, ReduceScatter   one way V (n-1)/n        two ways V/2 at most: floor(n/2) hops of V/n
    AllToAll                   one way V (n-1)/(2n)     two ways V/8

So an AllToAll takes 1/2 of the time of an AllGather on a ring of one way, and 1/4 on one of two ways.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from scaling import collectives
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError


@dataclass
class LinkBytes:
    """The traffic on a ring: `bytes` by directed link (source, target) along the axis, and the `hops` in sequence."""

    bytes: Counter = field(default_factory=Counter)
    hops: int = 0

    @property
    def busiest(self) -> int:
        """The bytes over the link that carries most, which bounds the time."""
        return max(self.bytes.values(), default=0)


def one_hop(x: torch.Tensor, mesh, axis: str, step: int, log: "LinkBytes | None", async_op: bool = False) -> Any:
    """Pass x to the neighbour `step` (+1 or -1) along the axis; return the other neighbour's, or a Pending of it."""
    n = mesh.size((axis,))
    pairs = [(i, (i + step) % n) for i in range(n)]
    if log is not None:
        for link in pairs if n > 1 else ():
            log.bytes[(*link, step)] += x.numel() * x.element_size()
    dims = ", ".join(f"D{i}" for i in range(x.dim()))
    return collectives.ppermute(f"[{dims}]", x, mesh, axis, pairs, async_op=async_op)


def directions(n: int, ways: int) -> list[tuple[int, int]]:
    """Return (step, hops) of each way: one way makes all n - 1 hops; two ways share them, floor(n/2) to the right."""
    if ways not in (1, 2):
        raise ValueError(f"ways must be 1 or 2, got {ways}\n  fix: 1 sends one way round the ring, 2 both ways")
    return [(1, n - 1)] if ways == 1 else [(1, n // 2), (-1, (n - 1) // 2)]


class RingPlaces:
    """The devices along an axis, seen from one.

    Attributes:
        n: The number of devices.
        me: This device's index.
        hops: {step: hops} for each direction; step +1 goes to the right, -1 to the left.
        longest: The larger number of hops.
    """

    def __init__(self, mesh, axis: str, ways: int, log: "LinkBytes | None" = None):
        self.mesh, self.axis, self.log = mesh, axis, log
        self.n, self.me = mesh.size((axis,)), mesh.coord[axis]
        self.hops = dict(directions(self.n, ways))
        self.longest = max(self.hops.values())

    def start(self, x: torch.Tensor, step: int) -> Any:
        """Start sending x to the neighbour, and return the pending array of the other neighbour."""
        return one_hop(x, self.mesh, self.axis, step, self.log, async_op=True)

    def count(self, times: int = 1) -> None:
        """Add the hops of an algorithm, `times` once round the ring, to the log, if there is one."""
        if self.log is not None:
            self.log.hops += times * self.longest


def passing(x: torch.Tensor, ring: RingPlaces) -> Iterator[dict[int, torch.Tensor]]:
    """Yield the devices' shards as they go round the ring, {device: its shard}, while they are sent on."""
    here = dict.fromkeys(ring.hops, x)
    for hop in range(ring.longest + 1):
        going = {step: ring.start(a, step) for step, a in here.items() if hop < ring.hops[step]}
        yield {(ring.me - step * hop) % ring.n: a for step, a in here.items()}
        here = {step: pending.wait() for step, pending in going.items()}


def summing(term: Callable[[int], torch.Tensor], ring: RingPlaces) -> Generator[None, None, torch.Tensor]:
    """Return the sum over the devices of their `term` for this one, by its index; yield while each hop is in flight."""
    total = []
    here = {step: term((ring.me + step * hops) % ring.n) for step, hops in ring.hops.items() if hops}
    for hop in range(1, ring.longest + 1):
        going = {step: ring.start(sums, step) for step, sums in here.items()}
        yield
        left = {step: hops - hop for step, hops in ring.hops.items() if hop < hops}
        terms = {step: term((ring.me + step * hops) % ring.n) for step, hops in left.items()}
        if hop == ring.longest:
            total.append(term(ring.me))
        arrived = {step: pending.wait() for step, pending in going.items()}
        total += [sums for step, sums in arrived.items() if step not in terms]
        here = {step: arrived[step] + own for step, own in terms.items()}
    return sum(total[1:], total[0]) if total else term(ring.me)


def gathering(x: torch.Tensor, ring: RingPlaces, dim: int = 0) -> Generator[None, None, torch.Tensor]:
    """Return the devices' shards, joined in a dim; yield while each hop is in flight."""
    blocks = {}
    for shards in passing(x, ring):
        blocks |= shards
        yield
    return torch.cat([blocks[i] for i in range(ring.n)], dim)


def together(*steps: Generator[None, None, Any]) -> list[Any]:
    """Run generators whose hops go at the same time, and return their results."""
    results: dict[int, Any] = {}
    going = dict(enumerate(steps))
    while going:
        for i, each in [*going.items()]:
            try:
                next(each)
            except StopIteration as end:
                results[i] = end.value
                del going[i]
    return [results[i] for i in range(len(steps))]


def all_gather(x: torch.Tensor, mesh, axis: str, ways: int = 2, log: "LinkBytes | None" = None) -> torch.Tensor:
    """A[I_X, ...] -> A[I, ...]: each device passes on the last shard it received, until all have been everywhere."""
    ring = RingPlaces(mesh, axis, ways, log)
    ring.count()
    return together(gathering(x, ring))[0]


def reduce_scatter(x: torch.Tensor, mesh, axis: str, ways: int = 2, log: "LinkBytes | None" = None) -> torch.Tensor:
    """A[I, ...] {U_X} -> A[I_X, ...]: sums travel to the device that owns them, and every device adds its own term."""
    ring = RingPlaces(mesh, axis, ways, log)
    blocks = _chunks(x, ring.n, axis)
    ring.count()
    return together(summing(blocks.__getitem__, ring))[0]


def all_to_all(x: torch.Tensor, mesh, axis: str, ways: int = 2, log: "LinkBytes | None" = None) -> torch.Tensor:
    """[n, ...] -> [n, ...], chunk j of device i to slot i on device j: every chunk travels only as far as it must.

    With two ways and n even, the chunk for the opposite device goes half to the right and half to the left.
    """
    ring = RingPlaces(mesh, axis, ways, log)
    n, me = ring.n, ring.me
    if x.shape[0] != n:
        raise ShardingError(
            f"AllToAll over {axis}={n}: dim 0 holds a chunk for each device, but the shape is {tuple(x.shape)}\n"
            f"  fix: view the dim that is split as ({n}, its size / {n}) and move the first of these in front"
        )
    chunks, shape = x.flatten(1) if x.dim() > 1 else x[:, None], x.shape[1:]
    half = chunks.shape[1] // 2
    received = {me: [chunks[me]]}
    for step, hops in ring.hops.items():
        middle = ways == 2 and n % 2 == 0
        part = slice(None, half) if step == 1 else slice(half, None)
        hops = n // 2 if middle else hops
        travelling = [chunks[(me + step * d) % n] for d in range(1, hops + 1)]  # by distance
        if middle:
            travelling[-1] = travelling[-1][part]
        for hop in range(1, hops + 1):
            travelling = [one_hop(chunk, mesh, axis, step, log) for chunk in travelling]
            received.setdefault((me - step * hop) % n, []).append(travelling.pop(0))
    ring.count()
    return torch.stack([torch.cat(received[i]) for i in range(n)]).unflatten(1, shape or (1,)).view(x.shape)


def _chunks(x: torch.Tensor, n: int, axis: str) -> list[torch.Tensor]:
    if x.shape[0] % n:
        raise ShardingError(
            f"ReduceScatter over {axis}={n}: dim 0 of size {x.shape[0]} does not divide into {n} blocks\n"
            f"  fix: make dim 0 a multiple of {n}"
        )
    return list(x.chunk(n))


def ring_counts(n: int, items: int) -> list[tuple[str, int, int, int]]:
    """Return (algorithm, ways, hops, scalars over the busiest link) for arrays of n * items scalars on n devices.

    `items` is the number that a device holds, a multiple of 2n, so that every chunk can be halved.
    """
    mesh, rows = AbstractMesh({"X": n}), []
    for ways in (1, 2):
        for name, run, shape in (
            ("AllGather", all_gather, (items,)),
            ("ReduceScatter", reduce_scatter, (n * items,)),
            ("AllToAll", all_to_all, (n, items // n)),
        ):
            log = LinkBytes()
            run(torch.empty(shape, device="meta", dtype=torch.int8), mesh, "X", ways, log)
            rows.append((name, ways, log.hops, log.busiest))
    return rows
