"""The reference model against its formula; what lies between the matmuls, and its derivatives written out, beside
autograd's; and autograd's tape as a vjp."""

import math

import pytest
import torch
from refused import refused
from torch.func import functional_call

from scaling import tree
from scaling.mesh import AbstractMesh
from scaling.models import mlp, pointwise
from scaling.models.pointwise import act, act_vjp, rms_norm, rms_norm_vjp

SMALL = {"L": 3, "D": 8, "F": 16, "K": 4, "V": 11}


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def same(a, b, tolerance=1e-14):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("norm", "activation"), [(True, "gelu"), (False, "relu"), (False, "none")])
def test_the_byte_model_is_the_formula(residual, norm, activation):
    config = mlp.MLPConfig(**SMALL, activation=activation, residual=residual, norm=norm)
    params = mlp.init(config, dtype=torch.float64)
    tree.check(params, mlp.SPECS, config.sizes, AbstractMesh({}), torch.float64)
    assert config.num_params() == tree.nbytes(params) // 8
    tokens = torch.randint(config.V, (6, config.K), generator=torch.Generator().manual_seed(0))
    In = Out = torch.stack([sum(params["embed"][k, row[k]] for k in range(config.K)) for row in tokens])
    same(mlp.embed(params["embed"], tokens), In)

    def normed(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() if norm else x

    for W_in, W_out in zip(*(params["blocks"][name] for name in ("W_in", "W_out")), strict=True):
        y = act(normed(Out) @ W_in, activation) @ W_out
        Out = Out + y if residual else y
    stack = mlp.MLPStack(config)
    assert all(p.is_meta for p in stack.parameters())
    same(functional_call(stack, params["blocks"], (In,)), Out)
    logits, targets = normed(Out) @ params["head"], tokens[:, 0]
    same(mlp.logits(params, tokens, config), logits)
    loss = -logits.log_softmax(-1)[range(6), targets].mean()
    same(mlp.loss_fn(params, tokens, targets, config), loss)
    same(mlp.bits_per_byte(loss), loss / math.log(2))
    halves = [mlp.loss_fn(params, tokens[p], targets[p], config, batch=6) for p in (slice(0, 2), slice(2, 6))]
    same(halves[0] + halves[1], loss)


test_a_config = refused(
    {
        "activation": (lambda: mlp.MLPConfig(activation="tanh"), "activation = 'tanh': one of 'none', 'relu', 'gelu'"),
        "size": (lambda: mlp.MLPConfig(F=0), "F must be at least 1"),
    }
)


def derivative(f, dy, x):
    return torch.func.vjp(f, x)[1](dy)[0]


@pytest.mark.parametrize("activation", pointwise.ACTIVATIONS)
def test_activations_their_derivatives_and_the_scale_that_they_leave(activation):
    x, dy = rand(5, 64) * 3, rand(5, 64, seed=1)
    x[0, :3] = torch.tensor([0.0, -40.0, 40.0])
    gelu = x * torch.distributions.Normal(0.0, 1.0).cdf(x)
    same(act(x, activation), {"none": x, "relu": x.clamp(min=0), "gelu": gelu}[activation])
    dx = derivative(lambda x: act(x, activation), dy, x)
    same(act_vjp(x, dy, activation), dx)
    assert act_vjp(x.bfloat16(), dy.bfloat16(), activation).dtype == torch.bfloat16
    config = mlp.MLPConfig(L=8, D=128, F=512, activation=activation, residual=False, norm=False)
    Out = functional_call(mlp.MLPStack(config), mlp.init(config)["blocks"], (rand(128, 128, dtype=torch.float32),))
    assert 0.5 < Out.square().mean() < 2


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_rms_norm_and_its_derivative(dtype, tolerance):
    """Also of a shard, by the mean over the whole row."""
    x, dy = (3 * rand(5, 64)).to(dtype), rand(5, 64, seed=1).to(dtype)
    y, dx = rms_norm(x), rms_norm_vjp(x, dy)
    same(y, torch.nn.functional.rms_norm(x, (64,), eps=pointwise.EPS), tolerance)
    same(dx, derivative(rms_norm, dy, x), tolerance)
    assert y.dtype == dx.dtype == dtype
    part, squares = slice(16, 32), x.float().square().mean(-1, keepdim=True)
    same(rms_norm(x[:, part], squares), y[:, part], max(tolerance, 1e-6))
    zeros = torch.zeros_like(x)
    assert torch.equal(rms_norm(zeros), zeros)
    same(rms_norm_vjp(zeros, dy), dy / math.sqrt(pointwise.EPS), tolerance)


def test_a_norm_with_gains_has_both_derivatives():
    x, gain = leaves = [t.requires_grad_() for t in (rand(2, 2, 4), rand(4, seed=1))]

    def norm(x, gain):
        return rms_norm(x, gain=gain, eps=1e-3)

    assert torch.autograd.gradcheck(norm, leaves)
    assert torch.autograd.gradgradcheck(norm, leaves)
    half = norm(x.bfloat16(), gain.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.autograd.grad(half.sum(), x)[0].dtype == torch.float64
    same(half.double(), norm(x, gain), 2e-2)


def test_the_tape_of_trees_and_of_what_is_not_used():
    W, ids = {"used": torch.tensor([2.0, 3.0]), "unused": torch.ones(3)}, torch.tensor([1, 0])
    out, pull = pointwise.vjp(lambda W, ids: {"y": W["used"][ids] ** 2}, W, ids)
    dW, dids = pull({"y": torch.tensor([10.0, 1.0])})
    assert out["y"].tolist() == [9.0, 4.0]
    assert [dW["used"].tolist(), dW["unused"].tolist(), dids.tolist()] == [[4.0, 60.0], [0.0] * 3, [0, 0]]
