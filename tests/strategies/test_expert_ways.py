"""Four ways through a layer of experts, beside each token's own products, with gradients."""

import pytest
import torch
from torch.func import vjp

from scaling import tree
from scaling.strategies.expert import ways

S, D, F, E = 12, 5, 7, 4
CASES = {
    "one": torch.tensor([[s * s % E] for s in range(S)]),
    "two": torch.tensor([[s * s % E, (s + 1) % E] for s in range(S)]),
    "empty experts": torch.tensor([[2 * (s % 2)] for s in range(S)]),
    "all to one": torch.full((S, 2), 3),
}


def drawn(*shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


A, W, dOut = drawn(S, D, seed=0), drawn(E, D, F, seed=1), drawn(S, F, seed=2)


def wanted(experts):
    """(Out, dA, dW) with a copy of its experts for each token."""
    out, pull = vjp(lambda A, W: torch.einsum("sd,skdf->skf", A, W[experts]).mean(1), A, W)
    return out, *pull(dOut)


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_on_one_device():
    for experts in CASES.values():
        for way in (ways.masked_loop, ways.grouped):
            out, pull = vjp(lambda A, W, way=way, experts=experts: way(A, W, experts), A, W)
            close((out, *pull(dOut)), wanted(experts))


def on_mesh(mesh):
    types = ["Out[S_X, F]", "A[S_X, D]", "W[E_X, D, F]"]
    a, w, d_out = tree.shard([A, W, dOut], ["A[S_X, D]", "W[E_X, D, F]", "dOut[S_X, F]"], mesh)
    for experts in CASES.values():
        want = tree.shard(list(wanted(experts)), types, mesh)
        mine = tree.shard([experts], ["B[S_X, k]"], mesh)[0] if mesh.sizes["X"] > 1 else experts
        for way, options in ((ways.gathered, {}), (ways.ragged, {"chunk": 1}), (ways.ragged, {})):
            out, pull = vjp(lambda a, w, way=way, mine=mine, o=options: way(a, w, mine, mesh, **o), a, w)
            close((out, *pull(d_out)), want)


@pytest.mark.slow
def test_on_meshes(ranks):
    for X in (1, 2, 4):
        ranks(on_mesh, {"X": X})
