"""A batch or params that torch would broadcast, cast or cut off: each is refused with its fix, on one device and on a
mesh, and gives no number."""

import pytest
import torch
from refused import refused

from scaling import tree
from scaling.configs import Config, RopeScaling
from scaling.mesh import Mesh
from scaling.models import transformer
from scaling.models.attention import dot_product_attention, flash_attention, sdpa
from scaling.models.rope import frequencies
from scaling.strategies import transformer as strategy

CONFIG = Config("small", L=2, D=8, F=16, N=4, K=2, H=4, V=16)
TOKENS = torch.arange(12).view(2, 6)
WEIGHTS = torch.tensor([[1.0, 0.0, 2.0, 1.0, 0.5], [3.0, 1.0, 1.0, 0.0, 1.0]])
NAN = float("nan")
PARAMS = transformer.init(CONFIG, 3, torch.float64)


def both(params, tokens=TOKENS, *, targets=None, config=CONFIG, weights=None, segments=None) -> tuple:
    """The loss on one device, and on a mesh."""
    mesh, given = Mesh({"X": 1, "Y": 1}), {"weights": weights, "segments": segments}
    inside, after = tokens[:, :-1].contiguous(), tokens[:, 1:] if targets is None else targets
    yield lambda: transformer.loss(params, tokens, config=config, **given)
    yield lambda: strategy.loss_and_grads(params, inside, after, config, mesh, **given)[0]


def refuses(words="fix:", params=None, **given):
    """On one device, and on a mesh."""

    def call():
        on_one, on_mesh = both(PARAMS if params is None else params, **given)
        with pytest.raises(ValueError, match="fix:"):
            on_one()
        on_mesh()

    return call, words


BATCHES = {
    "weights": [
        *(WEIGHTS[:, :1], WEIGHTS[:1], WEIGHTS[0], torch.tensor(2.0)),  # all of these torch would broadcast
        *(WEIGHTS.to(torch.complex64), 2.0),
    ],
    "segments": [TOKENS[:1, :5], WEIGHTS, WEIGHTS > 0, TOKENS[:, :4]],
    "tokens": [TOKENS.to(torch.uint8), TOKENS.double()],
    "config": [CONFIG.with_(**given) for given in (
        {"N": 2}, {"V": 32}, {"gated": False}, {"attention_bias": True},
    )],
    "params": [tree.map(torch.Tensor.int, PARAMS)],
}  # fmt: skip
IN_VOCABULARY = "tokens must lie in 0..15"
test_a_batch_that_does_not_fit = refused(
    {f"{name} {i}": refuses(**{name: value}) for name, values in BATCHES.items() for i, value in enumerate(values)}
    | {
        "tokens large": refuses(IN_VOCABULARY, tokens=TOKENS + 10),
        "tokens negative": refuses(IN_VOCABULARY, tokens=TOKENS - 1),
        "config of other layers": refuses("has the shape (1, ", config=CONFIG.with_(L=1)),
    }
)


def test_weights_of_other_dtypes_and_params_that_require_gradients_are_right():
    for weights in (WEIGHTS.round().long(), WEIGHTS > 0.7):
        one, mesh = (call() for call in both(PARAMS, weights=weights))
        torch.testing.assert_close(mesh, one, rtol=1e-12, atol=0)
    learned = tree.map(torch.nn.Parameter, PARAMS)
    one, mesh = (call().detach() for call in both(learned))
    torch.testing.assert_close(mesh, one, rtol=1e-12, atol=0)


def test_a_target_outside_the_vocabulary_counts_only_with_weight_0():
    targets = TOKENS[:, 1:].clone()
    targets[0, 1] = 99
    _, on_mesh = both(PARAMS, targets=targets)
    with pytest.raises(ValueError, match=r"targets must lie in 0\.\.15.* found 99"):
        on_mesh()
    _, on_mesh = both(PARAMS, targets=targets, weights=WEIGHTS)
    one, _ = both(PARAMS, weights=WEIGHTS)
    torch.testing.assert_close(on_mesh(), one(), rtol=1e-12, atol=0)


def on_mesh(params=PARAMS, inside=TOKENS[:, :-1], targets=TOKENS[:, 1:], config=CONFIG, **given):
    return lambda: strategy.loss_and_grads(params, inside, targets, config, Mesh({"X": 1}), **given)


OPTIONS = [{"microbatches": m} for m in (0, 2.0, "2", True, 3)]
OPTIONS += [{"label_smoothing": s} for s in (-0.1, 2.0, NAN)]
OPTIONS += [{"z_loss": z} for z in (-1.0, NAN)]
OPTIONS += [{"scale": s} for s in (0.0, NAN, float("inf"))]
OPTIONS += [{"sums": s} for s in (torch.int32, "float32")]
OPTIONS += [{"zero": z} for z in (4, "3")]
OPTIONS += [{"context": "zig"}, {"remat": "all"}, {"schedule": "gpipe"}]
SEEDS = ("3", 1.5, NAN, None)
ANOTHER = [torch.Tensor.int, torch.Tensor.bfloat16, lambda p: p.to("meta"), lambda p: p[:1], torch.Tensor.tolist]
test_what_a_step_is_asked_for = refused(
    {f"{name}={value}": on_mesh(**{name: value}) for given in OPTIONS for name, value in given.items()}
    | {f"seed={seed}": on_mesh(config=CONFIG.with_(dropout=0.5), seed=seed) for seed in SEEDS}
    | {f"init {seed}": lambda seed=seed: transformer.init(CONFIG, seed) for seed in SEEDS}
    | {f"a leaf {i}": (on_mesh(PARAMS | {"norm": f(PARAMS["norm"])}), 'params["norm"]') for i, f in enumerate(ANOTHER)}
    | {
        "targets longer": (on_mesh(targets=TOKENS), "targets"),
        "targets of one row": (on_mesh(targets=TOKENS[:1, 1:]), "targets"),
        "targets of floats": (on_mesh(targets=TOKENS[:, 1:].double()), "targets"),
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
        "dense layers without experts": (lambda: transformer.init(CONFIG.with_(**DENSE), device="meta"), NO_EXPERTS),
    }
    | {f.__name__: (lambda f=f: f(Q, K, K), "must divide N=3") for f in (sdpa, dot_product_attention, flash_attention)}
)
