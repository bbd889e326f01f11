"""A batch or params that torch would broadcast, cast or cut off: each is refused with its fix, on one device and on a
mesh, and gives no number."""

import pytest
import torch

from scaling import tree
from scaling.configs import Config
from scaling.mesh import Mesh
from scaling.models import transformer
from scaling.strategies import transformer as strategy

CONFIG = Config("small", L=2, D=8, F=16, N=4, K=2, H=4, V=16)
TOKENS = torch.arange(12).view(2, 6)
WEIGHTS = torch.tensor([[1.0, 0.0, 2.0, 1.0, 0.5], [3.0, 1.0, 1.0, 0.0, 1.0]])
NAN = float("nan")


@pytest.fixture(scope="module")
def params():
    return transformer.init(CONFIG, 3, torch.float64)


def changed(params, name, change) -> dict:
    return params | {name: change(params[name])}


def both(params, tokens=TOKENS, *, targets=None, config=CONFIG, weights=None, segments=None) -> tuple:
    """The loss on one device, and on a mesh."""
    mesh, given = Mesh({"X": 1, "Y": 1}), {"weights": weights, "segments": segments}
    inside, after = tokens[:, :-1].contiguous(), tokens[:, 1:] if targets is None else targets
    yield lambda: transformer.loss(params, tokens, config=config, **given)
    yield lambda: strategy.loss_and_grads(params, inside, after, config, mesh, **given)[0]


BATCHES = {
    "weights a row": {"weights": WEIGHTS[:, :1]},
    "weights one row for all": {"weights": WEIGHTS[:1]},
    "weights along T": {"weights": WEIGHTS[0]},
    "weights one number": {"weights": torch.tensor(2.0)},
    "weights complex": {"weights": WEIGHTS.to(torch.complex64)},
    "weights a float": {"weights": 2.0},
    "segments one row for all": {"segments": TOKENS[:1, :5]},
    "segments floats": {"segments": WEIGHTS},
    "segments bools": {"segments": WEIGHTS > 0},
    "segments short": {"segments": TOKENS[:, :4]},
    "tokens bytes": {"tokens": TOKENS.to(torch.uint8)},
    "tokens floats": {"tokens": TOKENS.double()},
    "tokens large": {"tokens": TOKENS + 10},
    "config of other layers": {"config": CONFIG.with_(L=1)},
    "config of other heads": {"config": CONFIG.with_(N=2)},
    "config of another vocabulary": {"config": CONFIG.with_(V=32)},
    "config without a gate": {"config": CONFIG.with_(gated=False)},
    "config with biases": {"config": CONFIG.with_(attention_bias=True)},
}


@pytest.mark.parametrize("given", BATCHES.values(), ids=BATCHES)
def test_a_batch_that_does_not_fit_is_refused(params, given):
    for call in both(params, **given):
        with pytest.raises(ValueError, match="fix:"):
            call()


def test_weights_of_other_dtypes_and_params_that_require_gradients_are_right(params):
    for weights in (WEIGHTS.round().long(), WEIGHTS > 0.7):
        one, mesh = (call() for call in both(params, weights=weights))
        torch.testing.assert_close(mesh, one, rtol=1e-12, atol=0)
    learned = tree.map(torch.nn.Parameter, params)
    one, mesh = (call().detach() for call in both(learned))
    torch.testing.assert_close(mesh, one, rtol=1e-12, atol=0)


def test_a_target_outside_the_vocabulary_counts_only_with_weight_0(params):
    targets = TOKENS[:, 1:].clone()
    targets[0, 1] = 99
    _, on_mesh = both(params, targets=targets)
    with pytest.raises(ValueError, match=r"targets must lie in 0\.\.15.* found 99"):
        on_mesh()
    _, on_mesh = both(params, targets=targets, weights=WEIGHTS)
    one, _ = both(params, weights=WEIGHTS)
    torch.testing.assert_close(on_mesh(), one(), rtol=1e-12, atol=0)


def test_targets_that_do_not_stand_beside_the_tokens_are_refused(params):
    for targets in (TOKENS, TOKENS[:1, 1:], TOKENS[:, 1:].double()):
        _, on_mesh = both(params, targets=targets)
        with pytest.raises(ValueError, match="targets"):
            on_mesh()


OPTIONS = {
    **{f"microbatches={m}": {"microbatches": m} for m in (0, -1, 2.0, "2", True)},
    **{f"label_smoothing={s}": {"label_smoothing": s} for s in (-0.1, 2.0, NAN, "0")},
    **{f"z_loss={z}": {"z_loss": z} for z in (-1.0, NAN, "0")},
    **{f"scale={s}": {"scale": s} for s in (0.0, -2.0, NAN, float("inf"))},
    **{f"sums={s}": {"sums": s} for s in (torch.int32, "float32")},
    **{f"zero={z}": {"zero": z} for z in (4, -1, "3")},
    "context": {"context": "zig"},
    "remat": {"remat": "all"},
    "schedule without stages": {"schedule": "gpipe"},
}


@pytest.mark.parametrize("given", OPTIONS.values(), ids=OPTIONS)
def test_options_out_of_range_are_refused(params, given):
    with pytest.raises(ValueError, match="fix:"):
        strategy.loss_and_grads(params, TOKENS[:, :-1], TOKENS[:, 1:], CONFIG, Mesh({"X": 1}), **given)


@pytest.mark.parametrize("seed", ["3", 1.5, NAN, None])
def test_a_seed_is_a_whole_number(params, seed):
    dropping = CONFIG.with_(dropout=0.5)
    with pytest.raises(ValueError, match="fix:"):
        strategy.loss_and_grads(params, TOKENS[:, :-1], TOKENS[:, 1:], dropping, Mesh({"X": 1}), seed=seed)
    with pytest.raises(ValueError, match="fix:"):
        transformer.init(CONFIG, seed)


@pytest.mark.parametrize(
    "change", [torch.Tensor.int, torch.Tensor.bfloat16, lambda p: p.to("meta"), lambda p: p[:1], torch.Tensor.tolist]
)
def test_a_leaf_unlike_the_others_is_refused_on_a_mesh(params, change):
    _, on_mesh = both(changed(params, "norm", change))
    with pytest.raises(ValueError, match=r'params\["norm"\](.|\n)*fix:'):
        on_mesh()
    if change is not torch.Tensor.bfloat16:
        return
    with pytest.raises(ValueError, match="fix:"):
        strategy.shard(changed(params, "norm", lambda p: p[:4]), CONFIG, Mesh({"X": 1}))


def test_params_are_floats(params):
    with pytest.raises(ValueError, match="floats"):
        transformer.init(CONFIG, dtype=torch.int32)
    _, on_mesh = both(tree.map(torch.Tensor.int, params))
    with pytest.raises(ValueError, match="fix:"):
        on_mesh()
