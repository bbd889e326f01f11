"""What serving cannot take is refused with its fix, before anything is computed; and what is as good as the usual."""

import math

import numpy
import pytest
import torch
from misuse import rooms
from refused import by_words, refused

from scaling import serve, tree
from scaling.configs import Config, Latent
from scaling.mesh import AbstractMesh
from scaling.models import transformer
from scaling.models.text import Unknown
from scaling.serve import engine, sampling, scheduler
from scaling.serve.requests import Draw, Request, Sampling
from scaling.serve.states import Arrive, Cancel, Done, Finish, Moved, Options
from scaling.serve.text import TextStream
from scaling.spec import ShardingError

CONFIG = Config("small", L=2, D=8, F=16, N=4, K=2, H=4, V=16)
EXPERTS = CONFIG.with_(E=4, k=2, capacity=1.0)
PARAMS = transformer.init(CONFIG, 3, torch.float64)
TOKENS = torch.arange(15).view(3, 5)
NAN, INF = math.nan, math.inf


def empty(config=CONFIG, page=None, pages=None, **options) -> dict:
    cache = serve.init_cache(config, 3, 8, page=page, **options)
    return cache if pages is None else cache | {"pages": pages(cache["pages"])}


def filled(tokens=TOKENS, cache=None, config=CONFIG, params=PARAMS, mesh=None, **options):
    return serve.prefill(params, tokens, empty() if cache is None else cache, config, mesh, **options)


def held(page=None, dtype=None, **changed) -> dict:
    cache = filled(cache=empty(page=page, dtype=dtype))[1]
    return cache | {name: change(cache[name]) for name, change in changed.items()}


def decoded(cache, params=PARAMS, config=CONFIG, **options):
    return serve.decode(params, TOKENS[:, 0], cache, config, **options)


CACHES = {
    "ints": {"KV": torch.Tensor.long},
    "of more heads": {"KV": lambda x: x.repeat(1, 1, 1, 1, 2, 1)},
    "rows that share memory": {"KV": lambda x: x[:, :, :1].expand_as(x)},
    "lengths below 0": {"lengths": torch.neg},
    "lengths of floats": {"lengths": torch.Tensor.double},
    "lengths a list": {"lengths": torch.Tensor.tolist},
    "full": {"lengths": lambda x: x + 3},
    "pages of one dim": {"page": 2, "pages": lambda x: x[:, 0]},
    "one page for all rows": {"page": 2, "pages": torch.zeros_like},
    "one page for all of a row": {"page": 2, "pages": lambda x: x[:, :1].expand_as(x)},
    "int8, of fewer scales": {"dtype": torch.int8, "scale": lambda x: x[:, :, :1]},
    "int8, then floats": {"dtype": torch.int8, "KV": torch.Tensor.float},
}
SIZES = {"batch": 0}, {"length": -1}, {"page": 0}
test_a_step = refused(
    {
        f"a cache {what}": lambda given=given, donate=bool(i % 2): decoded(held(**given), donate=donate)
        for i, (what, given) in enumerate(CACHES.items())
    }
    | {
        f"a cache of {size}": (
            lambda size=size: serve.init_cache(CONFIG, **{"batch": 1, "length": 1} | size),
            "at least 1",
        )
        for size in SIZES
    }
    | {"of more layers": lambda: decoded(held(), config=CONFIG.with_(L=1))}
    | by_words(
        {
            "there are no tokens": lambda: filled(TOKENS[:, :0]),
            "vocabulary": lambda: filled(TOKENS + 16),
            "whole numbers": lambda: filled(TOKENS.double()),
            "room for 8": lambda: filled(TOKENS.repeat(1, 2)),
            "one token a row": lambda: serve.decode(PARAMS, TOKENS, held(), CONFIG),
            "of 2 rows, as the tokens": lambda: filled(TOKENS[:2]),
            "row 1 is empty": lambda: filled(lengths=torch.tensor([4, 0, 4])),
            "lengths must lie in": lambda: filled(lengths=torch.tensor([6, 4, 4])),
            "one for each row": lambda: filled(lengths=torch.tensor([1, 2])),
            "no page for its tokens": lambda: filled(cache=empty(page=2, pages=torch.neg)),
            "is what init_cache": lambda: filled(cache={"KV": empty()["KV"]}),
            "without its scales": lambda: filled(
                cache={name: empty(dtype=torch.int8)[name] for name in ("KV", "lengths")}
            ),
            "capacity=None": lambda: filled(config=EXPERTS, params=transformer.init(EXPERTS)),
            "floating point or int8": lambda: empty(dtype=torch.int16),
            "not finite": lambda: serve.quantize(PARAMS | {"unembed": PARAMS["unembed"] + INF}, CONFIG),
            "layers": lambda: filled(params=serve.quantize(PARAMS, CONFIG) | {"embed": PARAMS["embed"]}),
        }
    )
)


