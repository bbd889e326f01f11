"""The ragged AllToAll: values against a stacked reference, its transpose by every transform, bytes, refusals."""

import warnings

import pytest
import torch
from torch.func import jvp, vjp, vmap

from scaling.collectives import ragged_all_to_all
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError, parse
from scaling.trace import trace

COUNTS = torch.tensor([[2, 0, 3, 1], [0, 0, 0, 0], [1, 4, 0, 2], [5, 1, 1, 0]])  # rows from block i to block j
LINES = {"XY": "A[G_XY, E, R, D] -> A[G, E_XY, R, D]", "YX": "A[G_YX, E, R, D] -> A[G, E_YX, R, D]"}


def blocks(seed: int = 0) -> list[torch.Tensor]:
    """What each block holds: rows in the order of where they go."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(int(row.sum()), 3, generator=rng, dtype=torch.float64) for row in COUNTS]


def moved(held: list[torch.Tensor], counts: torch.Tensor) -> list[torch.Tensor]:
    parts = [x.split(row.tolist()) for x, row in zip(held, counts, strict=True)]
    return [torch.cat([parts[i][j] for i in range(4)]) for j in range(4)]


def every_way(mesh, order):
    index = mesh.group(tuple(order)).index
    x, t = blocks()[index], blocks(1)[index]
    sends, receives = COUNTS[index].tolist(), COUNTS[:, index].tolist()

    def f(x):
        return ragged_all_to_all(LINES[order], x, sends, receives, mesh)

    dy = moved(blocks(2), COUNTS)[index]
    with trace() as log:
        y = f(x)
    leaf = x.clone().requires_grad_()
    f(leaf).backward(dy)
    out, pull = vjp(f, x)
    _, again = vjp(lambda d: pull(d)[0], dy)  # the derivative of the pull: the way there again
    with trace() as back:
        (dx,) = pull(dy)
    with warnings.catch_warnings():  # torch's own, of its tracer
        warnings.simplefilter("ignore")
        pushed = jvp(f, (t,), (x,))[1]
    return {
        "index": index,
        "y": [y, out, again(x)[0], pushed],
        "dx": [dx, leaf.grad, vmap(pull, in_dims=1)(torch.stack([-dy, dy], 1))[0][1]],
        "sent": [(e.op, e.axes, str(e), e.nbytes, e.wire_bytes) for e in log.events + back.events],
    }


@pytest.mark.parametrize("order", LINES)
def test_equals_the_stacked_reference(ranks, order):
    y, dx = moved(blocks(), COUNTS), moved(moved(blocks(2), COUNTS), COUNTS.T)
    for got in ranks(every_way, {"X": 2, "Y": 2}, order):
        i = got["index"]
        for value in got["y"]:
            assert torch.equal(value, y[i])
        for value in got["dx"]:
            assert torch.equal(value, dx[i])
        there, back = (int(c[i].sum() - c[i, i]) * 24 for c in (COUNTS, COUNTS.T))
        assert got["sent"] == [
            ("AllToAll", tuple(order), f"A[G, E_{order}, R, D] = AllToAll_{order}(A[G_{order}, E, R, D])",
             4 * 24 * int(COUNTS[i].sum()), there),
            ("AllToAll", tuple(order), f"dA[G_{order}, E, R, D] = AllToAll_{order}(dA[G, E_{order}, R, D])",
             4 * 24 * int(COUNTS[:, i].sum()), back),
        ]  # fmt: skip


def test_the_cotangent_of_partial_sums_is_replicated():
    mesh, x = AbstractMesh({"X": 4, "Y": 2}), torch.empty(8, 3, device="meta")
    line = "A[G, E_X, R, D] {U_Y} -> A[G_X, E, R, D] {U_Y}"
    _, pull = vjp(lambda x: ragged_all_to_all(line, x, (2, 2, 2, 2), (2, 0, 5, 2), mesh), x)
    with trace() as log:
        (dx,) = pull(torch.empty(9, 3, device="meta"))
    assert dx.shape == (8, 3)
    assert log.events[0].before == parse("dA[G_X, E, R, D]")


def test_counts_may_be_a_tensor():
    x, five = torch.arange(20.0).view(5, 4), torch.tensor([5])
    assert torch.equal(ragged_all_to_all("A[G_X, E, R, D] -> A[G, E_X, R, D]", x, five, five, Mesh({"X": 1})), x)


def unlike(mesh, wrong):
    x, counts = torch.ones(2 * mesh.sizes["X"], 3), [2] * mesh.sizes["X"]
    try:
        ragged_all_to_all("A[G_X, E, R, D] -> A[G, E_X, R, D]", x, counts, wrong if mesh.rank else counts, mesh)
    except ShardingError as error:
        return str(error)


def test_ranks_that_expect_other_counts_all_raise(ranks):
    for said in ranks(unlike, {"X": 2}, [1, 2]):
        assert "the ranks send [[2, 2], [2, 2]], but expect [[2, 2], [1, 2]]" in said
