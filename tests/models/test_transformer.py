import math
from functools import partial

import optree
import pytest
import torch
import torch.nn.functional as F
from probes import shaken
from torch.utils.flop_counter import FlopCounterMode

from scaling import tree
from scaling.configs import MODELS, Config, Latent, RopeScaling
from scaling.cost.transformer import forward_flops, num_params, remat_flops, saved_bytes, train_flops
from scaling.models import moe, rope, transformer
from scaling.models.attention import dot_product_attention, flash_attention
from scaling.models.pointwise import rms_norm

SMALL = Config("small", L=3, D=32, F=48, N=4, K=2, H=8, V=50)
LATENT = SMALL.with_(K=4, latent=Latent(q_rank=12, kv_rank=10, nope=6, rope=4, value=8))
VARIANTS = [LATENT, SMALL, SMALL.with_(gated=False, K=4), SMALL.with_(tied=True, K=1, H=10)]
ALL = SMALL.with_(theta=100.0, attention_bias=True, output_bias=True, qk_norm=True, window=(3, None, 5), eps=1e-3)
ALL = ALL.with_(rope_scaling=RopeScaling("llama3", 4.0, 1.0, 4.0, 16))
EXPERTS = SMALL.with_(E=4, k=2, shared=1, routing="sigmoid", aux_coef=0.1, z_coef=0.01, capacity=1.2)
FIRST = EXPERTS.with_(dense_layers=1, F_dense=20)
IDS = torch.tensor([[0] * 4 + [1] * 5 + [7] * 4, [3] * 13])  # the ids of packed documents


