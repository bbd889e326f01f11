"""The Transformer under every axis beside one device: loss, every gradient, the params after an AdamW step, and then
another batch's loss.

Whatever is kept for the backward, loss and gradients are the same to the bit: each case takes one policy more, in turn;
marked sweep, every one. The one-device model is differentiated by autograd, with dropout around its blocks. What is
dropped looks random, hangs on the seed, and nothing is where nothing is trained. On abstract meshes, what a step sends,
computes and holds beside the closed forms of Part 5."""

import itertools
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from problems import close, counts, trained
from torch.func import grad_and_value
from torch.utils.flop_counter import FlopCounterMode

from scaling import tree
from scaling.book.largest import largest
from scaling.configs import Config, Latent, RopeScaling
from scaling.cost import transformer as tm
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer as model
from scaling.models.dropout import at_step, dropout
from scaling.schedules import make
from scaling.spec.reader import read_type
from scaling.strategies import transformer
from scaling.strategies.axes import present
from scaling.strategies.transformer.stages import resolved, stored_places
from scaling.trace import trace
from scaling.trace.peak import peak_memory

PLAIN = Config("plain", 2, 16, 24, 4, 2, 8, 32)
RICH = PLAIN.with_(name="rich", attention_bias=True, output_bias=True, qk_norm=True, tied=True, window=(None, 5))
DROPPED = RICH.with_(name="dropout", dropout=0.3, L=3, window=(None, 5, 9))
EXPERTS = PLAIN.with_(name="experts", E=4, k=2, aux_coef=0.1, z_coef=0.01, shared=1)
LATENT = PLAIN.with_(name="latent", K=4, theta=1e4, latent=Latent(q_rank=12, kv_rank=10, nope=6, rope=4, value=8))
LATENT = LATENT.with_(rope_scaling=RopeScaling("yarn", 4.0, 1.0, 32.0, 8, mscale=0.8, mscale_all=1.2))
FIRST = EXPERTS.with_(name="dense first", K=4, routing="sigmoid", expert_groups=2, latent=LATENT.latent)
FIRST = FIRST.with_(L=3, dense_layers=2, F_dense=40)
DEEP = FIRST.with_(name="dense first, deep", L=4, window=(None, 5, 3, None), aux_coef=0.0)
B, T = 8, 16
LOSS = {"segments": True, "label_smoothing": 0.1, "z_loss": 0.01}
CASES = [
    (PLAIN.with_(name="large", D=128, F=1400), {"X": 2}, {}),  # its leaves are sent one by one
    (PLAIN.with_(name="relu", gated=False, activation="relu"), {"Y": 2}, LOSS),
    (RICH.with_(name="one KV head", K=1, activation="gelu_tanh"), {"Y": 4}, LOSS),
    # a vocabulary that does not divide: of 5 entries the last of four ranks has padding alone
    (PLAIN.with_(N=12, V=5), {"Y": 4}, LOSS | {"scale": 1024.0}),
    (RICH, {"X": 2}, LOSS | {"microbatches": 2, "zero": 1}),
    (RICH.with_(name="gelu", gated=False), {"P": 2, "X": 2}, {"segments": True, "z_loss": 0.01}),
    (RICH, {"Z": 2}, LOSS | {"microbatches": 4}),
    (PLAIN.with_(L=5), {"Z": 2, "X": 2}, {"microbatches": 4, "schedule": "interleaved", "segments": True}),
    (DROPPED, {"X": 2, "Y": 2}, {"microbatches": 2, "label_smoothing": 0.1}),
    (DROPPED, {"C": 2, "Y": 2}, LOSS | {"microbatches": 2, "context": "ring"}),
    (DROPPED, {"Z": 2, "P": 2}, {"microbatches": 2}),
    (EXPERTS.with_(balance_by="sequence", F_shared=10), {"C": 2, "E": 2}, {"microbatches": 2}),
    (LATENT.with_(V=31), {"X": 2, "Y": 2}, {"microbatches": 2, "label_smoothing": 0.1}),
    (LATENT.with_(L=4), {"Z": 2}, LOSS | {"microbatches": 4, "schedule": "dualpipev"}),
    (LATENT.with_(window=(None, 5)), {"C": 2, "Y": 2}, LOSS),
    (FIRST.with_(dropout=0.3), {"E": 2, "Y": 2}, {}),
    (FIRST, {"X": 2}, LOSS),
    # with microbatches the z terms alone are those of the whole batch: a mean
    (DEEP, {"Z": 2, "X": 2}, LOSS | {"microbatches": 2, "schedule": "zb-h1"}),
    (DEEP.with_(L=6, window=None), {"Z": 2, "E": 2}, {"microbatches": 2, "schedule": "interleaved"}),
    (PLAIN.with_(name="V 30", V=30, tied=True), {"Z": 2, "Y": 2}, {"microbatches": 2, "label_smoothing": 0.1}),
]
SWEPT = [  # of the same kinds as those above
    (PLAIN, {"X": 2, "C": 2}, {"context": "ring", "microbatches": 2}),
    (EXPERTS, {"X": 2, "E": 2}, {"label_smoothing": 0.1}),
    (RICH.with_(L=3, window=(None, 5, 3)), {"Z": 2, "Y": 2}, {"microbatches": 2, "z_loss": 0.01}),
]
BLOCK_OR_KEPT = [{"remat": "block"}, {"keep_weights": True}]  # experts have no policy between
WAYS = {False: [*BLOCK_OR_KEPT, {"remat": "attention"}, {"remat": "matmuls"}], True: BLOCK_OR_KEPT}
TURNS = {moe: itertools.cycle(ways) for moe, ways in WAYS.items()}


