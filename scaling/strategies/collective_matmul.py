"""Collective matmuls: products whose AllGather, ReduceScatter or AllReduce is hidden behind them (Parts 3 and 10).

Shards, or sums of them, go round the ring along an axis hop by hop while blocks are multiplied (Wang et al. 2023):

    gather_matmul    A[B, D_Y] * W[D, F_Y] -> Out[B, F_Y]        AllGather of A first, otherwise
    matmul_scatter   A[B, D_Y] * W[D_Y, F] -> Out[B, F_Y]        ReduceScatter of Out after, otherwise
    matmul_reduce    A[B, D_Y] * W[D_Y, F] -> Out[B, F]          AllReduce of Out after, otherwise
    mlp              In[B, D_Y] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D_Y]

B may be split over other axes. `ways` 1 sends round the ring in one direction, 2 in both at once. Of n devices, with V
the bytes of the gathered or unreduced array, one after the other go `hops`, and the busiest link carries:

    gather_matmul, matmul_scatter     one way n - 1 hops, V (n-1)/n        two ways floor(n/2) hops, V floor(n/2)/n
    matmul_reduce in t tiles          (t + 1) times as many hops, each of V/(n t); twice the bytes

Derivatives are those of the loops: the cotangent of a hop is the hop back. `log`: a `rings.LinkBytes` that counts.
"""

from collections.abc import Callable, Generator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.collectives.linear import Pending
from scaling.collectives.rings import LinkBytes, count_hops, directions, one_hop
from scaling.spec import ShardingError


class RingPlaces:
    """The devices along an axis, seen from one: `hops` {step: hops} of each way, +1 to the right, -1 to the left."""

    def __init__(self, mesh, axis: str, ways: int, log: LinkBytes | None = None):
        self.mesh, self.axis, self.log = mesh, axis, log
        self.n, self.me = mesh.sizes[axis], mesh.coord[axis]
        self.hops = dict(directions(self.n, ways))
        self.longest = max(self.hops.values())

    def start(self, x: Tensor, step: int) -> Pending:
        """Start sending x to the neighbour, and return the pending array of the other neighbour."""
        return one_hop(x, self.mesh, self.axis, step, self.log, async_op=True)

    def blocks(self, x: Tensor, dim: int, of: str) -> list[Tensor]:
        """x in as many equal parts as there are devices."""
        if x.shape[dim] % self.n:
            raise ShardingError(
                f"a collective matmul over {self.axis}={self.n}: {of} has size {x.shape[dim]}\n"
                f"  rule: a part of it belongs to each device\n  fix: make it a multiple of {self.n}"
            )
        return list(x.chunk(self.n, dim))


def gather_matmul(
    A: Tensor, W: Tensor, mesh, axis: str = "Y", *, ways: int = 2, log: LinkBytes | None = None
) -> Tensor:
    """A[B, D_Y] * W[D, F_Y] -> Out[B, F_Y]: shards of A travel, and are multiplied where they come by."""
    ring = RingPlaces(mesh, axis, ways, log)
    rows = ring.blocks(W, 0, "W's first dim")
    passing, Out = dict.fromkeys(ring.hops, A), cast(Tensor, 0)
    for hop in range(ring.longest + 1):
        going = {step: ring.start(a, step) for step, a in passing.items() if hop < ring.hops[step]}  # 1. they set out
        for step, a in passing.items() if hop else [(0, A)]:
            Out = Out + a @ rows[(ring.me - step * hop) % ring.n]  # 2. meanwhile they are multiplied
        passing = {step: pending.wait() for step, pending in going.items()}  # 3. the next ones are here
    count_hops(log, ring.longest)
    return Out


def matmul_scatter(
    A: Tensor, W: Tensor, mesh, axis: str = "Y", *, ways: int = 2, log: LinkBytes | None = None
) -> Tensor:
    """A[B, D_Y] * W[D_Y, F] -> Out[B, F_Y]: sums travel to where they belong, and grow by each device's product."""
    ring = RingPlaces(mesh, axis, ways, log)
    (Out,) = _together(scattered(A, ring.blocks(W, 1, "W's last dim"), ring))
    count_hops(log, ring.longest)
    return Out


def matmul_reduce(
    A: Tensor, W: Tensor, mesh, axis: str = "Y", *, ways: int = 2, tiles: int = 2, log: LinkBytes | None = None
) -> Tensor:
    """A[B, D_Y] * W[D_Y, F] -> Out[B, F]: by tiles of F: sums of one travel while the one before is gathered."""
    ring, done, before = RingPlaces(mesh, axis, ways, log), [], []
    for tile in W.chunk(tiles, 1):
        mine, *whole = _together(scattered(A, ring.blocks(tile, 1, "a tile of W's last dim"), ring), *before)
        done, before = done + whole, [gathered_by_hops(mine, ring)]
    done += _together(*before)
    count_hops(log, (len(done) + 1) * ring.longest)
    return torch.cat(done, 1)


def mlp(
    In: Tensor,
    W_in: Tensor,
    W_out: Tensor,
    mesh,
    axis: str = "Y",
    *,
    activation: Callable[[Tensor], Tensor] = F.gelu,
    ways: int = 2,
    log: LinkBytes | None = None,
) -> Tensor:
    """In[B, D_Y] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D_Y], with an activation between the products."""
    Tmp = gather_matmul(In, W_in, mesh, axis, ways=ways, log=log)
    return matmul_scatter(activation(Tmp), W_out, mesh, axis, ways=ways, log=log)


def scattered(A: Tensor, columns: list[Tensor], ring: RingPlaces) -> Generator[None, None, Tensor]:
    """The sums over the ring of A @ columns[j], of which device j gets its own; stops while each hop is under way."""
    total = []
    passing = {step: A @ columns[(ring.me + step * hops) % ring.n] for step, hops in ring.hops.items() if hops}
    for hop in range(1, ring.longest + 1):
        going = {step: ring.start(sums, step) for step, sums in passing.items()}
        yield
        later = {step: (ring.me + step * (hops - hop)) % ring.n for step, hops in ring.hops.items() if hop < hops}
        products = {step: A @ columns[block] for step, block in later.items()}
        if hop == ring.longest:
            total.append(A @ columns[ring.me])
        arrived = {step: pending.wait() for step, pending in going.items()}
        total += [sums for step, sums in arrived.items() if step not in products]
        passing = {step: arrived[step] + product for step, product in products.items()}
    return sum(total[1:], total[0]) if total else A @ columns[ring.me]


def gathered_by_hops(x: Tensor, ring: RingPlaces) -> Generator[None, None, Tensor]:
    """x[B, F_Y] -> [B, F]; stops while each hop is under way."""
    blocks, passing = {ring.me: x}, dict.fromkeys(ring.hops, x)
    for hop in range(1, ring.longest + 1):
        going = {step: ring.start(passing[step], step) for step, hops in ring.hops.items() if hop <= hops}
        yield
        for step, pending in going.items():
            passing[step] = blocks[(ring.me - step * hop) % ring.n] = pending.wait()
    return torch.cat([blocks[i] for i in range(ring.n)], 1)


def _together(*steps: Generator[None, None, Any]) -> list[Any]:
    """The results of rings whose hops go at the same time."""
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
