"""Four ways through a layer of experts, beside each token's own products, with gradients."""

from functools import partial

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


TYPES = ["Out[S_X, F]", "A[S_X, D]", "W[E_X, D, F]"]


def on_mesh(mesh):
    a, w, d_out = tree.shard([A, W, dOut], [*TYPES[1:], TYPES[0]], mesh)
    forms = {"gathered": ways.gathered, "ragged": ways.ragged, "in chunks": partial(ways.ragged, chunk=1)}
    forms = {name: partial(way, mesh=mesh) for name, way in forms.items()}
    if mesh.size() == 1:
        forms |= {"masked loop": ways.masked_loop, "grouped": ways.grouped}
    for what, experts in CASES.items():  # beside a copy of its experts for each token
        out, pull = vjp(lambda A, W, experts=experts: torch.einsum("sd,skdf->skf", A, W[experts]).mean(1), A, W)
        wanted = tree.shard([out, *pull(dOut)], TYPES, mesh)
        mine = tree.shard([experts], ["B[S_X, k]"], mesh)[0]
        for name, way in forms.items():
            out, pull = vjp(lambda a, w, way=way, mine=mine: way(a, w, mine), a, w)
            for got, want in zip((out, *pull(d_out)), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=f"{name}, {what}")


@pytest.mark.parametrize("X", [1, 2, 4])
def test_each_way_is_each_token_s_own_products(ranks, X):
    ranks(on_mesh, {"X": X})
