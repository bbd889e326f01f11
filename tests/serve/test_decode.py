"""Cached equals uncached (nanoGPT PR#613, "a bug or not?"): prefill, chunks and decode beside the model's own logits,
on one device and in every form on meshes; what is held in int8, within half a scale."""

from collections import Counter

import pytest
import torch

from scaling import serve, tree
from scaling.configs import Config, Latent
from scaling.configs.config import RopeScaling
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.serve.int8 import quantized
from scaling.serve.step import kernels
from scaling.serve.types import FORMS, ONE
from scaling.spec import ShardingError

PLAIN = Config("plain", 2, 16, 24, 4, 2, 8, 32)
RICH = PLAIN.with_(
    name="rich", L=3, attention_bias=True, output_bias=True, qk_norm=True, tied=True, window=(None, 5, 3)
)
CONFIGS = {
    "gqa": PLAIN,
    "mha": PLAIN.with_(K=4, gated=False, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16)),
    "mqa": PLAIN.with_(K=1, tied=True, rope_scaling=RopeScaling("linear", 2.0)),
    "rich": RICH,
    "window": PLAIN.with_(window=4),
    "experts": PLAIN.with_(E=4, k=2, shared=1),
    "latent": PLAIN.with_(
        K=4, window=(None, 5), rope_scaling=RopeScaling("yarn", 4.0, 1.0, 32.0, 8, mscale=0.8, mscale_all=1.2),
        latent=Latent(q_rank=12, kv_rank=10, nope=6, rope=4, value=8),
    ),
    "deepseek": PLAIN.with_(  # a prompt of 7 tokens is computed by heads, chunks and single tokens by latents
        L=3, dense_layers=1, F_dense=40, K=4, E=4, k=2, shared=1, routing="sigmoid", expert_groups=2,
        latent=Latent(q_rank=12, kv_rank=60, nope=4, rope=4, value=8, interleaved=False),
    ),
}  # fmt: skip
B, S = 4, 16
LENGTHS = torch.tensor([5, 1, 7, 4])
STEPS = 3
WAYS = [{}, {"donate": True, "chunks": (2, 3, 7)}, {"page": 4}, {"page": 3, "chunks": (4, 7)}]


def setting(config, dtype=torch.float64):
    """Params whose biases and gains are not the initial constants, and tokens[B, S]."""
    g = torch.Generator().manual_seed(1)
    params = model.init(config, 0, dtype)
    params = tree.map(lambda p: p + 0.1 * torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype), params)
    return params, torch.randint(0, config.V, (B, S), generator=g)


def served(params, tokens, config, mesh=None, chunks=(7,), form="heads", donate=False, **options):
    """(logits[B, STEPS + 1, V] from each row's last prompt token on, the cache): the prompts LENGTHS in chunks, the
    pages of a row in any order."""
    cache = serve.init_cache(config, B, S, mesh=mesh, form=form, **options)
    cache |= {"pages": cache["pages"].flip(1)} if "pages" in cache else {}
    given, seen, done = {"form": form, "donate": donate}, [], torch.zeros(B, dtype=torch.int64)
    for n in chunks[:-1]:  # chunks of another size for each row, none longer than what is left but one token
        part = torch.minimum(LENGTHS - done - 1, torch.full_like(done, n)).clamp(min=0)
        chunk = torch.stack([tokens[b].roll(-int(done[b]))[:n] for b in range(B)])
        _, cache = serve.extend(params, chunk, cache, config, mesh, lengths=part, **given)
        done = done + part
    left = LENGTHS - done
    chunk = torch.stack([tokens[b].roll(-int(done[b]))[: int(left.max())] for b in range(B)])
    logits, cache = serve.prefill(params, chunk, cache, config, mesh, lengths=left, **given)
    for step in range(STEPS):
        seen.append(logits)
        logits, cache = serve.decode(params, tokens[range(B), LENGTHS + step], cache, config, mesh, **given)
    assert cache["lengths"].tolist() == (LENGTHS + STEPS).tolist()
    return torch.stack([*seen, logits], 1), cache