def named(case, ways, what="", marks=()):
    """`docs/museum.md` names a case by its id."""
    config, mesh, _ = case
    return pytest.param((*case, ways), id=f"{what}{config.name} {mesh}".replace("'", ""), marks=marks)


EVERY = [named(case, WAYS[case[0].moe], "every policy: ", pytest.mark.sweep) for case in CASES + SWEPT]
CASES = [named(case, [next(TURNS[case[0].moe])]) for case in CASES]


def batch(config, seed):
    """Tokens, targets of which some are ignored, uneven weights (one sequence has none), and packed documents."""
    g = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, config.V, (B, T), generator=g) for _ in range(2))
    targets[torch.rand(B, T, generator=g) < 0.1] = -100
    weights = torch.rand(B, T, generator=g, dtype=torch.float64)
    weights[0] = 0
    return tokens, targets, weights, (torch.rand(B, T, generator=g) < 0.2).cumsum(1)


def reference(params, config, options, seed):
    """The loss by F.cross_entropy on one device, with the experts' terms of the model's own loss."""
    tokens, targets, weights, segments = batch(config, seed)
    with dropping(config, seed):
        logits, extra = model._forward(
            params, tokens, "none", model.sdpa, config, segments if "segments" in options else None
        )
    flat, labels = logits.flatten(0, 1), targets.flatten()
    smoothing = options.get("label_smoothing", 0.0)
    ce = F.cross_entropy(flat, labels, reduction="none", ignore_index=-100, label_smoothing=smoothing)
    ce = ce + options.get("z_loss", 0.0) * flat.logsumexp(-1).square()
    w = weights.flatten() * (labels != -100)
    return (w * ce).sum() / w.sum() + extra


@contextmanager
def dropping(config, seed):
    """The one-device model with elements dropped of what each block returns."""
    given = {"rate": config.dropout, "seed": at_step(7, seed), "samples": torch.arange(B), "positions": torch.arange(T)}
    layers = {"attention": itertools.count(), "mlp": itertools.count()}

    def dropped(block, branch):
        def wrapped(*args):
            found = block(*args)
            Out, *aux = found if isinstance(found, tuple) else (found,)
            Out = dropout(Out, branch, next(layers[branch]), **given)
            return (Out, *aux) if aux else Out

        return wrapped

    blocks = {"attention_block": "attention", "latent_block": "attention", "mlp_block": "mlp"}
    blocks = {name: dropped(getattr(model, name), branch) for name, branch in blocks.items()}
    with patch.multiple(model, **blocks), patch.object(model.moe, "forward", dropped(model.moe.forward, "mlp")):
        yield


def one_device(config, options):
    """Loss and gradients of a batch, the params after a step, and the loss of another one, of which nothing drops."""

    def step(params, seed):
        return grad_and_value(lambda params: reference(params, config, options, seed))(params)[::-1]

    (loss,), (grads,), after = trained(model.init(config, 0, torch.float64), step, (1,))
    return loss, grads, after, reference(after, config.with_(dropout=0.0), options, 2)


