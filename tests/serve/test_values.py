"""Caches, tokens, requests and options that would be cast, cut off, shared or ignored: refused with their fix."""

import math

import numpy
import pytest
import torch

from scaling import serve, tree
from scaling.configs import Config
from scaling.models import transformer
from scaling.serve import engine, requests, sampling, scheduler
from scaling.serve.requests import Draw, Request, Sampling
from scaling.serve.states import Arrive, Done, Options

CONFIG = Config("small", L=2, D=8, F=16, N=4, K=2, H=4, V=16)
PARAMS = transformer.init(CONFIG, 3, torch.float64)
TOKENS = torch.arange(15).view(3, 5)
NAN, INF = math.nan, math.inf


def held(page=None, **changed) -> dict:
    cache = serve.prefill(PARAMS, TOKENS, serve.init_cache(CONFIG, 3, 8, page=page), CONFIG)[1]
    return cache | {name: change(cache[name]) for name, change in changed.items()}


def decoded(cache, params=PARAMS, config=CONFIG, **options):
    return serve.decode(params, TOKENS[:, 0], cache, config, **options)[0]


CACHES = {
    "ints": {"KV": torch.Tensor.long},
    "bools": {"KV": lambda x: x > 0},
    "complex": {"KV": lambda x: x.to(torch.complex128)},
    "rows that share memory": {"KV": lambda x: x[:, :, :1].expand_as(x)},
    "lengths below 0": {"lengths": torch.neg},
    "lengths of floats": {"lengths": torch.Tensor.double},
    "lengths of bools": {"lengths": lambda x: x > 0},
    "lengths a list": {"lengths": torch.Tensor.tolist},
    "pages of floats": {"page": 2, "pages": torch.Tensor.double},
    "pages of bytes": {"page": 2, "pages": lambda x: x.to(torch.uint8)},
    "pages of fewer rows": {"page": 2, "pages": lambda x: x[:2]},
    "pages of one dim": {"page": 2, "pages": lambda x: x[0]},
    "one page for all rows": {"page": 2, "pages": torch.zeros_like},
    "one page for all of a row": {"page": 2, "pages": lambda x: x[:, :1].expand_as(x)},
}


@pytest.mark.parametrize("given", CACHES.values(), ids=CACHES)
def test_a_cache_that_is_not_as_made_is_refused(given):
    for donate in (False, True):
        with pytest.raises(ValueError, match="fix:"):
            decoded(held(**given), donate=donate)


def test_rows_share_the_full_pages_of_a_prefix_alone():
    cache = serve.init_cache(CONFIG, 2, 8, page=2)
    cache = serve.prefill(PARAMS, torch.tensor([[1, 2, 3, 4]] * 2), cache, CONFIG)[1]
    wanted = serve.decode(PARAMS, torch.tensor([5, 6]), cache, CONFIG)[0]
    shared = cache["pages"].clone()
    shared[1, :2] = shared[0, :2]  # what both have read, and neither writes to
    found = serve.decode(PARAMS, torch.tensor([5, 6]), cache | {"pages": shared}, CONFIG)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    shared[1, 2] = shared[0, 2]
    with pytest.raises(ValueError, match=r"page 2 is written to(.|\n)*fix:"):
        serve.decode(PARAMS, torch.tensor([5, 6]), cache | {"pages": shared}, CONFIG)


PARTS = {
    "fewer layers": PARAMS | {"layers": tree.map(lambda x: x[:1], PARAMS["layers"])},
    "no norm": {name: leaf for name, leaf in PARAMS.items() if name != "norm"},
    "a norm elsewhere": PARAMS | {"norm": PARAMS["norm"].to("meta")},
    "a list": [1],
}


@pytest.mark.parametrize("params", PARTS.values(), ids=PARTS)
def test_a_decode_step_looks_at_its_params_too(params):
    with pytest.raises(ValueError, match="fix:"):
        decoded(held(), params)
    for config in (CONFIG.with_(L=1), CONFIG.with_(V=32), CONFIG.with_(N=2)):
        with pytest.raises(ValueError, match="fix:"):
            decoded(held(), config=config)


IDS = {"floats": [1.7, 2.2], "bools": [True, False], "text": "abc", "texts": ["1"], "none": [], "beyond": [16]}
SOME = [[1, 2, 3], [4]]
GENERATE = {
    **{f"prompts {name}": {"prompts": [ids]} for name, ids in IDS.items()},
    **{f"prompts {p!r}": {"prompts": p} for p in ("abc", None, [1, 2], torch.tensor([1, 2]), torch.rand(1, 2))},
    **{f"max_new_tokens={n}": {"max_new_tokens": n} for n in (-1, True, 2.5, "2", NAN, None)},
    **{f"temperature={t!r}": {"temperature": t} for t in (True, "1", None, NAN)},
    **{f"top_k={k!r}": {"top_k": k} for k in (1.5, True, "1", 0)},
    **{f"top_p={p!r}": {"top_p": p} for p in ("0.5", NAN, True)},
    **{f"seed={s!r}": {"seed": s} for s in (1.5, None, "ab", [1.7, 2.2], [1], torch.rand(2))},
    **{f"stop={s!r}": {"stop": s} for s in ("a", [1.5], None, ["3"], [True])},
    **{f"proposals={n!r}": {"draft": "ngram", "proposals": n} for n in (0, 1.5, True, "2")},
    "form": {"form": "rows"},
    "draft": {"draft": "bigram"},
}


