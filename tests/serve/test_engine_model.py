"""The engine with a real model: each request's tokens are those it gives alone, and in the batch-invariant mode its
logits are the same bits. `invariant_sweep.py` runs many more traces."""

import functools
import random

import invariant_sweep
import pytest
import torch

from scaling import serve, tree
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models import transformer
from scaling.serve import engine, invariant
from scaling.serve.invariant import tiles
from scaling.serve.sampling import Sampling
from scaling.serve.simulate import drive, simulate
from scaling.serve.states import Options, Request, Run

CONFIG = Config("tiny", L=2, D=16, F=24, N=4, K=2, H=4, V=30, window=(None, 7))
params = transformer.init(CONFIG, 1, torch.float64)


SMALL = Config("small", L=1, D=8, F=12, N=2, K=1, H=4, V=30)
small = transformer.init(SMALL, 2, torch.float64)


NEAR = transformer.tree.map(lambda p: p + 0.2 * p.std() * torch.sin(torch.arange(p.numel())).view(p.shape), params)


def requests(seed: int, count: int = 6):
    chance = random.Random(seed)
    stem = [chance.randrange(29) for _ in range(8)]
    prompts = [stem[: chance.choice([0, 4, 8])] + [chance.randrange(29)] * chance.randint(1, 5) for _ in range(count)]
    return [Request(i, tuple(p), chance.randint(1, 9)) for i, p in enumerate(prompts)]


@functools.cache
def alone(request, seed):
    options = {} if seed is None else {"temperature": 0.9, "top_k": 12, "seed": [seed]}
    return serve.generate(params, [request.prompt], CONFIG, request.max_new_tokens, **options)[0]