def run(mesh, config, options, ways):
    """The same, whole. What else is kept or computed again changes no bit, and params are not changed."""
    layout = {key: options[key] for key in ("schedule", "zero") if key in options}
    params = transformer.shard(model.init(config, 0, torch.float64), config, mesh, **layout)
    types, places = transformer.specs(config, mesh, **layout), stored_places(config, mesh, layout.get("schedule"))

    def given(seed, *left_out):
        tokens, targets, weights, segments = tree.shard(
            list(batch(config, seed)), [present("t[B_PXE, T_C]", mesh)] * 4, mesh
        )
        more = {"weights": weights} | ({"segments": segments} if "segments" in options else {})
        return (tokens, targets, config, mesh), {key: options[key] for key in options if key not in left_out} | more

    def step(params, seed, **more):
        arguments, options = given(seed)
        more |= {"seed": at_step(7, seed)} if config.dropout else {}
        return transformer.loss_and_grads(params, *arguments, **options, **more)

    (loss,), (grads,), after = trained(params, step, (1,))
    for more in ways:
        assert same(step(params, 1, **more), (loss, grads)), more
    assert same(model.init(config, 0, torch.float64, "cpu", mesh=mesh, specs=types, places=places), params)
    arguments, options_of_loss = given(2, "microbatches", "scale")
    then = transformer.loss(after, *arguments, **options_of_loss)
    return loss, *(transformer.unshard(found, config, mesh, **layout) for found in (grads, after)), then


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(tree.leaves(ours), tree.leaves(theirs), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + EVERY)
def test_equal_to_one_device(ranks, case):
    config, mesh, options, ways = case
    loss, grads, after, then = one_device(config, options)
    for found_loss, found_grads, found_after, found_then in ranks(run, mesh, config, options, ways):
        close(found_loss, loss)
        close(found_grads, grads, 1e-11)
        close((found_after, found_then), (after, then), 1e-9)


def test_a_single_sequence_and_a_batch_in_which_nothing_counts():
    mesh, params = Mesh({"X": 1}), model.init(PLAIN, 0, torch.float64)
    tokens, targets, *_ = (x[:1] for x in batch(PLAIN, 1))
    loss, _ = transformer.loss_and_grads(params, tokens, targets, PLAIN, mesh)
    assert torch.equal(transformer.loss(params, tokens, targets, PLAIN, mesh), loss)
    loss, grads = transformer.loss_and_grads(params, tokens, torch.full_like(targets, -100), PLAIN, mesh)
    assert loss == 0
    assert not any(g.any() for g in tree.leaves(grads))


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")  # of torch's own code
def test_compiled_as_one_graph():
    """A policy that computes layers again; `tests/sweeps/layouts.py --compile` has the others. Types are read outside
    of the graph: to trace the parser would take half of the time."""
    mesh, config = Mesh({"X": 1}), PLAIN.with_(L=1, F=16, V=16)
    params, (tokens, targets, *_) = model.init(config, 0), batch(config, 1)

    def step(params):
        return transformer.loss_and_grads(params, tokens, targets, config, mesh, remat="block")

    read = torch.compiler.assume_constant_result(lambda *text: read_type(*text))
    with patch("scaling.spec.types.read_type", read):
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(params)
    for ours, wanted in zip(tree.leaves(got), tree.leaves(step(params)), strict=True):
        torch.testing.assert_close(ours, wanted)


def test_another_seed_drops_others_and_the_loss_alone_none():
    tokens, targets, *_ = batch(DROPPED, 1)
    params, mesh = model.init(DROPPED, 0, torch.float64), Mesh({"X": 1})
    a, b = (transformer.loss_and_grads(params, tokens, targets, DROPPED, mesh, seed=s)[0] for s in (1, 2))
    assert abs(a - b) > 1e-4
    none = DROPPED.with_(dropout=0.0)
    assert torch.equal(*(transformer.loss(params, tokens, targets, c, mesh) for c in (DROPPED, none)))
    assert torch.equal(*(model.forward(params, tokens, config=c) for c in (DROPPED, none)))


def test_what_is_dropped_looks_random():
    """Of each element as often as the rate says, in whatever direction one looks, and scaled so that the mean stays."""
    B, T, D = 32, 64, 62
    given = {"rate": 0.25, "seed": 3, "samples": torch.arange(B), "positions": torch.arange(T)}
    whole = torch.stack(
        [dropout(torch.ones(B, T, D), branch, l, **given) for branch in ("attention", "mlp") for l in (0, 1)]
    )
    assert set(whole.unique().tolist()) == {0.0, torch.tensor(65536 / 49152).item()}
    off, variance = whole - 1, 1 / 3

    def as_if_random(means, of):
        return bool((means.abs() < 5 * (variance / of) ** 0.5).all())

    for dims in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):  # of all, of each layer and branch, ...
        means = off.mean(dims)
        assert as_if_random(means, off.numel() / means.numel())
    shifts = [(1, 0), (2, 0), (1, 1), (1, 2), (1, 3)]  # one layer or branch beside another, and neighbours
    products = torch.stack([(off * off.roll(*shift)).mean() / variance**0.5 for shift in shifts])
    assert as_if_random(products, off.numel())
    assert torch.equal(dropout(whole[0], "mlp", **given | {"rate": 0.0}), whole[0])


