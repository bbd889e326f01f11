"""Cached equals uncached (nanoGPT PR#613, "a bug or not?"): prefill, chunks and decode beside the model's own logits,
on one device and on meshes."""

import pytest
import torch

from scaling import serve, tree
from scaling.configs import Config, Latent
from scaling.configs.config import RopeScaling
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
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


def setting(config, dtype=torch.float64):
    """Params whose biases and gains are not the initial constants, and tokens[B, S]."""
    g = torch.Generator().manual_seed(1)
    params = model.init(config, 0, dtype)
    params = tree.map(lambda p: p + 0.1 * torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype), params)
    return params, torch.randint(0, config.V, (B, S), generator=g)


def served(params, tokens, config, mesh=None, chunks=(7,), form="heads", donate=False, **options):
    """Logits[B, STEPS + 1, V] from each row's last prompt token on, the prompts LENGTHS given in chunks."""
    cache = serve.init_cache(config, B, S, mesh=mesh, form=form, **options)
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
    return torch.stack([*seen, logits], 1)


def expected(params, tokens, config):
    """The same by the model, which keeps no cache: one sequence at a time, without padding."""
    rows = [model.forward(params, tokens[b : b + 1], config=config)[0] for b in range(B)]
    return torch.stack([rows[b][int(LENGTHS[b]) - 1 : int(LENGTHS[b]) + STEPS] for b in range(B)])


def close(found, wanted, tolerance=1e-12):
    assert ((found - wanted).abs() <= tolerance * wanted.abs().max()).all(), (found - wanted).abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_equals_uncached_at_every_position(name):
    config = CONFIGS[name]
    params, tokens = setting(config)
    wanted = expected(params, tokens, config)
    for options in ({}, {"donate": True, "chunks": (2, 3, 7)}, {"page": 4}, {"page": 3, "chunks": (4, 7)}):
        close(served(params, tokens, config, **options), wanted)


def test_every_position_of_a_prompt():
    params, tokens = setting(RICH)
    logits, _ = serve.extend(params, tokens, serve.init_cache(RICH, B, S), RICH)
    close(logits, model.forward(params, tokens, config=RICH))


def test_pure_unless_donated():
    params, tokens = setting(PLAIN)
    cache = serve.init_cache(PLAIN, B, S, dtype=torch.float64)
    _, one = serve.prefill(params, tokens[:, :3], cache, PLAIN)
    assert not cache["KV"].any()
    assert not cache["lengths"].any()
    before = tree.map(torch.clone, one)
    _, two = serve.decode(params, tokens[:, 3], one, PLAIN)
    assert all(torch.equal(one[name], before[name]) for name in before)
    _, three = serve.decode(params, tokens[:, 3], one, PLAIN, donate=True)
    assert three["KV"].data_ptr() == one["KV"].data_ptr()
    assert torch.equal(two["KV"], three["KV"])


def test_tokens_taken_back_leave_no_trace():
    params, tokens = setting(PLAIN)
    _, cache = serve.prefill(params, tokens[:, :6], serve.init_cache(PLAIN, B, S), PLAIN)
    wanted, _ = serve.decode(params, tokens[:, 6], cache, PLAIN)
    _, longer = serve.extend(params, tokens[:, 8:12], cache, PLAIN)
    found, _ = serve.decode(params, tokens[:, 6], longer | {"lengths": cache["lengths"]}, PLAIN)
    assert torch.equal(found, wanted)


def on_mesh(mesh, name, form, options):
    config = CONFIGS[name]
    params, tokens = setting(config)
    mine = tree.shard(params, serve.specs(config, mesh, form=form), mesh)
    return served(mine, tokens, config, mesh, form=form, **options)


