"""The engine with a real model: each request's tokens are those it gives alone."""

import functools
import random

import pytest
import torch

from scaling import serve, tree
from scaling.configs import Config, Latent
from scaling.models import transformer
from scaling.serve import engine
from scaling.serve.requests import Draw, Request, Sampling
from scaling.serve.simulate import drive, simulate
from scaling.serve.states import Options, Run

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
    some = [r if r.id % 2 else r._replace(draw=Draw(how, 100 + r.id)) for r in some]
    options = Options(pages=11, page=2, slots=3, budget=5, policy=policy, proposals=3 if draft else 0)
    arrivals = [(0.001 * (r.id // 2), r) for r in some]
    served = engine.serve(params, CONFIG, arrivals, options, draft=draft)
    for r in some:
        assert list(served.requests[r.id].tokens) == alone(r, None if r.id % 2 else 100 + r.id)


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
    for policy, how in (("interleaved", Sampling()), ("disaggregated", Sampling(0.8))):
        options = Options(pages=20, page=2, policy=policy, proposals=3)
        arrivals = [(9.0 * id, Request(id, prompt, 13, draw=Draw(how, 7))) for id in range(2)]
        served = engine.serve(params, CONFIG, arrivals, options, draft=(CONFIG, params))
        assert served.requests[1].cached == 8
        assert len([s for s in served.steps if isinstance(s, Run)]) == 2 * (1 + 3)  # 1 + 3 x 4 tokens
        assert served.requests[0].tokens == served.requests[1].tokens


def test_proposals_and_drafts_come_together():
    for options, draft in ((Options(9, proposals=2), None), (Options(9), "ngram")):
        with pytest.raises(ValueError, match="give both, or neither"):
            engine.Engine(params, CONFIG, options, draft=draft)
    with pytest.raises(ValueError, match="same vocabulary"):
        engine.Engine(params, CONFIG, Options(9, proposals=2), draft=(SMALL.with_(V=31), small))


def test_stop_strings_and_ids_outside_the_vocabulary():
    options = Options(pages=8, page=4)
    served = engine.serve(params, CONFIG, [(0.0, Request(0, (1, 2), 9))], options, on_token=lambda id, token: True)
    assert served.requests[0].reason == "stop"
    assert len(served.requests[0].at) == 1
    with pytest.raises(ValueError, match=r"request 7: token 30 .* 0\.\.29"):
        engine.serve(params, CONFIG, [(0.0, Request(7, (30,), 9))], options)


DEEPSEEK = CONFIG.with_(
    L=3, dense_layers=1, F_dense=40, K=4, H=8, E=4, k=2, shared=1, routing="sigmoid", expert_groups=2, window=None,
    latent=Latent(q_rank=12, kv_rank=60, nope=4, rope=4, value=8, interleaved=False),
)  # fmt: skip
MODELS = {"dense": CONFIG, "experts": CONFIG.with_(E=4, k=2, shared=1), "deepseek": DEEPSEEK}


def engine_over_groups(mesh, name, form, policy, proposals, prompts):
    """(what each request is given, how often rows of one group only were computed, whether some were preempted)."""
    config = MODELS[name]
    mine = tree.shard(transformer.init(config, 1, torch.float64), serve.specs(config, mesh, form=form), mesh)
    options = Options(11, page=2, slots=8, budget=7, policy=policy, proposals=proposals, groups=2)
    how, draft = Sampling(0.9, top_k=12), "ngram" if proposals else None
    prompts = [r if r.id % 2 else r._replace(draw=Draw(how, r.id)) for r in prompts]
    arrivals = [(0.001 * (r.id // 3), r) for r in prompts]
    served = engine.serve(mine, config, arrivals, options, mesh=mesh, form=form, draft=draft)
    groups = [len({work.group for work in step.works}) for step in served.steps if isinstance(step, Run)]
    preempted = sum(times.preempted for times in served.requests.values())
    return {id: times.tokens for id, times in served.requests.items()}, groups.count(1), preempted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "name", "form", "policy", "proposals"),
    [
        ({"Z": 2, "Y": 2}, "dense", "heads", "chunked", 2),
        ({"Z": 2}, "dense", "heads_batch", "interleaved", 0),
        ({"E": 2}, "experts", "heads", "disaggregated", 0),
        ({"E": 2, "Y": 2}, "experts", "experts", "chunked", 0),
        ({"E": 2, "Y": 2}, "deepseek", "experts", "static", 2),
    ],
)
def test_requests_split_over_ranks_give_what_they_give_alone(ranks, sizes, name, form, policy, proposals):
    """Attention by data: greedy and sampled requests, on groups of ranks that have pages of their own."""
    some = requests(4, 12)
    found = ranks(engine_over_groups, sizes, name, form, policy, proposals, some)
    assert all(other == found[0] for other in found)
    tokens, uneven, preempted = found[0]
    assert uneven
    assert preempted
    config, params = MODELS[name], transformer.init(MODELS[name], 1, torch.float64)
    for r in some:
        how = {"temperature": 0.9, "top_k": 12, "seed": [r.id]} if r.id % 2 == 0 else {}
        assert list(tokens[r.id]) == serve.generate(params, [r.prompt], config, r.max_new_tokens, **how)[0]


def engine_on_a_mesh(mesh):
    mine = tree.shard(params, serve.specs(CONFIG, mesh), mesh)
    options = Options(pages=9, page=2, slots=3, budget=5)
    served = engine.serve(mine, CONFIG, [(0.001 * r.id, r) for r in requests(3)], options, mesh=mesh, dtype=torch.int8)
    return {id: times.tokens for id, times in served.requests.items()}, served.seconds


def test_on_a_mesh_all_ranks_take_the_same_steps(ranks):
    """Each rank drives the scheduler; their clocks agree. The cache is of int8."""
    (tokens, seconds), other = ranks(engine_on_a_mesh, {"Y": 2})
    assert (tokens, seconds) == other
    assert {id: len(some) for id, some in tokens.items()} == {r.id: r.max_new_tokens for r in requests(3)}
