"""Cached equals uncached (nanoGPT PR#613, "a bug or not?"): prefill, chunks and decode beside the model's own logits,
on one device and in every form on meshes; weights and caches with scales."""

import contextlib
import functools
import itertools
from collections import Counter
from dataclasses import replace

import optree
import pytest
import torch
from probes import shaken
from problems import close, same

from scaling import serve, tree
from scaling.configs import Config, Latent, RopeScaling
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.models.leaves import STACKED
from scaling.scaled import Scaled, dequantize
from scaling.serve.cache import share_of
from scaling.serve.slots import Extent, Slots
from scaling.serve.step import kernels
from scaling.serve.types import FORMS, ONE, lay_out_by_output
from scaling.spec import FORMATS, ShardingError, parse

PLAIN = Config("plain", 2, 16, 24, 4, 2, 8, 32)
CONFIGS = {
    "gqa": PLAIN,
    "mha": PLAIN.with_(K=4, gated=False, head_gate=True, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16)),
    "mqa": PLAIN.with_(K=1, tied=True, rope_scaling=RopeScaling("linear", 2.0)),
    "rich": PLAIN.with_(L=3, attention_bias=True, output_bias=True, qk_norm=True, tied=True, window=(None, 5, 3),
        unit_offset=True, logit_scale=0.5),
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
INT8 = {"dtype": torch.int8, "weights": "int8"}
FP8 = {"dtype": torch.float8_e4m3fn, "weights": "fp8-row"}
SMALL = [FORMATS[name]._replace(block=2) for name in ("fp8-128", "mxfp8", "mxfp8-rceil", "nvfp4", "int4-32")]


@functools.cache
def params_of(name: str) -> dict:
    return shaken(CONFIGS[name])


@functools.cache
def expected(name: str) -> torch.Tensor:
    """What `served` should say, by the model, which keeps no cache: one sequence at a time, without padding."""
    rows = [model.forward(params_of(name), TOKENS[b : b + 1], config=CONFIGS[name])[0] for b in range(B)]
    return torch.stack([rows[b][int(n) - 1 : int(n) + STEPS] for b, n in enumerate(LENGTHS)])


def served(mesh, name, params, chunks=(7,), form="heads", donate=False, weights=None, **options):
    """(logits[B, STEPS + 1, V] from each row's last prompt token on, the cache): the prompts LENGTHS in chunks, the
    pages of a row in any order; each rank stores its shards of the matrices in the format `weights`."""
    config = CONFIGS[name]
    if mesh is not None:
        params = tree.shard(params, serve.specs(config, mesh, form=form), mesh)
    if weights is not None:
        params = serve.quantize(params, config, weights, mesh=mesh, form=form)
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


def served_logits(mesh, *what, **how):
    return served(mesh, *what, **how)[0]


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
FIRST += [("sequence", {"Y": 2, "Z": 2}, "deepseek", INT8), ("2d", {"X": 2, "Y": 2}, "rich", FP8)]


@pytest.mark.parametrize("cases", [[case] for case in FIRST] + [pytest.param(CASES, marks=pytest.mark.sweep, id="all")])
def test_every_form_on_a_mesh(ranks, cases):
    """Of all that fit together, each form with each model and on each mesh; the sweep has the others. Scales lie where
    their channels do: the logits are one device's."""
    fit = Counter(form for form, *_ in CASES)
    assert fit == {"heads": 60, "heads_batch": 40, "sequence": 40, "2d": 35, "experts": 6}  # none is left out
    for form, sizes, name, way in cases:
        params, wanted, tolerance = params_of(name), expected(name), 1e-12
        if "dtype" in way:  # a rounding of the cache may tip over
            (wanted, _), tolerance = served(None, name, params, **way), 1e-6
        for found in ranks(functools.partial(served_logits, form=form, **way), sizes, name, params):
            close(found, wanted, tolerance)


