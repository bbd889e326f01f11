"""Dropout: the same elements on every mesh, with the gradient of what was computed; none where nothing is trained."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_transformer_mesh import EXPERTS, RICH, batch, local

from scaling import optim, tree
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.models.dropout import at_step, dropout
from scaling.models.pointwise import rms_norm
from scaling.models.rope import tables
from scaling.strategies import transformer

RATE = 0.3
DENSE, ROUTED = RICH.with_(dropout=RATE, L=3, window=(None, 5, 9)), EXPERTS.with_(dropout=RATE)


def trained(mesh, config, options):
    """(losses of two steps, each with masks of its own; params after them, whole)."""
    layout = {"schedule": options["schedule"]} if "schedule" in options else {}
    params = transformer.shard(model.init(config, 0, torch.float64), config, mesh, **layout)
    rule, losses = optim.adamw(0.01), []
    state = rule.init(params)
    for step in range(2):
        tokens, targets, _, segments = (local(x, mesh) for x in batch(config, step))
        given = {"segments": segments, "seed": at_step(7, step), **options}
        loss, grads = transformer.loss_and_grads(params, tokens, targets, config, mesh, **given)
        params, state = rule.update(grads, state, params)
        losses.append(loss.item())
    return losses, transformer.unshard(params, config, mesh, **layout)


CASES = [
    (DENSE, {"X": 2, "Y": 2}, {"remat": "matmuls"}),
    (DENSE, {"C": 2, "P": 2}, {"remat": "block", "microbatches": 2}),
    (DENSE, {"C": 2, "Y": 2}, {"context": "ring"}),
    (DENSE, {"Z": 2, "X": 2}, {"microbatches": 2, "schedule": "1f1b"}),
    (ROUTED, {"E": 2, "Y": 2}, {"remat": "block"}),
]


def every_case(mesh):
    found = [trained(Mesh(sizes), config, options) for config, sizes, options in CASES]
    return found if mesh.rank == mesh.size() - 1 else [losses for losses, _ in found]


def test_params_after_two_steps_are_those_of_one_device(ranks):
    wanted = {config.name: trained(Mesh({"X": 1}), config, {}) for config in (DENSE, ROUTED)}
    *others, last = ranks(every_case, {"X": 4})
    assert others == [[losses for losses, _ in last]] * 3
    for (config, sizes, _), (losses, params) in zip(CASES, last, strict=True):
        assert losses == pytest.approx(wanted[config.name][0], rel=1e-12), sizes
        for where, W in tree.named_leaves(wanted[config.name][1]).items():
            torch.testing.assert_close(
                tree.named_leaves(params)[where], W, rtol=1e-9, atol=1e-12, msg=f"{where} on {sizes}"
            )


def plain_loss(params, tokens, targets, config, drop):
    """By the one-device model's own blocks, on autograd's tape."""
    T, eps = tokens.shape[1], config.eps
    x = F.embedding(tokens, params["embed"])
    rope = tables(torch.arange(T), config.H, config.theta, config.rope_scaling, x.dtype)
    for l, layer in enumerate(tree.unstacked(params["layers"])):
        attend = partial(model.sdpa, window=config.windows[l])
        x = x + drop(model.attention_block(layer, x, attend, rope, eps), "attention", l)
        x = x + drop(model.mlp_block(layer, x, config.nonlinearity, eps), "mlp", l)
    x = rms_norm(x, gain=params["norm"], eps=eps)
    return F.cross_entropy((x @ params["embed"].T).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("remat", ["none", "block"])
def test_the_gradients_are_those_of_autograd(remat):
    tokens, targets, *_ = batch(DENSE)
    params, mesh = model.init(DENSE, 0, torch.float64), Mesh({"X": 1})
    given = {"rate": RATE, "seed": 5, "samples": torch.arange(len(tokens)), "positions": torch.arange(tokens.shape[1])}
    leaves = tree.map(lambda p: p.clone().requires_grad_(), params)
    wanted = plain_loss(leaves, tokens, targets, DENSE, partial(dropout, **given))
    wanted.backward()
    loss, grads = transformer.loss_and_grads(params, tokens, targets, DENSE, mesh, seed=5, remat=remat)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    for where, g in tree.named_leaves(grads).items():
        torch.testing.assert_close(g, tree.named_leaves(leaves)[where].grad, rtol=1e-10, atol=1e-13, msg=where)


def test_another_seed_drops_others_and_none_is_refused():
    tokens, targets, *_ = batch(DENSE)
    params, mesh = model.init(DENSE, 0, torch.float64), Mesh({"X": 1})
    a, b = (transformer.loss_and_grads(params, tokens, targets, DENSE, mesh, seed=s)[0] for s in (1, 2))
    assert abs(a - b) > 1e-4
    with pytest.raises(ValueError, match="draws random masks\n  fix: give seed="):
        transformer.loss_and_grads(params, tokens, targets, DENSE, mesh)


def test_nothing_is_dropped_where_nothing_is_trained():
    tokens, targets, *_ = batch(DENSE)
    params, mesh = model.init(DENSE, 0, torch.float64), Mesh({"X": 1})
    none = DENSE.with_(dropout=0.0)
    assert torch.equal(*(transformer.loss(params, tokens, targets, c, mesh) for c in (DENSE, none)))
    assert torch.equal(*(model.forward(params, tokens, config=c) for c in (DENSE, none)))


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


def test_a_part_of_the_batch_and_of_the_sequence_drops_what_the_whole_does():
    x = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(0))
    samples, positions = torch.arange(6), torch.arange(8)
    whole = dropout(x, "mlp", 3, rate=0.5, seed=1, samples=samples, positions=positions)
    part = dropout(x[2:5, 4:], "mlp", 3, rate=0.5, seed=1, samples=samples[2:5], positions=positions[4:])
    assert torch.equal(part, whole[2:5, 4:])
    assert torch.equal(dropout(x, "mlp", rate=0.0, seed=1, samples=samples, positions=positions), x)
