"""The ring algorithms against the collectives, and what their links carry against the book's counts."""

import pytest
import torch

from scaling import collectives as c
from scaling.collectives import rings
from scaling.mesh import AbstractMesh

ROWS, COLUMNS = 3, 4  # of a shard
RINGS = rings.all_gather, rings.reduce_scatter, rings.all_to_all


@pytest.mark.parametrize(("mesh", "axis"), [({"X": 2, "Y": 4}, "Y"), ({"X": 3}, "X")])
def test_equal_to_the_collectives(mesh, axis):
    n, rng = mesh.size((axis,)), torch.Generator().manual_seed(mesh.rank)
    shard = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=rng)
    whole = torch.randn(n * ROWS, COLUMNS, dtype=torch.float64, generator=rng)
    chunks = whole.view(n, ROWS, COLUMNS)
    wanted = [
        c.all_gather(f"A[I_{axis}, J] -> A[I, J]", shard, mesh),
        c.reduce_scatter(f"A[I, J] {{U_{axis}}} -> A[I_{axis}, J]", whole, mesh),
        c.all_to_all(f"A[I_{axis}, J, K] -> A[I, J_{axis}, K]", chunks.transpose(0, 1).contiguous(), mesh),
    ]
    V = 8 * whole.numel()
    for ways in (1, 2):
        logs = [rings.LinkBytes() for _ in range(3)]
        for ring, x, log, theirs in zip(RINGS, (shard, whole, chunks), logs, wanted, strict=True):
            torch.testing.assert_close(ring(x, mesh, axis, ways, log).flatten(), theirs.flatten(), rtol=0, atol=1e-12)
        hops = n - 1 if ways == 1 else n // 2
        for log in logs[:2]:
            assert (log.busiest, log.hops, sum(log.bytes.values())) == (hops * V // n, hops, n * (n - 1) * V // n)


def counted(ways, n, items):
    """What links carry on an abstract ring, in bytes: AllGather and AllToAll of the same array of V bytes."""
    mesh, logs = AbstractMesh({"X": n}), (rings.LinkBytes(), rings.LinkBytes())
    rings.all_gather(torch.empty(n, items, device="meta"), mesh, "X", ways, logs[0])
    rings.all_to_all(torch.empty(n, items, device="meta"), mesh, "X", ways, logs[1])
    return logs[0].busiest, logs[1].busiest, 4 * n * n * items


@pytest.mark.parametrize("n", [2, 6, 16])
def test_half_and_quarter(n):
    """Question 10: an AllToAll takes 1/2 of an AllGather one way round, 1/4 with both ways, for every even n."""
    gather, exchange, V = counted(1, n, 2)
    assert gather == V * (n - 1) // n
    assert exchange * 2 == gather
    gather, exchange, V = counted(2, n, 2)
    assert gather == V // 2
    assert exchange * 4 == gather


def test_an_odd_ring_and_one_device():
    gather, exchange, V = counted(2, 5, 2)
    assert (gather, exchange) == (2 * V // 5, 3 * V // 25)
    assert counted(1, 1, 3)[:2] == counted(2, 1, 3)[:2] == (0, 0)