@pytest.mark.parametrize(("name", "cases"), [("decode", 60), ("serve", 60), ("sampling", 200)])
def test_no_argument_that_is_spoiled_gives_a_wrong_number(name, cases):
    """Params, ids and numbers, drawn: the right calls beside `misuse.plain`, the others refused with their fix."""
    outcomes, failures = rooms.spoiled(name, cases)
    assert not failures, "\n\n".join(failures)
    assert len(outcomes) == 2  # right and refused


def specs(sizes, form, config=CONFIG):
    return serve.specs(config, AbstractMesh(sizes), form=form)


LATENT = CONFIG.with_(K=CONFIG.N, latent=Latent(q_rank=4, kv_rank=4, nope=2, rope=2, value=CONFIG.H))
Y2, Z2 = AbstractMesh({"Y": 2}), AbstractMesh({"Z": 2})
test_a_mesh = refused(
    by_words(
        {
            "K=2 KV heads over Y=3": lambda: specs({"Y": 3}, "heads"),
            "N=4 query heads": lambda: specs({"Y": 8}, "heads"),
            "X splits nothing": lambda: specs({"X": 2}, "heads"),
            "unknown form": lambda: specs({"Y": 2}, "rows"),
            "the model has none": lambda: specs({"E": 2}, "heads"),
            "of a model without": lambda: specs({"Y": 2}, "experts"),
            "no latent attention": lambda: specs({"X": 2}, "2d", LATENT),
            "which a cache in pages cannot do": lambda: empty(page=4, mesh=Z2, form="sequence"),
            "does not divide": lambda: empty(mesh=Z2),
            "fix: tree.shard(params, serve.specs": lambda: filled(TOKENS.to("meta"), empty(mesh=Y2), mesh=Y2),
        }
    ),
    ShardingError,
)


def on_a_mesh(mesh):
    """What each rank says to bad input, and the logits of what comes after it: nobody waits for anybody."""
    mine, tokens, said = tree.shard(PARAMS, serve.specs(CONFIG, mesh), mesh), TOKENS[:2], []
    cache = serve.init_cache(CONFIG, 2, 8, mesh=mesh)
    for bad in (tokens + 16 * (torch.arange(2) == 1)[:, None], tokens.repeat(1, 2), tokens[:, :0]):
        try:
            filled(bad, cache, params=mine, mesh=mesh)
        except ValueError as error:
            said.append(str(error))
    return said, filled(tokens, cache, params=mine, mesh=mesh)[0]


def test_every_rank_refuses_before_any_works(ranks):
    wanted = transformer.forward(PARAMS, TOKENS[:2], config=CONFIG)[:, -1]
    for said, logits in ranks(on_a_mesh, {"Z": 2, "Y": 2}):
        assert all(part in text for text, part in zip(said, ("vocabulary", "room for 8", "no token"), strict=True))
        torch.testing.assert_close(logits, wanted, rtol=1e-12, atol=1e-14)


def generated(prompts=((1, 2, 3), (4,)), config=CONFIG, new=6, **options):
    return serve.generate(PARAMS, [*prompts] if isinstance(prompts, tuple) else prompts, config, new, **options)


SOME = [1.7, 2.2], [True, False], [], [16], [-1]
GIVEN = {
    "prompts": [*([[1], ids] for ids in SOME), "abc", None, [1, 2]],
    "new": [-1], "top_k": [0], "top_p": [0.0, 1.5], "min_p": [1.01], "seed": [1.5, [1]], "stop": ["a", [True]],
    "page": [0], "proposals": [0], "form": ["rows"],
}  # fmt: skip
D4, V33 = CONFIG.with_(name="two", D=4), CONFIG.with_(V=33)
DRAFTS = {"neither": "bigram", "the draft two: params": (D4, PARAMS), "same vocabulary": (V33, transformer.init(V33))}
test_options_of_generate = refused(
    {f"{name}={v!r:.50}": lambda name=name, v=v: generated(**{name: v}) for name in GIVEN for v in GIVEN[name]}
    | {words: (lambda draft=draft: generated(draft=draft), words) for words, draft in DRAFTS.items()}
)


def test_numbers_of_numpy_and_torch_are_as_good_as_pythons():
    plain, given = generated(), {"temperature": 2.0, "top_k": 5, "top_p": 0.875, "min_p": 0.125}
    assert generated(torch.tensor([[1, 2, 3]])) == plain[:1]
    assert generated(stop=torch.tensor([plain[0][2]]))[0] == plain[0][:3]
    own = {name: (numpy.float32 if isinstance(x, float) else numpy.int64)(x) for name, x in given.items()}
    assert generated(**own) == generated(**given) != plain


