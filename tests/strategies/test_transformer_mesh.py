"""The Transformer under every axis beside one device: loss, every gradient, the params after an AdamW step, and then
another batch's loss.

Whatever is kept for the backward, loss and gradients are the same to the bit: each case takes one policy more, in turn;
marked sweep, every one, and every layout: each axis alone, all pairs, triples, 16 ranks, and layouts that are drawn.
The one-device model is differentiated by autograd, with dropout around its blocks. What is dropped looks random, hangs
on the seed, and nothing is where nothing is trained."""

import itertools
import random
import warnings
from contextlib import contextmanager
from math import gcd, lcm, prod
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from problems import close, rows_on, same, trained
from refused import read_table
from torch.func import grad_and_value

from scaling import launch, tree
from scaling.configs import Config, Latent, RopeScaling
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.models.dropout import at_step, dropout
from scaling.strategies import transformer
from scaling.strategies.transformer.types import stored_places

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
SHAPE = B, T, 1  # of a batch, and how many of its first sequences have no weight
LOSS = {"segments": True, "label_smoothing": 0.1, "z_loss": 0.01}
ONE_KV_HEAD = RICH.with_(name="one KV head", K=1, activation="gelu_tanh")
TABLE = """
config                                                    mesh     options
# its leaves are sent one by one
PLAIN.with_(name="large", D=128, F=1400)                  X=2
PLAIN.with_(name="relu", gated=False, activation="relu")  Y=2      LOSS
ONE_KV_HEAD                                               Y=4      LOSS
# a vocabulary that does not divide: of 5 entries the last of four ranks has padding alone
PLAIN.with_(N=12, V=5)                                    Y=4      LOSS, scale=1024.0
RICH                                                      X=2      LOSS, microbatches=2, zero=1
RICH.with_(name="gelu", gated=False)                      P=2,X=2  segments=True, z_loss=0.01
RICH                                                      Z=2      LOSS, microbatches=4
PLAIN.with_(L=5)                                          Z=2,X=2  microbatches=4, schedule="interleaved", segments=True
DROPPED                                                   X=2,Y=2  microbatches=2, label_smoothing=0.1
DROPPED                                                   C=2,Y=2  LOSS, microbatches=2, context="ring"
DROPPED                                                   Z=2,P=2  microbatches=2
EXPERTS.with_(balance_by="sequence", F_shared=10)         C=2,E=2  microbatches=2
LATENT.with_(V=31)                                        X=2,Y=2  microbatches=2, label_smoothing=0.1
LATENT.with_(L=4)                                         Z=2      LOSS, microbatches=4, schedule="dualpipev"
LATENT.with_(window=(None, 5))                            C=2,Y=2  LOSS
FIRST.with_(dropout=0.3)                                  E=2,Y=2
EXPERTS                                                   X=2,E=2  label_smoothing=0.1
# with microbatches the z terms alone are those of the whole batch: a mean
DEEP                                                      Z=2,X=2  LOSS, microbatches=2, schedule="zb-h1"
ONE_KV_HEAD                                               Z=2,Y=2  microbatches=2, schedule="zb-h1"
DEEP.with_(L=6, window=None)                              Z=2,E=2  microbatches=2, schedule="interleaved"
PLAIN.with_(name="V 30", V=30, tied=True)                 Z=2,Y=2  microbatches=2, label_smoothing=0.1
"""
CASES = read_table(TABLE, globals())
WAYS = [{"remat": "block"}, {"keep_weights": True}, {"remat": "attention"}, {"remat": "matmuls"}]
TURNS = {moe: itertools.cycle(WAYS) for moe in (False, True)}


def named(case, ways, what="", marks=()):
    """`docs/museum.md` names a case by its id."""
    config, mesh, options = case
    return pytest.param(mesh, config, options, ways, id=f"{what}{config.name} {mesh}".replace("'", ""), marks=marks)