@pytest.mark.parametrize("draft", [None, "ngram", (SMALL, small)], ids=["plain", "ngram", "draft"])
@pytest.mark.parametrize("policy", ["static", "interleaved", "chunked", "disaggregated"])
def test_each_request_gives_what_it_gives_alone(policy, draft):
    """Greedy and sampled ones, without a draft and with one: what it proposes changes no token."""
    some = requests(3)
    how = Sampling(0.9, top_k=12)
    draws = {i: engine.Draw(how, 100 + i) for i in range(0, 6, 2)}
    options = Options(pages=11, page=2, slots=3, budget=5, policy=policy, proposals=3 if draft else 0)
    arrivals = [(0.001 * (r.id // 2), r) for r in some]
    served = engine.serve(params, CONFIG, arrivals, options, draws, draft=draft)
    for r in some:
        assert list(served.requests[r.id].tokens) == alone(r, 100 + r.id if r.id in draws else None)


@pytest.mark.parametrize("draft", [None, (CONFIG, NEAR)], ids=["plain", "draft"])
@pytest.mark.parametrize("policy", ["static", "interleaved", "chunked", "disaggregated"])
def test_the_simulators_steps_are_the_engines(policy, draft):
    """On a trace whose events come in the same order: each step takes what it took in the engine."""
    some, right, taken = [(0.001 * (r.id // 2), r) for r in requests(5, 8)], set(), []
    options = Options(pages=9, page=3, slots=3, budget=6, policy=policy, proposals=2 if draft else 0)
    run = engine.Engine(params, CONFIG, options, draft=draft)

    def execute(action):
        seconds, tokens = run(action)
        taken.append(seconds)
        for work in action.works if isinstance(action, Run) else ():
            first = work.start + len(work.tokens)
            right.update((work.id, first + n) for n in range(len(tokens.get(work.id, "?")) - 1))
        return seconds, tokens

    served = drive(some, options, execute)
    tokens = {r.id: (*r.prompt, *served.requests[r.id].tokens) for _, r in some}
    told = {"token": lambda id, n: (*tokens[id], -1)[n], "kept": lambda id, n: (id, n) in right}
    times = iter(taken)
    assert simulate(some, options, lambda action: next(times), **told).steps == served.steps
    assert bool(right) == bool(draft)


def test_a_draft_that_is_the_model_is_always_right():
    """Greedy and sampled: each step of decode gives 1 + k tokens, over prefix hits and a move to another worker."""
    prompt = tuple(range(9))
    arrivals = [(0.0, Request(0, prompt, 13)), (9.0, Request(1, prompt, 13))]
    for policy, how in (("interleaved", Sampling()), ("disaggregated", Sampling(0.8))):
        options = Options(pages=20, page=2, policy=policy, proposals=3)
        draws = {id: engine.Draw(how, 7) for id in range(2)}
        served = engine.serve(params, CONFIG, arrivals, options, draws, draft=(CONFIG, params))
        assert served.requests[1].cached == 8
        assert len([s for s in served.steps if isinstance(s, Run)]) == 2 * (1 + 3)  # 1 + 3 x 4 tokens
        assert served.requests[0].tokens == served.requests[1].tokens


def test_proposals_and_drafts_come_together():
    for options, draft in ((Options(9, proposals=2), None), (Options(9), "ngram")):
        with pytest.raises(ValueError, match="give both, or neither"):
            engine.Engine(params, CONFIG, options, draft=draft)
    with pytest.raises(ValueError, match="same vocabulary"):
        engine.Engine(params, CONFIG, Options(9, proposals=2), draft=(SMALL.with_(V=31), small))


@pytest.mark.slow
def test_batch_invariant_bits():
    """vllm#11658, #7779, #48271, #51187, transformers#25921, batch_invariant_ops#6: no batch, page, chunk, hit, draft
    or preemption changes a bit of a logit."""
    assert sum(invariant_sweep.trace(seed)["compared"] for seed in (1, 2, 4)) > 60


@pytest.mark.parametrize(("params", "config", "dtype"), invariant_sweep.MODELS)
def test_batch_invariant_is_serves_own(params, config, dtype):
    """Prefill and extend, dense and of experts, int8 weights and caches, in float64."""
    wide = tree.map(lambda p: p if p.dtype == torch.int8 else p.double(), params)
    tokens = torch.randint(0, config.V, (2, 5), generator=torch.Generator().manual_seed(0))
    found = []
    for room in (serve, invariant):
        cache = serve.init_cache(config, 2, 9, dtype=dtype)
        first, cache = room.prefill(wide, tokens, cache, config, lengths=torch.tensor([5, 3]))
        found.append((first, room.extend(wide, tokens[:, :2], cache, config)[0]))
    for mine, wanted in zip(*found, strict=True):
        assert (mine - wanted).abs().max() < 1e-12


def test_batch_invariant_over_other_axes():
    with pytest.raises(ValueError, match="mesh axis C: the batch-invariant mode splits heads and features over Y"):
        invariant.check_axes(AbstractMesh({"Y": 2, "C": 2}))


def test_batch_invariant_is_the_model():
    tokens = torch.randint(0, 29, (2, 70), generator=torch.Generator().manual_seed(0))
    cache = serve.init_cache(CONFIG, 2, 70, page=8)
    logits, cache = invariant.prefill(params, tokens[:, :69], cache, CONFIG, lengths=torch.tensor([69, 30]))
    dense = transformer.forward(params, tokens, config=CONFIG)
    assert (logits - torch.stack([dense[0, 68], dense[1, 29]])).abs().max() < 1e-12
    cache = cache | {"lengths": torch.tensor([69, 69])}
    again, _ = serve.prefill(params, tokens[:, 69:], cache | {"lengths": torch.tensor([69, 30])}, CONFIG)
    assert (again[0] - dense[0, 69]).abs().max() < 1e-12


@pytest.mark.parametrize("name", tiles.ACTIVATIONS)
def test_an_activations_bits_do_not_depend_on_the_place(name):
    """torch's own silu and gelu round the last elements of an array in another way than the rest."""
    act, x = tiles.ACTIVATIONS[name], 4 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(act(x), transformer.ACTIVATIONS[name](x), atol=1e-6)
    assert torch.cat([act(part.clone()) for part in x.split(37)]).equal(act(x))


def test_tiles_that_do_not_agree_are_not_used(monkeypatch):
    plain = tiles.product
    off = lambda x, W, sizes=tiles.SIZES: plain(x, W, sizes) * (1 + 1e-9 * (sizes == (16,)))  # noqa: E731
    assert set(tiles.agreeing(params, CONFIG)) <= set(tiles.SIZES)
    monkeypatch.setattr(tiles, "product", off)
    found = tiles.agreeing(params, CONFIG)
    assert 16 not in found
    assert tiles.TILE in found
    monkeypatch.setattr(tiles, "_same_attention", lambda *_: False)
    assert min(tiles.agreeing(params, CONFIG)) == tiles.TILE


@pytest.mark.parametrize("G", [1, 2, 3, 4])
def test_smaller_tiles_give_the_same_bits_where_they_agree(G):
    config = CONFIG.with_(N=2 * G, K=2)
    params = transformer.init(config, 0, torch.float32)
    sizes = tiles.agreeing(params, config)
    tokens = torch.randint(0, 29, (3, 5), generator=torch.Generator().manual_seed(G))
    found = []
    for own in ((tiles.TILE,), sizes):
        cache = serve.init_cache(config, 3, 80, dtype=torch.float32, page=8)
        _, cache = invariant.prefill(params, tokens.repeat(1, 14), cache, config, sizes=own)
        logits = invariant.prefill(params, tokens[:, :1], cache, config, sizes=own)[0]
        found.append((logits, invariant.prefill(params, tokens[:, 1:3], cache, config, sizes=own)[0]))
    for mine, wanted in zip(*found, strict=True):
        assert mine.equal(wanted)


@pytest.mark.parametrize(("D", "F"), [(6, 4), (16, 6), (8, 5), (3, 8)])
def test_a_row_has_the_same_bits_at_each_place_of_a_tile(D, F):
    x, W = torch.randn(64, D), torch.randn(F, D).T
    for matrix in (W, W.contiguous()):
        for size in tiles.SIZES:
            still = tiles.product(x, matrix, (size,))
            for by in (1, 2, 5):
                assert torch.equal(tiles.product(x.roll(by, 0), matrix, (size,)), still.roll(by, 0))


def test_stop_strings_and_ids_outside_the_vocabulary():
    options = Options(pages=8, page=4)
    served = engine.serve(params, CONFIG, [(0.0, Request(0, (1, 2), 9))], options, on_token=lambda id, token: True)
    assert served.requests[0].reason == "stop"
    assert len(served.requests[0].at) == 1
    with pytest.raises(ValueError, match=r"request 7: token 30 .* 0\.\.29"):
        engine.serve(params, CONFIG, [(0.0, Request(7, (30,), 9))], options)


MOE = Config("experts", L=1, D=16, F=12, N=4, K=2, H=4, V=30, E=3, k=2)
experts = transformer.init(MOE, 3, torch.float32)
dense = transformer.init(CONFIG, 1, torch.float32)


def same_bits(mesh, config, whole):
    """Whether engines whose batches, pages and chunks differ have the same logits, by request and place."""
    mine = tree.shard(whole, serve.specs(config, mesh), mesh)
    setups = [{"pages": 9, "page": 2, "slots": 3, "budget": 5}, {"pages": 40, "page": 4, "slots": 6, "budget": 64}]
    found = []
    for setup in setups:
        seen = {}
        keep = lambda id, place, logits, seen=seen: seen.update({(id, place): logits})  # noqa: E731
        arrivals = [(0.001 * r.id, r) for r in requests(3)[:3]]
        engine.serve(mine, config, arrivals, Options(**setup), mesh=mesh, batch_invariant=True, logits=keep)
        found.append(seen)
    return all(torch.equal(logits, found[1][at]) for at, logits in found[0].items())


def engine_on_a_mesh(mesh):
    mine = tree.shard(params, serve.specs(CONFIG, mesh), mesh)
    options = Options(pages=9, page=2, slots=3, budget=5)
    served = engine.serve(mine, CONFIG, [(0.001 * r.id, r) for r in requests(3)], options, mesh=mesh, dtype=torch.int8)
    bits = same_bits(mesh, CONFIG, dense), same_bits(mesh, MOE, experts)
    return {id: times.tokens for id, times in served.requests.items()}, served.seconds, bits


def test_on_a_mesh_all_ranks_take_the_same_steps(ranks):
    """Each rank drives the scheduler; their clocks agree. The cache is of int8. In the batch-invariant mode, the same
    bits."""
    (tokens, seconds, bits), other = ranks(engine_on_a_mesh, {"Y": 2})
    assert (tokens, seconds, bits) == other
    assert bits == (True, True)
    assert {id: len(some) for id, some in tokens.items()} == {r.id: r.max_new_tokens for r in requests(3)}
