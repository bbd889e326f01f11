"""The reference model: its parts against plain loops, and that it learns."""

import math

import pytest
import torch
from torch.func import functional_call, grad_and_value

from scaling import data, optim, tree
from scaling.mesh import AbstractMesh
from scaling.models import mlp, pointwise

SMALL = {"L": 3, "D": 8, "F": 16, "K": 4, "V": 11}


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def same(a, b, tolerance=1e-14):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", pointwise.ACTIVATIONS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_the_stack_is_the_formula(residual, norm, activation):
    config = mlp.MLPConfig(**SMALL, activation=activation, residual=residual, norm=norm)
    params = mlp.init(config, dtype=torch.float64)["blocks"]
    In = Out = rand(6, config.D)
    for layer in range(config.L):
        x = Out / (Out.square().mean(-1, keepdim=True) + 1e-6).sqrt() if norm else Out
        y = pointwise.act(x @ params["W_in"][layer], activation) @ params["W_out"][layer]
        Out = Out + y if residual else y
    stack = mlp.MLPStack(config)
    assert all(p.is_meta for p in stack.parameters())
    same(functional_call(stack, params, (In,)), Out)


def test_a_block_on_shards_of_F_gives_partial_sums():
    config = mlp.MLPConfig(**SMALL)
    W_in, W_out = (mlp.init(config, dtype=torch.float64)["blocks"][name][0] for name in ("W_in", "W_out"))
    In = rand(6, config.D)
    parts = [mlp.block(In, W_in[:, part], W_out[part]) for part in (slice(0, 8), slice(8, 16))]
    same(parts[0] + parts[1], mlp.block(In, W_in, W_out))


def test_the_byte_model_is_the_formula():
    config = mlp.MLPConfig(**SMALL)
    params = mlp.init(config, dtype=torch.float64)
    tokens = torch.randint(config.V, (6, config.K), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 0]
    In = torch.stack([sum(params["embed"][k, row[k]] for k in range(config.K)) for row in tokens])
    same(mlp.embed(params["embed"], tokens), In)
    Out = functional_call(mlp.MLPStack(config), params["blocks"], (In,))
    logits = pointwise.rms_norm(Out) @ params["head"]
    same(mlp.logits(params, tokens, config), logits)
    loss = -logits.log_softmax(-1)[range(6), targets].mean()
    same(mlp.loss_fn(params, tokens, targets, config), loss)
    same(mlp.bits_per_byte(loss), loss / math.log(2))
    halves = [mlp.loss_fn(params, tokens[p], targets[p], config, batch=6) for p in (slice(0, 2), slice(2, 6))]
    same(halves[0] + halves[1], loss)
    plain = mlp.MLPConfig(**SMALL, norm=False, residual=False)
    Out = functional_call(mlp.MLPStack(plain), params["blocks"], (In,))
    same(mlp.logits(params, tokens, plain), Out @ params["head"])


def test_shapes_specs_and_sharded_init():
    config = mlp.MLPConfig()
    params = mlp.init(config)
    assert tree.map(lambda p: p.shape, params) == config.shapes()
    assert config.num_params() == tree.nbytes(params) // 4 == 8 * 256 * 128 + 4 * 2 * 128 * 512 + 128 * 256
    tree.check(params, mlp.SPECS, config.sizes, AbstractMesh({}), torch.float32)
    sharded = {"embed": "E[K, V, D_Y]", "head": "W_head[D_X, V]"}
    sharded["blocks"] = {"W_in": "W_in[L, D_X, F_Y]", "W_out": "W_out[L, F_Y, D_X]"}
    at = AbstractMesh({"X": 4, "Y": 2}, {"X": 3, "Y": 1})
    local = mlp.init(config, mesh=at, specs=sharded, device="cpu")
    tree.map(lambda a, b: same(a, b, 0), local, tree.shard(params, sharded, at))
    assert mlp.init(config, mesh=at, specs=sharded)["embed"].is_meta


@pytest.mark.parametrize("activation", pointwise.ACTIVATIONS)
def test_the_plain_stack_starts_at_unit_scale(activation):
    config = mlp.MLPConfig(L=8, D=256, F=1024, activation=activation, residual=False, norm=False)
    Out = functional_call(mlp.MLPStack(config), mlp.init(config)["blocks"], (rand(256, 256, dtype=torch.float32),))
    assert 0.5 < Out.square().mean() < 2


def test_errors_of_the_config():
    with pytest.raises(ValueError, match=r"unknown activation 'tanh'\n  fix: choose one of none, relu, gelu"):
        mlp.MLPConfig(activation="tanh")
    with pytest.raises(ValueError, match="F must be at least 1"):
        mlp.MLPConfig(F=0)


@pytest.mark.slow
def test_it_learns_pythons_source():
    train, valid = data.split(data.load_text())
    config = mlp.MLPConfig()
    params, optimizer = mlp.init(config), optim.adamw(3e-3, betas=(0.9, 0.99))
    state, step = optimizer.init(params), grad_and_value(mlp.loss_fn)
    for _, batch in zip(range(40), data.endless(train, config.K, 256), strict=False):
        grads, _ = step(params, *batch, config)
        params, state = optimizer.update(grads, state, params, donate=True)
    windows = data.Windows(valid, config.K)
    rows = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[:1024]
    bits = mlp.bits_per_byte(mlp.loss_fn(params, *windows[rows], config))
    assert bits < data.order0_entropy(valid) - 0.5  # more than single bytes tell
