"""A layer's weights sent together are those sent one by one, and so are their gradients."""

import pytest
import torch

from scaling import tree
from scaling.collectives import wait
from scaling.mesh import AbstractMesh
from scaling.strategies.transformer.step import (
    SMALL,
    gathered_leaves,
    gathered_together,
    moves_of,
    scattered_leaves,
    scattered_together,
    sent_together,
    totalled,
)
from scaling.trace import trace

STORED = {"a": "a[D_X, F_Y]", "b": "b[N_Y, H, D_X]", "c": {"d": "d[E, F, D_X]"}, "g": "g[D]"}
SHAPES = {"a": (4, 6), "b": (2, 3, 4), "c": {"d": (2, 6, 4)}, "g": (8,)}


def both_ways(mesh):
    def drawn(shapes):
        seed = torch.Generator().manual_seed(mesh.rank)
        return {k: drawn(v) if isinstance(v, dict) else torch.randn(v, generator=seed) for k, v in shapes.items()}

    W = drawn(SHAPES)
    moves = moves_of(tree.leaves(STORED), mesh, ("X",))
    sent = sent_together(tree.leaves(W), moves, mesh)
    together = gathered_together(W, mesh, sent).wait()
    alone = tree.unflatten(W, [wait(x) for x in gathered_leaves(tree.leaves(W), moves, mesh)])
    dW = tree.map(lambda x: torch.randn_like(x) + mesh.rank, together)
    at_once = scattered_together(dW, mesh, sent).wait()
    reduced = tree.unflatten(W, totalled(scattered_leaves(tree.leaves(dW), moves, mesh), moves, mesh))
    reduced["g"] = at_once["g"]  # what X does not split is not sent here
    return len(sent), [(together, alone), (at_once, reduced)]


@pytest.mark.parametrize("sizes", [{"X": 2}, {"X": 2, "Y": 2}])
def test_together_is_one_by_one(ranks, sizes):
    for count, pairs in ranks(both_ways, sizes):
        assert count == 3
        for ours, theirs in pairs:
            assert tree.structure(ours) == tree.structure(theirs)
            for a, b in zip(tree.leaves(ours), tree.leaves(theirs), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_large_layers_and_mixed_dtypes_go_one_by_one():
    mesh = AbstractMesh({"X": 2})
    large = [torch.empty(SMALL // 4 + 1, 1, device="meta"), torch.empty(1)]
    assert sent_together(large, moves_of(["a[D_X, F]", "g[D]"], mesh), mesh) == {}
    mixed = [torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.float64)]
    assert sent_together(mixed, moves_of(["a[D_X, F]", "b[D_X, F]"], mesh), mesh) == {}


def test_they_are_under_way_until_they_are_needed():
    mesh = AbstractMesh({"X": 2})
    W = {"a": torch.empty(4, 6, device="meta"), "g": torch.empty(8, device="meta")}
    dW = {"a": torch.empty(8, 6, device="meta"), "g": torch.empty(8, device="meta")}
    sent = sent_together(tree.leaves(W), moves_of(["a[D_X, F]", "g[D]"], mesh), mesh)
    with trace() as log:
        waiting = gathered_together(W, mesh, sent), scattered_together(dW, mesh, sent)
        for pending in waiting:
            pending.wait()
    assert [(event.op, event.async_op) for event in log.collectives()] == [("AllGather", True), ("ReduceScatter", True)]
