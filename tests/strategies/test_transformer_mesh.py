"""The Transformer under every axis: loss and every gradient leaf equal one device; params after AdamW steps too."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value

from scaling import optim, tree
from scaling.book.largest import largest
from scaling.configs import Config
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer as model
from scaling.schedules import make
from scaling.spec import ShardingError, parse
from scaling.strategies import transformer
from scaling.strategies.axes import present
from scaling.strategies.transformer.api import check_batch
from scaling.strategies.transformer.layer import own_heads
from scaling.strategies.transformer.stages import resolved, slots_of
from scaling.strategies.transformer.step import AskedStep
from scaling.trace import trace

PLAIN = Config("plain", 2, 16, 24, 4, 2, 8, 32)
RICH = PLAIN.with_(name="rich", attention_bias=True, output_bias=True, qk_norm=True, tied=True, window=(None, 5))
EXPERTS = PLAIN.with_(name="experts", E=4, k=2, aux_coef=0.1, z_coef=0.01, shared=1)
B, T = 8, 16


def batch(config, seed=1):
    """Tokens, targets of which some are ignored, uneven weights (one sequence has none), and packed documents."""
    g = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, config.V, (B, T), generator=g) for _ in range(2))
    targets[torch.rand(B, T, generator=g) < 0.1] = -100
    weights = torch.rand(B, T, generator=g, dtype=torch.float64)
    weights[0] = 0
    return tokens, targets, weights, (torch.rand(B, T, generator=g) < 0.2).cumsum(1)


def reference(params, config, tokens, targets, weights, segments, smoothing, z):
    """The loss by F.cross_entropy on one device, with the experts' terms of the model's own loss."""
    logits, extra = model._forward(params, tokens, "none", model.sdpa, config, segments)
    flat, labels = logits.flatten(0, 1), targets.flatten()
    ce = F.cross_entropy(flat, labels, reduction="none", ignore_index=-100, label_smoothing=smoothing)
    ce = ce + z * flat.logsumexp(-1).square()
    w = weights.flatten() * (labels != -100)
    return (w * ce).sum() / w.sum() + extra


def local(x, mesh):
    return tree.shard(x, str(present("t[B_PXE, T_C]", mesh)), mesh)


def run(mesh, config, options, packed, smoothing, z):
    """(loss, gradients, the loss alone, params after 3 AdamW steps), whole."""
    layout = {"schedule": options["schedule"]} if "schedule" in options else {}
    params = transformer.shard(model.init(config, 0, torch.float64), config, mesh, **layout)
    adamw, seen = optim.adamw(0.01), ()
    state = adamw.init(params)
    for seed in (1, 2, 3):
        tokens, targets, weights, segments = (local(x, mesh) for x in batch(config, seed))
        given = {"weights": weights, "segments": segments if packed else None, **options}
        loss, grads = transformer.loss_and_grads(
            params, tokens, targets, config, mesh, label_smoothing=smoothing, z_loss=z, **given
        )
        if not seen:
            alike = {k: v for k, v in given.items() if k not in ("remat", "microbatches")}
            alone = transformer.loss(
                params, tokens, targets, config, mesh, label_smoothing=smoothing, z_loss=z, **alike
            )
            seen = loss, transformer.unshard(grads, config, mesh, **layout), alone
        params, state = adamw.update(grads, state, params)
    return *seen, transformer.unshard(params, config, mesh, **layout)


def one_device(config, packed, smoothing, z):
    params, adamw, seen = model.init(config, 0, torch.float64), optim.adamw(0.01), []
    state = adamw.init(params)
    for seed in (1, 2, 3):
        tokens, targets, weights, segments = batch(config, seed)
        given = tokens, targets, weights, segments if packed else None, smoothing, z
        grads, loss = grad_and_value(lambda p, given=given: reference(p, config, *given))(params)
        seen.append((loss, grads))
        params, state = adamw.update(grads, state, params)
    return *seen[0], params


CASES = [
    (PLAIN, {"X": 1}, {"remat": "block"}, False, 0.0, 0.0),
    (RICH, {"X": 2}, {"microbatches": 2}, True, 0.1, 0.01),
    (RICH, {"P": 2, "Y": 2}, {}, True, 0.0, 0.01),
    (RICH, {"X": 2, "Y": 2}, {"remat": "block", "microbatches": 2}, False, 0.1, 0.0),
    (PLAIN, {"Y": 4}, {}, True, 0.1, 0.01),
    (RICH, {"C": 2, "Y": 2}, {"context": "zigzag"}, True, 0.1, 0.01),
    (RICH, {"Z": 2}, {"microbatches": 4}, True, 0.1, 0.01),
    (RICH.with_(L=3, window=(None, 5, 3)), {"Z": 2, "Y": 2}, {"microbatches": 2, "remat": "block"}, False, 0.0, 0.01),
    (PLAIN.with_(L=5), {"Z": 2, "X": 2}, {"microbatches": 4, "schedule": "interleaved"}, True, 0.0, 0.0),
    # with microbatches the z terms alone are those of the whole batch: a mean
    (EXPERTS.with_(aux_coef=0.0), {"Z": 2, "E": 2}, {"microbatches": 2, "schedule": "zb-h1"}, False, 0.0, 0.0),
    (EXPERTS, {"E": 2, "Y": 2}, {}, False, 0.0, 0.0),
    (EXPERTS.with_(balance_by="sequence", F_shared=10), {"C": 2, "E": 2}, {"microbatches": 2}, False, 0.0, 0.0),
    # a vocabulary that does not divide: of 5 entries the last of four ranks has padding alone
    (PLAIN.with_(name="V 5", V=5, D=16), {"Y": 4}, {}, False, 0.1, 0.01),
    (RICH.with_(name="V 31", V=31), {"X": 2, "Y": 2}, {"microbatches": 2}, True, 0.1, 0.01),
    (PLAIN.with_(name="V 30", V=30), {"Z": 2, "Y": 2}, {"microbatches": 2}, False, 0.1, 0.0),
]
CASES += [  # of the same kinds as those above
    pytest.param(case, marks=pytest.mark.sweep)
    for case in (
        (PLAIN, {"X": 2, "C": 2}, {"context": "ring", "microbatches": 2}, False, 0.0, 0.0),
        (EXPERTS, {"X": 2, "E": 2}, {"remat": "block"}, False, 0.1, 0.0),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].name} {c[1]}".replace("'", ""))
def test_equal_to_one_device(ranks, case):
    config, mesh, options, packed, smoothing, z = case
    wanted = one_device(config, packed, smoothing, z)
    for got in ranks(run, mesh, config, options, packed, smoothing, z):
        assert abs(got[0] - wanted[0]) < 1e-12
        assert abs(got[2] - wanted[0]) < 1e-12
        for limit, ours, theirs in ((1e-11, got[1], wanted[1]), (1e-9, got[3], wanted[2])):
            for where, a in tree.named_leaves(ours).items():
                b = tree.named_leaves(theirs)[where]
                assert (a - b).abs().max() <= limit * b.abs().max().clamp(min=1e-30), (where, a, b)


def test_nothing_counts_where_no_token_does(ranks):
    for both in ranks(without_targets, {"X": 2}):
        assert both == (0, 0)


def without_targets(mesh):
    params = transformer.shard(model.init(PLAIN, 0, torch.float64), PLAIN, mesh)
    tokens = torch.zeros(2, T, dtype=torch.int64)
    loss, grads = transformer.loss_and_grads(params, tokens, torch.full_like(tokens, -100), PLAIN, mesh)
    return loss.item(), largest(g.abs().max().item() for g in tree.leaves(grads))


def test_what_is_stored_over_x_follows_zero():
    mesh = AbstractMesh({"X": 2, "Y": 2})
    *replicated, stored = [tree.leaves(transformer.specs(PLAIN, mesh, zero=zero)) for zero in (0, 1, 2, 3)]
    assert all(types == [text.replace("D_X", "D") for text in stored] for types in replicated)
    assert sum("D_X" in text for text in stored) >= 9


def traced(config, sizes, **options):
    mesh = AbstractMesh(sizes)
    types = transformer.specs(config, mesh)
    params = tree.map(lambda t: torch.empty(parse(t).local_shape(config.sizes, mesh), device="meta"), types)
    shape = parse(str(present("t[B_PXE, T_C]", mesh))).local_shape({"B": B, "T": T}, mesh)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    with trace() as log:
        transformer.loss_and_grads(params, tokens, tokens, config, mesh, **options)
    return log


def test_a_layer_s_gradients_are_under_way_while_the_one_below_is_differentiated():
    """So no more than two layers' whole gradients are held."""
    L = 4
    ops = [event.op for event in traced(PLAIN.with_(L=L), {"X": 2}).events]
    starts = [i for i, op in enumerate(ops) if op == "ReduceScatter"]  # a layer's, all in one, and those of the ends
    assert len(starts) == L + 2
    assert all(ops[a:b].count("Einsum") >= 14 for a, b in itertools.pairwise(starts[:L]))


