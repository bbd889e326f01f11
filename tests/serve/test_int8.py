"""int8 weights and caches: their error bounds, their scales, and pages that hold the same bits."""

import pytest
import torch

from scaling import serve, tree
from scaling.configs import Config, Latent
from scaling.models import transformer as model
from scaling.serve.int8 import quantized

CONFIG = Config("plain", 2, 64, 96, 4, 2, 16, 52, qk_norm=True, tied=True)
EXPERTS = CONFIG.with_(name="experts", E=4, k=2, shared=1, tied=False)
LATENT = EXPERTS.with_(
    name="latent", K=4, qk_norm=False, latent=Latent(q_rank=24, kv_rank=20, nope=12, rope=8, value=16)
)
B, S = 3, 20
both = pytest.mark.parametrize("config", [CONFIG, LATENT], ids=lambda c: c.name)
LENGTHS = torch.tensor([7, 12, 4])


def setting(config):
    g = torch.Generator().manual_seed(1)
    return model.init(config, 0, torch.float32), torch.randint(0, config.V, (B, S), generator=g)


def run(params, tokens, config, **options):
    """Logits[B, 4, V] of a ragged prompt and three steps, and the cache."""
    cache = serve.init_cache(config, B, S, **options)
    logits, cache = serve.prefill(params, tokens[:, :12], cache, config, lengths=LENGTHS)
    seen = [logits]
    for step in range(3):
        logits, cache = serve.decode(params, tokens[range(B), LENGTHS + step], cache, config, donate=True)
        seen.append(logits)
    return torch.stack(seen, 1), cache


