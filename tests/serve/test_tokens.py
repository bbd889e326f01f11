"""Each request gives the tokens that the model without a cache gives it, whatever computes it and runs beside it."""

import functools
import random

import pytest
import torch

from scaling import serve, tree
from scaling.configs import Config, Latent
from scaling.models import transformer
from scaling.models.text import ByteText
from scaling.serve import engine
from scaling.serve.requests import Draw, Request, Sampling
from scaling.serve.sampling import probabilities, uniforms
from scaling.serve.simulate import drive, simulate
from scaling.serve.states import Options, Run

CONFIG = Config("tiny", L=2, D=16, F=24, N=4, K=2, H=4, V=32, window=(None, 7))
SMALL = Config("small", L=1, D=8, F=12, N=4, K=1, H=4, V=32)
DEEPSEEK = CONFIG.with_(
    L=3, dense_layers=1, F_dense=40, K=4, H=8, E=4, k=2, shared=1, routing="sigmoid", expert_groups=2, window=None,
    latent=Latent(q_rank=12, kv_rank=60, nope=4, rope=4, value=8, interleaved=False),
)  # fmt: skip
MODELS = {"dense": CONFIG, "experts": CONFIG.with_(E=4, k=2, shared=1), "deepseek": DEEPSEEK, "small": SMALL}
HOW = Sampling(0.9, top_k=12, top_p=0.95)
DRAFTS = {"plain": None, "ngram": "ngram", "draft": "small"}
drafts = pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
policies = pytest.mark.parametrize("policy", ["static", "interleaved", "chunked", "disaggregated"])


@functools.cache
def params_of(name: str) -> dict:
    return transformer.init(MODELS[name], 1 + (name == "small"), torch.float64)


params = params_of("dense")
NEAR = tree.map(lambda p: p + 0.2 * p.std() * torch.sin(torch.arange(p.numel())).view(p.shape), params)


def drafted(draft, mesh=None, form="heads"):
    if draft != "small":
        return draft
    own = params_of("small")
    return SMALL, own if mesh is None else tree.shard(own, serve.specs(SMALL, mesh, form=form), mesh)


def requests(seed: int, count: int = 6) -> list[Request]:
    """Some begin alike; every other one is sampled."""
    chance = random.Random(seed)
    stem = [chance.randrange(29) for _ in range(8)]
    prompts = [stem[: chance.choice([0, 4, 8])] + [chance.randrange(29)] * chance.randint(1, 5) for _ in range(count)]
    draws = [Draw(Sampling() if i % 2 else HOW, 100 + i) for i in range(count)]
    return [Request(i, tuple(p), chance.randint(1, 9), draw=draws[i]) for i, p in enumerate(prompts)]


@functools.cache
def wanted(request: Request, name: str = "dense") -> tuple[int, ...]:
    tokens, (how, seed) = list(request.prompt), request.draw
    for _ in range(request.max_new_tokens):
        logits = transformer.forward(params_of(name), torch.tensor([tokens]), config=MODELS[name])[0, -1]
        u = float(uniforms([seed], [len(tokens)]))
        tokens.append(
            int((probabilities(logits, how).cumsum(0) <= u).sum()) if how.temperature else int(logits.argmax())
        )
    return tuple(tokens[len(request.prompt) :])


def generated(some: list[Request], own=params, config=CONFIG, **options) -> dict[int, tuple[int, ...]]:
    """By `generate`: those that are greedy together, and those that are sampled."""
    found = {}
    for rows in (some[1::2], some[::2]):
        how, seeds = rows[0].draw.how, [r.draw.seed for r in rows]
        given = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p, "seed": seeds} | options
        tokens = serve.generate(own, [r.prompt for r in rows], config, max(r.max_new_tokens for r in rows), **given)
        found |= {r.id: tuple(row[: r.max_new_tokens]) for r, row in zip(rows, tokens, strict=True)}
    return found