@pytest.mark.parametrize("given", GENERATE.values(), ids=GENERATE)
def test_options_of_generate_are_what_they_should_be(given):
    given = {"prompts": SOME, "max_new_tokens": 2} | given
    with pytest.raises(ValueError, match="fix:"):
        serve.generate(PARAMS, given.pop("prompts"), CONFIG, given.pop("max_new_tokens"), **given)


def test_ids_of_a_tensor_are_as_good_as_a_list():
    plain = serve.generate(PARAMS, SOME[:1], CONFIG, 6)
    assert serve.generate(PARAMS, torch.tensor(SOME[:1]), CONFIG, 6) == plain
    assert serve.generate(PARAMS, SOME[:1], CONFIG, 6, stop=torch.tensor([plain[0][2]])) == [plain[0][:3]]
    assert serve.score(PARAMS, [], CONFIG) == []


@pytest.mark.parametrize("real", [numpy.float32, numpy.float64])
def test_numbers_of_numpy_are_as_good_as_python_s(real):
    plain = {"temperature": 2.0, "top_k": 5, "top_p": 0.875, "min_p": 0.125}
    given = {name: (real if isinstance(value, float) else numpy.int64)(value) for name, value in plain.items()}
    tokens = serve.generate(PARAMS, SOME, CONFIG, 6, **plain)
    assert serve.generate(PARAMS, SOME, CONFIG, 6, **given) == tokens != serve.generate(PARAMS, SOME, CONFIG, 6)


LOGITS = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
DRAWS = {
    "seeds of fewer rows": lambda: sampling.sample(LOGITS, [Draw(Sampling(1.0), 1)], [0]),
    "one row": lambda: sampling.sample(LOGITS[0], [Draw(Sampling(1.0), 1)], [0]),
    "seeds of floats": lambda: sampling.uniforms([1.5], [0]),
    "seeds below 0": lambda: sampling.uniforms([-1], [0]),
    "positions below 0": lambda: sampling.uniforms([1], [-1]),
    "positions of floats": lambda: sampling.uniforms([1], [1.5]),
    "logits of bools": lambda: sampling.probabilities(LOGITS > 0, Sampling(1.0)),
    "logits complex": lambda: sampling.likeliest(LOGITS.to(torch.complex64)),
    "logits none": lambda: sampling.likeliest(LOGITS[:, :0]),
    "p of zeros": lambda: sampling.draw_token(torch.zeros(1, 4), torch.tensor([0.5])),
    "p of NaN": lambda: sampling.draw_token(torch.full((1, 4), NAN), torch.tensor([0.5])),
    "u of fewer rows": lambda: sampling.draw_token(LOGITS.softmax(-1), torch.tensor([0.5])),
}


@pytest.mark.parametrize("call", DRAWS.values(), ids=DRAWS)
def test_what_is_drawn_from_fits_together(call):
    with pytest.raises(ValueError, match="fix:"):
        call()


OPTIONS = [("pages", 2.5), ("pages", True), ("page", "2"), ("slots", 1.5), ("budget", NAN), ("decode_pages", 0)]
OPTIONS += [("decode_pages", 1.5), ("proposals", True), ("prefix", "no"), ("policy", None)]


@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_options_of_the_engine_are_whole_numbers(name, value):
    with pytest.raises(ValueError, match="fix:"):
        Options(**({"pages": 4} | {name: value}))


@pytest.mark.parametrize("time", [NAN, INF, "0", None])
def test_a_time_that_nothing_compares_with_is_refused_and_does_not_hang(time):
    request, options = Request(0, (1, 2), 2), Options(4, page=2)
    with pytest.raises(ValueError, match=r"a time(.|\n)*fix:"):
        engine.serve(PARAMS, CONFIG, [(time, request)], options)
    with pytest.raises(ValueError, match=r"a time(.|\n)*fix:"):
        engine.serve(PARAMS, CONFIG, [(0.0, request)], options, cancel=[(time, 0)])
    if isinstance(time, float):
        with pytest.raises(ValueError, match=r"seconds of a step(.|\n)*fix:"):
            engine.serve(PARAMS, CONFIG, [(0.0, request)], options, clock=lambda: time)


@pytest.mark.parametrize(
    "request_",
    [
        Request(0, [1, 2], 2),
        Request(0, (1.5,), 2),
        Request(0, "ab", 2),
        Request(0, (1,), NAN),
        Request(0, (1,), 1.5),
        Request(0, (1,), 2, 5),
        Request(0, (1,), 2, frozenset({"5"})),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_by_name(request_):
    (finished,) = scheduler.step(scheduler.initial(Options(4)), [Arrive(request_)])[1]
    assert finished.reason.startswith("refused: ")
    assert "must be a" in finished.reason


def test_a_step_gives_what_its_works_sample():
    state, _ = scheduler.step(scheduler.initial(Options(4)), [Arrive(Request(0, (1, 2), 2))])
    for tokens in ({}, {0: ()}, {0: (1, 2)}):
        with pytest.raises(ValueError, match=r"request 0 gives(.|\n)*fix:"):
            scheduler.step(state, [Done("engine", tokens)])


def test_a_field_that_is_null_is_one_that_is_left_out():
    text = '{"ids": null}\n{"ids": [1], "arrival": null, "seed": null, "stop": null}\n{"prompt": null, "ids": [2]}'
    lines, bad = requests.read_requests(text, None, 16, (), 4)
    assert [line.request.prompt for line in lines] == [(1,), (2,)]
    assert bad == [{"line": 1, "error": 'one of "prompt" and "ids" is needed'}]
