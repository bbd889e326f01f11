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

from collections.abc import Generator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.collectives.rings import LinkBytes, RingPlaces, gathering, passing, summing, together
from scaling.spec import ShardingError


def _blocks(x: Tensor, dim: int, ring: RingPlaces, of: str) -> list[Tensor]:
    """Return x in as many equal parts as there are devices."""
    if x.shape[dim] % ring.n:
        raise ShardingError(
            f"a collective matmul over {ring.axis}={ring.n}: {of} has size {x.shape[dim]}\n"
            f"  rule: a part of it belongs to each device\n  fix: make it a multiple of {ring.n}"
        )
    return list(x.chunk(ring.n, dim))


def gather_matmul(
    A: Tensor, W: Tensor, mesh, axis: str = "Y", *, ways: int = 2, log: LinkBytes | None = None
) -> Tensor:
    """A[B, D_Y] * W[D, F_Y] -> Out[B, F_Y]: each device multiplies the shards of A as they go round the ring."""
    ring = RingPlaces(mesh, axis, ways, log)
    rows, Out = _blocks(W, 0, ring, "W's first dim"), cast(Tensor, 0)
    for shards in passing(A, ring):  # 1. they are sent on
        for i, a in shards.items():
            Out = Out + a @ rows[i]  # 2. and meanwhile multiplied
    ring.count()
    return Out


def matmul_scatter(
    A: Tensor, W: Tensor, mesh, axis: str = "Y", *, ways: int = 2, log: LinkBytes | None = None
) -> Tensor:
    """A[B, D_Y] * W[D_Y, F] -> Out[B, F_Y]: each device adds its products to the sums as they go round the ring."""
    ring = RingPlaces(mesh, axis, ways, log)
    (Out,) = together(scattered(A, _blocks(W, 1, ring, "W's last dim"), ring))
    ring.count()
    return Out


def matmul_reduce(
    A: Tensor, W: Tensor, mesh, axis: str = "Y", *, ways: int = 2, tiles: int = 2, log: LinkBytes | None = None
) -> Tensor:
    """A[B, D_Y] * W[D_Y, F] -> Out[B, F]: by tiles of F: sums of one travel while the one before is gathered."""
    ring, done, before = RingPlaces(mesh, axis, ways, log), [], []
    for tile in W.chunk(tiles, 1):
        mine, *whole = together(scattered(A, _blocks(tile, 1, ring, "a tile of W's last dim"), ring), *before)
        done, before = done + whole, [gathering(mine, ring, 1)]
    done += together(*before)
    ring.count(len(done) + 1)
    return torch.cat(done, 1)


def scattered(A: Tensor, columns: list[Tensor], ring: RingPlaces) -> Generator[None, None, Tensor]:
    """Return the sum over the ring of A @ columns[j] for this device j; yield while each hop is in flight."""
    return summing(lambda j: A @ columns[j], ring)


def mlp(
    In: Tensor,
    W_in: Tensor,
    W_out: Tensor,
    mesh,
    axis: str = "Y",
    *,
    ways: int = 2,
    log: LinkBytes | None = None,
) -> Tensor:
    """In[B, D_Y] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D_Y], with gelu between the products."""
    Tmp = gather_matmul(In, W_in, mesh, axis, ways=ways, log=log)
    return matmul_scatter(F.gelu(Tmp), W_out, mesh, axis, ways=ways, log=log)
