"""The ring algorithms against the collectives, and what their links carry against the book's counts."""

import itertools

import pytest
import torch

from scaling import collectives as c
from scaling.collectives import rings
from scaling.mesh import AbstractMesh


@pytest.mark.parametrize(("mesh", "axis"), [({"X": 2, "Y": 4}, "Y"), ({"X": 3}, "X")])
def test_rings_are_equal_to_the_collectives(mesh, axis):
    n, rng = mesh.size((axis,)), torch.Generator().manual_seed(mesh.rank)
    part = torch.randn(3, 4, dtype=torch.float64, generator=rng)
    whole = torch.randn(n * 3, 4, dtype=torch.float64, generator=rng)
    chunks, V = whole.view(n, 3, 4), 8 * whole.numel()
    by_blocks = chunks.transpose(0, 1).contiguous()
    cases = [
        (rings.all_gather, part, c.all_gather(f"A[I_{axis}, J] -> A[I, J]", part, mesh)),
        (rings.reduce_scatter, whole, c.reduce_scatter(f"A[I, J] {{U_{axis}}} -> A[I_{axis}, J]", whole, mesh)),
        (rings.all_to_all, chunks, c.all_to_all(f"A[I_{axis}, J, K] -> A[I, J_{axis}, K]", by_blocks, mesh)),
    ]
    for ways, (ring, x, wanted) in itertools.product((1, 2), cases):
        log = rings.LinkBytes()
        torch.testing.assert_close(ring(x, mesh, axis, ways, log).flatten(), wanted.flatten(), rtol=0, atol=1e-12)
        hops = n - 1 if ways == 1 else n // 2
        if ring != rings.all_to_all:
            assert (log.busiest, log.hops, sum(log.bytes.values())) == (hops * V // n, hops, n * (n - 1) * V // n)


def counted(ways, n, items):
    """What links carry on an abstract ring, in bytes: AllGather and AllToAll of the same array of V bytes."""
    mesh, logs = AbstractMesh({"X": n}), (rings.LinkBytes(), rings.LinkBytes())
    rings.all_gather(torch.empty(n, items, device="meta"), mesh, "X", ways, logs[0])
    rings.all_to_all(torch.empty(n, items, device="meta"), mesh, "X", ways, logs[1])
    return logs[0].busiest, logs[1].busiest, 4 * n * n * items


def test_half_and_quarter():
    """Question 10: an AllToAll takes 1/2 of an AllGather one way round, 1/4 with both ways, for every even n."""
    for n in (2, 6, 16):
        gather, exchange, V = counted(1, n, 2)
        assert (gather, exchange * 2) == (V * (n - 1) // n, gather)
        gather, exchange, V = counted(2, n, 2)
        assert (gather, exchange * 4) == (V // 2, gather)
    gather, exchange, V = counted(2, 5, 2)  # an odd ring
    assert (gather, exchange) == (2 * V // 5, 3 * V // 25)
    assert counted(1, 1, 3)[:2] == counted(2, 1, 3)[:2] == (0, 0)
