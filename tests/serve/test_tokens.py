"""Each request gives the tokens that the model without a cache gives it, whatever computes it and runs beside it; and
those of Hugging Face's generate and vLLM (`tests/oracles/completions.py`)."""

import functools
import itertools
import random
from collections import Counter

import mock_model
import pytest
import stored
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
PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [6, 5, 3], [2]]


@functools.cache
def params_of(name: str) -> dict:
    return transformer.init(MODELS[name], 1 + (name == "small"), torch.float64)


params = params_of("dense")
NEAR = tree.map(lambda p: p + 0.2 * p.std() * torch.sin(torch.arange(p.numel())).view(p.shape), params)


def sharded(params: dict, config: Config, mesh, form: str) -> dict:
    return params if mesh is None else tree.shard(params, serve.specs(config, mesh, form=form), mesh)


def drafted(draft, mesh=None, form="heads"):
    """A draft of the dense model: beside n-grams one that is unlike it, and one that is often right."""
    if draft in (None, "ngram"):
        return draft
    config, own = (SMALL, params_of("small")) if draft == "small" else (CONFIG, NEAR)
    return config, sharded(own, config, mesh, form)


@functools.cache
def wanted(request: Request, name: str = "dense") -> tuple[int, ...]:
    """By the model's own forward pass, which has no cache, up to a stop token."""
    tokens, (how, seed) = list(request.prompt), request.draw
    for _ in range(request.max_new_tokens):
        logits = transformer.forward(params_of(name), torch.tensor([tokens]), config=MODELS[name])[0, -1]
        u = float(uniforms([seed], [len(tokens)]))
        drawn = (probabilities(logits, how).cumsum(0) <= u).sum() if how.temperature else logits.argmax()
        tokens.append(int(drawn))
        if tokens[-1] in request.stop:
            break
    return tuple(tokens[len(request.prompt) :])


def traced(trace, name="dense", draft=None, mesh=None, form="heads") -> Counter:
    """A trace (options, arrivals, what is cancelled) through the engine, its clock drawn: audited, each request's
    tokens as it has them alone, and the simulator's steps as the engine's. How often what happened."""
    options, arrivals, cancel = trace
    audited, chance = mock_model.Audited(options, random.Random(0)), random.Random(1)
    mine = sharded(params_of(name), MODELS[name], mesh, form)
    clock = itertools.accumulate(chance.choice([0.0, 1.0, 1.0, 2.5]) for _ in itertools.count()).__next__
    given = {"mesh": mesh, "form": form, "draft": drafted(draft, mesh, form), "clock": clock}
    run, right, taken = engine.Engine(mine, MODELS[name], options, **given), set(), []

    def execute(action):
        seconds, event = run(action)
        taken.append(seconds)
        for work in action.works if isinstance(action, Run) else ():
            first = work.start + len(work.tokens)
            right.update((work.id, first + n) for n in range(len(event.tokens.get(work.id, "?")) - 1))
        return seconds, event

    served = drive(arrivals, options, execute, cancel=cancel, watch=audited.watch)
    mock_model.check(served, arrivals, cancel, options, functools.partial(wanted, name=name))
    tokens, times = {r.id: (*r.prompt, *served.requests[r.id].tokens) for _, r in arrivals}, iter(taken)
    told = {"token": lambda id, n: (*tokens[id], *[-1] * 9)[n], "kept": lambda id, n: (id, n) in right}
    assert simulate(arrivals, options, lambda action: next(times), cancel=cancel, **told).steps == served.steps
    return audited.ended(served) + Counter({"proposals kept": len(right)})


RICH = 3, 7, 8, 10, 16, 25  # seeds of traces in which most happens


@pytest.mark.parametrize("seeds", [RICH, pytest.param(range(300), marks=pytest.mark.sweep)], ids=["rich", "all"])
@pytest.mark.parametrize("draft", [None, "ngram", "small", "near"])
def test_random_traces(draft, seeds):
    """Preempted, prefixed, moved and speculated: what a draft proposes changes no token."""
    total: Counter = Counter()
    for seed in seeds:
        options, arrivals, cancel = mock_model.trace(seed, drafted=draft is not None)
        arrivals = [(at, r._replace(draw=Draw(HOW, 100 + r.id)) if r.id % 2 else r) for at, r in arrivals]
        total += traced((options, arrivals, cancel), draft=draft)
    for what in ["Preempt", "Move", "hits", "cancelled", *["proposals kept"] * (draft == "near")]:
        assert total[what], (what, total)


