"""A batch or params that torch would broadcast, cast or cut off: each is refused with its fix, on one device and on a
mesh, and gives no number."""

import pytest
import torch
from misuse import rooms
from refused import refused

from scaling.configs import Config, RopeScaling
from scaling.mesh import Mesh
from scaling.models import transformer
from scaling.models.attention import dot_product_attention, flash_attention, sdpa
from scaling.models.rope import frequencies
from scaling.strategies import transformer as strategy

CONFIG = Config("small", L=2, D=8, F=16, N=4, K=2, H=4, V=16)
TOKENS = torch.arange(12).view(2, 6)
WEIGHTS = torch.tensor([[1.0, 0.0, 2.0, 1.0, 0.5], [3.0, 1.0, 1.0, 0.0, 1.0]])
PARAMS = transformer.init(CONFIG, 3, torch.float64)


def both(targets=TOKENS[:, 1:], config=CONFIG, **given) -> tuple:
    """The loss on one device, and on a mesh."""
    inside, mesh = TOKENS[:, :-1].contiguous(), Mesh({"X": 1, "Y": 1})
    yield lambda: transformer.loss(PARAMS, TOKENS, config=config, **given)
    yield lambda: strategy.loss_and_grads(PARAMS, inside, targets, config, mesh, **given)[0]


def refuses(words="fix:", **given):
    """On one device, and on a mesh."""

    def call():
        on_one, on_mesh = both(**given)
        with pytest.raises(ValueError, match="fix:"):
            on_one()
        on_mesh()

    return call, words


WRONG = {
    "segments": [TOKENS[:1, :5], WEIGHTS, WEIGHTS > 0],
    "config": [CONFIG.with_(V=32), CONFIG.with_(gated=False), CONFIG.with_(attention_bias=True)],
}
test_a_batch_that_does_not_fit = refused(
    {f"{name} {i}": refuses(**{name: value}) for name, values in WRONG.items() for i, value in enumerate(values)}
    | {"config of other layers": refuses("has the shape (1, ", config=CONFIG.with_(L=1))}
)


@pytest.mark.parametrize("name", ["loss", "loss on a mesh"])
def test_no_argument_that_is_spoiled_gives_a_wrong_number(name):
    """Params, tokens, weights and numbers, drawn: the right calls beside `misuse.plain`, the others refused."""
    outcomes, failures = rooms.spoiled(name, 60)
    assert not failures, "\n\n".join(failures)
    assert len(outcomes) == 2  # right and refused


def test_weights_of_other_dtypes_are_right():
    for weights in (WEIGHTS.round().long(), WEIGHTS > 0.7):
        one, mesh = (call() for call in both(weights=weights))
        torch.testing.assert_close(mesh, one, rtol=1e-12, atol=0)


def test_a_target_outside_the_vocabulary_counts_only_with_weight_0():
    targets = TOKENS[:, 1:].clone()
    targets[0, 1] = 99
    _, on_mesh = both(targets)
    with pytest.raises(ValueError, match=r"targets must lie in 0\.\.15.* found 99"):
        on_mesh()
    _, on_mesh = both(targets, weights=WEIGHTS)
    one, _ = both(weights=WEIGHTS)
    torch.testing.assert_close(on_mesh(), one(), rtol=1e-12, atol=0)


def on_mesh(params=PARAMS, inside=TOKENS[:, :-1], targets=TOKENS[:, 1:], config=CONFIG, **given):
    return lambda: strategy.loss_and_grads(params, inside, targets, config, Mesh({"X": 1}), **given)


OPTIONS = {
    "microbatches": [0, 3], "label_smoothing": [-0.1, 2.0], "scale": [0.0], "sums": [torch.int32, "float32"],
    "zero": [4], "context": ["zig"], "remat": ["all"], "schedule": ["gpipe"],
}  # fmt: skip
SEEDS = ("3", None)
test_what_a_step_is_asked_for = refused(
    {f"{name}={value}": on_mesh(**{name: value}) for name, values in OPTIONS.items() for value in values}
    | {f"seed={seed}": on_mesh(config=CONFIG.with_(dropout=0.5), seed=seed) for seed in SEEDS}
    | {f"init {seed}": lambda seed=seed: transformer.init(CONFIG, seed) for seed in SEEDS}
    | {
        "a leaf of another dtype": (on_mesh(PARAMS | {"norm": PARAMS["norm"].bfloat16()}), 'params["norm"]'),
        "targets longer": (on_mesh(targets=TOKENS), "targets"),
        "params as floats": (lambda: transformer.init(CONFIG, dtype=torch.int32), "floats"),
        "a leaf to shard": lambda: strategy.shard(PARAMS | {"norm": PARAMS["norm"][:4]}, CONFIG, Mesh({"X": 1})),
    }
)

EXPERTS = CONFIG.with_(E=4, k=2)
DYNAMIC = CONFIG.with_(rope_scaling=RopeScaling("dynamic", 2.0))
DENSE = {"dense_layers": 2, "F_dense": 8}
NO_EXPERTS = "without layers with experts after them"
Q, K = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 2, 4)
test_what_one_device_does_not_compute = refused(
    {
        "targets short": (lambda: transformer.loss(PARAMS, TOKENS, targets=TOKENS[:, :3]), "targets must be"),
        "one token": (lambda: transformer.loss(PARAMS, TOKENS[:, :1]), "hold no next token"),
        "remat": (lambda: transformer.forward(PARAMS, TOKENS, "all"), "unknown remat 'all'"),
        "experts without a config": (lambda: transformer.forward(transformer.init(EXPERTS), TOKENS), "give config="),
        "dynamic rotations": (
            lambda: transformer.loss(PARAMS, TOKENS, config=DYNAMIC),
            "rope_scaling of type 'dynamic'",
        ),
        "dynamic frequencies": (
            lambda: frequencies(8, 1e4, DYNAMIC.rope_scaling),
            "'dynamic' is not computed here; linear, llama3, yarn are",
        ),
        "dense layers alone": (lambda: transformer.init(EXPERTS.with_(**DENSE), device="meta"), NO_EXPERTS),
    }
    | {f.__name__: (lambda f=f: f(Q, K, K), "must divide N=3") for f in (sdpa, dot_product_attention, flash_attention)}
)