MESHES = [
    ({"Y": 2}, "heads", "rich", {"donate": True}),
    ({"Y": 4}, "heads", "rich", {"chunks": (3, 7)}),  # K < Y
    ({"Y": 4}, "heads", "mqa", {"page": 4}),
    ({"Z": 2, "Y": 2}, "heads", "rich", {"page": 3}),
    ({"Z": 4}, "heads", "mha", {}),
    ({"E": 2, "Y": 2}, "heads", "experts", {"chunks": (4, 7)}),
    ({"C": 2, "Y": 2}, "heads", "rich", {"chunks": (3, 7)}),  # 7 tokens over C, where 2 does not divide
    ({"C": 4}, "heads", "window", {"page": 3}),
    ({"Y": 2, "Z": 2}, "heads_batch", "rich", {"page": 3}),
    ({"Z": 2, "Y": 2}, "heads_batch", "mqa", {"chunks": (3, 7)}),  # K < Y
    ({"Y": 2, "Z": 2}, "heads_batch", "experts", {"donate": True}),
    ({"Y": 2, "Z": 2}, "sequence", "rich", {"chunks": (3, 7)}),
    ({"Y": 2, "Z": 2}, "sequence", "mqa", {}),
    ({"Z": 4}, "sequence", "window", {"donate": True}),
    ({"X": 2, "Y": 2}, "2d", "rich", {"chunks": (3, 7)}),
    ({"X": 2, "Y": 2}, "2d", "mqa", {"page": 4}),
    ({"E": 2, "Y": 2}, "experts", "experts", {"chunks": (4, 7)}),
    ({"Y": 4}, "experts", "experts", {"page": 3, "donate": True}),
    ({"Y": 4}, "heads", "latent", {"chunks": (3, 7)}),
    ({"Z": 2, "Y": 2}, "heads", "deepseek", {"page": 3}),
    ({"C": 2, "Y": 2}, "heads", "deepseek", {}),
    ({"Y": 2, "Z": 2}, "heads_batch", "latent", {"page": 4}),
    ({"Y": 2, "Z": 2}, "sequence", "latent", {"chunks": (3, 7)}),
    ({"E": 2, "Y": 2}, "experts", "deepseek", {"donate": True}),
]
MESHES += [  # of the same kinds as those above
    pytest.param(*case, marks=pytest.mark.sweep)
    for case in (
        ({"Z": 2, "Y": 2}, "heads", "experts", {}),
        ({"C": 2, "E": 2}, "heads", "experts", {}),
        ({"C": 4}, "heads", "latent", {"page": 3}),
        ({"Y": 2, "Z": 2}, "heads_batch", "deepseek", {"donate": True}),
        ({"Z": 4}, "sequence", "deepseek", {}),
        ({"Y": 4}, "experts", "deepseek", {"chunks": (4, 7)}),
        ({"X": 2, "Z": 2}, "2d", "mha", {"chunks": (3, 7)}),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "form", "name", "options"), MESHES)
def test_every_form_on_a_mesh(ranks, sizes, form, name, options):
    config = CONFIGS[name]
    wanted = expected(*setting(config), config)
    for found in ranks(on_mesh, sizes, name, form, options):
        close(found, wanted)


