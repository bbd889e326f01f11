"""bfloat16 in the products, float32 in what is added up: gradients over microbatches and ranks, moments and params."""

import pytest
import torch

from scaling import optim, tree
from scaling.configs import get
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.trace import trace
from scaling.train.evaluate import local
from scaling.train.settings import Settings, optimizer_of
from scaling.train.step import make_step

TINY = get("tiny").with_(L=2, D=32, F=64, H=16, N=2, K=2)
EXPERTS = TINY.with_(E=4, k=2, aux_coef=0.01)


@pytest.mark.parametrize("rule", [lambda master: optim.sgd(1.0, master=master), None], ids=["sgd", "adamw"])
def test_a_thousand_small_updates_are_not_lost(rule):
    """Each is 2^-10 of the weight, below what bfloat16 resolves."""
    moved = {}
    for master in (True, False):
        optimizer = rule(master) if rule else optim.adamw(2.0**-10, weight_decay=0.0, master=master)
        params = {"W": torch.ones(4, dtype=torch.bfloat16)}
        state, grads = optimizer.init(params), {"W": torch.full((4,), -(2.0**-10), dtype=torch.bfloat16)}
        for _ in range(1000):
            params, state = optimizer.update(grads, state, params, donate=True)
        moved[master] = params["W"].double() - 1
    assert (moved[True] - 1000 * 2.0**-10).abs().max() < 0.01 * 1000 * 2.0**-10
    assert moved[False].abs().max() == 0


def gradients(mesh, config, dtype, microbatches):
    types = transformer.specs(config, mesh)
    params = transformer.shard(model.init(config, 0, dtype), config, mesh)
    rows = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(1))
    batch = [local(x, mesh) for x in (rows[:, :-1], rows[:, 1:])]
    _, grads = transformer.loss_and_grads(
        params, *batch, config, mesh, microbatches=microbatches, sums=torch.promote_types(dtype, torch.float32)
    )
    tree.check(grads, types, config.sizes, mesh, torch.promote_types(dtype, torch.float32))
    return transformer.unshard(grads, config, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "sizes", "microbatches"),
    [(TINY, {"X": 2, "Y": 2}, 2), (TINY, {"Z": 2, "X": 2}, 2), (EXPERTS, {"E": 2}, 1), (TINY, {"C": 2}, 1)],
    ids=["X, Y", "Z, X", "E", "C"],
)
def test_gradients_are_summed_in_float32(ranks, config, sizes, microbatches):
    wanted = gradients(Mesh({"X": 1}), config, torch.float64, 1)
    found = ranks(gradients, sizes, config, torch.bfloat16, microbatches)[0]
    for where, grad in tree.named_leaves(found).items():
        want = tree.named_leaves(wanted)[where]
        assert grad.dtype == torch.float32
        assert (grad - want).norm() < 0.05 * want.norm() or "router" in where, where
    assert not torch.equal(found["norm"], found["norm"].bfloat16().float())  # sums that bfloat16 cannot hold


def dtypes(mesh, remat):
    """Of each line of a training step its dtype."""
    settings = Settings(TINY, "", "", 8, 32, dtype="bf16", remat=remat)
    types, optimizer = transformer.specs(TINY, mesh), optimizer_of(settings)
    params = model.init(TINY, 0, torch.bfloat16, mesh=mesh, specs=types)
    rows = local(torch.ones(8, 32, dtype=torch.int64), mesh)
    with trace() as log:
        make_step(settings, mesh, optimizer)(params, optimizer.init(params), (rows, rows, None))
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
    settings = Settings(TINY, "", "", 8, 32, steps=steps, lr=3e-3, warmup=5, dtype=dtype)
    mesh, optimizer = Mesh({"X": 1}), optimizer_of(settings)
    params = model.init(TINY, 0, torch.bfloat16 if dtype == "bf16" else torch.float32)
    state, step, losses = optimizer.init(params), make_step(settings, mesh, optimizer), []
    g = torch.Generator().manual_seed(0)
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
