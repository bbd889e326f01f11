"""The model on one device: params and FLOPs by the formulas, one gradient however it is taken, and its loss; its
attention, query by query; and a batch or params that torch would broadcast, cast or cut off: each is refused with its
fix, on one device and on a mesh, and gives no number."""

import math
from functools import partial
from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F
from misuse import plain
from probes import shaken
from problems import drawn
from refused import evaluated, named, refused
from torch.utils.flop_counter import FlopCounterMode

from scaling import tree
from scaling.common.limits import Limits
from scaling.configs import Config, Latent, RopeScaling
from scaling.cost.transformer import forward_flops, num_params, saved_bytes, train_flops
from scaling.mesh import Mesh
from scaling.models import moe, rope, transformer
from scaling.models.attention import PackedSpans, dot_product_attention, sdpa, shared_mask
from scaling.strategies import transformer as strategy

SMALL = Config("small", L=3, D=32, F=48, N=4, K=2, H=8, V=50)
LATENT = SMALL.with_(name="latent", K=4, latent=Latent(q_rank=12, kv_rank=10, nope=6, rope=4, value=8))
PLAIN = SMALL.with_(name="plain", gated=False, K=4)
TIED = SMALL.with_(name="tied", tied=True, K=1, H=10)
ALL = SMALL.with_(name="all", theta=100.0, attention_bias=True, output_bias=True, qk_norm=True, window=(3, None, 5))
ALL = ALL.with_(eps=1e-3, rope_scaling=RopeScaling("llama3", 4.0, 1.0, 4.0, 16))
EXPERTS = SMALL.with_(name="experts", E=4, k=2, shared=1, routing="sigmoid", aux_coef=0.1, z_coef=0.01, capacity=1.2)
FIRST = EXPERTS.with_(name="dense first", dense_layers=1, F_dense=20)
IDS = torch.tensor([[0] * 4 + [1] * 5 + [7] * 4, [3] * 13])  # the ids of packed documents


def tokens_of(config, B=2, T=12):
    return torch.randint(config.V, (B, T + 1), generator=torch.Generator().manual_seed(1))


def close(got, want, rtol=1e-9, atol=1e-11):
    torch.testing.assert_close(tree.leaves(got), tree.leaves(want), rtol=rtol, atol=atol)


def flops(f, *args, **given) -> int:
    with FlopCounterMode(display=False) as counter:
        f(*args, **given)
    return counter.get_total_flops()


@pytest.mark.parametrize("config", [LATENT.with_(L=2), TIED.with_(L=2, gated=False)], ids=attrgetter("name"))
def test_flops_equal_the_counter(config):
    params, tokens = transformer.init(config, device="meta"), tokens_of(config).to("meta")
    got = flops(transformer.forward, params, tokens[:, :-1], config=config)
    assert got == sum(forward_flops(config, 2, 12).values())
    for remat in ("none", "matmuls", "block"):
        got = flops(torch.func.grad(transformer.loss), params, tokens, remat, config=config)
        assert got == sum(train_flops(config, 2, 12, remat=remat).values()), remat


@pytest.mark.parametrize("config", [LATENT, PLAIN, TIED, ALL, FIRST], ids=attrgetter("name"))
def test_params_equal_the_formula_and_gradients_however_they_are_taken(config):
    """By torch.func and by autograd, with any attention, and whatever is computed again."""
    params, tokens = shaken(config), tokens_of(config)
    shapes = [p.shape for p in tree.leaves(transformer.init(config, device="meta"))]
    assert shapes == [p.shape for p in tree.leaves(params)]
    assert sum(shape.numel() for shape in shapes) == num_params(config)
    want = torch.func.grad_and_value(transformer.loss)(params, tokens, config=config)[::-1]
    close(transformer.loss_and_grads(params, tokens, config=config), want)
    for given in ((tokens, "block", sdpa), (tokens, "matmuls", dot_product_attention)):
        if config.moe and "matmuls" in given:
            with pytest.raises(ValueError, match=r"cannot be used with experts\n  fix: "):
                transformer.loss(params, *given, config=config)
            continue
        close(torch.func.grad_and_value(transformer.loss)(params, *given, config=config)[::-1], want)
        close(transformer.loss_and_grads(params, *given, config=config), want)
    assert not any(leaf.requires_grad for leaf in tree.leaves(params))


