"""A layer's weights sent together are those sent one by one, and so are their gradients."""

import pytest
import torch

from scaling import tree
from scaling.mesh import AbstractMesh
from scaling.strategies.transformer import flat, step
from scaling.trace import trace

STORED = {"a": "a[D_X, F_Y]", "b": "b[N_Y, H, D_X]", "c": {"d": "d[E, F, D_X]"}, "g": "g[D]"}
USED = {"a": "a[D, F_Y]", "b": "b[N_Y, H, D]", "c": {"d": "d[E, F, D]"}, "g": "g[D]"}
SHAPES = {"a": (4, 6), "b": (2, 3, 4), "c": {"d": (2, 6, 4)}, "g": (8,)}


def both_ways(mesh):
    def drawn(shapes):
        seed = torch.Generator().manual_seed(mesh.rank)
        return {k: drawn(v) if isinstance(v, dict) else torch.randn(v, generator=seed) for k, v in shapes.items()}

    W = drawn(SHAPES)
    sent = flat.sent_over_x(W, STORED)
    together = flat.gather(W, mesh, sent).wait()
    alone = tree.map(
        lambda x: x if isinstance(x, torch.Tensor) else x.wait(), step.gathered_weights(W, STORED, USED, mesh)
    )
    dW = tree.map(lambda x: torch.randn_like(x) + mesh.rank, together)
    scattered = flat.scatter(dW, mesh, sent).wait()
    reduced = step.reduce_gradients(dW, STORED, USED, mesh, ("X",))
    reduced["g"] = scattered["g"]  # what X does not split is not sent here
    return len(sent), [(together, alone), (scattered, reduced)]


@pytest.mark.parametrize("sizes", [{"X": 2}, {"X": 2, "Y": 2}])
def test_together_is_one_by_one(ranks, sizes):
    for count, pairs in ranks(both_ways, sizes):
        assert count == 3
        for ours, theirs in pairs:
            assert tree.structure(ours) == tree.structure(theirs)
            for a, b in zip(tree.leaves(ours), tree.leaves(theirs), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_large_layers_and_mixed_dtypes_go_one_by_one():
    large = {"a": torch.empty(flat.SMALL // 4 + 1, 1, device="meta"), "g": torch.empty(1)}
    types = {"a": "a[D_X, F]", "g": "g[D]"}
    assert flat.sent_over_x(large, types) == {}
    mixed = {"a": torch.zeros(1, 1), "b": torch.zeros(1, 1, dtype=torch.float64)}
    assert flat.sent_over_x(mixed, {"a": "a[D_X, F]", "b": "b[D_X, F]"}) == {}


def test_they_are_under_way_until_they_are_needed():
    mesh = AbstractMesh({"X": 2})
    W = {"a": torch.empty(4, 6, device="meta"), "g": torch.empty(8, device="meta")}
    dW = {"a": torch.empty(8, 6, device="meta"), "g": torch.empty(8, device="meta")}
    sent = flat.sent_over_x(W, {"a": "a[D_X, F]", "g": "g[D]"})
    with trace() as log:
        waiting = flat.gather(W, mesh, sent), flat.scatter(dW, mesh, sent)
        for pending in waiting:
            pending.wait()
    assert [(event.op, event.async_op) for event in log.collectives()] == [("AllGather", True), ("ReduceScatter", True)]
