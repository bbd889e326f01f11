"""The Transformer under every axis beside one device: loss, every gradient, and the params after AdamW steps.

Whatever is kept for the backward, loss and gradients are the same to the bit: each case takes one policy more, in turn;
marked sweep, every one. The one-device model is differentiated by autograd, with dropout around its blocks. What is
dropped looks random, hangs on the seed, and nothing is where nothing is trained."""

import itertools
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value

from scaling import optim, tree
from scaling.configs import Config, Latent, RopeScaling
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.models.dropout import at_step, dropout
from scaling.strategies import transformer
from scaling.strategies.axes import present
from scaling.strategies.transformer.stages import stored_places

PLAIN = Config("plain", 2, 16, 24, 4, 2, 8, 32)
RICH = PLAIN.with_(name="rich", attention_bias=True, output_bias=True, qk_norm=True, tied=True, window=(None, 5))
DROPPED = RICH.with_(name="dropout", dropout=0.3, L=3, window=(None, 5, 9))
EXPERTS = PLAIN.with_(name="experts", E=4, k=2, aux_coef=0.1, z_coef=0.01, shared=1)
LATENT = PLAIN.with_(name="latent", K=4, theta=1e4, latent=Latent(q_rank=12, kv_rank=10, nope=6, rope=4, value=8))
LATENT = LATENT.with_(rope_scaling=RopeScaling("yarn", 4.0, 1.0, 32.0, 8, mscale=0.8, mscale_all=1.2))
DEEPSEEK = EXPERTS.with_(name="deepseek", K=4, routing="sigmoid", expert_groups=2, latent=LATENT.latent)
FIRST = DEEPSEEK.with_(name="dense first", L=DEEPSEEK.L + 1, dense_layers=2, F_dense=40, window=None)
DEEP = FIRST.with_(name="dense first, deep", L=5, window=(None, 5, 3, None, 4), aux_coef=0.0)
B, T = 8, 16
LOSS = {"segments": True, "label_smoothing": 0.1, "z_loss": 0.01}
CASES = [
    (PLAIN.with_(name="large", D=128, F=1400), {"X": 2}, {}),  # its leaves are sent one by one
    (PLAIN.with_(name="relu", gated=False, activation="relu"), {"Y": 2}, LOSS),
    (PLAIN.with_(name="gelu", gated=False), {"X": 2, "Y": 2}, {}),
    (RICH.with_(name="one KV head", K=1, activation="gelu_tanh"), {"Y": 4}, LOSS),
    (PLAIN.with_(N=12), {"Y": 4}, LOSS | {"scale": 1024.0}),
    (RICH, {"X": 2}, LOSS | {"microbatches": 2, "zero": 1}),
    (RICH, {"P": 2, "Y": 2}, {"segments": True, "z_loss": 0.01}),
    (RICH, {"C": 2, "Y": 2}, LOSS),
    (RICH, {"Z": 2}, LOSS | {"microbatches": 4}),
    (RICH.with_(L=3, window=(None, 5, 3)), {"Z": 2, "Y": 2}, {"microbatches": 2, "z_loss": 0.01}),
    (PLAIN.with_(L=5), {"Z": 2, "X": 2}, {"microbatches": 4, "schedule": "interleaved", "segments": True}),
    (DROPPED, {"X": 2, "Y": 2}, {"microbatches": 2, "label_smoothing": 0.1}),
    (DROPPED, {"C": 2, "P": 2}, {"microbatches": 2}),
    (DROPPED, {"C": 2, "Y": 2}, {"context": "ring"}),
    (DROPPED, {"Z": 2, "X": 2}, {"microbatches": 2}),
    # with microbatches the z terms alone are those of the whole batch: a mean
    (EXPERTS.with_(aux_coef=0.0), {"Z": 2, "E": 2}, {"microbatches": 2, "schedule": "zb-h1"}),
    (EXPERTS, {"E": 2, "Y": 2}, {}),
    (EXPERTS.with_(name="experts, dropout", dropout=0.3), {"E": 2, "Y": 2}, {}),
    (EXPERTS.with_(balance_by="sequence", F_shared=10), {"C": 2, "E": 2}, {"microbatches": 2}),
    (LATENT, {"X": 2, "Y": 2}, {"microbatches": 2, "label_smoothing": 0.1}),
    (LATENT.with_(L=4), {"Z": 2}, LOSS | {"microbatches": 4, "schedule": "dualpipev"}),
    (LATENT.with_(window=(None, 5)), {"C": 2, "Y": 2}, LOSS),
    (DEEPSEEK, {"E": 2, "Y": 2}, {}),
    (FIRST, {"E": 2, "Y": 2}, {}),
    (FIRST, {"X": 2}, LOSS),
    (DEEP, {"Z": 2, "X": 2}, LOSS | {"microbatches": 2}),
    (DEEP.with_(L=6, window=None), {"Z": 2, "E": 2}, {"microbatches": 4, "schedule": "interleaved"}),
    # a vocabulary that does not divide: of 5 entries the last of four ranks has padding alone
    (PLAIN.with_(name="V 5", V=5), {"Y": 4}, {"label_smoothing": 0.1, "z_loss": 0.01}),
    (RICH.with_(name="V 31", V=31), {"X": 2, "Y": 2}, LOSS | {"microbatches": 2}),
    (PLAIN.with_(name="V 30", V=30), {"Z": 2, "Y": 2}, {"microbatches": 2, "label_smoothing": 0.1}),
]
SWEPT = [  # of the same kinds as those above
    (PLAIN, {"X": 2, "C": 2}, {"context": "ring", "microbatches": 2}),
    (EXPERTS, {"X": 2, "E": 2}, {"label_smoothing": 0.1}),
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


def dropping(config, seed):
    """The one-device model with elements dropped of what each block returns."""
    given = {"rate": config.dropout, "seed": at_step(7, seed), "samples": torch.arange(B), "positions": torch.arange(T)}

    def of(block, branch, layers):
        def wrapped(*args):
            match block(*args):
                case Out, aux:
                    return dropout(Out, branch, next(layers), **given), aux
                case Out:
                    return dropout(Out, branch, next(layers), **given)

        return wrapped

    attention, mlp = itertools.count(), itertools.count()
    blocks = {name: of(getattr(model, name), "attention", attention) for name in ("attention_block", "latent_block")}
    blocks["mlp_block"] = of(model.mlp_block, "mlp", mlp)
    routed = {**vars(model.moe), "forward": of(model.moe.forward, "mlp", mlp)}
    return patch.multiple(model, **blocks, moe=type("moe", (), {k: staticmethod(v) for k, v in routed.items()}))


def one_device(config, options):
    params, adamw, seen = model.init(config, 0, torch.float64), optim.adamw(0.01), []
    state = adamw.init(params)
    for seed in (1, 2):
        grads, loss = grad_and_value(lambda p, seed=seed: reference(p, config, options, seed))(params)
        seen.append((loss, grads))
        params, state = adamw.update(grads, state, params)
    return *seen[0], params


def run(mesh, config, options, ways):
    """(loss, gradients, the loss alone, params after 2 AdamW steps), whole; and what is not the same to the bit."""
    layout = {key: options[key] for key in ("schedule", "zero") if key in options}
    params = transformer.shard(model.init(config, 0, torch.float64), config, mesh, **layout)
    adamw, differing = optim.adamw(0.01), []
    state, seen = adamw.init(params), ()
    types, places = transformer.specs(config, mesh, **layout), stored_places(config, mesh, layout.get("schedule"))
    made = model.init(config, 0, torch.float64, "cpu", mesh=mesh, specs=types, places=places)
    differing += unlike("init", made, params)
    for seed in (1, 2):
        tokens, targets, weights, segments = (
            tree.shard(x, str(present("t[B_PXE, T_C]", mesh)), mesh) for x in batch(config, seed)
        )
        given = options | {"weights": weights} | ({"segments": segments} if "segments" in options else {})
        alone = {key: value for key, value in given.items() if key not in ("microbatches", "scale")}
        given |= {"seed": at_step(7, seed)} if config.dropout else {}
        arguments = params, tokens, targets, config, mesh
        before = tree.map(torch.clone, params)
        loss, grads = transformer.loss_and_grads(*arguments, **given)
        if not seen:
            for more in ways:
                again = transformer.loss_and_grads(*arguments, **given, **more)
                differing += unlike(str(more), again, (loss, grads))
            seen = loss, transformer.unshard(grads, config, mesh, **layout), transformer.loss(*arguments, **alone)
            differing += unlike("params", params, before)
        params, state = adamw.update(grads, state, params)
    return *seen, transformer.unshard(params, config, mesh, **layout), differing


def unlike(what, ours, theirs):
    pairs = zip(tree.leaves(ours), tree.leaves(theirs), strict=True)
    return [] if all(torch.equal(a, b) for a, b in pairs) else [what]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + EVERY)
