"""One layer of a Transformer on a mesh, forward and backward, beside the vjp of one device's: numbers, collectives."""

import pytest
import torch
from torch.func import vjp

from scaling import tree
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.models.attention import sdpa
from scaling.models.leaves import without
from scaling.models.rope import tables
from scaling.strategies import transformer
from scaling.strategies.axes import present
from scaling.strategies.transformer.layer import REMAT, VJPS, Context, dropped, layer, layer_backward
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


def one_device(config, rope):
    def step(W, x):
        x = x + model.attention_block(W, x, lambda *QKV: sdpa(*QKV, window=config.window), rope, config.eps)
        return x + model.mlp_block(W, x, config.nonlinearity, config.eps)

    return step


def both(mesh, config, remat):
    """(x, dx, dW) whole, on the mesh and on one device; how many collectives; whether inputs are as before."""
    g = torch.Generator().manual_seed(0)
    whole = tree.map(lambda W: W[0], model.init(config, 1, torch.float64)["layers"])
    whole = {name: W + 0.1 * torch.randn(W.shape, generator=g, dtype=W.dtype) for name, W in whole.items()}
    x, dx = (torch.randn(4, 8, config.D, generator=g, dtype=torch.float64) for _ in range(2))
    rope = tables(torch.arange(8), config.H, config.theta, None, x.dtype)
    out, pull = vjp(one_device(config, rope), whole, x)
    want = out, *reversed(pull(dx))

    specs = tree.map(lambda text: without(text, ("X", "Z")), transformer.specs(config, mesh)["layers"])
    types = {name: text.replace("[L, ", "[") for name, text in specs.items()}
    stream = str(present("x[B_X, T_Y, D]", mesh))
    W, x, dx = tree.shard(whole, types, mesh), tree.shard(x, stream, mesh), tree.shard(dx, stream, mesh)
    at = Context(config, mesh, rope, lambda Q, K, V, window: sdpa(Q, K, V, window=window)).of_layer(0)
    before = [leaf.clone() for leaf in (x, dx, *W.values())]
    with trace() as log:
        out, _, saved = layer(W, x, at, dropped(remat, config))
        dIn, dW = layer_backward(W, dx, saved, at)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, (x, dx, *W.values()), strict=True))
    reduced = {}
    for name, g in dW.items():  # unreduced over the axes that split the tokens, and not the weight
        axes = "".join(axis for axis in mesh.sizes if mesh.sizes[axis] > 1 and f"_{axis}" not in types[name])
        partial = types[name] + (f" {{U_{axes}}}" if axes else "")
        reduced[name] = tree.unshard(g, partial, mesh)
    got = tree.unshard(out, stream, mesh), tree.unshard(dIn, stream, mesh), reduced
    return got, want, len(log.collectives()), unchanged


@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].name} {c[1]}".replace("'", ""))
def test_is_one_device_s(ranks, case, remat):
    config, mesh = case
    again = {"none": 0, "attention": 0, "matmuls": 2, "block": 3}[remat]  # both y, and attention's result for the MLP
    for got, want, collectives, unchanged in ranks(both, mesh, config, remat):
        assert unchanged
        assert collectives == (8 + again if mesh.get("Y", 1) > 1 else 0)  # of the residual stream, four each way
        a, b = tree.named_leaves(got), tree.named_leaves(want)
        assert a.keys() == b.keys()
        for where in a:
            assert (a[where] - b[where]).abs().max() <= 1e-12 * b[where].abs().max(), where


def test_every_activation_has_its_derivative():
    x, dy = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    assert VJPS.keys() == model.ACTIVATIONS.keys()
    for name, act in model.ACTIVATIONS.items():
        torch.testing.assert_close(VJPS[name](dy, x), vjp(act, x)[1](dy)[0], rtol=1e-13, atol=1e-15)