def traced(config, sizes, step=transformer.loss_and_grads, **options):
    mesh = AbstractMesh(sizes)
    params = model.init(config, mesh=mesh, specs=transformer.specs(config, mesh))
    tokens = tree.shard(torch.empty(B, T, dtype=torch.int64, device="meta"), str(present("t[B_PXE, T_C]", mesh)), mesh)
    with trace() as log:
        step(params, tokens, tokens, config, mesh, **options)
    return log


def test_gathers_and_reductions_are_under_way_while_a_layer_computes():
    """So no more than two layers' whole gradients are held. Over X all of a layer travels at once."""
    L = 4
    events = traced(PLAIN.with_(L=L), {"X": 2}).events
    moves = [event for event in events if event.op in ("AllGather", "ReduceScatter")]
    assert all(event.async_op for event in moves)
    ops = [event.op for event in events]
    starts = [i for i, op in enumerate(ops) if op == "ReduceScatter"]  # a layer's, all in one, and those of the ends
    assert len(starts) == L + 2
    assert all(ops[a:b].count("Einsum") >= 14 for a, b in itertools.pairwise(starts[:L]))


@pytest.mark.parametrize("keep", [False, True])
def test_bytes_are_part_5_s(keep):
    """Over X a layer's weights are gathered in both passes, or once if they are kept, those of the ends once, and each
    gradient is scattered once; over Y the residual stream goes four times a layer.

    Every other collective moves one number a token, or a gain.
    """
    X, Y, c = 2, 2, PLAIN
    moved = Counter()
    for event in traced(c, {"X": X, "Y": Y}, keep_weights=keep).collectives():
        moved[event.op, "".join(event.axes)] += event.nbytes
    layer = (2 * c.N * c.H + 2 * c.K * c.H + 3 * c.F) * c.D
    weights, tokens = (c.L * layer + 2 * c.V * c.D) // Y * 4, B // X * T * 4
    stream = (4 * c.L + 2) * tokens * c.D  # and once each for embedding and head, forward and backward together
    gains = (2 * c.L + 1) * c.D * 4
    assert moved == {
        ("ReduceScatter", "X"): weights,
        ("AllGather", "X"): weights + (0 if keep else c.L * layer // Y * 4),
        ("AllGather", "Y"): stream,
        ("ReduceScatter", "Y"): stream,
        ("AllReduce", "Y"): 4 * tokens,  # the largest logit of each token, and three sums over V
        ("AllReduce", "XY"): gains + 4,  # and the loss
        ("AllReduce", "X"): 4,  # the sum of the weights
    }


def test_a_layer_of_latents_sends_and_multiplies_by_the_closed_form():
    """Over Y the latents R + M of each token travel instead of the stream D, in both passes; C_Q and C_KV each way."""
    c, X, Y = LATENT, 2, 4
    deep, once = (traced(c.with_(L=L), {"X": X, "Y": Y}) for L in (3, 2))
    assert deep.flops - once.flops == 3 * 2 * B * T * (tm.attention_params(c) + 3 * c.D * c.F) // (X * Y)
    moves = [[e.nbytes for e in log.collectives() if e.op != "AllReduce" and e.axes == ("Y",)] for log in (deep, once)]
    assert len(moves[0]) - len(moves[1]) == 2 * 5
    latents = c.sizes["R"] + c.sizes["M"]
    assert sum(moves[0]) - sum(moves[1]) == 2 * 4 * (B // X) * T * (latents + 3 * c.D)


def test_stages_run_1f1b_unless_they_are_given_a_schedule():
    flat, staged, given = AbstractMesh({"X": 2}), AbstractMesh({"X": 2, "Z": 2}), make("zb-h1", 2, 4)
    assert resolved(None, flat, 4) is None
    assert resolved(None, staged, 4) == make("1f1b", 2, 4)
    assert resolved(given, staged, 4) is given


def test_the_loss_alone_computes_a_third_of_a_step():
    sizes = {"X": 2, "Y": 2}
    assert 3 * traced(PLAIN, sizes, transformer.loss).flops == traced(PLAIN, sizes).flops


XY, STREAMS = {"X": 2, "Y": 2}, {("AllGather", "Y"): 2 * PLAIN.L}
TWO = {"microbatches": 2}
MORE = [  # of a mesh, with options or others, what these send more: nothing is repeated whose result nobody reads
    (PLAIN, XY, {}, {"remat": "attention"}, {}),
    (PLAIN, XY, {}, {"remat": "matmuls"}, STREAMS),  # of a layer the two streams y over Y
    (
        PLAIN,
        XY,
        {},
        {"remat": "block"},
        STREAMS | {("ReduceScatter", "Y"): PLAIN.L},
    ),  # attention's, which the MLP needs
    (
        EXPERTS,
        {"E": 2},
        {},
        {"remat": "block"},
        {("AllToAll", "E"): 2 * EXPERTS.L},
    ),  # rows go there and back, as routed
    # weights that stay: else a layer's, which travel together, are gathered in both passes of each microbatch
    (PLAIN, {"X": 2}, TWO | {"keep_weights": True}, TWO, {("AllGather", "X"): 3 * PLAIN.L}),
    (PLAIN, {"Z": 2, "X": 2}, TWO | {"keep_weights": True}, TWO, {("AllGather", "X"): 3 * PLAIN.L // 2}),
]


@pytest.mark.parametrize(("config", "sizes", "options", "others", "more"), MORE)
def test_what_another_way_sends_more(config, sizes, options, others, more):
    fewer, many = (counts(traced(config, sizes, **each)) for each in (options, others))
    assert (many - fewer, fewer - many) == (more, {})


def attention_flops(Q, K, V, *_, **__):
    """Of torch's kernel on the CPU, which its counter does not know: from the shapes [B, N, T, H]."""
    batch, heads, queries, width = Q
    return 4 * batch * heads * queries * K[2] * width


def flops(config, remat):
    tokens, kernel = torch.zeros(B, T, dtype=torch.int64), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={kernel: attention_flops}) as counter:
        transformer.loss_and_grads(model.init(config, 0), tokens, tokens, config, Mesh({"X": 1}), remat=remat)
    return counter.get_total_flops()


@pytest.mark.parametrize("config", [PLAIN, PLAIN.with_(gated=False, K=4)], ids=["gated", "plain"])
def test_what_is_computed_again_is_the_formula(config):
    once = flops(config, "none")
    for remat in tm.POLICIES[1:]:
        assert flops(config, remat) - once == tm.remat_flops(config, B, T, remat, last=False), remat


LARGE, X = Config("large", 8, 1024, 4096, 8, 8, 128, 64), 4


def peak(config, tokens, step, **options):
    """Bytes of one rank of X=4: params, and all that the step makes."""
    mesh = AbstractMesh({"X": X})
    params = model.init(config, mesh=mesh, specs=transformer.specs(config, mesh))
    ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    with peak_memory() as memory:
        tree.map(torch.sum, params)  # so that they count already
        step(params, ids, ids, config, mesh, **options)
    return memory.peak


def closed_form(remat, tokens, keep_weights):
    """The fullest of the layers' backward passes. Layer l has the stored shards, the activations of layers 0 to l, its
    own computed again, its weights and the next ones gathered, its gradients whole and those of the layer above being
    reduced, the others' shards, and what lies between its lines: dAct, dTmp and dGate, and two of the stream."""
    c, L = LARGE, LARGE.L
    layer = 4 * (4 * c.D * c.N * c.H + 3 * c.D * c.F)
    saved, every = (tm.saved_bytes(c, tokens, policy, "fp32") / L for policy in (remat, "none"))
    between = every - saved + 4 * tokens * (3 * c.F + 2 * c.D)

    def held(l):
        gathered = L if keep_weights else min(2, l + 1)
        under_way, done = int(l < L - 1) * (1 + 1 / X), max(0, L - 2 - l) / X
        return (l + 1) * saved + between + layer * (L / X + gathered + 1 + under_way + done)

    return largest(held(l) for l in range(L))


@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("remat", tm.POLICIES)
def test_peak_is_the_closed_form(remat, keep_weights):
    tokens = 2048 if keep_weights else 4096
    held = peak(LARGE, tokens, transformer.loss_and_grads, remat=remat, keep_weights=keep_weights)
    assert held == pytest.approx(closed_form(remat, tokens, keep_weights), rel=0.05)


def test_the_loss_alone_holds_the_weights_of_two_layers():
    """Those that are used, and the next ones: so few tokens that nothing else counts. Experts have no backward here,
    which would keep theirs."""
    c = LARGE.with_(name="large, experts", E=4, k=2)
    layer = 4 * (4 * c.D * c.N * c.H + 3 * c.E * c.D * c.F)
    assert peak(c, 64, transformer.loss) == pytest.approx(layer * (c.L / X + 2), rel=0.05)