@pytest.mark.parametrize("remat", ["none", "block"])
def test_tokens_are_routed_once(remat):
    """What was decided forward is kept: a layer that is computed again asks no rank again."""
    log = traced(EXPERTS, {"E": 2}, remat=remat)
    counts = [event for event in log.events if event.op == "AllToAll" and str(event.before).startswith("n[")]
    assert len(counts) == EXPERTS.L


@pytest.mark.parametrize("keep", [False, True])
def test_bytes_are_part_5_s(keep):
    """Over X a layer's weights are gathered in both passes, or once if they are kept, those of the ends once, and each
    gradient is scattered once; over Y the residual stream goes four times a layer.

    Every other collective moves one number a token, or a gain.
    """
    X, Y, c = 2, 2, PLAIN
    moved = {}
    for event in traced(c, {"X": X, "Y": Y}, keep_weights=keep).collectives():
        key = event.op, "".join(event.axes)
        moved[key] = moved.get(key, 0) + event.nbytes
    layer = (2 * c.N * c.H + 2 * c.K * c.H + 3 * c.F) * c.D
    weights, tokens = (c.L * layer + 2 * c.V * c.D) // Y * 4, B // X * T * 4
    assert moved.pop(("ReduceScatter", "X")) == weights
    assert moved.pop(("AllGather", "X")) == weights + (0 if keep else c.L * layer // Y * 4)
    stream = (4 * c.L + 2) * tokens * c.D  # and once each for embedding and head, forward and backward together
    assert moved.pop(("AllGather", "Y")) == stream
    assert moved.pop(("ReduceScatter", "Y")) == stream
    gains = (2 * c.L + 1) * c.D * 4
    assert moved.pop(("AllReduce", "Y")) == 4 * tokens  # the largest logit of each token, and three sums over V
    assert moved.pop(("AllReduce", "XY")) == gains + 4  # and the loss
    assert moved == {("AllReduce", "X"): 4}  # the sum of the weights


@pytest.mark.parametrize(
    ("config", "sizes", "words"),
    [
        (PLAIN, {"Q": 2}, "splits nothing of a Transformer"),
        (PLAIN.with_(N=6, K=2), {"Y": 4}, "N=6 query heads do not divide"),
        (PLAIN.with_(N=12, K=2), {"Y": 3}, "K=2 KV heads over Y=3"),
        (PLAIN.with_(N=12, K=4), {"Y": 3}, "K=4 KV heads over Y=3"),
        (PLAIN, {"E": 2}, "E=1 experts"),
    ],
)
def test_what_does_not_fit_is_refused(config, sizes, words):
    with pytest.raises(ShardingError, match=words):
        transformer.specs(config, AbstractMesh(sizes))


def test_a_vocabulary_that_does_not_divide_is_padded_in_store_alone():
    config, mesh = PLAIN.with_(name="V 30", V=30), AbstractMesh({"Y": 4})
    params = transformer.shard(model.init(config, 0, device="meta"), config, mesh)
    assert params["embed"].shape == (8, 16)
    assert params["unembed"].shape == (16, 8)
    assert transformer.unshard(params, config, mesh)["unembed"].shape == (16, 30)


@pytest.mark.slow
def test_experts_with_a_capacity_take_tokens_in_plain_order():
    """So zig-zag, which reorders them, is refused where a sequence is split, and there alone."""
    moe = PLAIN.with_(E=4, k=2, capacity=1.5)
    with pytest.raises(ValueError, match="zig-zag reorders them"):
        traced(moe, {"X": 2, "C": 2})
    assert traced(moe, {"X": 2, "C": 2}, context="ring").events
    assert traced(moe, {"X": 2, "C": 1}).events
    assert traced(moe, {"X": 2}).events
    assert traced(moe.with_(capacity=None), {"X": 2, "C": 2}).events


@pytest.mark.parametrize(("token", "lies_in"), [(0, True), (PLAIN.V - 1, True), (PLAIN.V, False), (-1, False)])
def test_tokens_lie_in_the_vocabulary(token, lies_in):
    tokens, mesh, params = torch.zeros(2, 3, dtype=torch.int64), Mesh({"X": 1}), model.init(PLAIN, 0)
    transformer.loss(params, tokens, tokens, PLAIN, mesh)  # also of a step that was asked for before
    tokens[1, 2] = token
    with nullcontext() if lies_in else pytest.raises(ValueError, match=f"tokens must lie in 0..{PLAIN.V - 1}"):
        transformer.loss(params, tokens, torch.zeros_like(tokens), PLAIN, mesh)


def test_what_no_compiled_graph_can_is_refused_there_alone(monkeypatch):
    tokens = torch.zeros(4, 4, dtype=torch.int64)
    cases = [(PLAIN, {"X": 2}, ""), (PLAIN, {"Z": 1, "X": 2}, ""), (PLAIN, {"Z": 2}, "stages")]
    cases += [(EXPERTS, {"X": 1}, "experts")]
    for config, sizes, why in cases:
        arguments = tokens, tokens, AskedStep(config, context="ring", backward=False), AbstractMesh(sizes)
        check_batch(*arguments)
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
            if why:
                with pytest.raises(ValueError, match=f"{why}.* which a compiled graph cannot"):
                    check_batch(*arguments)
            else:
                check_batch(*arguments)


def test_stages_run_1f1b_unless_they_are_given_a_schedule():
    flat, staged = AbstractMesh({"X": 2}), AbstractMesh({"X": 2, "Z": 2})
    assert resolved(None, flat, 4) is None
    assert resolved("gpipe", flat, 4) == make("gpipe", 1, 4)
    assert resolved(None, staged, 4) == make("1f1b", 2, 4)
    assert resolved(made := make("zb-h1", 2, 4), staged, 4) is made
    assert slots_of(PLAIN.with_(L=3), staged, None) == [0, 1, 2, -1]
    assert slots_of(PLAIN.with_(L=4), staged, "dualpipev") == [0, 3, 1, 2]


@pytest.mark.parametrize(("N", "K", "Y"), [(4, 2, 4), (8, 2, 4), (8, 1, 2), (12, 2, 4), (16, 2, 8), (8, 4, 2)])
def test_replicated_kv_heads_are_those_of_a_ranks_query_heads(N, K, Y):
    for y in range(Y):
        at = SimpleNamespace(config=PLAIN.with_(N=N, K=K), mesh=AbstractMesh({"Y": Y}, {"Y": y}))
        seen = sorted({head * K // N for head in range(y * N // Y, (y + 1) * N // Y)})
        held = torch.arange(K) if K % Y else torch.arange(K).chunk(Y)[y]
        assert own_heads(held, at, 0).tolist() == seen


def test_the_loss_alone_takes_a_single_sequence():
    mesh, params = Mesh({"X": 1}), model.init(PLAIN, 0, torch.float64)
    tokens, targets, *_ = (x[:1] for x in batch(PLAIN))
    loss, _ = transformer.loss_and_grads(params, tokens, targets, PLAIN, mesh)
    assert torch.equal(transformer.loss(params, tokens, targets, PLAIN, mesh), loss)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_model_dims_divide_only_where_params_are_split_over_x(zero):
    config = PLAIN.with_(D=PLAIN.D // 2 * 2 + 2)
    assert "X" not in str(transformer.specs(config, {"X": 4}, zero=zero))
    with pytest.raises(ShardingError, match="model dims do not divide into 4 blocks"):
        transformer.specs(config, {"X": 4})
