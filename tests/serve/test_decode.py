"""Cached equals uncached (nanoGPT PR#613, "a bug or not?"): prefill, chunks and decode beside the model's own logits,
on one device and in every form on meshes; what is held in int8, within half a scale."""

import contextlib
import functools
import itertools
from collections import Counter

import pytest
import torch
from probes import shaken

from scaling import serve, tree
from scaling.configs import Config, Latent, RopeScaling
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.serve.step import kernels
from scaling.serve.types import FORMS, ONE
from scaling.spec import ShardingError

PLAIN = Config("plain", 2, 16, 24, 4, 2, 8, 32)
CONFIGS = {
    "gqa": PLAIN,
    "mha": PLAIN.with_(K=4, gated=False, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16)),
    "mqa": PLAIN.with_(K=1, tied=True, rope_scaling=RopeScaling("linear", 2.0)),
    "rich": PLAIN.with_(L=3, attention_bias=True, output_bias=True, qk_norm=True, tied=True, window=(None, 5, 3)),
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
B, S, STEPS = 4, 16, 2
LENGTHS = torch.tensor([5, 1, 7, 4])
TOKENS = torch.randint(0, 32, (B, S), generator=torch.Generator().manual_seed(1))
WAYS = [{}, {"donate": True, "chunks": (2, 3, 7)}, {"page": 4}, {"page": 3, "chunks": (4, 7)}]
INT8 = {"dtype": torch.int8}


@functools.cache
def params_of(name: str) -> dict:
    return shaken(CONFIGS[name])


@functools.cache
def expected(name: str) -> torch.Tensor:
    """What `served` should say, by the model, which keeps no cache: one sequence at a time, without padding."""
    rows = [model.forward(params_of(name), TOKENS[b : b + 1], config=CONFIGS[name])[0] for b in range(B)]
    return torch.stack([rows[b][int(n) - 1 : int(n) + STEPS] for b, n in enumerate(LENGTHS)])


def served(mesh, name, params, chunks=(7,), form="heads", donate=False, **options):
    """(logits[B, STEPS + 1, V] from each row's last prompt token on, the cache): the prompts LENGTHS in chunks, the
    pages of a row in any order."""
    config = CONFIGS[name]
    if mesh is not None:
        params = tree.shard(params, serve.specs(config, mesh, form=form, int8="dtype" in options), mesh)
    cache = serve.init_cache(config, B, S, mesh=mesh, form=form, **options)
    cache |= {"pages": cache["pages"].flip(1)} if "pages" in cache else {}
    given, seen, done = {"form": form, "donate": donate}, [], torch.zeros(B, dtype=torch.int64)

    def next_of_each(n: int) -> torch.Tensor:
        return torch.stack([TOKENS[b].roll(-int(done[b]))[:n] for b in range(B)])

    for n in chunks[:-1]:  # chunks of another size for each row, none longer than what is left but one token
        part = torch.minimum(LENGTHS - done - 1, torch.full_like(done, n)).clamp(min=0)
        _, cache = serve.extend(params, next_of_each(n), cache, config, mesh, lengths=part, **given)
        done = done + part
    left = LENGTHS - done
    logits, cache = serve.prefill(params, next_of_each(int(left.max())), cache, config, mesh, lengths=left, **given)
    for step in range(STEPS):
        seen.append(logits)
        logits, cache = serve.decode(params, TOKENS[range(B), LENGTHS + step], cache, config, mesh, **given)
    assert cache["lengths"].tolist() == (LENGTHS + STEPS).tolist()
    return torch.stack([*seen, logits], 1), cache


def close(found, wanted, tolerance=1e-12):
    assert ((found - wanted).abs() <= tolerance * wanted.abs().max()).all(), (found - wanted).abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_equals_uncached_at_every_position(name):
    config, params = CONFIGS[name], params_of(name)
    for way in WAYS:
        close(served(None, name, params, **way)[0], expected(name))
    logits, _ = serve.extend(params, TOKENS, serve.init_cache(config, B, S), config)
    close(logits, model.forward(params, TOKENS, config=config))


def test_a_cache_is_data():
    """Pure unless it is donated; tokens that are taken back leave no trace; other rows of it are another batch."""
    params = params_of("gqa")
    for page in (None, 4):
        empty = serve.init_cache(PLAIN, B, S, dtype=torch.float64, page=page)
        _, one = serve.prefill(params, TOKENS[:, :6], empty, PLAIN)
        assert not empty["KV"].any()
        assert not empty["lengths"].any()
        before = tree.map(torch.clone, one)
        wanted, two = serve.decode(params, TOKENS[:, 6], one, PLAIN)
        _, longer = serve.extend(params, TOKENS[:, 8:12], one, PLAIN)
        assert all(torch.equal(one[name], before[name]) for name in before)
        found, _ = serve.decode(params, TOKENS[:, 6], longer | {"lengths": one["lengths"]}, PLAIN)
        assert torch.equal(found, wanted)
        _, three = serve.decode(params, TOKENS[:, 6], one, PLAIN, donate=True)
        assert three["KV"].data_ptr() == one["KV"].data_ptr()
        assert torch.equal(two["KV"], three["KV"])
    rows = torch.tensor([2, 0])
    some = before | {name: before[name][rows] for name in ("pages", "lengths")}
    close(serve.decode(params, TOKENS[rows, 6], some, PLAIN)[0], wanted[rows])