EVERY = [named(case, WAYS, "every policy: ", pytest.mark.sweep) for case in CASES]
CASES = [named(case, [next(TURNS[case[0].moe])]) for case in CASES]

AXES = "PZXCYE"
LARGER = ["ZCY", "XCY", "ZXY", "XEY", "ZXCY"]
LAYOUTS = [
    *({axis: size} for axis in AXES for size in (2, 4)),
    *({a: 2, b: 2} for a, b in itertools.combinations(AXES, 2)),
]
LAYOUTS += [dict.fromkeys(axes, 2) for axes in LARGER]
DENSE = [PLAIN, RICH.with_(L=3, window=(None, 5, 3), theta=100.0), ONE_KV_HEAD.with_(tied=False, window=4)]
SPARSE = [EXPERTS, PLAIN.with_(E=6, k=3, aux_coef=0.1, routing="sigmoid", routed_scale=2.5, K=4, qk_norm=True)]
CHOICES = {"label_smoothing": (0.0, 0.1), "z_loss": (0.0, 0.01), "segments": (False, True), "zero": (0, 3)}
CHOICES |= {"context": ("zigzag", "ring", "gather", "ulysses")}
CHOICES |= {"schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev")}


def fitted(config, sizes, options):
    """A case with as many layers, heads and features as its mesh asks for, and the options that the mesh allows."""
    X, Y, Z, E, C = (sizes.get(axis, 1) for axis in "XYZEC")
    replicas, options = prod(sizes.get(axis, 1) for axis in "PXE"), options | {"microbatches": 2 * Z}
    if Z > 1:
        chunks = 2 if options["schedule"] in ("interleaved", "dualpipev") else 1
        L = max(config.L, chunks * Z + 1)  # stages of unequal sizes
        config = config.with_(
            L=L, window=(None, *[5, 3] * L)[:L] if isinstance(config.window, tuple) else config.window
        )
    else:
        del options["schedule"]
    K = 1 if config.K % Y and Y % config.K else config.K
    config = config.with_(D=lcm(config.D, X), F=lcm(config.F, Y), V=lcm(config.V, Y * Z), N=lcm(config.N, Y))
    config = config.with_(K=gcd(config.N, K), E=lcm(config.E, E) if config.moe else 1)
    if options["context"] == "ulysses" and config.N // Y % C:
        del options["context"]
    if not options["segments"]:
        del options["segments"]
    rows = 2 * options["microbatches"]  # of each rank; with several the first has none that count
    return config, sizes, options | {"shape": (rows * replicas, 6 * C * Y, rows * (replicas > 1))}


def layouts(count, seed=0):
    """Every layout with two models, and `count` drawn ones, of other sizes too."""
    draw = random.Random(seed)
    for n in range(len(LAYOUTS) + count):
        options = {name: draw.choice(values) for name, values in CHOICES.items()}
        axes = draw.sample(AXES, draw.randint(1, 3))
        sizes = LAYOUTS[n] if n < len(LAYOUTS) else {axis: draw.choice((2, 3)) for axis in axes}
        models = SPARSE if "E" in sizes else DENSE + SPARSE
        if n >= len(LAYOUTS):
            N, K = draw.choice([(4, 2), (6, 3), (6, 1), (12, 4)])
            models = [m.with_(D=draw.choice((8, 12, 20)), H=draw.choice((4, 6, 8)), N=N, K=K) for m in models]
        for i in (0, 1):
            case = fitted(models[(n + i) % len(models)], sizes, options)
            yield named(case, [next(TURNS[case[0].moe])], f"{n}.{i} ", pytest.mark.sweep)