def test_equal_to_one_device(ranks, case):
    config, mesh, options, ways = case
    wanted_loss, wanted_grads, wanted_params = one_device(config, options)
    for loss, grads, alone, params, differing in ranks(run, mesh, config, options, ways):
        assert differing == []
        assert abs(loss - wanted_loss) < 1e-12
        assert config.dropout or abs(alone - wanted_loss) < 1e-12
        for limit, ours, theirs in ((1e-11, grads, wanted_grads), (1e-9, params, wanted_params)):
            for where, a in tree.named_leaves(ours).items():
                b = tree.named_leaves(theirs)[where]
                assert (a - b).abs().max() <= limit * b.abs().max().clamp(min=1e-30), (where, a, b)


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
    """A policy that computes layers again; `tests/sweeps/layouts.py --compile` has the others."""
    mesh, config = Mesh({"X": 1}), PLAIN.with_(L=1, F=16, V=16)
    params, (tokens, targets, *_) = model.init(config, 0), batch(config, 1)

    def step(params):
        return transformer.loss_and_grads(params, tokens, targets, config, mesh, remat="block")

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
    kept = [dropout(torch.ones(B, T, D), branch, l, **given) for branch in ("attention", "mlp") for l in (0, 1)]
    assert set(kept[0].unique().tolist()) == {0.0, torch.tensor(65536 / 49152).item()}
    whole = torch.stack(kept)
    assert whole.mean().item() == pytest.approx(1, abs=5 * (1 / 3 / whole.numel()) ** 0.5)
    for dims in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):  # a part each, layers and branches, samples, ...
        n = whole.numel() / whole.mean(dims).numel()
        assert (whole.mean(dims) - 1).abs().max() < 5 * (1 / 3 / n) ** 0.5
    flat = (whole - 1).flatten(1)
    correlated = (flat @ flat.T) / flat.square().mean() / flat.shape[1] - torch.eye(4)
    assert correlated.abs().max() < 5 / flat.shape[1] ** 0.5
    for dim in (0, 1, 2):  # neighbours
        a, b = (kept[0] - 1).narrow(dim, 0, 31), (kept[0] - 1).narrow(dim, 1, 31)
        assert abs((a * b).mean()) < 5 / 3 / a.numel() ** 0.5
    assert torch.equal(dropout(whole[0], "mlp", **given | {"rate": 0.0}), whole[0])
