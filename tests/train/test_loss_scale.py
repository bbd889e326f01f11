"""float16: the loss's scale beside torch.amp.GradScaler's, the same on every mesh, and saved with the run."""

import json
from itertools import pairwise

import pytest
import torch

from scaling import optim, tree
from scaling.book.largest import largest
from scaling.configs import get
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.train import dcp
from scaling.train.evaluate import local
from scaling.train.loop import run
from scaling.train.settings import Settings, optimizer_of
from scaling.train.step import make_step

TINY = get("tiny").with_(L=2, D=32, F=64, H=16, N=2, K=2)
EXPERTS = TINY.with_(E=4, k=2, aux_coef=0.01)
INF = float("inf")


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


def batch(mesh):
    rows = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(1))
    return [local(x, mesh) for x in (rows[:, :-1], rows[:, 1:])]


def scaled(mesh, config, microbatches):
    """Whether a loss and gradients by a scale of 2^10 are those without, to the bit."""
    params = transformer.shard(model.init(config, 0, torch.float64), config, mesh)
    given = {"microbatches": microbatches}
    plain, found = (
        transformer.loss_and_grads(params, *batch(mesh), config, mesh, scale=s, **given) for s in (1.0, 1024.0)
    )
    alike = [torch.equal(a, b) for a, b in zip(tree.leaves(plain[1]), tree.leaves(found[1]), strict=True)]
    return all(alike), (plain[0] - found[0]).abs().item()


@pytest.mark.parametrize(
    ("config", "sizes"),
    [(TINY, {"X": 2, "Y": 2}), (EXPERTS, {"Z": 2, "E": 2}), (EXPERTS, {"C": 2})],
    ids=["X, Y", "Z, E", "C"],
)
def test_nothing_else_is_seen_of_a_scale(ranks, config, sizes):
    for same, off in ranks(scaled, sizes, config, 2):
        assert same
        assert off < 1e-14


def trained(mesh):
    """Two steps with a scale that is too great, three with one that is right: (scales, losses, whole masters)."""
    settings = Settings(TINY, "", "", 8, 32, dtype="fp16", warmup=1, lr=3e-3, microbatches=2)
    optimizer, step = optimizer_of(settings), make_step(settings, mesh, optimizer_of(settings))
    params = transformer.shard(model.init(TINY, 0, torch.float16), TINY, mesh)
    state, scales, losses = optimizer.init(params), [], []
    before = tree.map(torch.clone, state["master"])
    for number in range(5):
        if number in (0, 2):
            state = state | {"scale": torch.tensor(2.0 ** (16 if number else 30))}
        params, state, metrics = step(params, state, (*batch(mesh), None))
        scales.append((metrics["scale"], state["scale"].item(), int(state["step"])))
        losses.append(metrics["loss"].item())
        if number == 1:
            untouched = tree.map(torch.equal, before, state["master"])
            assert all(tree.leaves(untouched))
    return scales, losses, transformer.unshard(state["master"], TINY, mesh)


@pytest.mark.parametrize("sizes", [{"X": 2, "Y": 2}, {"Z": 2, "C": 2}], ids=str)
def test_all_ranks_skip_the_same_steps_as_one_device(ranks, sizes):
    scales, losses, masters = trained(Mesh({"X": 1}))
    assert scales == [(2.0**30, 2.0**29, 0), (2.0**29, 2.0**28, 0), *[(2.0**16, 2.0**16, n) for n in (1, 2, 3)]]
    assert losses[0] == losses[2]
    assert all(b < a for a, b in pairwise(losses[2:]))
    for found in ranks(trained, sizes):
        assert found[0] == scales
        assert found[1] == pytest.approx(losses, rel=2e-3)
        for where, W in tree.named_leaves(found[2]).items():
            wanted = tree.named_leaves(masters)[where]
            assert (W - wanted).norm() < 5e-3 * wanted.norm(), where


def test_small_gradients_survive():
    """Beside float64's: with a scale as near as float16 is; those 2^12 times smaller without one, as of a batch of a
    million tokens, are not."""
    mesh = Mesh({"X": 1})
    wanted = tree.named_leaves(
        transformer.loss_and_grads(model.init(TINY, 0, torch.float64), *batch(mesh), TINY, mesh)[1]
    )
    half = model.init(TINY, 0, torch.float16)

    def off(scale):
        _, grads = transformer.loss_and_grads(half, *batch(mesh), TINY, mesh, sums=torch.float32, scale=scale)
        return {
            where: ((g - wanted[where]).norm() / wanted[where].norm()).item()
            for where, g in tree.named_leaves(grads).items()
        }

    with_it, without = off(2.0**16), off(2.0**-12)
    assert largest(with_it.values()) < 0.01
    assert max(without.values()) > 3 * max(with_it.values())


def test_where_no_scale_helps_the_run_ends():
    settings = Settings(TINY, "", "", 8, 32, dtype="fp16")
    mesh, optimizer = Mesh({"X": 1}), optimizer_of(settings)
    params = model.init(TINY, 0, torch.float16)
    state = optimizer.init(params)
    params["norm"][0] = INF
    with pytest.raises(ArithmeticError, match="step 1: the loss is nan"):
        make_step(settings, mesh, optimizer)(params, state, (*batch(mesh), None))


@pytest.mark.slow
def test_the_scale_is_saved_and_resumed(tmp_path):
    (tmp_path / "text.txt").write_text("a text to learn " * 200)
    given = [TINY, str(tmp_path / "text.txt")]
    options = {"dtype": "fp16", "warmup": 2, "eval_every": 0, "eval_batches": 1}
    for folder, more in (("whole", {}), ("parts", {"steps": 2}), ("parts", {"resume": True})):
        (tmp_path / folder).mkdir(exist_ok=True)
        run(Mesh({"X": 1}), Settings(*given, str(tmp_path / folder), 4, 32, **{"steps": 4} | options | more))
    whole, parts = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    assert len(parts) == 4
    assert [record["loss_scale"] for record in parts] == [65536.0] * 4
    assert parts[0]["loss"] == whole[0]["loss"]
    assert {"optimizer.scale", "optimizer.good"} <= dcp.saved_leaves(tmp_path / "parts" / "step-000004").keys()