def saved_elements(config, remat, attention, B, T):
    """Elements that autograd holds for the backward pass of one layer, without params."""
    params = tree.map(lambda p: p.requires_grad_(), transformer.init(config, dtype=torch.float64))
    own, tokens = {p.untyped_storage()._cdata for p in tree.leaves(params)}, tokens_of(config, B, T)[:, :-1]

    def held(layers):
        storages = {}

        def pack(x):
            storages[x.untyped_storage()._cdata] = x.untyped_storage()
            return x

        cut = params | {"layers": {name: p[:layers] for name, p in params["layers"].items()}}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = transformer.forward(cut, tokens, remat, attention, config=config.with_(L=layers))
        assert out.requires_grad
        return sum(s.nbytes() for key, s in storages.items() if key not in own) // 8

    return held(2) - held(1)


@pytest.mark.parametrize("config", [SMALL, LATENT, TIED, TIED.with_(name="scaled", embed_scale=32**0.5)])
def test_a_model_begins_near_the_loss_of_equal_chances(config):
    params, tokens = transformer.init(config, 0), tokens_of(config, B=8, T=32)
    assert abs(transformer.loss(params, tokens, config=config) - math.log(config.V)) < 1


@pytest.mark.parametrize("config", [LATENT, SMALL, PLAIN, TIED], ids=attrgetter("name"))
def test_saved_bytes_equal_the_formula(config):
    B, T = 3, 16
    for remat in ("block", "matmuls"):
        got = saved_elements(config, remat, sdpa, B, T)
        assert got == saved_bytes(config, B * T, remat, dtype=1) / config.L, remat
    if config.latent:  # the tape holds queries and keys again, with their rotated parts beside the others
        return
    everything = saved_elements(config, "none", sdpa, B, T)  # more by the norms' statistics and the angles
    assert everything == pytest.approx(saved_bytes(config, B * T, "none", dtype=1) / config.L, rel=0.06)
    naive = saved_elements(config, "none", dot_product_attention, B, T)
    assert naive - everything > B * T * T * config.N - B * T * config.N  # the scores


@pytest.mark.parametrize("config", [ALL, EXPERTS.with_(capacity=None)], ids=attrgetter("name"))
def test_packed_documents_are_as_if_alone(config):
    assert rope.restarted(IDS)[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3]
    params, tokens = shaken(config), tokens_of(config, 2, 13)
    packed = transformer.forward(params, tokens[:, :-1], config=config, segments=IDS)
    total, count = 0.0, 0
    for b, start, stop in [(0, 0, 4), (0, 4, 9), (0, 9, 13), (1, 0, 13)]:
        alone = transformer.forward(params, tokens[b : b + 1, start:stop], config=config)
        close(packed[b, start:stop], alone[0], 1e-12, 1e-12)
        targets = tokens[b, start + 1 : stop + (stop == 13)]  # the last token's next one is taken for its document's
        total, count = total + F.cross_entropy(alone[0, : len(targets)], targets, reduction="sum"), count + len(targets)
    dense = partial(transformer.loss, params, tokens, config=config.with_(aux_coef=0.0, z_coef=0.0))
    close(dense(segments=IDS), total / count, 1e-12, 0)
    assert torch.equal(dense(segments=IDS), dense(segments=torch.cat([IDS, IDS[:, -1:]], 1)))


@pytest.mark.parametrize(
    "config", [PLAIN, ALL, LATENT, ALL.with_(name="chunks", window=5, chunked=True)], ids=attrgetter("name")
)
def test_packed_documents_attend_in_spans_with_the_gradients_of_one_masked_row(config):
    """Documents of 4, 5, 4 and of 13 tokens: short ones share a span, and a window cuts long ones."""
    params, tokens, mesh = shaken(config), tokens_of(config, T=13), Mesh({"X": 1})
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step(segments, span):
        given = {"segments": segments, "limits": Limits(span=span)}
        return strategy.loss_and_grads(params, inputs, targets, config, mesh, **given)

    def loss(p):
        return transformer.loss(p, inputs, config=config, targets=targets, segments=segments)

    pieces = torch.tensor([[0] * 4 + [1] * 5 + [0] * 4, [3] * 13])  # one document in two pieces
    for segments, span, lengths in ((IDS, 9, (9, 4, 13)), (IDS, 3, (4, 5, 4, 13)), (pieces, 9, None)):
        spans = shared_mask(None, 13, segments, torch.float64, "cpu", False, span)
        assert lengths == (spans.lengths if isinstance(spans, PackedSpans) else None)
        grads, value = torch.func.grad_and_value(loss)(params)
        close(step(segments, span), (value, grads))