def batch(config, seed, shape=SHAPE):
    """Tokens, targets of which some are ignored, uneven weights (some sequences have none), and packed documents."""
    g, (*rows_and_tokens, empty) = torch.Generator().manual_seed(seed), shape
    tokens, targets = (torch.randint(0, config.V, rows_and_tokens, generator=g) for _ in range(2))
    targets[torch.rand(rows_and_tokens, generator=g) < 0.1] = -100
    weights = torch.rand(rows_and_tokens, generator=g, dtype=torch.float64)
    weights[:empty] = 0
    return tokens, targets, weights, (torch.rand(rows_and_tokens, generator=g) < 0.2).cumsum(1)


def reference(params, config, options, seed, replicas=1):
    """The loss by F.cross_entropy on one device, with the experts' terms of the model's own loss, by microbatches of
    all replicas together."""
    tokens, targets, weights, segments = batch(config, seed, options.get("shape", SHAPE))
    w, M, total = weights * (targets != -100), options.get("microbatches", 1), 0.0
    for rows in torch.arange(len(tokens)).view(replicas, M, -1).transpose(0, 1).flatten(1):
        with dropping(config, seed, rows, tokens.shape[1]):
            given = segments[rows] if "segments" in options else None
            logits, extra = model._forward(params, tokens[rows], "none", model.sdpa, config, given)
        flat, smoothing = logits.flatten(0, 1), options.get("label_smoothing", 0.0)
        ce = F.cross_entropy(flat, targets[rows].flatten(), reduction="none", label_smoothing=smoothing)
        ce = ce + options.get("z_loss", 0.0) * flat.logsumexp(-1).square()
        total = total + (w[rows].flatten() * ce).sum() / w.sum() + extra / M
    return total


@contextmanager
def dropping(config, seed, rows, T):
    """The one-device model on these rows, with elements dropped of what each block returns."""
    given = {"rate": config.dropout, "seed": at_step(7, seed), "samples": rows, "positions": torch.arange(T)}
    layers = {"attention": itertools.count(), "mlp": itertools.count()}

    def dropped(block, branch):
        def wrapped(*args):
            found = block(*args)
            Out, *aux = found if isinstance(found, tuple) else (found,)
            Out = dropout(Out, branch, next(layers[branch]), **given)
            return (Out, *aux) if aux else Out

        return wrapped

    branches = {"attention_block": "attention", "mlp_block": "mlp"}
    blocks: Any = {name: dropped(getattr(model, name), branch) for name, branch in branches.items()}
    with patch.multiple(model, **blocks), patch.object(model.moe, "forward", dropped(model.moe.forward, "mlp")):
        yield


def one_device(config, options, replicas):
    """Loss and gradients of a batch, the params after a step; and the loss of another batch, of which nothing drops."""

    def step(params, seed):
        return grad_and_value(lambda params: reference(params, config, options, seed, replicas))(params)[::-1]

    params = model.init(config, 0, torch.float64)
    (loss,), (grads,), after = cast(Any, trained(params, step, (1,)))
    whole = {name: value for name, value in options.items() if name != "microbatches"}
    return loss, grads, after, reference(params, config.with_(dropout=0.0), whole, 2)


