"""Each request gives the tokens that the model without a cache gives it, whatever computes it and runs beside it; and
those of Hugging Face's generate and vLLM (`tests/oracles/completions.py`)."""

import functools
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import stored
import test_engine
import torch
from probes import shaken
from refused import read_table
from test_decode import CONFIGS, PLAIN

from scaling import serve, tree
from scaling.configs import Linear
from scaling.models import transformer
from scaling.serve import engine
from scaling.serve.fixed import PagedModel
from scaling.serve.requests import Draw, Request, Sampling
from scaling.serve.sampling import Drawn, probabilities, uniforms
from scaling.serve.simulate import drive, simulate
from scaling.serve.states import Options, Run

DENSE = PLAIN.with_(window=(None, 7))
SMALL = PLAIN.with_(name="small", L=1, D=8, F=12, K=1, H=4)
LINEAR = PLAIN.with_(L=3, linear=Linear(2, 4, 6, 8, 4, (0, 2)))
MODELS = {
    "dense": DENSE,
    "chunks": DENSE.with_(chunked=True),
    "linear": LINEAR,
    "experts": CONFIGS["experts"],
    "deepseek": CONFIGS["deepseek"],
    "small": SMALL,
}
HOW = Sampling(0.9, top_k=12, top_p=0.95)
PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [6, 5, 3], [2]]
SEEDS = [3, 1, 4, 1]


@functools.cache
def params_of(name: str) -> dict:
    """ "near": almost the dense model's."""
    if name != "near":
        return shaken(MODELS[name])
    return tree.map(lambda p: p + 0.2 * p.std() * torch.sin(torch.arange(p.numel())).view(p.shape), params_of("dense"))


def sharded(name: str, mesh=None, form="heads") -> dict:
    if mesh is None:
        return params_of(name)
    return tree.shard(params_of(name), serve.specs(MODELS[name], mesh, form=form), mesh)


def drafted(draft, mesh=None, form="heads"):
    """For the dense model: "small", which is unlike it, or "near", which is often right; another draft as it is."""
    if draft not in ("small", "near"):
        return draft
    return SMALL if draft == "small" else DENSE, sharded(draft, mesh, form)


def test_in_fp32_a_request_gives_alone_what_it_gives_in_a_batch_and_with_a_draft():
    """Greedy and sampled, but for one token in a million. In bf16 several of these differ, which the docs say."""
    params = tree.map(lambda p: p.to(torch.float32), params_of("dense"))
    prompts = [[(7 * i + j * j) % DENSE.V for j in range(1 + i)] for i in range(4)]
    for how in ({}, {"temperature": 1.0}):
        both = serve.generate(params, prompts, DENSE, 8, seed=range(4), **how)
        assert serve.generate(params, prompts, DENSE, 8, seed=range(4), draft="ngram", **how) == both
        for i in (0, 3):
            assert serve.generate(params, [prompts[i]], DENSE, 8, seed=[i], **how) == [both[i]]


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


def traced(mesh, trace, name="dense", form="heads", draft=None, ahead=False):
    """A trace (options, arrivals, what is cancelled) through the engine, its clock drawn: audited, and the simulator's
    steps as the engine's. (What was served, how often what happened.)"""
    options, arrivals, cancel = trace
    audited, chance = test_engine.Audited(options, random.Random(0)), random.Random(1)
    clock = itertools.accumulate(chance.choice([0.0, 1.0, 1.0, 2.5]) for _ in itertools.count()).__next__
    given = {"mesh": mesh, "form": form, "draft": drafted(draft, mesh, form), "clock": clock}
    run, right, taken = engine.Engine(sharded(name, mesh, form), MODELS[name], options, **given), set(), []

    run.ahead = ahead

    def execute(action):
        seconds, event = run(action)
        taken.append(seconds)
        for work in action.works if isinstance(action, Run) else ():
            first = work.start + len(work.tokens)
            right.update((work.id, first + n) for n in range(len(event.tokens.get(work.id, "?")) - 1))
        return seconds, event

    served = drive(arrivals, options, execute, cancel=cancel, watch=audited.watch)
    tokens, times = {r.id: (*r.prompt, *served.requests[r.id].tokens) for _, r in arrivals}, iter(taken)
    told = {"token": lambda id, n: (*tokens[id], *[-1] * 9)[n], "kept": lambda id, n: (id, n) in right}
    assert simulate(arrivals, options, lambda action: next(times), cancel=cancel, **told).steps == served.steps
    return served, audited.ended(served) + Counter({"proposals kept": len(right)})


RICH = 1, 14  # seeds of traces in which everything happens


