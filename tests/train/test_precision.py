"""bfloat16 and float16 in the products, float32 in what is added up: gradients over microbatches and ranks, moments and
params; float16's loss scale beside torch.amp.GradScaler's, the same on every mesh, and saved with the run."""

from itertools import pairwise

import pytest
import torch
from runs import records

from scaling import optim, tree
from scaling.book.largest import largest
from scaling.configs import get
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.trace import trace
from scaling.train import dcp
from scaling.train.evaluate import local
from scaling.train.loop import run
from scaling.train.settings import DTYPES, Settings, optimizer_of
from scaling.train.step import make_step

TINY = get("tiny").with_(L=2, D=32, F=64, H=16, N=2, K=2)
EXPERTS = TINY.with_(E=4, k=2, aux_coef=0.01)
INF, ONE = float("inf"), Mesh({"X": 1})


def batch(mesh):
    rows = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(1))
    return [local(x, mesh) for x in (rows[:, :-1], rows[:, 1:])]


def shards(mesh, config, dtype):
    return transformer.shard(model.init(config, 0, dtype), config, mesh)


def off(grads, wanted):
    """{leaf: the norm of the difference over the wanted one's}"""
    wanted = tree.named_leaves(wanted)
    return {
        where: ((g - wanted[where]).norm() / wanted[where].norm()).item()
        for where, g in tree.named_leaves(grads).items()
    }


def begun(dtype, mesh, **options):
    """(params, state, step) of a run's settings."""
    settings = Settings(TINY, "", "", 8, 32, dtype=dtype, **options)
    optimizer, params = optimizer_of(settings), shards(mesh, TINY, DTYPES[dtype])
    return params, optimizer.init(params), make_step(settings, mesh, optimizer)


@pytest.mark.parametrize("rule", [optim.sgd, optim.adamw])
def test_a_thousand_small_updates_are_not_lost(rule):
    """Each is 2^-10 of the weight, below what bfloat16 resolves."""
    moved = {}
    for master in (True, False):
        lr, options = (1.0, {}) if rule is optim.sgd else (2.0**-10, {"weight_decay": 0.0})
        optimizer, params = rule(lr, master=master, **options), {"W": torch.ones(4, dtype=torch.bfloat16)}
        state, grads = optimizer.init(params), {"W": torch.full((4,), -(2.0**-10), dtype=torch.bfloat16)}
        for _ in range(1000):
            params, state = optimizer.update(grads, state, params, donate=True)
        moved[master] = params["W"].double() - 1
    assert (moved[True] - 1000 * 2.0**-10).abs().max() < 0.01 * 1000 * 2.0**-10
    assert moved[False].abs().max() == 0


def gradients(mesh, config, dtype, microbatches):
    types, sums = transformer.specs(config, mesh), torch.promote_types(dtype, torch.float32)
    options = {"microbatches": microbatches, "sums": sums}
    _, grads = transformer.loss_and_grads(shards(mesh, config, dtype), *batch(mesh), config, mesh, **options)
    tree.check(grads, types, config.sizes, mesh, sums)
    return transformer.unshard(grads, config, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "sizes", "microbatches"),
    [(TINY, {"X": 2, "Y": 2}, 2), (TINY, {"Z": 2, "X": 2}, 2), (EXPERTS, {"E": 2}, 1), (TINY, {"C": 2}, 1)],
    ids=["X, Y", "Z, X", "E", "C"],
)
def test_gradients_are_summed_in_float32(ranks, config, sizes, microbatches):
    found = ranks(gradients, sizes, config, torch.bfloat16, microbatches)[0]
    assert {grad.dtype for grad in tree.leaves(found)} == {torch.float32}
    far = off(found, gradients(ONE, config, torch.float64, 1))
    assert not {where: by for where, by in far.items() if not by < 0.05 and "router" not in where}
    assert not torch.equal(found["norm"], found["norm"].bfloat16().float())  # sums that bfloat16 cannot hold


def dtypes(mesh, remat):
    """Of each line of a training step its dtype."""
    params, state, step = begun("bf16", mesh, remat=remat)
    rows = local(torch.ones(8, 32, dtype=torch.int64), mesh)
    with trace() as log:
        step(params, state, (rows, rows, None))
    return {(event.op, str(event.after.name), str(event.dtype).removeprefix("torch.")) for event in log.events}


@pytest.mark.parametrize("remat", ["none", "block"])
def test_which_lines_are_in_which_dtype(ranks, remat):
    """Products, weights and activations on their way in bfloat16; gradients, the loss and norms are sums in float32."""
    for found in ranks(dtypes, {"X": 2, "Y": 2}, remat):
        assert {dtype for op, name, dtype in found if op == "Einsum" and name != "total"} == {"bfloat16"}
        gathered = {dtype for op, name, dtype in found if op == "AllGather" and name != "k"}  # of the loss: its slope
        assert gathered == {"bfloat16"}
        streams = {"x", "y", "dy", "dx", "Attn", "Out"}
        scattered = {(name in streams, dtype) for op, name, dtype in found if op == "ReduceScatter"}
        assert scattered == {(True, "bfloat16"), (False, "float32")}
        assert {dtype for op, _, dtype in found if op == "AllReduce"} == {"float32"}


def curve(dtype, steps=200):
    params, state, step = begun(dtype, ONE, steps=steps, lr=3e-3, warmup=5)
    g, losses = torch.Generator().manual_seed(0), []
    text = torch.randint(0, 16, (4096,), generator=g).cumsum(0) % 64
    for _ in range(steps):
        at = torch.randint(0, 4096 - 33, (8,), generator=g)
        rows = torch.stack([text[i : i + 33] for i in at])
        params, state, metrics = step(params, state, (rows[:, :-1], rows[:, 1:], None), donate=True)
        losses.append(metrics["loss"].item())
    return sum(losses[-10:]) / 10


