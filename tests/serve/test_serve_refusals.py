"""What serving cannot take is refused with its fix, before anything is computed; and what is as good as the usual."""

import math

import numpy
import pytest
import torch
from machine import on_ranks
from refused import evaluated, named, refused

from scaling import serve, tree
from scaling.configs import Config, Latent
from scaling.mesh import AbstractMesh
from scaling.models import transformer
from scaling.models.text import Unknown  # noqa: F401, as the three below: calls in the tables name them
from scaling.serve import engine, sampling, scheduler, simulate  # noqa: F401
from scaling.serve.requests import Draw, Request, Sampling  # noqa: F401
from scaling.serve.states import Arrive, Cancel, Done, Finish, Moved, Options
from scaling.serve.text import TextStream  # noqa: F401
from scaling.spec import FORMATS, ShardingError  # noqa: F401

CONFIG = Config("small", L=2, D=8, F=16, N=4, K=2, H=4, V=16)
EXPERTS = CONFIG.with_(E=4, k=2, capacity=1.0)
PARAMS = transformer.init(CONFIG, 3, torch.float64)
TOKENS = torch.arange(15).view(3, 5)
NAN, INF = math.nan, math.inf


def empty(**options) -> dict:
    return serve.init_cache(CONFIG, 3, 8, **options)


def filled(tokens=TOKENS, cache=None, config=CONFIG, params=PARAMS, mesh=None, **options):
    return serve.prefill(params, tokens, empty() if cache is None else cache, config, mesh, **options)


def held(page=None, dtype=None, **changed) -> dict:
    cache = filled(cache=empty(page=page, dtype=dtype))[1]
    return cache | {name: change(cache[name]) for name, change in changed.items()}


def decoded(cache, tokens=TOKENS[:, 0], config=CONFIG, **options):
    return serve.decode(PARAMS, tokens, cache, config, **options)


STEPS = """
call                                                      words of its error
decoded(held(), config=CONFIG.with_(L=1))                 has the shape (1, 8, 2, 4)
decoded(held(KV=torch.Tensor.long))                       int8, float8_e4m3fn, not torch.int64
decoded(held(KV=lambda x: x.repeat(1, 1, 1, 1, 2, 1)), donate=True)  found (2, 2, 3, 8, 4, 4)
decoded(held(KV=lambda x: x[:, :, :1].expand_as(x)))      share their memory
decoded(held(lengths=torch.neg), donate=True)             the cache's lengths are [-5, -5, -5]
decoded(held(lengths=torch.Tensor.double))                found torch.float64 [3]
decoded(held(lengths=torch.Tensor.tolist))                found list
decoded(held(lengths=lambda x: x + 3))                    row 0: 8 tokens are held and 1 more come
decoded(held(page=2, pages=lambda x: x[:, 0]))            pages[B, M] are int64
decoded(held(page=2, pages=torch.zeros_like))             page 0 is written to, but stands in more than one place
decoded(held(page=2, pages=lambda x: x[:, :1].expand_as(x)), donate=True)  page 0 is written to
decoded(held(dtype=torch.int8, scale=lambda x: x[:, :, :1]))  found (2, 2, 1, 8, 2)
decoded(held(dtype=torch.int8, KV=torch.Tensor.float), donate=True)  scales beside a cache of torch.float32
serve.init_cache(CONFIG, 0, 1)                            at least 1
serve.init_cache(CONFIG, 1, -1)                           at least 1
serve.init_cache(CONFIG, 1, 1, page=0)                    at least 1
empty(dtype=torch.int16)                                  a cache is of float32
serve.init_cache(CONFIG.with_(uncomputed=('a thing',)), 1, 1)  not computed here: a thing
filled(TOKENS[:, :0])                                     there are no tokens
filled(TOKENS + 16)                                       vocabulary
filled(TOKENS.double())                                   whole numbers
filled(TOKENS.repeat(1, 2))                               room for 8
filled(TOKENS[:2])                                        of 2 rows, as the tokens
decoded(held(), TOKENS)                                   one token a row
filled(lengths=torch.tensor([4, 0, 4]))                   row 1 is empty
filled(lengths=torch.tensor([6, 4, 4]))                   lengths must lie in
filled(lengths=torch.tensor([1, 2]))                      one for each row
filled(cache=empty(page=2) | {'pages': -empty(page=2)['pages']})  no page for its tokens
filled(cache={'KV': empty()['KV']})                       is what init_cache
filled(cache=empty() | {'KV': empty(dtype=torch.int8)['KV']})  without its scales
filled(config=EXPERTS, params=transformer.init(EXPERTS))  capacity=None
filled(params=serve.quantize(PARAMS, CONFIG) | {'embed': PARAMS['embed']})  layers
empty(dtype=torch.float8_e5m2)                            a cache is of float32
serve.quantize(PARAMS, CONFIG, 'int7')                    unknown format
serve.quantize(PARAMS, CONFIG, 'mxfp8')                   in blocks of 32
serve.quantize(PARAMS | {'unembed': PARAMS['unembed'] + INF}, CONFIG)  not finite
serve.quantize(PARAMS | {'unembed': PARAMS['unembed'] + 1e39}, CONFIG)  not finite in float32
serve.quantize(PARAMS, CONFIG, FORMATS['int4-32']._replace(block=0, per_byte=3))  8 of D on each rank
serve.quantize(serve.quantize(PARAMS, CONFIG), CONFIG)    params["embed"]: missing
serve.quantize(PARAMS | {'norm': PARAMS['norm'].numpy()}, CONFIG)  found ndarray
serve.quantize(PARAMS | {'norm': PARAMS['norm'].int()}, CONFIG)  dense tensors of floats
serve.quantize(PARAMS | {'embed': PARAMS['embed'].T}, CONFIG)  found (8, 16)
filled(params=tree.map(torch.Tensor.bfloat16, serve.quantize(PARAMS, CONFIG)))  before they are quantized
filled(params=serve.quantize(PARAMS, CONFIG) | {'norm': PARAMS['norm'].int()})  ["norm"] is in torch.int32
"""
test_a_step = refused(evaluated(STEPS, globals()))