def test_bad_input_is_refused():
    params, tokens = setting(PLAIN)

    def cache(**options):
        return serve.init_cache(PLAIN, B, S, **options)

    def refused(message, call, error=ValueError):
        with pytest.raises(error, match=message):
            call()

    prompt = tokens[:, :4]
    for bad, message in ((tokens[:, :0], "no token"), (prompt + 32, "vocabulary"), (prompt - 32, "vocabulary")):
        refused(message, lambda bad=bad: serve.prefill(params, bad, cache(), PLAIN))
    refused("whole numbers", lambda: serve.prefill(params, prompt.double(), cache(), PLAIN))
    refused("of 2 rows, as the tokens", lambda: serve.prefill(params, prompt[:2], cache(), PLAIN))
    refused("one token a row", lambda: serve.decode(params, prompt, cache(), PLAIN))
    for lengths, message in (
        ([4, 0, 4, 4], "row 1 is empty"),
        ([5, 4, 4, 4], "lengths must lie in"),
        ([1, 2], "one for each row"),
    ):
        refused(message, lambda n=lengths: serve.prefill(params, prompt, cache(), PLAIN, lengths=torch.tensor(n)))
    refused("room for 16", lambda: serve.prefill(params, tokens.repeat(1, 2), cache(), PLAIN))
    full = serve.prefill(params, tokens, cache(), PLAIN)[1]
    refused("row 0: 16 tokens are held", lambda: serve.decode(params, tokens[:, 0], full, PLAIN))
    pages = cache(page=4)
    pages["pages"][2, 1] = -1
    refused("row 2: no page for its tokens from 4", lambda: serve.prefill(params, tokens[:, :5], pages, PLAIN))
    serve.prefill(params, prompt, pages, PLAIN)  # which the third row does not need yet
    refused("of KV|is what init_cache", lambda: serve.prefill(params, prompt, {"KV": full["KV"]}, PLAIN))
    other = serve.init_cache(PLAIN.with_(K=4), B, S)
    refused("KV.*on each device", lambda: serve.prefill(params, prompt, other, PLAIN), ShardingError)
    fewer = {name: leaf for name, leaf in params.items() if name != "unembed"}
    refused("unembed", lambda: serve.prefill(fewer, prompt, cache(), PLAIN), ShardingError)
    experts = CONFIGS["experts"].with_(capacity=1.0)
    refused("capacity=None", lambda: serve.prefill(setting(experts)[0], prompt, cache(), experts))
    for sizes in ({"batch": 0}, {"length": -1}, {"page": 0}):
        refused("at least 1", lambda s=sizes: serve.init_cache(PLAIN, **({"batch": 1, "length": 1} | s)))


def refused_on_a_mesh(mesh):
    """What each rank says to bad input, and the logits of what comes after it: nobody waits for anybody."""
    params, tokens = setting(PLAIN)
    mine, cache = tree.shard(params, serve.specs(PLAIN, mesh), mesh), serve.init_cache(PLAIN, B, S, mesh=mesh)
    said = []
    for bad in (tokens + 32 * (torch.arange(B) == 3)[:, None], tokens.repeat(1, 2), tokens[:, :0]):
        try:
            serve.prefill(mine, bad, cache, PLAIN, mesh)
        except ValueError as error:
            said.append(str(error))
    return said, serve.prefill(mine, tokens, cache, PLAIN, mesh)[0]


def test_bad_input_is_refused_by_every_rank_before_any_works(ranks):
    params, tokens = setting(PLAIN)
    wanted = model.forward(params, tokens, config=PLAIN)[:, -1]
    for said, logits in ranks(refused_on_a_mesh, {"Z": 2, "Y": 2}):
        for text, part in zip(said, ("vocabulary", "room for 16", "no token"), strict=True):
            assert part in text
        close(logits, wanted)


def test_meshes_that_do_not_fit_are_refused():
    for sizes, form, message in (
        ({"Y": 3}, "heads", "K=2 KV heads over Y=3"),
        ({"Y": 8}, "heads", "N=4 query heads"),
        ({"X": 2}, "heads", "X splits nothing"),
        ({"E": 2}, "heads", "the model has none"),
        ({"Y": 2}, "experts", "of a model without"),
        ({"Z": 2}, "experts", "Z splits nothing"),
        ({"Y": 2}, "rows", "unknown form"),
    ):
        with pytest.raises(ShardingError, match=message):
            serve.specs(PLAIN, AbstractMesh(sizes), form=form)
    with pytest.raises(ShardingError, match="which a cache in pages cannot do"):
        serve.init_cache(PLAIN, 2, S, mesh=AbstractMesh({"Z": 2}), form="sequence", page=4)
    with pytest.raises(ShardingError, match="does not divide"):
        serve.init_cache(PLAIN, 3, S, mesh=AbstractMesh({"Z": 2}))


def test_shapes_alone_on_an_abstract_mesh():
    mesh = AbstractMesh({"Z": 4, "Y": 2})
    params = model.init(RICH, mesh=mesh, specs=serve.specs(RICH, mesh))
    cache = serve.init_cache(RICH, 8, S, mesh=mesh)
    logits, cache = serve.decode(params, torch.empty(8, dtype=torch.int64, device="meta"), cache, RICH, mesh)
    assert logits.shape == (8, 32)
    assert cache["KV"].shape == (2, 3, 2, S, 1, 8)
