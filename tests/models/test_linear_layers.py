"""Linear layers: the gated delta rule in chunks beside the rule token by token, its written-out derivative beside
autograd's, and models with such layers on meshes beside one device. That one device equals Hugging Face's class is in
test_hugging_face.py."""

import itertools
from collections import Counter
from functools import cache

import pytest
import torch
from machine import on_ranks
from refused import named
from test_families import LINEAR, PROMPTS, check_step, greedy, model, served

from scaling import serve, tree
from scaling.configs import Config
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer
from scaling.models.delta_rule import delta_rule, delta_rule_backward
from scaling.serve import engine
from scaling.serve.states import Options
from scaling.strategies import transformer as strategy
from scaling.trace import trace
from scaling.train.settings import Settings


def by_token(Q, K, V, g, beta, S, starts):
    """The rule as it is defined: decay, read, write the difference."""
    outs = []
    for t in range(Q.shape[1]):
        S = S * (g[:, t].exp() * ~starts[:, t, None])[..., None, None]
        seen = torch.einsum("bnhv,bnh->bnv", S, K[:, t])
        S = S + torch.einsum("bnh,bnv->bnhv", K[:, t], beta[:, t, :, None] * (V[:, t] - seen))
        outs.append(torch.einsum("bnhv,bnh->bnv", S, Q[:, t]))
    return torch.stack(outs, 1), S


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("T", "chunk"), [*itertools.product([1, 5, 8, 13], [1, 4, 8, 64])])
def test_chunks_and_their_derivative_are_those_of_single_tokens(T, chunk, documents):
    make = torch.Generator().manual_seed(T)
    Q, K, V = (torch.randn(2, T, 3, width, generator=make, dtype=torch.float64) for width in (4, 4, 5))
    g, beta = torch.rand(2, 2, T, 3, generator=make, dtype=torch.float64) * torch.tensor([-2, 1]).view(2, 1, 1, 1)
    S = torch.randn(2, 3, 4, 5, generator=make, dtype=torch.float64)
    starts = torch.rand(2, T, generator=make) < (0.3 if documents else 0.0)
    given = [x.requires_grad_() for x in (Q, K / K.norm(dim=-1, keepdim=True), V, g, beta, S)]
    wanted = by_token(*given, starts)
    *found, kept = delta_rule(*given, starts if documents else None, chunk=chunk)
    torch.testing.assert_close(found, [*wanted], rtol=0, atol=1e-13)
    cotangents = [torch.randn(x.shape, generator=make, dtype=torch.float64) for x in wanted]
    gradients = torch.autograd.grad(wanted, given, cotangents)
    with torch.no_grad():
        got = delta_rule_backward(*cotangents, kept, *given[:5], starts if documents else None, chunk=chunk)
    torch.testing.assert_close(got, gradients, rtol=0, atol=1e-12)


def test_a_decay_to_nothing_is_no_overflow():
    """Between a later and an earlier token the decay would be exp(+1000)."""
    x, g = torch.ones(1, 4, 1, 2), torch.full((1, 4, 1), -1000.0)
    O, S, kept = delta_rule(x, x / 2**0.5, x, g, g / -1000, torch.ones(1, 1, 2, 2))
    grads = delta_rule_backward(O, S, kept, x, x / 2**0.5, x, g, g / -1000)
    assert all(torch.isfinite(each).all() for each in (O, S, *grads))


ROWS = torch.randint(60, (4, 17), generator=torch.Generator().manual_seed(3))
DOCUMENTS = (torch.rand(4, 16, generator=torch.Generator().manual_seed(5)) < 0.2).long().cumsum(1)


@cache
def alone(family: str, documents: bool) -> tuple[torch.Tensor, dict]:
    config, params = model(family)
    given = {"targets": ROWS[:, 1:], "config": config, "segments": DOCUMENTS if documents else None}
    return transformer.loss_and_grads(params, ROWS[:, :-1], **given)


MESHES = [("qwen3 next", mesh) for mesh in ({"X": 2, "Y": 2}, {"C": 4}, {"Y": 2, "C": 2}, {"E": 2, "C": 2})]
MESHES += [("qwen3 next dense", mesh) for mesh in ({"Y": 2}, {"X": 2, "C": 2}, {"P": 2, "Y": 2})]
WAYS = [({}, False), ({"remat": "block", "microbatches": 2}, True), ({"zero": 1}, True)]
DENSE_WAYS = [({"remat": remat}, True) for remat in ("attention", "matmuls")]
STEPS = [  # for the sweep all; for the suite each mesh in one way, another than the last one's
    pytest.param(mesh, family, *way, marks=() if i == (n - 1) % len(ways) else pytest.mark.sweep)
    for n, (family, mesh) in enumerate(MESHES)
    for ways in [WAYS + (DENSE_WAYS if "dense" in family else [])]
    for i, way in enumerate(ways)
]


@pytest.mark.parametrize(("mesh", "family", "options", "documents"), STEPS, ids=str)
def test_a_step_of_linear_layers_on_a_mesh_is_that_of_one_device(mesh, family, options, documents):
    whole = ROWS[:, :-1], ROWS[:, 1:], *([DOCUMENTS] if documents else [])
    check_step(mesh, family, alone(family, documents), *whole, context="ring", **options)