def test_numbers_are_within_half_a_scale():
    x = (
        torch.randn(5, 7, 16, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-4, 1, 50, 0, 3])[:, None, None]
    )
    for dims in ((-1,), (1,), (0, 1)):
        q, scale = quantized(x, dims)
        assert q.dtype == torch.int8
        assert ((q * scale - x).abs() <= scale / 2 * (1 + 1e-5)).all()
        assert torch.allclose(scale * 127, x.abs().amax(dims, keepdim=True))
    params = model.init(CONFIG)
    params["layers"]["W_O"][1, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        serve.quantize(params, CONFIG)


@pytest.mark.parametrize("config", [CONFIG, EXPERTS, LATENT], ids=lambda c: c.name)
def test_weights(config):
    """A product's error is at most sum |x| times half the channel's scale; the logits' is small."""
    params, tokens = setting(config)
    small = serve.quantize(params, config)
    tree.check(small, serve.specs(config, int8=True), config.sizes | {"I": 1, "J": 1}, serve.types.ONE)
    assert tree.nbytes(small) < 0.3 * tree.nbytes(params)
    name = "W_DQ" if config.latent else "W_Q"
    W, x = small["layers"][name], torch.randn(8, config.D, generator=torch.Generator().manual_seed(2))
    exact = torch.einsum("bd,ld...->lb...", x, params["layers"][name])
    found = torch.einsum("bd,ld...->lb...", x, W["q"] * W["scale"])
    assert (
        (found - exact).abs() <= torch.einsum("bd,ld...->lb...", x.abs(), W["scale"].expand_as(W["q"])) / 2 * (1 + 1e-5)
    ).all()
    assert W["scale"].shape == (config.L, 1, *W["q"].shape[2:])
    (wanted, _), (logits, _) = run(params, tokens, config), run(small, tokens, config)
    assert 0 < (logits - wanted).norm() / wanted.norm() < 0.05
    plain = tree.map(lambda leaf: leaf, small) | {"embed": params["embed"]}
    with pytest.raises(ValueError, match="embed"):
        run(plain, tokens, config)


@both
def test_cache(config):
    """llm-compressor#2176, Model-Optimizer#20, vllm PR#11906: scales are of the values, and never lost."""
    params, tokens = setting(config)
    (wanted, exact), (logits, cache) = run(params, tokens, config), run(params, tokens, config, dtype=torch.int8)
    assert 0 < (logits - wanted).norm() / wanted.norm() < 0.03
    assert cache["scale"].shape == cache["KV"].shape[:-1]
    first = exact["KV"][:, 0]  # the first layer's keys and values come of the same numbers
    error = (cache["KV"] * cache["scale"][..., None])[:, 0] - first
    assert (error.abs() <= cache["scale"][:, 0, ..., None] / 2 * (1 + 1e-4)).all()
    with pytest.raises(ValueError, match=r"cache..scale"):
        serve.decode(params, tokens[:, 0], cache | {"scale": cache["scale"][:, :, :1]}, config)
    with pytest.raises(ValueError, match="int8 needs one scale for each token and head"):
        serve.decode(params, tokens[:, 0], cache | {"KV": cache["KV"].float()}, config)
    del cache["scale"]
    with pytest.raises(ValueError, match="without its scales"):
        serve.decode(params, tokens[:, 0], cache, config)
    with pytest.raises(ValueError, match="floating point or int8"):
        serve.init_cache(config, 1, 1, dtype=torch.int16)


@both
def test_what_a_prefill_sees_is_what_a_decode_sees(config):
    """sglang#25790: an int8 cache is read as it is stored, by the tokens that fill it too: chunks change no logits."""
    params, tokens = setting(config)
    cache = serve.init_cache(config, B, S, dtype=torch.int8)
    once, _ = serve.extend(params, tokens[:, :6], cache, config)
    steps = []
    for t in range(6):
        logits, cache = serve.decode(params, tokens[:, t], cache, config)
        steps.append(logits)
    assert (torch.stack(steps, 1) - once).abs().max() < 1e-4 * once.abs().max()


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=["float", "int8"])
def test_pages_hold_the_same_bits(dtype):
    params, tokens = setting(CONFIG.with_(window=(None, 6)))
    config = CONFIG.with_(window=(None, 6))
    wanted, _ = run(params, tokens, config, dtype=dtype)
    for page in (1, 3, 4, 16, 32):
        logits, cache = run(params, tokens, config, dtype=dtype, page=page)
        assert torch.equal(logits, wanted), page
        assert cache["KV"].shape[2:4] == (B * -(-S // page), page)


def test_rows_with_pages_anywhere_in_the_pool():
    """Other pages, in any order, and another batch on the same pool: the same bits."""
    params, tokens = setting(CONFIG)
    wanted, _ = run(params, tokens, CONFIG, page=4)
    cache = serve.init_cache(CONFIG, 1, 4 * 40, page=4)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    cache |= {"pages": order[:15].view(B, 5), "lengths": torch.zeros(B, dtype=torch.int64)}
    logits, cache = serve.prefill(params, tokens[:, :12], cache, CONFIG, lengths=LENGTHS)
    assert torch.equal(logits, wanted[:, 0])
    rows = torch.tensor([2, 0])
    two = cache | {"pages": cache["pages"][rows], "lengths": cache["lengths"][rows]}
    logits, _ = serve.decode(params, tokens[rows, LENGTHS[rows]], two, CONFIG)
    assert torch.allclose(logits, wanted[rows, 1], rtol=1e-5, atol=1e-5)
    untouched = [page for page in range(40) if page not in order[:15]]
    assert not cache["KV"][:, :, untouched].any()


def on_mesh(mesh, form, config):
    params, tokens = setting(config)
    small = serve.quantize(tree.map(torch.Tensor.double, params), config)
    mine = tree.shard(small, serve.specs(config, mesh, form=form, int8=True), mesh)
    cache = serve.init_cache(config, 2, S, mesh=mesh, form=form, dtype=torch.int8)
    return serve.prefill(mine, tokens[:2, :9], cache, config, mesh, form=form)[0]


@pytest.mark.parametrize(
    ("sizes", "form", "config"),
    [({"Y": 4}, "heads", CONFIG), ({"X": 2, "Y": 2}, "2d", CONFIG), ({"Y": 2, "Z": 2}, "sequence", LATENT)],
)
def test_on_a_mesh(ranks, sizes, form, config):
    """The scales lie where their channels do: the logits are one device's."""
    params, tokens = setting(config)
    small = serve.quantize(tree.map(torch.Tensor.double, params), config)
    wanted, _ = serve.prefill(small, tokens[:2, :9], serve.init_cache(config, 2, S, dtype=torch.int8), config)
    for found in ranks(on_mesh, sizes, form, config):
        assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()  # a rounding of the cache may tip over