def specs(sizes, form, config=CONFIG):
    return serve.specs(config, AbstractMesh(sizes), form=form)


LATENT = CONFIG.with_(K=CONFIG.N, latent=Latent(q_rank=4, kv_rank=4, nope=2, rope=2, value=CONFIG.H))
Y2, Z2 = AbstractMesh({"Y": 2}), AbstractMesh({"Z": 2})
MESHES = """
call                                                words of its error
specs({'Y': 3}, 'heads')                            K=2 KV heads over Y=3
specs({'Y': 8}, 'heads')                            N=4 query heads
specs({'X': 2}, 'heads')                            X splits nothing
specs({'Y': 2}, 'rows')                             unknown form
specs({'E': 2}, 'heads')                            the model has none
specs({'Y': 2}, 'experts')                          of a model without
specs({'Y': 4}, 'heads', CONFIG.with_(qk_norm=True, qk_wide=True))  fix: choose Y among divisors of K
specs({'X': 2}, '2d', LATENT)                       no latent attention
empty(mesh=Z2)                                      does not divide
empty(page=4, mesh=Z2, form='sequence')             which a cache in pages cannot do
filled(TOKENS.to('meta'), empty(mesh=Y2), mesh=Y2)  fix: tree.shard(params, serve.specs
"""
test_a_mesh = refused(evaluated(MESHES, globals()), ShardingError)


@on_ranks({"Z": 2, "Y": 2})
def test_every_rank_refuses_before_any_works(mesh):
    """So nobody waits for anybody at what comes after it."""
    mine, tokens = tree.shard(PARAMS, serve.specs(CONFIG, mesh), mesh), TOKENS[:2]
    cache, beyond = serve.init_cache(CONFIG, 2, 8, mesh=mesh), 16 * (torch.arange(2) == 1)[:, None]  # in one group
    for bad, words in (tokens + beyond, "vocabulary"), (tokens.repeat(1, 2), "room for 8"), (tokens[:, :0], "no token"):
        with pytest.raises(ValueError, match=words):
            filled(bad, cache, params=mine, mesh=mesh)
    wanted = transformer.forward(PARAMS, tokens, config=CONFIG)[:, -1]
    torch.testing.assert_close(filled(tokens, cache, params=mine, mesh=mesh)[0], wanted, rtol=1e-12, atol=1e-14)


def generated(prompts=([1, 2, 3], [4]), new=6, **options):
    return serve.generate(PARAMS, prompts, CONFIG, new, **options)


D4, V33 = CONFIG.with_(name="two", D=4), CONFIG.with_(V=33)
LOGITS = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
REQUEST = Request(0, (1, 2), 2)


def served(request=REQUEST, at=0.0, options=Options(4, page=2), **more):  # noqa: B008
    return engine.serve(PARAMS, CONFIG, [(at, request)], options, **more)


