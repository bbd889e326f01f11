"""Collective matmuls: products whose AllGather, ReduceScatter or AllReduce is hidden behind them (Parts 3 and 10).

Shards, or sums of them, go round the ring along an axis hop by hop while blocks are multiplied (Wang et al. 2023). The
right column has the collective that each replaces:

    gather_matmul    A[B, D_Y] * W[D, F_Y] -> Out[B, F_Y]        AllGather of A, before the product
    matmul_scatter   A[B, D_Y] * W[D_Y, F] -> Out[B, F_Y]        ReduceScatter of Out, after it
    matmul_reduce    A[B, D_Y] * W[D_Y, F] -> Out[B, F]          AllReduce of Out, after it
    mlp              In[B, D_Y] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D_Y]

B may be split over other axes. With `ways` 1 the ring runs in one direction, with 2 in both at once. Let n be the
number of devices and V the bytes of the gathered or unreduced array. The hops, one after another, and the bytes that
the busiest link carries are

    gather_matmul, matmul_scatter     one way n - 1 hops, V (n-1)/n        two ways floor(n/2) hops, V floor(n/2)/n
    matmul_reduce in t tiles          (t + 1) times as many hops, each of V/(n t); twice the bytes

Autograd differentiates the loops: the cotangent of a hop is the hop back. `log` is a `rings.LinkBytes` that counts.
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
    """The devices along an axis, seen from one.

    Attributes:
        n: The number of devices.
        me: This device's index.
        hops: {step: hops} for each direction; step +1 goes to the right, -1 to the left.
        longest: The larger number of hops.
    """

    def __init__(self, mesh, axis: str, ways: int, log: LinkBytes | None = None):
        self.mesh, self.axis, self.log = mesh, axis, log
        self.n, self.me = mesh.sizes[axis], mesh.coord[axis]
        self.hops = dict(directions(self.n, ways))
        self.longest = max(self.hops.values())

    def start(self, x: Tensor, step: int) -> Pending:
        """Start sending x to the neighbour, and return the pending array of the other neighbour."""
        return one_hop(x, self.mesh, self.axis, step, self.log, async_op=True)

    def blocks(self, x: Tensor, dim: int, of: str) -> list[Tensor]:
        """Return x in as many equal parts as there are devices."""
        if x.shape[dim] % self.n:
            raise ShardingError(
                f"a collective matmul over {self.axis}={self.n}: {of} has size {x.shape[dim]}\n"
                f"  rule: a part of it belongs to each device\n  fix: make it a multiple of {self.n}"
            )
        return list(x.chunk(self.n, dim))


def gather_matmul(
    A: Tensor, W: Tensor, mesh, axis: str = "Y", *, ways: int = 2, log: LinkBytes | None = None
) -> Tensor:
    """A[B, D_Y] * W[D, F_Y] -> Out[B, F_Y]: each device multiplies the shards of A as they go round the ring."""
    ring = RingPlaces(mesh, axis, ways, log)
    rows = ring.blocks(W, 0, "W's first dim")
    passing, Out = dict.fromkeys(ring.hops, A), cast(Tensor, 0)
    for hop in range(ring.longest + 1):
        going = {step: ring.start(a, step) for step, a in passing.items() if hop < ring.hops[step]}  # 1. send shards on
        for step, a in passing.items() if hop else [(0, A)]:
            Out = Out + a @ rows[(ring.me - step * hop) % ring.n]  # 2. meanwhile multiply them
        passing = {step: pending.wait() for step, pending in going.items()}  # 3. wait for the next ones
    count_hops(log, ring.longest)
    return Out


def matmul_scatter(
    A: Tensor, W: Tensor, mesh, axis: str = "Y", *, ways: int = 2, log: LinkBytes | None = None
) -> Tensor:
    """A[B, D_Y] * W[D_Y, F] -> Out[B, F_Y]: each device adds its products to the sums as they go round the ring."""
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
    """Return the sum over the ring of A @ columns[j] for this device j; yield while each hop is in flight."""
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
    """x[B, F_Y] -> [B, F], hop by hop; yield while each hop is in flight."""
    blocks, passing = {ring.me: x}, dict.fromkeys(ring.hops, x)
    for hop in range(1, ring.longest + 1):
        going = {step: ring.start(passing[step], step) for step, hops in ring.hops.items() if hop <= hops}
        yield
        for step, pending in going.items():
            passing[step] = blocks[(ring.me - step * hop) % ring.n] = pending.wait()
    return torch.cat([blocks[i] for i in range(ring.n)], 1)


def _together(*steps: Generator[None, None, Any]) -> list[Any]:
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