def test_the_loss_is_torch_s_cross_entropy():
    """Of targets, some of which do not count, weighted, with smoothing and z; and of nothing. Of the next tokens
    `misuse.plain` has it."""
    params, tokens = shaken(SMALL), tokens_of(SMALL)
    g, inside = torch.Generator().manual_seed(3), tokens[:, :-1]
    weights = torch.rand(2, 12, generator=g, dtype=torch.float64) * (torch.arange(12) % 3 > 0)
    targets = torch.randint(0, SMALL.V, (2, 12), generator=g)
    targets[0, :3] = -100
    logits, w = transformer.forward(params, inside), weights * (targets != -100)
    ce = F.cross_entropy(logits.mT, targets, reduction="none", label_smoothing=0.1)
    wanted = (w * (ce + 0.01 * logits.logsumexp(-1).square())).sum() / w.sum()
    given = {"targets": targets, "weights": weights, "label_smoothing": 0.1, "z_loss": 0.01}
    close(transformer.loss(params, inside, **given), wanted, 1e-12, 0)
    nothing = transformer.loss_and_grads(params, tokens, weights=torch.zeros(2, 12))
    assert not any(leaf.any() for leaf in tree.leaves(nothing))


def test_the_loss_of_experts_has_their_terms_of_every_layer():
    params, tokens = shaken(EXPERTS), tokens_of(EXPERTS)
    x, extra = params["embed"][tokens[:, :-1]], 0.0
    angles = rope.tables(torch.arange(12), SMALL.H, SMALL.theta)

    def normed(x, gain):
        return F.rms_norm(x, (32,), gain, 1e-5)

    for layer in tree.unstacked(params["layers"]):
        x = x + transformer.attention_block(layer, x, dot_product_attention, angles, EXPERTS)
        out, aux = moe.dense(layer, normed(x, layer["norm_mlp"]), EXPERTS)
        x, extra = x + out, extra + 0.1 * aux["balance"] + 0.01 * aux["z"]
    want = F.cross_entropy((normed(x, params["norm"]) @ params["unembed"]).mT, tokens[:, 1:])
    close(transformer.loss(params, tokens, config=EXPERTS), want + extra, 1e-12, 0)


def qkv(B=2, T=13, S=13, N=4, K=2, H=8):
    return [x.requires_grad_() for x in drawn((B, T, N, H), (B, S, K, H), (B, S, K, H))]


@pytest.mark.parametrize(("T", "S"), [(13, 13), (5, 13), (1, 9)])
@pytest.mark.parametrize(
    "given", [{}, {"window": 3}, {"segments": True}, {"window": 4, "segments": True, "scale": 0.7}]
)
def test_attention_query_by_query_forward_and_backward(T, S, given):
    inputs = qkv(T=T, S=S)
    given = given | ({"segments": IDS[:, :S]} if "segments" in given else {})
    want = plain.attend(*inputs, **given)
    cotangent = drawn(want.shape, seed=2)
    slopes = torch.autograd.grad(want, inputs, *cotangent)
    for attention in (sdpa, dot_product_attention):
        got = attention(*inputs, **given)
        close(got, want, 1e-12, 1e-12)
        close(torch.autograd.grad(got, inputs, cotangent), slopes, 1e-11, 1e-12)


@pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule", "ignore:`torch.jit.script`")
def test_under_torch_func():
    inputs = [x.detach() for x in qkv(T=6, S=6)]
    tangents = [torch.randn_like(x) for x in inputs]
    many = [torch.stack([x, t]) for x, t in zip(inputs, tangents, strict=True)]

    def slopes(f):
        return torch.vmap(torch.func.grad(lambda *a: f(*a).sin().sum(), argnums=(0, 1, 2)))(*many)

    close(slopes(sdpa), slopes(dot_product_attention), 1e-11, 1e-12)
    ours, wanted = (torch.func.jvp(f, tuple(inputs), tuple(tangents)) for f in (sdpa, dot_product_attention))
    close(ours, wanted, 1e-12, 1e-12)


# What is not as it should be