def expected(params, tokens, config):
    """The same logits by the model, which keeps no cache: one sequence at a time, without padding."""
    rows = [model.forward(params, tokens[b : b + 1], config=config)[0] for b in range(B)]
    return torch.stack([rows[b][int(LENGTHS[b]) - 1 : int(LENGTHS[b]) + STEPS] for b in range(B)])


def close(found, wanted, tolerance=1e-12):
    assert ((found - wanted).abs() <= tolerance * wanted.abs().max()).all(), (found - wanted).abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_equals_uncached_at_every_position(name):
    config = CONFIGS[name]
    params, tokens = setting(config)
    wanted = expected(params, tokens, config)
    for way in WAYS:
        close(served(params, tokens, config, **way)[0], wanted)
    logits, _ = serve.extend(params, tokens, serve.init_cache(config, B, S), config)
    close(logits, model.forward(params, tokens, config=config))


def test_a_cache_is_data():
    """Pure unless it is donated; tokens that are taken back leave no trace; other rows of it are another batch."""
    params, tokens = setting(PLAIN)
    for page in (None, 4):
        empty = serve.init_cache(PLAIN, B, S, dtype=torch.float64, page=page)
        _, one = serve.prefill(params, tokens[:, :6], empty, PLAIN)
        assert not empty["KV"].any()
        assert not empty["lengths"].any()
        before = tree.map(torch.clone, one)
        wanted, two = serve.decode(params, tokens[:, 6], one, PLAIN)
        _, longer = serve.extend(params, tokens[:, 8:12], one, PLAIN)
        assert all(torch.equal(one[name], before[name]) for name in before)
        found, _ = serve.decode(params, tokens[:, 6], longer | {"lengths": one["lengths"]}, PLAIN)
        assert torch.equal(found, wanted)
        _, three = serve.decode(params, tokens[:, 6], one, PLAIN, donate=True)
        assert three["KV"].data_ptr() == one["KV"].data_ptr()
        assert torch.equal(two["KV"], three["KV"])
    rows = torch.tensor([2, 0])
    some = before | {name: before[name][rows] for name in ("pages", "lengths")}
    close(serve.decode(params, tokens[rows, 6], some, PLAIN)[0], wanted[rows])


def on_mesh(mesh, name, form, int8, way):
    config = CONFIGS[name]
    params, tokens = setting(config)
    params = serve.quantize(params, config) if int8 else params
    mine = tree.shard(params, serve.specs(config, mesh, form=form, int8=int8), mesh)
    return served(mine, tokens, config, mesh, form=form, dtype=torch.int8 if int8 else None, **way)[0]


def fits(form, sizes, name) -> bool:
    try:
        return bool(serve.specs(CONFIGS[name], AbstractMesh(sizes), form=form))
    except ShardingError:
        return False


SIZES = [{"Y": 2}, {"Y": 4}, {"Z": 4}, {"Z": 2, "Y": 2}, {"Y": 2, "Z": 2}, {"C": 2, "Y": 2}, {"C": 4}, {"C": 2, "E": 2}]
SIZES += [{"E": 2, "Y": 2}, {"X": 2, "Y": 2}, {"X": 2, "Z": 2}]
CASES = [(form, sizes, name) for form in FORMS for sizes in SIZES for name in CONFIGS if fits(form, sizes, name)]
CASES = [(*case, WAYS[i % (2 if case[0] == "sequence" else 4)]) for i, case in enumerate(CASES)]  # it has no pages
FIRST, covered = set(), set()  # few cases that have each model and each mesh of each form
for new in (2, 1):
    for i, (form, *both, _) in enumerate(CASES):
        if len(more := {(form, str(what)) for what in both} - covered) >= new:
            FIRST.add(i)
            covered |= more


def test_none_that_fits_is_left_out():
    found = Counter(form for form, *_ in CASES)
    assert found == {"heads": 60, "heads_batch": 40, "sequence": 40, "2d": 35, "experts": 6}