def tokens_of(config, B=2, T=12):
    return torch.randint(config.V, (B, T + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("config", VARIANTS)
def test_params_equal_the_formula(config):
    params = transformer.init(config)
    assert sum(p.numel() for p in optree.tree_leaves(params)) == num_params(config)
    meta = transformer.init(config, device="meta")
    assert [p.shape for p in optree.tree_leaves(meta)] == [p.shape for p in optree.tree_leaves(params)]


@pytest.mark.parametrize("name", ["llama2-13b", "llama3-70b", "llama3-405b"])
def test_params_of_real_models_equal_the_formula(name):
    config = MODELS[name]
    params = transformer.init(config, device="meta")
    assert sum(p.numel() for p in optree.tree_leaves(params)) == num_params(config)


@pytest.mark.slow
@pytest.mark.parametrize("config", [*VARIANTS, MODELS["llama3-8b"].with_(L=2)])
def test_flops_equal_the_counter(config):
    B, T = 2, 12
    params = transformer.init(config, device="meta")
    tokens = torch.zeros(B, T + 1, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        transformer.forward(params, tokens[:, :-1], config=config)
    assert counter.get_total_flops() == sum(forward_flops(config, B, T).values())
    for remat in ("none", "matmuls", "block"):
        with FlopCounterMode(display=False) as counter:
            torch.func.grad(transformer.loss)(params, tokens, remat, config=config)
        assert counter.get_total_flops() == sum(train_flops(config, B, T, remat=remat).values()), remat


def test_remat_flops_of_question_6():
    config, B, T = MODELS["llama3-8b"], 2, 1000
    assert remat_flops(config, B, T, "matmuls") == 4 * B * T**2 * config.N * config.H * config.L


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("remat", ["block", "matmuls"])
def test_remat_changes_no_number(config, remat):
    params, tokens = transformer.init(config, dtype=torch.float64), tokens_of(config)
    want = torch.func.grad_and_value(transformer.loss)(params, tokens, config=config)
    for attention in (dot_product_attention, flash_attention):
        got = torch.func.grad_and_value(transformer.loss)(params, tokens, remat, attention, config=config)
        for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    leaves = [p.requires_grad_() for p in optree.tree_leaves(params)]  # and under plain autograd
    grads = torch.autograd.grad(transformer.loss(params, tokens, remat, config=config), leaves)
    for a, b in zip(grads, optree.tree_leaves(want[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def saved_elements(config, remat, attention, B, T):
    """Elements that autograd holds for the backward pass of the layers, params and the ends of the model left out."""
    params = optree.tree_map(lambda p: p.requires_grad_(), transformer.init(config, dtype=torch.float64))
    own = {p.untyped_storage()._cdata for p in optree.tree_leaves(params)}

    def held(layers):
        storages = {}

        def pack(x):
            storages[x.untyped_storage()._cdata] = x.untyped_storage()
            return x

        cut = params | {"layers": {name: p[:layers] for name, p in params["layers"].items()}}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            tokens, cut_config = tokens_of(config, B, T)[:, :-1], config.with_(L=layers)
            out = transformer.forward(cut, tokens, remat, attention, config=cut_config)
        kept = sum(s.nbytes() for key, s in storages.items() if key not in own) // 8
        assert out.requires_grad
        return kept

    return held(2) - held(1)  # of one layer


@pytest.mark.parametrize("config", VARIANTS)
def test_saved_bytes_equal_the_formula(config):
    B, T = 3, 16
    for remat in ("block", "matmuls"):
        got = saved_elements(config, remat, flash_attention, B, T)
        assert got == saved_bytes(config, B * T, remat, dtype=1) / config.L, remat
    if config.latent:  # the tape holds queries and keys again, with their rotated parts beside the others
        return
    everything = saved_elements(config, "none", flash_attention, B, T)  # more by the norms' statistics and the angles
    assert everything == pytest.approx(saved_bytes(config, B * T, "none", dtype=1) / config.L, rel=0.06)
    naive = saved_elements(config, "none", dot_product_attention, B, T)
    assert naive - everything > B * T * T * config.N - B * T * config.N  # the scores


def test_the_model_is_causal_and_learns():
    params, tokens = transformer.init(SMALL), tokens_of(SMALL)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.V
    a, b = (transformer.forward(params, x) for x in (tokens, changed))
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.allclose(a[:, 7:], b[:, 7:])
    before = transformer.loss(params, tokens).item()
    for _ in range(10):
        grads = torch.func.grad(transformer.loss)(params, tokens)
        params = optree.tree_map(lambda p, g: p - 0.5 * g, params, grads)
    assert before > 0.8 * math.log(SMALL.V)
    assert transformer.loss(params, tokens).item() < 0.8 * before


@pytest.mark.slow
def test_gradient_equals_finite_differences():
    config = SMALL.with_(L=1, D=8, F=6, N=2, K=1, H=4, V=7)
    params, tokens = transformer.init(config, dtype=torch.float64), tokens_of(config, 1, 5)
    leaves, treedef = optree.tree_flatten(params)
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def f(*leaves):
        logits = transformer.forward(optree.tree_unflatten(treedef, leaves), tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    assert torch.autograd.gradcheck(f, leaves)


def test_refuses_what_it_is_not():
    for config in (EXPERTS.with_(dense_layers=EXPERTS.L, F_dense=8), SMALL.with_(dense_layers=1, F_dense=8)):
        with pytest.raises(
            ValueError, match=r"not computed here: dense_layers=.* without layers with experts after them"
        ):
            transformer.init(config, device="meta")
    with pytest.raises(ValueError, match="unknown remat 'all'"):
        transformer.forward(transformer.init(SMALL), tokens_of(SMALL), "all")


def test_rotary_positions_turn_planes():
    """Dim i and i + H/2 are a plane, turned by position * theta^(-2i/H); scaled frequencies by hand."""
    H, theta = 6, 50.0
    x = torch.randn(2, 4, 3, H, dtype=torch.float64)
    places = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 7]])
    got = rope.rotate(x, *rope.tables(places, H, theta))
    as_complex = torch.complex(x[..., :3], x[..., 3:])
    angles = torch.tensor([theta ** (-2 * i / H) for i in range(3)], dtype=torch.float64) * places[:, :, None, None]
    want = as_complex * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(got, torch.cat([want.real, want.imag], -1), rtol=1e-13, atol=1e-13)
    f = rope.frequencies(H, theta)
    torch.testing.assert_close(rope.frequencies(H, theta, RopeScaling("linear", 4.0)), f / 4)
    turns = [20.0, 2.5, 0.5]  # of the original context: kept, between, slowed
    original = [2 * math.pi * t / w for t, w in zip(turns, f.tolist(), strict=True)]
    for at, wanted in enumerate((1.0, 0.5 + 0.5 / 8, 1 / 8)):
        scaled = rope.frequencies(H, theta, RopeScaling("llama3", 8.0, 1.0, 4.0, original[at]))
        assert scaled[at].item() == pytest.approx(f[at].item() * wanted)
    with pytest.raises(ValueError, match="'dynamic' is not computed here; linear, llama3, yarn are"):
        rope.frequencies(H, theta, RopeScaling("dynamic", 8.0))


@pytest.mark.parametrize("config", [ALL, EXPERTS.with_(capacity=None)], ids=["all", "experts"])
def test_packed_documents_are_as_if_alone(config):
    params, tokens = shaken(config), tokens_of(config, 2, 13)
    packed = transformer.forward(params, tokens[:, :-1], config=config, segments=IDS)
    for b, start, stop in [(0, 0, 4), (0, 4, 9), (0, 9, 13), (1, 0, 13)]:
        alone = transformer.forward(params, tokens[b : b + 1, start:stop], config=config)
        torch.testing.assert_close(packed[b, start:stop], alone[0], rtol=1e-12, atol=1e-12)
    assert rope.restarted(IDS)[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3]
    dense = partial(transformer.loss, params, tokens, config=config)
    longer = torch.cat([IDS, IDS[:, -1:]], 1)
    assert torch.equal(dense(segments=IDS), dense(segments=longer))
    torch.testing.assert_close(dense(segments=IDS, attention=flash_attention), dense(segments=IDS))


def test_weights_make_a_weighted_mean():
    params, tokens = shaken(SMALL), tokens_of(SMALL)
    weights = torch.rand(2, 12, generator=torch.Generator().manual_seed(2)) * (torch.arange(12) % 3 > 0)
    weights = weights.double()
    logits = transformer.forward(params, tokens[:, :-1])
    each = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    want = (each * weights).sum() / weights.sum()
    torch.testing.assert_close(transformer.loss(params, tokens, weights=weights), want, rtol=1e-12, atol=0)
    torch.testing.assert_close(transformer.loss(params, tokens), each.mean(), rtol=1e-12, atol=0)
    none = torch.func.grad_and_value(transformer.loss)(params, tokens, weights=torch.zeros(2, 12))
    assert none[1] == 0
    assert not any(leaf.any() for leaf in tree.leaves(none[0]))


def test_the_loss_of_experts_has_their_terms_of_every_layer():
    params, tokens = shaken(EXPERTS), tokens_of(EXPERTS)
    plain = EXPERTS.with_(aux_coef=0.0, z_coef=0.0)
    x = params["embed"][tokens[:, :-1]]
    extra, steps = 0.0, tree.unstacked(params["layers"])
    angles = rope.tables(torch.arange(12), SMALL.H, SMALL.theta)
    for layer in steps:
        x = x + transformer.attention_block(layer, x, dot_product_attention, angles, 1e-5)
        y = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer["norm_mlp"]
        out, aux = moe.dense(layer, y, EXPERTS)
        x = x + out
        extra = extra + 0.1 * aux["balance"] + 0.01 * aux["z"]
    x = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * params["norm"]
    want = F.cross_entropy((x @ params["unembed"]).mT, tokens[:, 1:])
    torch.testing.assert_close(transformer.loss(params, tokens, config=plain), want, rtol=1e-12, atol=0)
    torch.testing.assert_close(transformer.loss(params, tokens, config=EXPERTS), want + extra, rtol=1e-12, atol=0)


@pytest.mark.parametrize("config", [ALL, EXPERTS, FIRST], ids=["all", "experts", "dense first"])
def test_everything_rematerialised(config):
    params, tokens = shaken(config), tokens_of(config)
    assert sum(p.numel() for p in tree.leaves(params)) == num_params(config)
    want = torch.func.grad_and_value(transformer.loss)(params, tokens, config=config)
    for remat in ("block", "matmuls"):
        if config.moe and remat == "matmuls":
            with pytest.raises(ValueError, match=r"cannot be used with experts\n  fix: "):
                transformer.loss(params, tokens, remat, config=config)
            continue
        got = torch.func.grad_and_value(transformer.loss)(params, tokens, remat, config=config)
        for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_tokens_outside_the_vocabulary_are_refused():
    params, tokens = transformer.init(SMALL), tokens_of(SMALL)
    for bad in (SMALL.V, -1):
        with pytest.raises(ValueError, match=r"tokens must lie in 0\.\.49"):
            transformer.forward(params, tokens.clone().index_fill_(1, torch.tensor([3]), bad))
        with pytest.raises(ValueError, match=r"tokens must lie in 0\.\.49"):
            transformer.loss(params, tokens.clone().index_fill_(1, torch.tensor([12]), bad))
    with pytest.raises(ValueError, match="give config="):
        transformer.forward(shaken(EXPERTS), tokens)


@pytest.mark.parametrize("config", [ALL, ALL.with_(tied=True), EXPERTS], ids=["all", "tied", "experts"])
def test_gradients_by_autograd_are_those_by_torch_func(config):
    params, tokens = shaken(config), tokens_of(config)
    grads, loss = torch.func.grad_and_value(transformer.loss)(params, tokens, config=config)
    got = transformer.loss_and_grads(params, tokens, config=config)
    for a, b in zip(tree.leaves(got), tree.leaves((loss, grads)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    assert not any(leaf.requires_grad for leaf in tree.leaves(params))


def test_the_norm_written_out_has_both_derivatives():
    x, gain = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def norm(x, gain):
        return rms_norm(x, gain=gain, eps=1e-3)

    leaves = [t.requires_grad_() for t in (x, gain)]
    assert torch.autograd.gradcheck(norm, leaves)
    assert torch.autograd.gradgradcheck(norm, leaves)
    half = norm(x.bfloat16(), gain.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.autograd.grad(half.sum(), leaves[0])[0].dtype == torch.float64
    torch.testing.assert_close(half.double(), norm(x, gain), rtol=2e-2, atol=2e-2)


def test_a_config_that_is_not_these_params_or_not_computed_is_refused():
    params, tokens = transformer.init(SMALL), tokens_of(SMALL)
    with pytest.raises(ValueError, match=r"has the shape \(2, .* found \(3, "):
        transformer.loss(params, tokens, config=SMALL.with_(L=2))
    with pytest.raises(ValueError, match=r"small: not computed here: rope_scaling of type 'dynamic'"):
        transformer.loss(params, tokens, config=SMALL.with_(rope_scaling=RopeScaling("dynamic", 2.0)))
