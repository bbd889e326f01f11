import math

import optree
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from scaling.configs import MODELS, Config
from scaling.cost.transformer import forward_flops, num_params, remat_flops, saved_bytes, train_flops
from scaling.models import transformer
from scaling.models.attention import combine, dot_product_attention, flash_attention

SMALL = Config("small", L=3, D=32, F=48, N=4, K=2, H=8, V=50)
VARIANTS = [SMALL, SMALL.with_(gated=False, K=4), SMALL.with_(tied=True, K=1, H=10)]


def tokens_of(config, B=2, T=12):
    return torch.randint(config.V, (B, T + 1), generator=torch.Generator().manual_seed(1))


def qkv(B=2, T=13, S=13, N=4, K=2, H=8):
    make = torch.Generator().manual_seed(0)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return [torch.randn(shape, dtype=torch.float64, generator=make, requires_grad=True) for shape in shapes]


def sdpa(Q, K, V):
    T, S = Q.shape[1], K.shape[1]
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    heads = (x.transpose(1, 2) for x in (Q, K, V))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("attention", [dot_product_attention, flash_attention, lambda *a: flash_attention(*a, block=4)])
@pytest.mark.parametrize(("T", "S"), [(13, 13), (5, 13), (1, 9)])
def test_attention_equals_torch_forward_and_backward(attention, T, S):
    inputs = qkv(T=T, S=S)
    want, got = sdpa(*inputs), attention(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for a, b in zip(*(torch.autograd.grad(out, inputs, cotangent) for out in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_flash_attention_under_torch_func_and_skips_the_future():
    inputs = [x.detach() for x in qkv(B=1, T=64, S=64, N=2, K=1)]
    got, want = (
        torch.func.grad(lambda *a, f=f: f(*a).square().sum(), argnums=(0, 1, 2))(*inputs)
        for f in (lambda *a: flash_attention(*a, block=16), dot_product_attention)
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    with FlopCounterMode(display=False) as counter:
        flash_attention(*inputs, block=16)
    assert counter.get_total_flops() == 4 * 64 * 64 * 2 * 8 * 10 / 16  # 10 of the 16 pairs of blocks are visible


def test_combine_is_associative_and_is_the_softmax():
    scores, values = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, 2, dtype=torch.float64)
    chunks = [(scores[i], torch.ones(5, dtype=torch.float64), values[i]) for i in range(3)]
    left = combine(*combine(*chunks[0], *chunks[1]), *chunks[2])
    right = combine(*chunks[0], *combine(*chunks[1], *chunks[2]))
    want = (scores.softmax(0)[..., None] * values).sum(0)
    for M, L, O in (left, right):
        torch.testing.assert_close(O / L[:, None], want)
        torch.testing.assert_close(M + L.log(), scores.logsumexp(0))


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


@pytest.mark.parametrize("config", [*VARIANTS, MODELS["llama3-8b"].with_(L=2)])
def test_flops_equal_the_counter(config):
    B, T = 2, 12
    params = transformer.init(config, device="meta")
    tokens = torch.zeros(B, T + 1, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        transformer.forward(params, tokens[:, :-1])
    assert counter.get_total_flops() == sum(forward_flops(config, B, T).values())
    for remat in ("none", "matmuls", "block"):
        with FlopCounterMode(display=False) as counter:
            torch.func.grad(transformer.loss)(params, tokens, remat)
        assert counter.get_total_flops() == sum(train_flops(config, B, T, remat=remat).values()), remat


def test_remat_flops_of_question_6():
    config, B, T = MODELS["llama3-8b"], 2, 1000
    assert remat_flops(config, B, T, "matmuls") == 4 * B * T**2 * config.N * config.H * config.L


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("remat", ["block", "matmuls"])
def test_remat_changes_no_number(config, remat):
    params, tokens = transformer.init(config, dtype=torch.float64), tokens_of(config)
    want = torch.func.grad_and_value(transformer.loss)(params, tokens)
    for attention in (dot_product_attention, flash_attention):
        got = torch.func.grad_and_value(transformer.loss)(params, tokens, remat, attention)
        for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    leaves = [p.requires_grad_() for p in optree.tree_leaves(params)]  # and under plain autograd
    grads = torch.autograd.grad(transformer.loss(params, tokens, remat), leaves)
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
            out = transformer.forward(cut, tokens_of(config, B, T)[:, :-1], remat, attention)
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
    with pytest.raises(ValueError, match="deepseek-v3: not computed here: latent attention"):
        transformer.init(MODELS["deepseek-v3"], device="meta")
    with pytest.raises(ValueError, match="unknown remat 'all'"):
        transformer.forward(transformer.init(SMALL), tokens_of(SMALL), "all")
    with pytest.raises(ValueError, match="must divide N=4"):
        dot_product_attention(*qkv(K=3))