TOKENS = torch.arange(12).view(2, 6)
INSIDE, TARGETS = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:]
WEIGHTS = torch.tensor([[1.0, 0.0, 2.0, 1.0, 0.5], [3.0, 1.0, 1.0, 0.0, 1.0]])
PARAMS = transformer.init(SMALL, 3, torch.float64)


def on_one(config=SMALL, **given):
    return transformer.loss(PARAMS, TOKENS, config=config, **given)


def on_mesh(params=PARAMS, targets=TARGETS, config=SMALL, **given):
    return strategy.loss_and_grads(params, INSIDE, targets, config, Mesh({"X": 1, "Y": 1}), **given)[0]


def by_torch_func(targets, **given):
    """The loss of one device, as it is differentiated by torch.func."""
    loss = partial(transformer.loss, tokens=INSIDE, config=SMALL, targets=targets, **given)
    return torch.func.grad_and_value(loss)(PARAMS)[1]


WRONG = {
    "segments": [TOKENS[:1, :5], WEIGHTS, WEIGHTS > 0],
    "config": [SMALL.with_(V=64), SMALL.with_(gated=False), SMALL.with_(attention_bias=True)],
}
OPTIONS = named(
    """
option           values
microbatches     [0, 3]
label_smoothing  [-0.1, 2.0]
scale            [0.0]
sums             [torch.int32, "float32"]
zero             [4]
context          ["zig"]
remat            ["all"]
schedule         ["gpipe"]
""",
    globals(),
)
STEPS = """
call                                                          words of its error
on_mesh(config=SMALL.with_(dropout=0.5), seed="3")
on_mesh(config=SMALL.with_(dropout=0.5), seed=None)
on_mesh(config=SMALL.with_(attention_dropout=0.5))
on_mesh(config=SMALL.with_(L=1))                              has the shape (1,
on_mesh(PARAMS | {"norm": PARAMS["norm"].bfloat16()})         params["norm"]
on_mesh(targets=TOKENS)                                       targets
on_mesh(targets=TARGETS + 99 * (TARGETS == 2))                targets must lie in 0..49
by_torch_func(TARGETS + 99 * (TARGETS == 2))                  found 101
strategy.shard(PARAMS | {"norm": PARAMS["norm"][:4]}, SMALL, Mesh({"X": 1}))
"""
test_a_step_on_a_mesh = refused(
    {f"{n} {i}": partial(on_mesh, **{n: x}) for n, some in (WRONG | OPTIONS).items() for i, x in enumerate(some)}
    | evaluated(STEPS, globals())
)


def test_weights_of_other_dtypes_are_right_and_targets_outside_the_vocabulary_where_they_have_none():
    for weights in (WEIGHTS, WEIGHTS.round().long(), WEIGHTS > 0.7):
        given = {"weights": weights, "targets": TARGETS + 99 * (weights == 0)}
        for found in (on_mesh(**given), by_torch_func(**given)):
            torch.testing.assert_close(found, on_one(weights=weights), rtol=1e-12, atol=0)


DYNAMIC = RopeScaling("dynamic", 2.0)
Q, K = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 2, 4)
ON_ONE = """
call                                                        words of its error
on_one(SMALL.with_(L=1))
transformer.init(SMALL, "3")
transformer.init(SMALL, None)
sdpa(Q, K, K)                                               must divide N=3
dot_product_attention(Q, K, K)                              must divide N=3
transformer.loss(PARAMS, TOKENS, targets=TOKENS[:, :3])     targets must be
transformer.loss(PARAMS, TOKENS[:, :1])                     hold no next token
transformer.forward(PARAMS, TOKENS, "all")                  remat = 'all': one of 'none'
transformer.forward(transformer.init(EXPERTS), TOKENS)      give config=
on_one(SMALL.with_(rope_scaling=DYNAMIC))                   rope_scaling of type 'dynamic'
rope.frequencies(8, 1e4, DYNAMIC)
    'dynamic' is not computed here; linear, llama3, yarn, longrope are
transformer.init(FIRST.with_(dense_layers=3))               without layers with experts
transformer.init(SMALL, dtype=torch.int32)                  floats
"""
test_what_one_device_does_not_compute = refused(
    {f"{name} {i}": partial(on_one, **{name: x}) for name, values in WRONG.items() for i, x in enumerate(values)}
    | evaluated(ON_ONE, globals())
)