@pytest.mark.parametrize(
    ("form", "sizes", "name", "way"),
    [case if i in FIRST else pytest.param(*case, marks=pytest.mark.sweep) for i, case in enumerate(CASES)],
)
def test_every_form_on_a_mesh(ranks, form, sizes, name, way):
    """Of all that fit together, each form with each model and on each mesh; the sweep has the others."""
    config = CONFIGS[name]
    wanted = expected(*setting(config), config)
    for found in ranks(on_mesh, sizes, name, form, False, way):
        close(found, wanted)


def off(found, wanted) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_int8_numbers_are_within_half_a_scale():
    sizes = torch.tensor([1e-4, 1, 50, 0, 3])[:, None, None]
    x = sizes * torch.randn(5, 7, 16, generator=torch.Generator().manual_seed(0))
    for dims in ((-1,), (1,), (0, 1)):
        q, scale = quantized(x, dims)
        assert q.dtype == torch.int8
        assert ((q * scale - x).abs() <= scale / 2 * (1 + 1e-5)).all()
        assert torch.allclose(scale * 127, x.abs().amax(dims, keepdim=True))


@pytest.mark.parametrize("name", ["rich", "experts", "deepseek"])
def test_int8_weights(name):
    """One scale an output channel; the logits' error is small."""
    config = CONFIGS[name]
    params, tokens = setting(config, torch.float32)
    small = serve.quantize(params, config)
    tree.check(small, serve.specs(config, int8=True), config.sizes | {"I": 1, "J": 1}, ONE)
    query = small["layers"]["W_DQ" if config.latent else "W_Q"]
    assert query["scale"].shape == (len(query["q"]), 1, *query["q"].shape[2:])
    assert 0 < off(served(small, tokens, config)[0], served(params, tokens, config)[0]) < 0.05


@pytest.mark.parametrize("name", ["rich", "latent"])
def test_an_int8_cache(name):
    """llm-compressor#2176, Model-Optimizer#20, vllm PR#11906, sglang#25790: scales are of the values, in pages too;
    what a prefill sees is what a decode sees, as it is stored."""
    config = CONFIGS[name]
    params, tokens = setting(config)
    (wanted, exact), (logits, cache) = (served(params, tokens, config, dtype=dtype) for dtype in (None, torch.int8))
    assert 0 < off(logits, wanted) < 0.03
    assert cache["scale"].shape == cache["KV"].shape[:-1]
    first = exact["KV"][:, 0]  # the first layer's keys and values come of the same numbers
    error = (cache["KV"] * cache["scale"][..., None])[:, 0] - first
    assert (error.abs() <= cache["scale"][:, 0, ..., None] / 2 * (1 + 1e-4)).all()
    for way in WAYS[1:]:
        close(served(params, tokens, config, dtype=torch.int8, **way)[0], logits, 1e-9)


@pytest.mark.parametrize(
    ("sizes", "form", "name"),
    [({"Y": 4}, "heads", "rich"), ({"X": 2, "Y": 2}, "2d", "rich"), ({"Y": 2, "Z": 2}, "sequence", "deepseek")],
)
def test_int8_on_a_mesh(ranks, sizes, form, name):
    """The scales lie where their channels do: the logits are one device's."""
    params, tokens = setting(CONFIGS[name])
    wanted, _ = served(serve.quantize(params, CONFIGS[name]), tokens, CONFIGS[name], dtype=torch.int8)
    for found in ranks(on_mesh, sizes, name, form, True, {}):
        close(found, wanted, 1e-6)  # a rounding of the cache may tip over


def test_on_a_gpu_attention_takes_kernels_that_plan_nothing_for_each_length(monkeypatch):
    seen, before = [], torch.backends.cuda.cudnn_sdp_enabled()
    with kernels(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    monkeypatch.setattr("scaling.serve.step.kernels", lambda device: seen.append(device.type) or kernels(device))
    cache = serve.init_cache(PLAIN, 1, 4, dtype=torch.float32)
    serve.prefill(model.init(PLAIN, 0), torch.zeros(1, 2, dtype=torch.int64), cache, PLAIN)
    assert seen == ["cpu"]