HANDED_ON = {"tail": 1, "S": 3, "dtail": 1, "dS": 3}  # along C=4, in each linear layer


def test_what_is_handed_on_along_C_comes_back_as_its_cotangent():
    """Permutations are counted, because the judge cannot see that one is missing: it changes no type."""
    config, mesh = model("qwen3 next")[0], AbstractMesh({"C": 4})
    params = strategy.shard(transformer.init(config, 0, torch.float32, "meta"), config, mesh)
    tokens = torch.zeros(4, 4, dtype=torch.long, device="meta")
    with trace() as log:
        strategy.loss_and_grads(params, tokens, tokens, config, mesh, context="ring")
    sent = Counter(event.before.name for event in log.collectives() if event.before.name in HANDED_ON)
    assert sent == {name: times * len(config.linear.layers) for name, times in HANDED_ON.items()}


REFUSED = named(
    """
words                              sizes, T, options
zig-zag reorders the tokens        ({"C": 2}, 16, {})
a convolution over 4 tokens        ({"C": 8}, 16, {"context": "ring"})
a stage stores layers of one kind  ({"Z": 2}, 16, {})
3 blocks                           ({"Y": 3}, 18, {})
""",
    globals(),
)


def step_on(config: Config, mesh, T: int, options: dict) -> None:
    own = tree.shard(transformer.init(config, device="meta"), strategy.specs(config, mesh), mesh)
    tokens = torch.zeros(2, T // mesh.sizes.get("C", 1), dtype=torch.int64, device="meta")
    strategy.loss_and_grads(own, tokens, tokens, config, mesh, **options)


@pytest.mark.parametrize(("said", "sizes", "T", "options"), [(said, *case) for said, case in REFUSED.items()], ids=str)
def test_what_linear_layers_do_not_do_is_refused(said, sizes, T, options):
    config = model("qwen3 next dense")[0].with_(N=6, K=6, F=42)
    with pytest.raises(ValueError, match=f"(?s){said}.*\n  fix: "):
        step_on(config, AbstractMesh(sizes).optional, T, options)


@pytest.mark.parametrize("family", LINEAR)
def test_a_prompt_in_chunks_has_the_state_of_the_whole_and_takes_no_token_back(family):
    config, params = model(family)
    tokens, cache = torch.tensor([[5, 9, 11, 2, 40, 3]]), serve.init_cache(config, 1, 8)
    whole, _ = serve.prefill(params, tokens, cache, config)
    for part in tokens.split([1, 3, 2], 1):
        logits, cache = serve.prefill(params, part, cache, config)
    torch.testing.assert_close(logits, whole, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="takes no token back\n  fix: "):
        serve.decode(params, tokens[:, 0], cache | {"lengths": cache["lengths"] - 1}, config)


SERVED = [({"Y": 2, "Z": 2}, "qwen3 next dense"), ({"Y": 2, "E": 2}, "qwen3 next")]


@pytest.mark.parametrize(("mesh", "family"), SERVED, ids=str)
def test_states_are_split_by_heads(mesh, family):
    assert served(mesh, family, page=4) == greedy(family, 6)


@on_ranks({"W": 4})
def test_states_are_moved_with_the_cache(mesh):
    """From the mesh that prefills to the one that decodes, whose cache is in pages."""
    config, params = model("qwen3 next")
    tokens, (a, b) = (
        torch.tensor(PROMPTS[:1]).repeat(2, 1),
        (Mesh({"Y": 2}, ranks=[0, 1]), Mesh({"Z": 2}, ranks=[2, 3])),
    )
    own = {on: tree.shard(params, serve.specs(config, on), on) for on in (a, b) if on.member}
    cache = serve.prefill(own[a], tokens, serve.init_cache(config, 2, 8, mesh=a), config, a)[1] if a.member else None
    cache = serve.move(cache, config, a, b, page=2)
    if b.member:
        logits, _ = serve.decode(own[b], torch.tensor([3, 3]), cache, config, b)
        wanted = transformer.forward(params, torch.tensor([[*PROMPTS[0], 3]]), config=config)[:, -1]
        torch.testing.assert_close(logits, wanted.repeat(2, 1), rtol=0, atol=1e-12)


def test_states_are_refused_where_they_are_not_served():
    config, params = model("qwen3 next dense")
    for options, said in ({"form": "sequence"}, "by heads alone"), ({"draft": "ngram"}, "no rejected"):
        with pytest.raises(ValueError, match=f"{said}.*\n  fix: "):
            serve.generate(params, PROMPTS, config, 6, **options)
    plain = Config("plain", L=1, D=8, F=8, N=2, K=2, H=4, V=60)
    with pytest.raises(ValueError, match="no rejected"):  # a draft with states, too
        serve.generate(transformer.init(plain), PROMPTS, plain, 6, draft=(params, config))
    with pytest.raises(ValueError, match="the state after its last token\n  fix: "):
        engine.serve(params, config, [], Options(4))


def test_a_run_s_order_of_tokens_is_the_one_that_linear_layers_need():
    plain = Config("plain", L=2, D=8, F=8, N=2, K=2, H=4, V=8)
    assert [Settings(config, "", "").context for config in (plain, model("qwen3 next")[0])] == ["zigzag", "ring"]
