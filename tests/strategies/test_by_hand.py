"""The layer whose backward is written out beside torch.func.vjp of the layer's lines: numbers and collectives."""

import pytest
import torch
from torch.func import vjp

from scaling import tree
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.models.attention import sdpa
from scaling.models.rope import tables
from scaling.strategies import transformer
from scaling.strategies.axes import present
from scaling.strategies.transformer.by_hand import layer_vjp
from scaling.strategies.transformer.layer import Context, run_layer
from scaling.strategies.transformer.types import used
from scaling.trace import trace

PLAIN = Config("plain", 1, 16, 24, 4, 2, 8, 32)
RICH = PLAIN.with_(name="rich", attention_bias=True, output_bias=True, qk_norm=True, window=5)
CASES = [
    (PLAIN, {"X": 1}),
    (RICH, {"Y": 2}),
    (RICH.with_(K=1, activation="gelu_tanh"), {"Y": 4}),
    (PLAIN.with_(gated=False), {"X": 2, "Y": 2}),
    (PLAIN.with_(gated=False, activation="relu"), {"Y": 2}),
]


def both(mesh, config):
    """(x, dx, dW) and the collectives, of the two backwards."""
    g = torch.Generator().manual_seed(0)
    whole = tree.map(lambda W: W[0], model.init(config, 1, torch.float64)["layers"])
    whole = {name: W + 0.1 * torch.randn(W.shape, generator=g, dtype=W.dtype) for name, W in whole.items()}
    types = used(transformer.specs(config, mesh))["layers"]
    types = {name: text.replace("[L, ", "[") for name, text in types.items()}
    stream = present("x[B_X, T_Y, D]", mesh)
    W = tree.shard(whole, types, mesh)
    x, dx = (torch.randn(4, 8, config.D, generator=g, dtype=torch.float64) for _ in range(2))
    x, dx = (tree.shard(t, str(stream), mesh) for t in (x, dx))
    rope = tables(torch.arange(8), config.H, config.theta, None, x.dtype)
    at = Context(config, mesh, rope, lambda Q, K, V, window: sdpa(Q, K, V, window=window))
    with trace() as derived:
        out, pull = vjp(lambda W, x: run_layer(W, x, at, config.window)[0][0], W, x)
        want = out, *reversed(pull(dx))
    before = [leaf.clone() for leaf in (x, dx, *W.values())]
    with trace() as written:
        out, pull = layer_vjp(W, x, at, config.window)
        got = out, *reversed(pull(W, dx))
    unchanged = all(torch.equal(a, b) for a, b in zip(before, (x, dx, *W.values()), strict=True))
    moved = [sorted((e.op, e.axes, e.nbytes) for e in log.collectives()) for log in (derived, written)]
    return got, want, moved, unchanged


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].name} {c[1]}".replace("'", ""))
def test_written_out_is_derived(ranks, case):
    config, mesh = case
    for got, want, (derived, written), unchanged in ranks(both, mesh, config):
        assert unchanged
        assert derived == written
        assert len(written) == (8 if mesh.get("Y", 1) > 1 else 0)  # of the residual stream, four each way
        a, b = tree.named_leaves(got), tree.named_leaves(want)
        assert a.keys() == b.keys()
        for where in a:
            assert (a[where] - b[where]).abs().max() <= 1e-12 * b[where].abs().max(), where


def test_every_activation_has_its_derivative():
    from scaling.strategies.transformer.by_hand import VJPS

    x, dy = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    assert VJPS.keys() == model.ACTIVATIONS.keys()
    for name, act in model.ACTIVATIONS.items():
        torch.testing.assert_close(VJPS[name](dy, x), vjp(act, x)[1](dy)[0], rtol=1e-13, atol=1e-15)