@pytest.mark.sweep
def test_the_loss_is_float32_s_after_200_steps():
    assert curve("bf16") == pytest.approx(curve("fp32"), rel=0.01)


def test_the_scales_are_those_of_grad_scaler():
    rule = optim.loss_scaled(optim.adamw(0.1), first=64.0, interval=3)
    params = {"W": torch.tensor([1.0, -2.0])}
    state, theirs = rule.init(params), params["W"].clone().requires_grad_()
    adamw = torch.optim.AdamW([theirs], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for slope in [1.0, INF, 2.0, 0.5, 3.0, 1.0, INF, INF, *[0.25] * 7]:
        x = torch.tensor([slope, 0.5])
        adamw.zero_grad()
        scaler.scale((theirs * x).sum()).backward()
        scaler.step(adamw)
        scaler.update()
        params, state = rule.update({"W": x}, state, params, finite=slope < INF)
        assert state["scale"].item() == scaler.get_scale()
        torch.testing.assert_close(params["W"], theirs.detach(), rtol=1e-6, atol=0)
    assert state["step"].item() == 12


def scaled(mesh, config, microbatches):
    """Whether a loss and gradients by a scale of 2^10 are those without, to the bit."""
    params = shards(mesh, config, torch.float64)
    plain, found = (
        transformer.loss_and_grads(params, *batch(mesh), config, mesh, scale=s, microbatches=microbatches)
        for s in (1.0, 1024.0)
    )
    alike = [torch.equal(a, b) for a, b in zip(tree.leaves(plain[1]), tree.leaves(found[1]), strict=True)]
    return all(alike), (plain[0] - found[0]).abs().item()


@pytest.mark.parametrize(
    ("config", "sizes"),
    [(TINY, {"X": 2, "Y": 2}), (EXPERTS, {"Z": 2, "E": 2}), (EXPERTS, {"C": 2})],
    ids=["X, Y", "Z, E", "C"],
)
def test_nothing_else_is_seen_of_a_scale(ranks, config, sizes):
    for same, by in ranks(scaled, sizes, config, 2):
        assert same
        assert by < 1e-14


def trained(mesh):
    """Two steps with a scale that is too great, three with one that is right: (scales, losses, whole masters)."""
    params, state, step = begun("fp16", mesh, warmup=1, lr=3e-3, microbatches=2)
    scales, losses, before = [], [], tree.map(torch.clone, state["master"])
    for number in range(5):
        if number in (0, 2):
            state = state | {"scale": torch.tensor(2.0 ** (16 if number else 30))}
        params, state, metrics = step(params, state, (*batch(mesh), None))
        scales.append((metrics["scale"], state["scale"].item(), int(state["step"])))
        losses.append(metrics["loss"].item())
        if number == 1:
            assert all(tree.leaves(tree.map(torch.equal, before, state["master"])))
    return scales, losses, transformer.unshard(state["master"], TINY, mesh)


@pytest.mark.parametrize("sizes", [{"X": 2, "Y": 2}, {"Z": 2, "C": 2}], ids=str)
def test_all_ranks_skip_the_same_steps_as_one_device(ranks, sizes):
    scales, losses, masters = trained(ONE)
    assert scales == [(2.0**30, 2.0**29, 0), (2.0**29, 2.0**28, 0), *[(2.0**16, 2.0**16, n) for n in (1, 2, 3)]]
    assert losses[0] == losses[2]
    assert all(b < a for a, b in pairwise(losses[2:]))
    for found in ranks(trained, sizes):
        assert found[0] == scales
        assert found[1] == pytest.approx(losses, rel=2e-3)
        assert largest(off(found[2], masters).values()) < 5e-3


def test_small_gradients_survive():
    """Beside float64's: with a scale as near as float16 is; those 2^12 times smaller without one, as of a batch of a
    million tokens, are not."""
    wanted, half = gradients(ONE, TINY, torch.float64, 1), model.init(TINY, 0, torch.float16)
    with_it, without = (
        off(transformer.loss_and_grads(half, *batch(ONE), TINY, ONE, sums=torch.float32, scale=scale)[1], wanted)
        for scale in (2.0**16, 2.0**-12)
    )
    assert largest(with_it.values()) < 0.01
    assert max(without.values()) > 3 * max(with_it.values())


def test_where_no_scale_helps_the_run_ends():
    params, state, step = begun("fp16", ONE)
    params["norm"][0] = INF
    with pytest.raises(ArithmeticError, match="step 1: the loss is nan"):
        step(params, state, (*batch(ONE), None))


@pytest.mark.slow
def test_the_scale_is_saved_and_resumed(tmp_path):
    (tmp_path / "text.txt").write_text("a text to learn " * 200)
    options = {"dtype": "fp16", "warmup": 2, "eval_every": 0, "eval_batches": 1}
    for folder, more in (("whole", {}), ("parts", {"steps": 2}), ("parts", {"resume": True})):
        (tmp_path / folder).mkdir(exist_ok=True)
        given = {"steps": 4} | options | more
        run(ONE, Settings(TINY, str(tmp_path / "text.txt"), str(tmp_path / folder), 4, 32, **given))
    whole, parts = (records(tmp_path / name) for name in ("whole", "parts"))
    assert [record["loss_scale"] for record in parts] == [65536.0] * 4
    assert parts[0]["loss"] == whole[0]["loss"]
    assert {"optimizer.scale", "optimizer.good"} <= dcp.saved_leaves(tmp_path / "parts" / "step-000004").keys()
