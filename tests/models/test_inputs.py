"""A batch or params that torch would broadcast, cast or cut off: each is refused with its fix, on one device and on a
mesh, and gives no number."""

from functools import partial

import pytest
import torch
from misuse import rooms
from refused import by_words, refused

from scaling.configs import Config, RopeScaling
from scaling.mesh import Mesh
from scaling.models import transformer
from scaling.models.attention import dot_product_attention, flash_attention, sdpa
from scaling.models.rope import frequencies
from scaling.strategies import transformer as strategy

CONFIG = Config("small", L=2, D=8, F=16, N=4, K=2, H=4, V=16)
TOKENS = torch.arange(12).view(2, 6)
INSIDE, TARGETS = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:]
WEIGHTS = torch.tensor([[1.0, 0.0, 2.0, 1.0, 0.5], [3.0, 1.0, 1.0, 0.0, 1.0]])
PARAMS = transformer.init(CONFIG, 3, torch.float64)


def on_one(config=CONFIG, **given):
    return transformer.loss(PARAMS, TOKENS, config=config, **given)


def on_mesh(params=PARAMS, targets=TARGETS, config=CONFIG, **given):
    return strategy.loss_and_grads(params, INSIDE, targets, config, Mesh({"X": 1, "Y": 1}), **given)[0]


def by_torch_func(targets, **given):
    """The loss of one device, as it is differentiated by torch.func."""
    loss = partial(transformer.loss, tokens=INSIDE, config=CONFIG, targets=targets, **given)
    return torch.func.grad_and_value(loss)(PARAMS)[1]


WRONG = {
    "segments": [TOKENS[:1, :5], WEIGHTS, WEIGHTS > 0],
    "config": [CONFIG.with_(V=32), CONFIG.with_(gated=False), CONFIG.with_(attention_bias=True)],
}
OPTIONS = {
    "microbatches": [0, 3], "label_smoothing": [-0.1, 2.0], "scale": [0.0], "sums": [torch.int32, "float32"],
    "zero": [4], "context": ["zig"], "remat": ["all"], "schedule": ["gpipe"],
}  # fmt: skip
OTHER_LAYERS = {"config": CONFIG.with_(L=1)}
test_a_step_on_a_mesh = refused(
    {f"{n} {value!s:.40}": partial(on_mesh, **{n: value}) for n, some in (WRONG | OPTIONS).items() for value in some}
    | {f"seed={seed}": partial(on_mesh, config=CONFIG.with_(dropout=0.5), seed=seed) for seed in ("3", None)}
    | by_words(
        {
            "has the shape (1, ": partial(on_mesh, **OTHER_LAYERS),
            'params["norm"]': partial(on_mesh, PARAMS | {"norm": PARAMS["norm"].bfloat16()}),
            "targets": partial(on_mesh, targets=TOKENS),
            "targets must lie in 0..15": partial(on_mesh, targets=TARGETS + 99 * (TARGETS == 2)),
            "found 101": lambda: by_torch_func(TARGETS + 99 * (TARGETS == 2)),
        }
    )
    | {"a leaf to shard": lambda: strategy.shard(PARAMS | {"norm": PARAMS["norm"][:4]}, CONFIG, Mesh({"X": 1}))}
)


@pytest.mark.parametrize("name", ["loss", "training"])
def test_no_argument_that_is_spoiled_gives_a_wrong_number(name):
    """Params, tokens, weights and numbers, drawn: the right calls beside `misuse.plain`, the others refused."""
    outcomes, failures = rooms.spoiled(name, 25)
    assert not failures, "\n\n".join(failures)
    assert len(outcomes) == 2  # right and refused


def test_weights_of_other_dtypes_are_right_and_targets_outside_the_vocabulary_where_they_have_none():
    for weights in (WEIGHTS, WEIGHTS.round().long(), WEIGHTS > 0.7):
        given = {"weights": weights, "targets": TARGETS + 99 * (weights == 0)}
        for found in (on_mesh(**given), by_torch_func(**given)):
            torch.testing.assert_close(found, on_one(weights=weights), rtol=1e-12, atol=0)


EXPERTS = CONFIG.with_(E=4, k=2)
DYNAMIC = CONFIG.with_(rope_scaling=RopeScaling("dynamic", 2.0))
DENSE = EXPERTS.with_(dense_layers=2, F_dense=8)
Q, K = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 2, 4)
test_what_one_device_does_not_compute = refused(
    {f"{name} {i}": partial(on_one, **{name: x}) for name, values in WRONG.items() for i, x in enumerate(values)}
    | {"other layers": partial(on_one, **OTHER_LAYERS)}
    | {f"init {seed}": lambda seed=seed: transformer.init(CONFIG, seed) for seed in ("3", None)}
    | {f.__name__: (partial(f, Q, K, K), "must divide N=3") for f in (sdpa, dot_product_attention, flash_attention)}
    | by_words(
        {
            "targets must be": lambda: transformer.loss(PARAMS, TOKENS, targets=TOKENS[:, :3]),
            "hold no next token": lambda: transformer.loss(PARAMS, TOKENS[:, :1]),
            "unknown remat 'all'": lambda: transformer.forward(PARAMS, TOKENS, "all"),
            "give config=": lambda: transformer.forward(transformer.init(EXPERTS), TOKENS),
            "rope_scaling of type 'dynamic'": partial(on_one, DYNAMIC),
            "'dynamic' is not computed here; linear, llama3, yarn are": (
                lambda: frequencies(8, 1e4, DYNAMIC.rope_scaling)
            ),
            "without layers with experts after them": lambda: transformer.init(DENSE, device="meta"),
            "floats": lambda: transformer.init(CONFIG, dtype=torch.int32),
        }
    )
)