SIZES = [{"Y": 2}, {"Z": 4}, {"Y": 4}, {"Z": 2, "Y": 2}, {"Y": 2, "Z": 2}, {"C": 2, "Y": 2}, {"C": 4}, {"C": 2, "E": 2}]
SIZES += [{"E": 2, "Y": 2}, {"X": 2, "Y": 2}, {"X": 2, "Z": 2}]
CASES = []
for form, sizes, name in itertools.product(FORMS, SIZES, CONFIGS):
    with contextlib.suppress(ShardingError):  # if they fit together
        serve.specs(CONFIGS[name], AbstractMesh(sizes), form=form)
        CASES.append((form, sizes, name, WAYS[len(CASES) % (2 if form == "sequence" else 4)]))  # it has no pages
FIRST, covered = [], set()  # few cases that have each model and each mesh of each form
for new in (2, 1):
    for form, *both, way in CASES:
        if len(more := {(form, str(what)) for what in both} - covered) >= new:
            FIRST.append((form, *both, way))
            covered |= more
FIRST += [("heads", {"Y": 4}, "rich", INT8), ("2d", {"X": 2, "Y": 2}, "rich", INT8)]
FIRST += [("sequence", {"Y": 2, "Z": 2}, "deepseek", INT8)]


@pytest.mark.parametrize("cases", [[case] for case in FIRST] + [pytest.param(CASES, marks=pytest.mark.sweep, id="all")])
def test_every_form_on_a_mesh(ranks, cases):
    """Of all that fit together, each form with each model and on each mesh; the sweep has the others. The scales of
    int8 lie where their channels do: the logits are one device's."""
    fit = Counter(form for form, *_ in CASES)
    assert fit == {"heads": 60, "heads_batch": 40, "sequence": 40, "2d": 35, "experts": 6}  # none is left out
    for form, sizes, name, way in cases:
        params, wanted, tolerance = params_of(name), expected(name), 1e-12
        if way is INT8:
            params, tolerance = serve.quantize(params, CONFIGS[name]), 1e-6  # a rounding of the cache may tip over
            wanted, _ = served(None, name, params, **INT8)
        for found, _ in ranks(functools.partial(served, form=form, **way), sizes, name, params):
            close(found, wanted, tolerance)


def restored(small: dict, off: float = 0.0) -> dict:
    """Quantized params as numbers, so many scales above."""
    if "q" in small:
        return (small["q"] + off) * small["scale"].double()
    return {name: restored(x, off) if isinstance(x, dict) else x.double() for name, x in small.items()}


@pytest.mark.parametrize("name", ["rich", "experts", "latent", "deepseek"])
def test_int8_weights_and_cache(name):
    """Of weights one scale an output channel, of a cache one a token and head; errors are small.

    llm-compressor#2176, Model-Optimizer#20, vllm PR#11906, sglang#25790: scales are of the values, in pages too; what a
    prefill sees is what a decode sees, as it is stored."""
    config, params = CONFIGS[name], params_of(name)
    small = serve.quantize(given := tree.map(torch.Tensor.float, params), config)
    tree.check(small, serve.specs(config, int8=True), config.sizes | {"I": 1, "J": 1}, ONE)
    query = small["layers"]["W_DQ" if config.latent else "W_Q"]
    assert query["scale"].shape == (len(query["q"]), 1, *query["q"].shape[2:])
    assert (query["q"].abs().amax(1) == 127).all()
    kept = restored(small)
    for near, above, leaf in zip(*map(tree.leaves, (kept, restored(small, 0.5), given)), strict=True):
        assert ((near - leaf).abs() <= (above - near) * (1 + 1e-4)).all()
    close(served(None, name, small)[0], served(None, name, kept)[0], 1e-5)

    (_, exact), (logits, cache) = served(None, name, params), served(None, name, params, **INT8)
    assert 0 < (logits - expected(name)).norm() / expected(name).norm() < 0.03
    assert cache["scale"].shape == cache["KV"].shape[:-1]
    first = exact["KV"][:, 0]  # the first layer's keys and values come of the same numbers
    error = (cache["KV"] * cache["scale"][..., None])[:, 0] - first
    assert (error.abs() <= cache["scale"][:, 0, ..., None] / 2 * (1 + 1e-4)).all()
    for way in WAYS[1:]:
        close(served(None, name, params, **INT8, **way)[0], logits, 1e-9)


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