# of generate, of what is drawn from, of the engine
OPTIONS = r"""
call                                                         words of its error
generated([[1], [1.7, 2.2]])                                 prompt 1 = [1.7, 2.2]: must be whole numbers
generated([[1], [True, False]])                              has bools
generated([[1], []])                                         prompt 1 is empty
generated([[1], [16]])                                       prompt 1: token 16 lies
generated([[1], [-1]])                                       prompt 1: token -1 lies
generated('abc')                                             must be lists of ids
generated(None)                                              must be lists of ids
generated([1, 2])                                            prompt 0 = 1
generated(new=-1)                                            0 or more
generated(top_k=0)                                           must be in [1, inf)
generated(top_p=0.0)                                         in (0, 1]
generated(top_p=1.5)                                         in (0, 1]
generated(min_p=1.01)                                        in [0, 1]
generated(seed=1.5)                                          whole numbers
generated(seed=[1])                                          1 seeds for 2 prompts
generated(stop='a')                                          stop = 'a': must be whole numbers
generated(stop=[True])                                       has bools
generated(page=0)                                            page = 0
generated(proposals=0)                                       proposals = 0
generated(form='rows')                                       form 'rows'
generated(draft='bigram')                                    neither
generated(draft=(D4, PARAMS))                                the draft two: params
generated(draft=(V33, transformer.init(V33)))                same vocabulary
sampling.sample(LOGITS, [Draw(Sampling(1.0), 1)], [0])       1 seeds for logits[2, 16]
sampling.uniforms([1.5], [0])                                seeds = [1.5]
sampling.uniforms([1], [1.5])                                positions = [1.5]
sampling.uniforms([-1], [0])                                 seeds in 0..2^63
sampling.uniforms([1], [-1])                                 positions from 0
sampling.probabilities(LOGITS > 0, Sampling(1.0))            got torch.bool [2, 16]
sampling.probabilities(LOGITS * NAN, Sampling())             no token can be drawn
sampling.probabilities(LOGITS + INF, Sampling())             no token can be drawn
sampling.probabilities(LOGITS - INF, Sampling())             no token can be drawn
sampling.probabilities(LOGITS[:, :0], Sampling())            got torch.float32 [2, 0]
sampling.draw_token(torch.zeros(1, 4), torch.tensor([0.5]))  without a sum above 0
sampling.draw_token(LOGITS.softmax(-1), torch.tensor([0.5]))  u[1] and p[2, 16]
Options(4, proposals=-1)                                     proposals = -1
Options(4, longest=0)                                        longest = 0
simulate.drive([(0.0, REQUEST), (9.0, REQUEST)], Options(4), None)  request 0 has been given already
Options(4, prefix='no')                                      must be True or False
Options(4, policy='best')                                    policy = 'best': one of
TextStream(Unknown('x'), ['a'])                              needs its tokenizer
served(at=NAN)                                               a time
served(at='0')                                               a time
served(cancel=[(NAN, 0)])                                    a time
served(clock=lambda: NAN)                                    seconds of a step
served(options=Options(9, proposals=2))                      give both, or neither
served(draft='ngram')                                        give both, or neither
served(Request(7, (16,), 2))                                 request 7: token 16
served(REQUEST._replace(stops=('a',)))                       request 0: a stop text
engine.Engine({}, None, Options(4, 1, 1), mesh=Z2)
    among 2 groups of ranks, options.groups is 1\n  fix: Options(..., groups=2)
"""
test_options_of_generate_of_drawing_and_of_the_engine = refused(evaluated(OPTIONS, globals()))


def test_numbers_of_numpy_and_torch_are_as_good_as_pythons():
    plain, given = generated(), {"temperature": 2.0, "top_k": 5, "top_p": 0.875, "min_p": 0.125}
    assert generated(torch.tensor([[1, 2, 3]])) == plain[:1]
    assert generated(stop=torch.tensor([plain[0][2]]))[0] == plain[0][:3]
    own = {name: (numpy.float32 if isinstance(x, float) else numpy.int64)(x) for name, x in given.items()}
    assert generated(**own) == generated(**given) != plain


UNREADABLE = named(
    """
words of the error   request
an empty prompt      Request(0, (), 3)
8 fit                Request(0, (1,), 8)
at least 1           Request(0, (1,), 0)
must be a tuple      Request(0, [1, 2], 2)
prompt=(1.5,)        Request(0, (1.5,), 2)
stop=5               Request(0, (1,), 2, 5)
must be a frozenset  Request(0, (1,), 2, frozenset({"5"}))
stops='ab'           Request(0, (1,), 2, stops="ab")
""",
    globals(),
)


def test_requests_that_can_never_be_served_and_events_that_nothing_waits_for():
    for words, request in UNREADABLE.items():
        state, actions = scheduler.step(scheduler.initial(Options(2, page=4)), [Arrive(request)])
        assert not state.live
        assert [type(action) for action in actions] == [Finish]
        assert actions[0].reason.startswith("refused: ")
        assert words in actions[0].reason
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