LOGITS = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
HALF = torch.tensor([0.5])
BAD = {f"logits of {bad}": torch.full((1, 3), bad) for bad in (NAN, INF, -INF)}
test_what_is_drawn_from = refused(
    {
        "seeds of fewer rows": lambda: sampling.sample(LOGITS, [Draw(Sampling(1.0), 1)], [0]),
        "seeds of floats": lambda: sampling.uniforms([1.5], [0]),
        "seeds below 0": lambda: sampling.uniforms([-1], [0]),
        "positions below 0": lambda: sampling.uniforms([1], [-1]),
        "positions of floats": lambda: sampling.uniforms([1], [1.5]),
        "logits of bools": lambda: sampling.probabilities(LOGITS > 0, Sampling(1.0)),
        "logits none": lambda: sampling.likeliest(LOGITS[:, :0]),
        "p of zeros": lambda: sampling.draw_token(torch.zeros(1, 4), HALF),
        "u of fewer rows": lambda: sampling.draw_token(LOGITS.softmax(-1), HALF),
    }
    | {w: (lambda x=x: sampling.probabilities(x, Sampling()), "no token can be drawn") for w, x in BAD.items()}
)

OPTIONS = {"decode_pages": 0, "proposals": -1, "prefix": "no", "policy": "best"}
REQUEST = Request(0, (1, 2), 2)


def served(request=REQUEST, at=0.0, options=Options(4, page=2), **more):  # noqa: B008
    return engine.serve(PARAMS, CONFIG, [(at, request)], options, **more)


test_options_of_the_engine = refused(
    {name: lambda name=name: Options(**{"pages": 4, name: OPTIONS[name]}) for name in OPTIONS}
    | {f"a time of {t}": (lambda t=t: served(at=t), "a time") for t in (NAN, "0")}
    | {"a stop text with an unknown tokenizer": lambda: TextStream(Unknown("x"), ["a"])}
    | {"a draft without proposals": (lambda: served(draft="ngram"), "give both, or neither")}
    | by_words(
        {
            "a time": lambda: served(cancel=[(NAN, 0)]),
            "seconds of a step": lambda: served(clock=lambda: NAN),
            "give both, or neither": lambda: served(options=Options(9, proposals=2)),
            "request 7: token 16": lambda: served(Request(7, (16,), 2)),
            "request 0: a stop text": lambda: served(REQUEST._replace(stops=("a",))),
            "among 2 groups of ranks, options.groups is 1\n  fix: Options(..., groups=2)": (
                lambda: engine.Engine({}, None, Options(4, 1, 1), mesh=Z2)
            ),
        }
    )
)

UNREADABLE = {
    "an empty prompt": Request(0, (), 3), "8 fit": Request(0, (1,), 8), "at least 1": Request(0, (1,), 0),
    "must be a tuple": Request(0, [1, 2], 2), "prompt=(1.5,)": Request(0, (1.5,), 2),
    "stop=5": Request(0, (1,), 2, 5), "must be a frozenset": Request(0, (1,), 2, frozenset({"5"})),
}  # fmt: skip


@pytest.mark.parametrize("words", UNREADABLE)
def test_a_request_that_can_never_be_served_is_finished_at_once(words):
    state, actions = scheduler.step(scheduler.initial(Options(2, page=4)), [Arrive(UNREADABLE[words])])
    assert not state.live
    assert [type(action) for action in actions] == [Finish]
    assert actions[0].reason.startswith("refused: ")
    assert words in actions[0].reason


def test_events_that_nothing_waits_for():
    start, _ = scheduler.step(scheduler.initial(Options(4)), [Arrive(REQUEST)])
    for events, words in (
        ([Arrive(REQUEST)], "request 0 has been given already"),
        *(([Done("engine", tokens)], "request 0 gives") for tokens in ({}, {0: ()}, {0: (1, 2)})),
        ([Done("engine", {0: (1,)}), Done("engine", {0: (1,)})], "engine is idle"),
        ([Moved(0)], "request 0 is not being moved"),
    ):
        with pytest.raises(ValueError, match=f"{words}(.|\n)*fix: "):
            scheduler.step(start, events)
    state, actions = scheduler.step(start, [Cancel(0), Cancel(77)])
    assert not actions  # it is in a step
    assert scheduler.step(state, [Done("engine", {0: (1,)})])[1] == [Finish(0, (), "cancelled")]
