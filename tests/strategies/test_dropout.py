"""Dropout by itself: what is dropped looks random, hangs on the seed, and nothing is where nothing is trained."""

import pytest
import torch
from test_transformer_mesh import DROPPED, batch

from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.models.dropout import dropout
from scaling.strategies import transformer


def test_another_seed_drops_others_and_the_loss_alone_none():
    tokens, targets, *_ = batch(DROPPED, 1)
    params, mesh = model.init(DROPPED, 0, torch.float64), Mesh({"X": 1})
    a, b = (transformer.loss_and_grads(params, tokens, targets, DROPPED, mesh, seed=s)[0] for s in (1, 2))
    assert abs(a - b) > 1e-4
    none = DROPPED.with_(dropout=0.0)
    assert torch.equal(*(transformer.loss(params, tokens, targets, c, mesh) for c in (DROPPED, none)))
    assert torch.equal(*(model.forward(params, tokens, config=c) for c in (DROPPED, none)))


def test_what_is_dropped_looks_random():
    """Of each element as often as the rate says, in whatever direction one looks, and scaled so that the mean stays."""
    B, T, D = 32, 64, 62
    given = {"rate": 0.25, "seed": 3, "samples": torch.arange(B), "positions": torch.arange(T)}
    kept = [dropout(torch.ones(B, T, D), branch, l, **given) for branch in ("attention", "mlp") for l in (0, 1)]
    assert set(kept[0].unique().tolist()) == {0.0, torch.tensor(65536 / 49152).item()}
    whole = torch.stack(kept)
    assert whole.mean().item() == pytest.approx(1, abs=5 * (1 / 3 / whole.numel()) ** 0.5)
    for dims in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):  # a part each, layers and branches, samples, ...
        n = whole.numel() / whole.mean(dims).numel()
        assert (whole.mean(dims) - 1).abs().max() < 5 * (1 / 3 / n) ** 0.5
    flat = (whole - 1).flatten(1)
    correlated = (flat @ flat.T) / flat.square().mean() / flat.shape[1] - torch.eye(4)
    assert correlated.abs().max() < 5 / flat.shape[1] ** 0.5
    for dim in (0, 1, 2):  # neighbours
        a, b = (kept[0] - 1).narrow(dim, 0, 31), (kept[0] - 1).narrow(dim, 1, 31)
        assert abs((a * b).mean()) < 5 / 3 / a.numel() ** 0.5
    assert torch.equal(dropout(whole[0], "mlp", **given | {"rate": 0.0}), whole[0])