def generated(own=params, config=CONFIG, **options) -> list[list[list[int]]]:
    """By `generate`: greedy, and sampled with a seed for each prompt."""
    ways = [{}, {"temperature": HOW.temperature, "top_k": HOW.top_k, "top_p": HOW.top_p, "seed": [3, 1, 4, 1]}]
    return [serve.generate(own, PROMPTS, config, 9, **way, **options) for way in ways]


def each(name="dense") -> list[list[list[int]]]:
    """What `generated` should say."""
    draws = [[Draw(how, seed) for seed in (3, 1, 4, 1)] for how in (Sampling(), HOW)]
    rows = [[Request(0, tuple(p), 9, draw=d) for p, d in zip(PROMPTS, own, strict=True)] for own in draws]
    return [[list(wanted(request, name)) for request in row] for row in rows]


@pytest.mark.parametrize("draft", [None, "ngram", "small", "near"])
def test_generate(draft):
    for options in ({"proposals": 1}, {"proposals": 4, "page": 3}):
        assert generated(draft=drafted(draft), **options) == each()
    if draft == "near":
        assert generated(draft=drafted(draft)[::-1]) == each()  # in either order


def by_ranks(mesh, name, form, policy, draft):
    """By the engine how often what happened; or what `generate` gives."""
    if policy == "generate":
        own = sharded(params_of(name), MODELS[name], mesh, form)
        return generated(own, MODELS[name], mesh=mesh, form=form, draft=drafted(draft, mesh, form))
    groups = mesh.sizes.get("Z", 1) * mesh.sizes.get("E", 1)
    prompts = [(*range(4 * (i % 3)), *PROMPTS[i % 4]) for i in range(12)]  # of which some begin alike
    draws = [Draw(HOW if i % 2 else Sampling(), i) for i in range(12)]
    arrivals = [(0.1 * (i // 3), Request(i, prompts[i], 1 + 5 * i % 9, draw=draws[i])) for i in range(12)]
    options = Options(11, page=2, slots=8, budget=7, policy=policy, proposals=2 * (draft is not None), groups=groups)
    return traced((options, arrivals, []), name, draft, mesh, form)


MESHES = [
    ({"Y": 2, "Z": 2}, "dense", "sequence", "generate", "small"),
    ({"Z": 2, "Y": 2}, "dense", "heads", "chunked", "small"),
    ({"Z": 2}, "dense", "heads_batch", "interleaved", None),
    ({"E": 2}, "experts", "heads", "disaggregated", None),
    ({"E": 2, "Y": 2}, "deepseek", "experts", "static", None),
]


@pytest.mark.parametrize(("sizes", "name", "form", "policy", "draft"), MESHES)
def test_on_a_mesh(ranks, sizes, name, form, policy, draft):
    """Each rank drives the scheduler, and their clocks agree; attention by data: requests are split over groups of
    ranks that have pages of their own."""
    found = ranks(by_ranks, sizes, name, form, policy, draft)
    assert all(other == found[0] for other in found)
    if policy == "generate":
        assert found[0] == each()
    else:
        assert found[0]["Preempt"]
        assert found[0]["steps of several groups"]


def test_a_draft_that_is_the_model_is_always_right():
    """Greedy and sampled: each step of decode gives 1 + k tokens, over prefix hits and a move to another worker."""
    for policy, how in (("interleaved", Sampling()), ("disaggregated", Sampling(0.8))):
        options = Options(pages=20, page=2, policy=policy, proposals=3)
        arrivals = [(9.0 * id, Request(id, tuple(range(9)), 13, draw=Draw(how, 7))) for id in range(2)]
        served = engine.serve(params, CONFIG, arrivals, options, draft=(CONFIG, params))
        assert served.requests[1].cached == 8
        assert len([s for s in served.steps if isinstance(s, Run)]) == 2 * (1 + 3)  # 1 + 3 x 4 tokens
    steps = list(serve.stream(params, [[3, 1], [2]], CONFIG, 13, Sampling(0.8), draft=(CONFIG, params), proposals=3))
    assert [len(tokens) for tokens in steps] == [2, 8, 8, 8]


def test_logprobs_and_scores_are_the_models():
    tokens = [t for step in serve.stream(params, PROMPTS, CONFIG, 4, Sampling()) for t in step if t.row == 0]
    text = [*PROMPTS[0], *(t.id for t in tokens)]
    logits = transformer.forward(params, torch.tensor([text[:-1]]), config=CONFIG)[0].log_softmax(-1)
    told = logits.gather(-1, torch.tensor(text[1:])[:, None])[:, 0].tolist()
    assert [t.logprob for t in tokens] == pytest.approx(told[-4:], abs=1e-12)
    assert serve.score(params, [text, [7, 7]], CONFIG)[0] == pytest.approx(told, abs=1e-12)
    assert serve.generate(params, [], CONFIG, 3) == serve.score(params, [], CONFIG) == []
    assert serve.generate(params, [[1], [2]], CONFIG, 0) == [[], []]


def test_a_prompt_is_drawn_alike_alone_and_beside_others_and_anew_where_it_comes_again():
    def drawn(prompts, seed=3):
        return serve.generate(params, prompts, CONFIG, 7, temperature=1.5, seed=seed)

    together = drawn(PROMPTS)
    assert together[:3] == [drawn([p])[0] for p in PROMPTS[:3]]
    assert together[1] not in (together[3], drawn(PROMPTS, seed=4)[1])


WAYS = {  # of Hugging Face's models; each way gives what the others give, as the tests above say
    "untied": {},
    "tied": {"draft": "ngram", "page": 5},
    "gqa": {"draft": (stored.GREEDY.configs["mqa"], stored.GREEDY.params_of("mqa")), "page": 16},
    "mqa": None,  # by the engine
}


@pytest.mark.slow
@pytest.mark.parametrize("name", stored.GREEDY.configs)
def test_greedy_tokens_are_hugging_faces(name):
    """Ragged batches in a contiguous cache, in pages with proposals of n-grams and of a draft, and by the engine."""
    table, config, own = stored.GREEDY, stored.GREEDY.configs[name], stored.GREEDY.params_of(name)
    prompts, answers, way = table.prompts_of(name), table.stored()[name], WAYS[name]
    assert len({tuple(row) for row in answers}) > 35  # of 50
    if way is not None:
        assert serve.generate(own, prompts, config, table.new, **way) == answers
        return
    arrivals = [(0.0, Request(i, tuple(prompt), table.new)) for i, prompt in enumerate(prompts)]
    served = engine.serve(own, config, arrivals, Options(pages=60, page=5, slots=20, budget=48))
    assert [list(served.requests[i].tokens) for i in range(len(prompts))] == answers


@pytest.mark.parametrize("name", stored.VLLM.configs)
def test_the_engines_tokens_and_hits_are_vllms(name):
    """All prompts, and when they are done, all of them again: how much of each is found."""
    table, prompts, answers = stored.VLLM, stored.VLLM.prompts_of(name), stored.VLLM.stored()[name]
    rounds = [(1e6 * (i >= len(prompts)), p) for i, p in enumerate(2 * prompts)]
    arrivals = [(when, Request(i, tuple(p), table.new)) for i, (when, p) in enumerate(rounds)]
    options = Options(pages=60, page=stored.PAGE, slots=12, budget=256)
    served = engine.serve(table.params_of(name), table.configs[name], arrivals, options)
    both = [served.requests[i] for i in range(len(arrivals))]
    assert [list(times.tokens) for times in both] == 2 * answers["tokens"]
    assert [times.cached for times in both[len(prompts) :]] == answers["cached"]


def test_an_id_of_the_stop_ends_a_completion():
    whole = serve.generate(params, PROMPTS, CONFIG, 9)
    end = whole[0][4]
    for draft, stop in ((None, [end]), ("ngram", end)):
        got = serve.generate(params, PROMPTS, CONFIG, 9, stop=stop, draft=draft)
        assert got == [row[: row.index(end) + 1] if end in row else row for row in whole]


def test_a_stop_text_ends_a_completion_at_its_token():
    """Whatever more a step has given."""
    whole = serve.generate(params, PROMPTS[:1], CONFIG, 9)[0]
    arrivals = [(0.0, Request(0, tuple(PROMPTS[0]), 9, stops=(bytes(whole[2:4]).decode(),)))]
    given = {"tokenizer": ByteText(), "draft": (CONFIG, params)}
    (times,) = engine.serve(params, CONFIG, arrivals, Options(8, page=4, proposals=3), **given).requests.values()
    assert (times.reason, list(times.tokens)) == ("stop", whole[:4])