@pytest.mark.parametrize("seeds", [RICH, pytest.param(range(300), marks=pytest.mark.sweep)], ids=["rich", "all"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("draft", [None, "ahead", "chunks", "linear", "ngram", "small", "near"])
def test_random_traces(draft, window, seeds):
    """Preempted, prefixed, moved and speculated: what a draft proposes changes no token, nor do steps that are started
    ahead, of which each row's that has ended is dropped. A model with linear layers has states beside the pages; layers
    with a window of 7 keep all pages, or give back those that fell out of it."""
    total: Counter = Counter()
    name, plain = draft if draft in ("chunks", "linear") else "dense", draft in (None, "ahead", "chunks", "linear")
    for seed in seeds:
        options, arrivals, cancel = test_engine.trace(seed, drafted=not plain)
        options = replace(options, prefix=options.prefix and name != "linear")
        options = replace(options, policy="chunked", window=window) if window else options
        arrivals = [(at, r._replace(draw=Draw(HOW, 100 + r.id)) if r.id % 2 else r) for at, r in arrivals]
        way = {"ahead": draft == "ahead", "draft": None if plain else draft, "name": name}
        served, happened = traced(None, (options, arrivals, cancel), **way)
        test_engine.check(served, arrivals, cancel, options, functools.partial(wanted, name=name))
        total += happened
    happens = ["Preempt", "given back" if window else "Move", "chunks", "cancelled"]
    happens += ["hits", "full hits", "evictions"] * (name != "linear") + ["proposals kept"] * (draft == "near")
    assert all(total[what] for what in happens), total


def test_a_step_is_started_before_the_tokens_of_the_one_before_are_read(monkeypatch):
    """A row that ends, by length or with a stop id, has one token too many where its pages have room for it."""
    calls = []
    for kind, name in ((PagedModel, "logits"), (Drawn, "read")):
        own = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *a, name=name, own=own, **b: calls.append(name) or own(*a, **b))
    request, both = Request(0, tuple(PROMPTS[0]), 7, draw=Draw(HOW, 3)), ["logits", "read"]
    for stop in (frozenset(), frozenset({wanted(request)[4]})):
        request, options = request._replace(stop=stop), Options(4, page=5)
        run = engine.Engine(params_of("dense"), DENSE, options)
        run.ahead = True
        served = drive([(0.0, request)], options, run)
        assert served.requests[0].tokens == wanted(request)
        assert calls == [*both, "logits", *both * (len(wanted(request)) - 1)]
        calls.clear()


ALONE = [("chunked", {}), ("static", {}), ("disaggregated", {}), ("chunked", {"window": 7})]
ALONE += [("chunked", {"ahead": True}), ("disaggregated", {"ahead": True}), ("chunked", {"draft": "ngram"})]
ALONE += [("interleaved", {"draft": "near"}), ("static", {"name": "linear"}), ("disaggregated", {"name": "linear"})]
ALONE += [pytest.param("chunked", {"compile": "eager"}, marks=pytest.mark.sweep)]


@pytest.mark.parametrize(("policy", "way"), ALONE, ids=str)
def test_a_request_whose_logits_are_not_finite_ends_alone(policy, way):
    """The embeddings of three tokens are infinite. Whoever goes on after one ends, and the others get their tokens: in
    its pages, after one that was proposed in vain or started ahead, and beside longer rows, whose padding has id 0."""
    way = {"name": "dense", "ahead": False, "draft": None, "window": None} | way
    name, ahead, window, draft = (way.pop(key) for key in ("name", "ahead", "window", "draft"))
    params, proposals = params_of(name) | {"embed": params_of(name)["embed"].clone()}, 0 if draft is None else 5
    bad, chance, ends = {0, 7, 9}, random.Random(1), Counter()
    params["embed"][[*bad]], good = torch.inf, [*{*range(MODELS[name].V)} - bad]
    options = Options(26, 4, 3, 12, policy, name != "linear", proposals, window=window)
    texts = [tuple(chance.choice(good) for _ in range(1 + 5 * i % 23)) for i in range(40)]
    texts = [(*text, 7) if i % 9 == 0 else text for i, text in enumerate(texts)]
    requests = [
        Request(i, text, 1 + 3 * i % 11, frozenset({9} if i % 2 else ()), Draw(Sampling(1.5), i))
        for i, text in enumerate(texts)
    ]
    run = engine.Engine(params, MODELS[name], options, draft=drafted(draft), **way)
    run.ahead = ahead
    served = drive([(0.0, request) for request in requests], options, run).requests
    for request in requests:
        tokens = () if 7 in request.prompt else wanted(request, name)
        tokens = tokens[: next((n for n, token in enumerate(tokens, 1) if token in bad), len(tokens))]
        over = tokens and (tokens[-1] in request.stop or len(tokens) == request.max_new_tokens)
        assert served[request.id].tokens == tokens, request
        assert served[request.id].reason.startswith(("stop", "length") if over else "failed: logits without"), request
        ends[bool(over)] += 1
    assert min(ends.values()) > 3, ends
    with pytest.raises(ValueError, match="prompt 0: logits without"):
        serve.generate(params, texts, MODELS[name], 2, draft=drafted(draft))


def test_a_started_step_is_kept_where_rows_are_added(monkeypatch):
    """So a request computes a token too many at most once, when it ends."""
    rows, own = Counter(), PagedModel.logits

    def counted(model, worker, works, *more, **options):
        rows.update(len(w.tokens) for w in works)
        return own(model, worker, works, *more, **options)

    monkeypatch.setattr(PagedModel, "logits", counted)
    requests, found = [Request(i, (i, 1, 2), 2 + 5 * i % 9, draw=Draw(HOW, i)) for i in range(12)], {}
    for ahead in (False, True):
        rows.clear()
        run = engine.Engine(params_of("dense"), DENSE, options := Options(40, 4, 3, 16, prefix=False))
        run.ahead = ahead
        served = drive([(0.0, request) for request in requests], options, run).requests
        found[ahead] = rows[1], [served[request.id].tokens for request in requests]
    assert found[True][1] == found[False][1]
    assert found[False][0] < found[True][0] <= found[False][0] + len(requests)


def generated(mesh=None, form="heads", draft=None, **options) -> list[list[int]]:
    """By `generate`, sampled with a seed for each prompt."""
    way = {"temperature": HOW.temperature, "top_k": HOW.top_k, "top_p": HOW.top_p, "seed": SEEDS}
    way |= {"mesh": mesh, "form": form, "draft": drafted(draft, mesh, form)}
    return serve.generate(sharded("dense", mesh, form), PROMPTS, DENSE, 7, **way, **options)


def each(stop=frozenset()) -> list[list[int]]:
    """What `generated` should say."""
    rows = [Request(0, tuple(p), 7, stop, Draw(HOW, seed)) for p, seed in zip(PROMPTS, SEEDS, strict=True)]
    return [list(wanted(request)) for request in rows]


@pytest.mark.parametrize("draft", [None, "ngram", "small", "near"])
def test_generate(draft):
    """With few and many proposals, in pages, and up to an id that ends a completion."""
    assert generated(draft=draft, proposals=1) == each()
    end = each()[0][3]
    found = generated(draft=draft, page=3, stop=end if draft else [end])
    assert found == each(frozenset({end})) != each()
    if draft == "near":
        assert generated(draft=drafted(draft)[::-1]) == each()  # in either order


@pytest.mark.parametrize(("form", "sizes"), [("heads", {}), ("heads_batch", {"Z": 2})])
def test_with_room_for_fewer_prompts_the_next_begins_when_one_has_ended(ranks, form, sizes):
    assert streamed(None, form, 1) == streamed(None, form, 2) == each()
    if sizes:
        assert ranks(streamed, sizes, form, 2) == [each()] * 2


def streamed(mesh, form, slots) -> list[list[int]]:
    params = sharded("dense", mesh, form)
    steps = serve.stream(params, PROMPTS, DENSE, 7, HOW, seed=SEEDS, mesh=mesh, form=form, slots=slots)
    found: list[list[int]] = [[] for _ in PROMPTS]
    for token in (token for step in steps for token in step):
        found[token.row].append(token.id)
    return found


TABLE = """
mesh     model     form         policy         draft
Y=2,Z=2  dense     sequence     generate       "small"
Z=2,Y=2  dense     heads        chunked        "small"
Z=2      dense     heads_batch  interleaved    None
Z=2,Y=2  linear    heads        disaggregated  None
E=2      experts   heads        disaggregated  None
E=2,Y=2  deepseek  experts      static         None
"""
MESHES = read_table(TABLE, {}, ("model", "form", "policy"))


@pytest.mark.parametrize(("sizes", "name", "form", "policy", "draft"), MESHES)
def test_on_a_mesh(ranks, sizes, name, form, policy, draft):
    """Each rank drives the scheduler, and their clocks agree; attention by data: requests are split over groups of
    ranks that have pages of their own."""
    if policy == "generate":
        assert ranks(generated, sizes, form, draft) == [each()] * 4
        return
    prompts = [(*range(4 * (i % 3)), *PROMPTS[i % 4]) for i in range(6)]  # of which some begin alike
    draws = [Draw(HOW if i % 2 else Sampling(), i) for i in range(6)]
    arrivals = [(0.1 * (i // 3), Request(i, prompts[i], 1 + 5 * i % 8, draw=draws[i])) for i in range(6)]
    options = Options(8, page=2, slots=6, budget=7, policy=policy, proposals=2 * (draft is not None), groups=2)
    options = replace(options, prefix=name != "linear", window=7 if policy == "chunked" else None)
    ahead = draft is None and name != "linear"
    found = ranks(traced, sizes, (options, arrivals, []), name, form, draft, ahead)
    assert all(other == found[0] for other in found)
    served, happened = found[0]
    assert {r.id: served.requests[r.id].tokens for _, r in arrivals} == {r.id: wanted(r, name) for _, r in arrivals}
    assert happened["Preempt"]
    assert happened["steps of several groups"]


def test_a_draft_that_is_the_model_is_always_right():
    """Greedy and sampled: each step of decode gives 1 + k tokens, over prefix hits and a move to another worker."""
    own, as_draft = params_of("dense"), {"draft": (DENSE, params_of("dense"))}
    for policy, how in (("interleaved", Sampling()), ("disaggregated", Sampling(0.8))):
        options = Options(pages=20, page=2, policy=policy, proposals=3)
        arrivals = [(9.0 * id, Request(id, tuple(range(9)), 13, draw=Draw(how, 7))) for id in range(2)]
        served = engine.serve(own, DENSE, arrivals, options, **as_draft)
        assert served.requests[1].cached == 8
        assert len([s for s in served.steps if isinstance(s, Run)]) == 2 * (1 + 3)  # 1 + 3 x 4 tokens
    steps = serve.stream(own, [[3, 1], [2]], DENSE, 13, Sampling(0.8), proposals=3, **as_draft)
    assert [len(tokens) for tokens in steps] == [2, 8, 8, 8]


def test_logprobs_and_scores_are_the_models():
    own = params_of("dense")
    tokens = [t for step in serve.stream(own, PROMPTS, DENSE, 4, Sampling()) for t in step if t.row == 0]
    text = [*PROMPTS[0], *(t.id for t in tokens)]
    logits = transformer.forward(own, torch.tensor([text[:-1]]), config=DENSE)[0].log_softmax(-1)
    told = logits.gather(-1, torch.tensor(text[1:])[:, None])[:, 0].tolist()
    assert [t.logprob for t in tokens] == pytest.approx(told[-4:], abs=1e-12)
    assert serve.score(own, [text, [7, 7]], DENSE)[0] == pytest.approx(told, abs=1e-12)
    assert serve.generate(own, [], DENSE, 3) == serve.score(own, [], DENSE) == []
    assert serve.generate(own, [[1], [2]], DENSE, 0) == [[], []]


def test_a_prompt_is_drawn_alike_alone_and_beside_others_and_anew_where_it_comes_again():
    def drawn(prompts, seed=3):
        return serve.generate(params_of("dense"), prompts, DENSE, 7, temperature=1.5, seed=seed)

    together = drawn(PROMPTS)
    assert together[:3] == [drawn([p])[0] for p in PROMPTS[:3]]
    assert together[1] not in (together[3], drawn(PROMPTS, seed=4)[1])


MQA = stored.GREEDY.configs["mqa"], stored.GREEDY.params_of("mqa")
WAYS = [  # each way gives what the others give, as the tests above say
    ("untied", {}), ("tied", {"draft": "ngram", "page": 5}), ("gqa", {"draft": MQA, "page": 16}), ("mqa", {"page": 3}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), WAYS, ids=stored.GREEDY.configs)
def test_greedy_tokens_are_hugging_faces(name, way):
    """Ragged batches in a contiguous cache, and in pages with proposals of n-grams and of a draft."""
    table = stored.GREEDY
    prompts, answers = table.prompts_of(name)[:25], table.stored()[name][:25]
    assert len({tuple(row) for row in answers}) > 18
    assert serve.generate(table.params_of(name), prompts, table.configs[name], table.new, **way) == answers


@pytest.mark.parametrize("name", stored.VLLM.configs)
def test_the_engines_tokens_and_hits_are_vllms(name):
    """All prompts, and when they are done, all of them again: how much of each is found."""
    table, prompts, answers = stored.VLLM, stored.VLLM.prompts_of(name), stored.VLLM.stored()[name]
    arrivals = [(1e6 * (i // 12), Request(i, tuple(p), table.new)) for i, p in enumerate(2 * prompts)]
    options = Options(pages=60, page=stored.PAGE, slots=12, budget=256)
    served = engine.serve(table.params_of(name), table.configs[name], arrivals, options)
    both = [served.requests[i] for i in range(len(arrivals))]
    assert [list(times.tokens) for times in both] == 2 * answers["tokens"]
    assert [times.cached for times in both[len(prompts) :]] == answers["cached"]