@pytest.mark.parametrize(("mesh", "config", "options", "ways"), [*CASES, *EVERY, *layouts(40)])
def test_equal_to_one_device(mesh, config, options, ways):
    """What else is kept or computed again changes no bit, and params are not changed."""
    layout = {key: options[key] for key in ("schedule", "zero") if key in options}
    params = transformer.shard(model.init(config, 0, torch.float64), config, mesh, **layout)
    types, places = transformer.specs(config, mesh, **layout), stored_places(config, mesh, layout.get("schedule"))

    def given(seed, *left_out):
        tokens, targets, weights, segments = rows_on(mesh, *batch(config, seed, options.get("shape", SHAPE)))
        more = {"weights": weights} | ({"segments": segments} if "segments" in options else {})
        left_out = *left_out, "shape"
        return (tokens, targets, config, mesh), {key: options[key] for key in options if key not in left_out} | more

    def step(params, seed, **more):
        arguments, options = given(seed)
        more |= {"seed": at_step(7, seed)} if config.dropout else {}
        loss, grads = transformer.loss_and_grads(params, *arguments, **options, **more)
        if options.get("zero") in (1, 2):  # which return shards of the gradients of params that are whole
            whole = tree.unshard(grads, transformer.grad_specs(config, mesh, zero=options["zero"]), mesh)
            grads = tree.shard(whole, types, mesh)
        return loss, grads

    (loss,), (grads,), after = cast(Any, trained(params, step, (1,)))
    for more in ways:
        assert same(step(params, 1, **more), (loss, grads)), more
    if mesh.sizes.get("X", 1) > 1 and options.get("microbatches", 1) > 1 and options.get("zero", 3):
        close(step(params, 1, reduce="each"), (loss, grads), 1e-11)
    assert same(model.init(config, 0, torch.float64, "cpu", mesh=mesh, specs=types, places=places), params)
    arguments, of_loss = given(2, "microbatches", "scale")
    another = transformer.loss(params, *arguments, **of_loss)
    found, found_after = (transformer.unshard(found, config, mesh, **layout) for found in (grads, after))
    replicas = prod(mesh.sizes.get(axis, 1) for axis in "PXE")
    wanted_loss, wanted, wanted_after, wanted_other = one_device(config, options, replicas)
    close((loss, another), (wanted_loss, wanted_other))
    close(found, wanted, 1e-11)
    close(found_after, wanted_after, 1e-9)


def test_a_step_sees_its_own_batch_and_nothing_where_nothing_counts():
    mesh, params = Mesh({"X": 1}), model.init(PLAIN, 0, torch.float64)
    for seed in (1, 2):
        tokens, targets, _, segments = (x[:1] for x in batch(PLAIN, seed))
        loss, _ = transformer.loss_and_grads(params, tokens, targets, PLAIN, mesh, segments=segments)
        fresh = transformer.loss(params, tokens, targets, PLAIN, Mesh({"X": 1}), segments=segments)
        assert torch.equal(fresh, loss)
    loss, grads = transformer.loss_and_grads(params, tokens, torch.full_like(targets, -100), PLAIN, mesh)
    assert loss == 0
    assert not any(g.any() for g in tree.leaves(grads))


SHALLOW = RICH.with_(L=1, window=5)
COMPILED = [(PLAIN, {"X": 1}, {}), (SHALLOW, {"C": 2}, {"context": "ring"}), (SHALLOW, {"X": 2}, {"zero": 0})]
COMPILED += [(PLAIN, {"C": 2}, {}), (PLAIN, {"C": 2}, {"context": "gather"}), (PLAIN, {"C": 2}, {"context": "ulysses"})]
COMPILED += [(LATENT, {"Y": 2}, {}), *((SHALLOW.with_(gated=False, K=1), {axis: 2}, {}) for axis in "PY")]


@pytest.mark.sweep
@pytest.mark.compile
@pytest.mark.parametrize(("config", "sizes", "options"), COMPILED, ids=lambda x: getattr(x, "name", str(x)))
def test_a_step_that_is_compiled_as_one_graph_is_the_eager_step(config, sizes, options):
    """With a policy that computes layers again. Stages and experts are refused there."""
    config, layout = config.with_(L=1), {name: value for name, value in options.items() if name == "zero"}

    def compare(mesh):
        torch._dynamo.reset()
        params = transformer.shard(model.init(config, 0, torch.float64), config, mesh, **layout)
        tokens, targets, *_ = rows_on(mesh, *batch(config, 1))

        def step(params):
            return transformer.loss_and_grads(params, tokens, targets, config, mesh, remat="block", **options)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own code
            compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")(params)
        close(compiled, step(params))

    launch.run(compare, sizes)


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
    given: Any = {"rate": 0.25, "seed": 3, "samples": torch.arange(B), "positions": torch.arange(T)}
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