@drafts
@pytest.mark.parametrize("page", [None, 3])
def test_generate(draft, page):
    some = requests(2)
    for proposals in (1, 4) if draft else (4,):
        found = generated(some, draft=drafted(draft), page=page, proposals=proposals)
        assert found == {r.id: wanted(r) for r in some}
    assert generated(some[:2], draft=drafted(draft)) == {r.id: wanted(r) for r in some[:2]}


@drafts
@policies
def test_the_engine(policy, draft):
    """Preempted, prefixed and speculated: what a draft proposes changes no token."""
    some = requests(3)
    options = Options(pages=11, page=2, slots=3, budget=5, policy=policy, proposals=3 if draft else 0)
    served = engine.serve(params, CONFIG, [(0.001 * (r.id // 2), r) for r in some], options, draft=drafted(draft))
    assert {id: times.tokens for id, times in served.requests.items()} == {r.id: wanted(r) for r in some}


def by_ranks(mesh, name, form, policy, proposals, some):
    """(what each request is given, the seconds, how often rows of one group only were computed, whether some were
    preempted): by the engine, or by `generate`."""
    config, draft = MODELS[name], "small" if proposals else None
    mine = tree.shard(params_of(name), serve.specs(config, mesh, form=form), mesh)
    given = {"mesh": mesh, "form": form, "draft": drafted(draft, mesh, form)}
    if policy == "generate":
        return generated(some, mine, config, **given), 0, 1, 1
    groups = mesh.sizes.get("Z", 1) * mesh.sizes.get("E", 1)
    options = Options(11, page=2, slots=8, budget=7, policy=policy, proposals=proposals, groups=groups)
    served = engine.serve(mine, config, [(0.001 * (r.id // 3), r) for r in some], options, **given)
    uneven = [len({work.group for work in step.works}) for step in served.steps if isinstance(step, Run)].count(1)
    preempted = sum(times.preempted for times in served.requests.values())
    return {id: times.tokens for id, times in served.requests.items()}, served.seconds, uneven, preempted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "name", "form", "policy", "proposals"),
    [
        ({"Y": 2, "Z": 2}, "dense", "heads", "generate", 0),
        ({"Y": 2, "Z": 2}, "dense", "sequence", "generate", 2),
        ({"Y": 2}, "dense", "heads", "chunked", 0),
        ({"Z": 2, "Y": 2}, "dense", "heads", "chunked", 2),
        ({"Z": 2}, "dense", "heads_batch", "interleaved", 0),
        ({"E": 2}, "experts", "heads", "disaggregated", 0),
        ({"E": 2, "Y": 2}, "experts", "experts", "chunked", 0),
        ({"E": 2, "Y": 2}, "deepseek", "experts", "static", 0),
    ],
)
def test_on_a_mesh(ranks, sizes, name, form, policy, proposals):
    """Each rank drives the scheduler, and their clocks agree; attention by data: requests are split over groups of
    ranks that have pages of their own."""
    some = requests(4, 12)
    found = ranks(by_ranks, sizes, name, form, policy, proposals, some)
    assert all(other == found[0] for other in found)
    tokens, _, uneven, preempted = found[0]
    assert uneven
    assert preempted
    assert tokens == {r.id: wanted(r, name) for r in some}


@policies
@pytest.mark.parametrize("draft", [None, (CONFIG, NEAR)], ids=["plain", "draft"])
def test_the_simulators_steps_are_the_engines(policy, draft):
    """On a trace whose events come in the same order: each step takes what it took in the engine."""
    some, right, taken = [(0.001 * (r.id // 2), r) for r in requests(5, 8)], set(), []
    options = Options(pages=9, page=3, slots=3, budget=6, policy=policy, proposals=2 if draft else 0)
    run = engine.Engine(params, CONFIG, options, draft=draft)

    def execute(action):
        seconds, event = run(action)
        taken.append(seconds)
        for work in action.works if isinstance(action, Run) else ():
            first = work.start + len(work.tokens)
            right.update((work.id, first + n) for n in range(len(event.tokens.get(work.id, "?")) - 1))
        return seconds, event

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
    steps = list(serve.stream(params, [[3, 1], [2]], CONFIG, 13, Sampling(0.8), draft=(CONFIG, params), proposals=3))
    assert [len(tokens) for tokens in steps] == [2, 8, 8, 8]


def test_proposals_and_drafts_come_together():
    for options, draft in ((Options(9, proposals=2), None), (Options(9), "ngram")):
        with pytest.raises(ValueError, match="give both, or neither"):
            engine.Engine(params, CONFIG, options, draft=draft)


def test_stops_and_ids_outside_the_vocabulary():
    whole = serve.generate(params, PROMPTS, CONFIG, 9)
    end = whole[0][4]
    for draft in (None, "ngram"):
        got = serve.generate(params, PROMPTS, CONFIG, 9, stop=[end], draft=draft)
        assert got == [row[: row.index(end) + 1] if end in row else row for row in whole]
    assert serve.generate(params, PROMPTS, CONFIG, 9, stop=end) == got
    text = Request(0, tuple(PROMPTS[0]), 9, stops=(bytes(whole[0][3:5]).decode(),))
    served = engine.serve(params, CONFIG, [(0.0, text)], Options(pages=8, page=4), tokenizer=ByteText())
    assert (served.requests[0].reason, list(served.requests[0].tokens)) == ("stop", whole[0][:5])
    with pytest.raises(ValueError, match=r"request 7: token 32 .* 0\.\.31"):
        engine.serve(params, CONFIG, [(0.0, Request(7, (32,), 9))], Options(pages=8, page=4))
    with pytest.raises(ValueError, match=r"request 0: a stop text .*\n  fix: "):
        engine.serve(params, CONFIG, [(0.0, text)], Options(pages=8, page=4))


PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [6, 5, 3], [2]]


def test_logprobs_and_scores_are_the_models():
    tokens = [t for step in serve.stream(params, PROMPTS, CONFIG, 4, Sampling()) for t in step if t.row == 0]
    text = [*PROMPTS[0], *(t.id for t in tokens)]
    logits = transformer.forward(params, torch.tensor([text[:-1]]), config=CONFIG)[0].log_softmax(-1)
    wanted = logits.gather(-1, torch.tensor(text[1:])[:, None])[:, 0].tolist()
    assert [t.logprob for t in tokens] == pytest.approx(wanted[-4:], abs=1e-12)
    assert serve.score(params, [text, [7, 7]], CONFIG)[0] == pytest.approx(wanted, abs=1e-12)


def test_the_same_prompt_is_drawn_anew():
    plain, zero = (serve.generate(params, PROMPTS, CONFIG, 7, temperature=1.5, **seed) for seed in ({}, {"seed": 0}))
    assert plain == zero
    together = serve.generate(params, PROMPTS, CONFIG, 7, temperature=1.5, seed=3)
    assert together[1] != together[3]
    assert together[:3] == [serve.generate(params, [p], CONFIG, 7, temperature=1.5, seed=3)[0] for p in PROMPTS[:3]]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"), ({"prompts": [[32]]}, "prompt 0: token 32.*0..31"),
        ({"prompts": [[-1]]}, "token -1"), ({"max_new_tokens": -1}, "max_new_tokens"), ({"top_k": 0}, "top_k"),
        ({"draft": 3}, "draft=3"), ({"draft": "ngram", "proposals": 0}, "proposals"),
        ({"draft": (SMALL.with_(V=33), params)}, "same vocabulary"), ({"page": 0}, "page"),
    ],
)  # fmt: skip
def test_bad_input(change, named):
    options = {"prompts": [[1]], "max_new_tokens": 2, "config": CONFIG} | change
    with pytest.raises(ValueError, match=f"(?s){named}"):
        serve.generate(params, **options)


def test_a_draft_in_either_order_and_nothing_to_do():
    assert generated(requests(2), draft=drafted("small")[::-1]) == generated(requests(2))
    assert serve.generate(params, [], CONFIG, 3) == []
    assert serve.generate(params, [[1], [2]], CONFIG, 0) == [[], []]