def in_chunks(mesh, page: int | None, chunks: list[int]) -> torch.Tensor:
    """The logits of rows of one length, whose cache is then full."""
    params = params_of("gqa") if mesh is None else tree.shard(params_of("gqa"), serve.specs(PLAIN, mesh), mesh)
    cache, found = serve.init_cache(PLAIN, B, sum(chunks), mesh=mesh, page=page), []
    for tokens in TOKENS[:, : sum(chunks)].split(chunks, 1):
        logits, cache = serve.extend(params, tokens, cache, PLAIN, mesh)
        found.append(logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize(("page", "chunks"), [(None, [1, 3]), (4, [1, 3]), (4, [3, 5]), (3, [7, 2]), (4, [8, 7, 1])])
def test_tokens_that_do_not_divide_over_C(ranks, page, chunks):
    """They are padded, and what is padded is in no place of a row that it fills, and in no page."""
    for found in ranks(in_chunks, {"C": 2}, page, chunks):
        close(found, in_chunks(None, page, chunks))


def restored(W, text: str):
    """A leaf as the numbers that it stands for, by a line of `scaling.scaled` for each layer."""
    if not isinstance(W, Scaled):
        return W.double()
    spec = parse(text)
    stacked = spec.dim_names[0] in STACKED
    own = replace(spec, dims=spec.dims[stacked:])
    line = f"{replace(own, scaled=tuple(own.dim_names[i] for i in W.shared))} -> {own}"
    layers = [W.of(parts) for parts in zip(*W.parts, strict=True)] if stacked else [W]
    found = [dequantize(line, each, ONE).double() for each in layers]
    return torch.stack(found) if stacked else found[0]


def is_scaled(node) -> bool:
    return isinstance(node, Scaled)


@pytest.mark.parametrize("format", [FORMATS["int8"], FORMATS["fp8-row"], *SMALL], ids=lambda format: format.name)
@pytest.mark.parametrize("name", ["rich", "experts", "deepseek"])
def test_weights_with_scales(name, format):
    """Logits are those of the numbers that the parts stand for, which are near the params."""
    config, params = CONFIGS[name], tree.map(torch.Tensor.float, params_of(name))
    small = serve.quantize(params, config, format)
    tree.check(small, serve.specs(config, format=format), config.sizes, ONE)
    kept = optree.tree_map(restored, small, serve.specs(config), is_leaf=is_scaled)
    most = {"int8": 0.01, "mxfp8": 0.1, "nvfp4": 0.12, "int4-32": 0.1}.get(format.name, 0.04)
    for near, leaf in zip(tree.leaves(kept), tree.leaves(params), strict=True):
        assert (near - leaf).norm() <= most * leaf.norm()
    assert format.block or tree.nbytes(small) < tree.nbytes(params) / 2
    close(served(None, name, small)[0], served(None, name, kept)[0], 1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["rich", "experts", "latent", "deepseek"])
def test_a_cache_with_scales(name, dtype):
    """One scale a token and head, and small errors.

    llm-compressor#2176, Model-Optimizer#20, vllm PR#11906, sglang#25790: scales are of the values, in pages too; what a
    prefill sees is what a decode sees, as it is stored."""
    params, given = params_of(name), {"dtype": dtype}
    (_, exact), (logits, cache) = served(None, name, params), served(None, name, params, **given)
    assert 0 < (logits - expected(name)).norm() / expected(name).norm() < (0.03 if dtype == torch.int8 else 0.1)
    assert cache["scale"].shape == cache["KV"].shape[:-1]
    first, scale = exact["KV"][:, 0], cache["scale"][:, 0, ..., None]  # the first layer's come of the same numbers
    error = (cache["KV"][:, 0].double() * scale - first).abs()
    assert (error <= (scale / 2 if dtype == torch.int8 else first.abs() / 16 + scale * 2**-10) * (1 + 1e-4)).all()
    for way in WAYS[1:]:
        close(served(None, name, params, **given, **way)[0], logits, 1e-9)


@pytest.mark.parametrize("name", ["gqa", "latent", "experts"])
def test_laid_out_by_output_each_output_reads_adjacent_elements(name):
    config = CONFIGS[name]
    params = model.init(config, 0)
    found = lay_out_by_output(params, config)
    W_O, wanted = found["layers"]["W_O"], params["layers"]["W_O"]
    assert W_O[0, ..., 0].is_contiguous()
    assert not wanted[0, ..., 0].is_contiguous()
    assert found["layers"]["norm_mlp"] is params["layers"]["norm_mlp"]
    assert same(found, params)


def test_a_cache_with_scales_is_multiplied_before_it_is_rounded():
    cache = serve.init_cache(PLAIN, 1, 4, dtype=torch.int8) | {"lengths": torch.tensor([3])}
    cache["KV"].random_(-127, 128, generator=torch.Generator().manual_seed(0))
    cache["scale"].uniform_(1e-5, 1, generator=torch.Generator().manual_seed(0))
    slots = Slots(cache, torch.ones(1, dtype=torch.int64), 1, share_of(ONE, "heads"), Extent.of([3], [1], 1))
    for found, x, scale in zip(slots.read(1, slice(0, 4), torch.bfloat16), cache["KV"], cache["scale"], strict=True):
        assert torch.equal(found, (x[1].double() * scale[1, ..., None]).bfloat16())


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
