"""Steps in bfloat16 and float16, whose sums are float32: gradients over microbatches, chunks and ranks; float16's loss
scale beside torch.amp.GradScaler's. A step on any mesh is one device's, whatever its dtype."""

import pytest
import torch
import torch.nn.functional as F

from scaling import optim, tree
from scaling.book.largest import largest
from scaling.configs import get
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.strategies.transformer.ends import loss
from scaling.trace import trace
from scaling.train.evaluate import local
from scaling.train.settings import DTYPES, Settings, optimizer_of
from scaling.train.step import make_step

TINY = get("tiny").with_(L=2, D=32, F=64, H=16, N=2, K=2)
EXPERTS = TINY.with_(E=4, k=2, aux_coef=0.01)
INF, ONE = float("inf"), Mesh({"X": 1})


def batch(mesh, seed=1):
    rows = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(seed))
    return [local(x, mesh) for x in (rows[:, :-1], rows[:, 1:])]


def shards(mesh, config, dtype):
    return transformer.shard(model.init(config, 0, dtype), config, mesh)


def off(found, wanted):
    """{leaf: the norm of the difference over the wanted one's}"""
    return tree.named_leaves(tree.map(lambda g, w: ((g - w).norm() / w.norm()).item(), found, wanted))


def begun(dtype, mesh, config=TINY, **options):
    """(params, state, step) of a run's settings."""
    settings = Settings(config, "", "", 8, 32, dtype=dtype, **options)
    optimizer, params = optimizer_of(settings), shards(mesh, config, DTYPES[dtype])
    return params, optimizer.init(params), make_step(settings, mesh, optimizer)


def trained(mesh, config, dtype, options):
    """Five steps; in float16 two with a scale that is too great and three with one that is right: (scales, losses,
    params or masters, whole)."""
    params, state, step = begun(dtype, mesh, config, warmup=1, lr=3e-3, **options)
    scales, losses = [], []
    for number in range(5):
        if "scale" in state and number in (0, 2):
            state = state | {"scale": torch.tensor(2.0 ** (16 if number else 30))}
        params, state, metrics = step(params, state, (*batch(mesh), None))
        losses.append(metrics["loss"].item())
        if "scale" in state:
            scales.append((metrics["scale"], state["scale"].item(), int(state["step"])))
            if number < 2:  # skipped
                first = tree.map(torch.Tensor.float, shards(mesh, config, DTYPES[dtype]))
                assert all(map(torch.equal, tree.leaves(first), tree.leaves(state["master"])))
    return scales, losses, transformer.unshard(state.get("master", params), config, mesh)


@pytest.mark.parametrize("sizes", [{"X": 2, "Y": 2}, {"Z": 2}], ids=str)
def test_in_float16_all_ranks_train_as_one_device(ranks, sizes):
    given = TINY, "fp16", {"microbatches": 2}
    scales, losses, wanted = trained(ONE, *given)
    assert scales == [(2.0**30, 2.0**29, 0), (2.0**29, 2.0**28, 0), *[(2.0**16, 2.0**16, n) for n in (1, 2, 3)]]
    assert losses[0] == losses[1] == losses[2] > losses[3] > losses[4]
    for found in ranks(trained, sizes, *given):
        assert found[:2] == (scales, pytest.approx(losses, rel=2e-3))
        assert largest(off(found[2], wanted).values()) < 5e-3


def test_with_muon_all_ranks_train_as_one_device(ranks):
    given = TINY.with_(E=4, k=2), "fp64", {"optimizer": "muon"}
    _, losses, wanted = trained(ONE, *given)
    for found in ranks(trained, {"Z": 2, "E": 2}, *given):
        assert found[1] == pytest.approx(losses, rel=1e-12)
        assert largest(off(found[2], wanted).values()) < 1e-10


def gradients(mesh, config, dtype, microbatches):
    types, sums = transformer.specs(config, mesh), torch.promote_types(dtype, torch.float32)
    options = {"microbatches": microbatches, "sums": sums}
    _, grads = transformer.loss_and_grads(shards(mesh, config, dtype), *batch(mesh), config, mesh, **options)
    tree.check(grads, types, config.sizes, mesh, sums)
    return transformer.unshard(grads, config, mesh)


@pytest.mark.parametrize(
    ("config", "sizes", "microbatches"),
    [(TINY, {"X": 2, "Y": 2}, 2), (TINY, {"Z": 2, "X": 2}, 2), (EXPERTS, {"E": 2}, 1), (TINY, {"C": 2}, 1)],
)
def test_gradients_are_summed_in_float32(ranks, config, sizes, microbatches):
    found = ranks(gradients, sizes, config, torch.bfloat16, microbatches)[0]
    assert {grad.dtype for grad in tree.leaves(found)} == {torch.float32}
    far = off(found, gradients(ONE, config, torch.float64, 1))
    assert largest(by for where, by in far.items() if "router" not in where) < 0.05
    assert not torch.equal(found["norm"], found["norm"].bfloat16().float())  # sums that bfloat16 cannot hold


def dtypes(mesh):
    """Of each line of a training step its dtype."""
    params, state, step = begun("bf16", mesh, remat="block")
    rows = local(torch.ones(8, 32, dtype=torch.int64), mesh)
    with trace() as log:
        step(params, state, (rows, rows, None))
    return {(event.op, str(event.after.name), str(event.dtype).removeprefix("torch.")) for event in log.events}


def test_which_lines_are_in_which_dtype(ranks):
    """Products, weights and activations on their way in bfloat16; gradients, the loss and norms are sums in float32."""
    for found in ranks(dtypes, {"X": 2, "Y": 2}):
        assert {dtype for op, name, dtype in found if op == "Einsum" and name != "total"} == {"bfloat16"}
        gathered = {dtype for op, name, dtype in found if op == "AllGather" and name != "k"}  # of the loss: its slope
        assert gathered == {"bfloat16"}
        streams = {"x", "y", "dy", "dx", "Attn", "Out"}
        scattered = {(name in streams, dtype) for op, name, dtype in found if op == "ReduceScatter"}
        assert scattered == {(True, "bfloat16"), (False, "float32")}
        assert {dtype for op, _, dtype in found if op == "AllReduce"} == {"float32"}


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


def scaled(mesh):
    """(the loss, the gradients) without a scale and with one of 2^10."""
    params, options = shards(mesh, EXPERTS, torch.float64), {"microbatches": 2}
    return [transformer.loss_and_grads(params, *batch(mesh), EXPERTS, mesh, scale=s, **options) for s in (1.0, 1024.0)]


def test_nothing_else_is_seen_of_a_scale(ranks):
    for (plain, wanted), (found, grads) in ranks(scaled, {"Z": 2, "E": 2}):
        assert all(map(torch.equal, tree.leaves(grads), tree.leaves(wanted)))
        assert found.item() == pytest.approx(plain.item(), abs=1e-14)


def test_where_no_scale_helps_the_run_ends():
    params, state, step = begun("fp16", ONE)
    params["norm"][0] = INF
    with pytest.raises(ArithmeticError, match="step 1: the loss is nan"):
        step(params, state, (*batch(ONE), None))


def test_a_loss_over_half_a_million_tokens_in_chunks():
    """Of which a few weigh a thousand times as much as the others: what the chunks add up is as good as float64's."""
    x, U, w = torch.randn(4, 1 << 17, 2), torch.randn(2, 4), torch.rand(4, 1 << 17)
    w[0, :200] = 1000
    targets = torch.randint(4, w.shape)
    ce = F.cross_entropy((x.double() @ U.double()).flatten(0, 1), targets.flatten(), reduction="none")
    true = ((w.double().flatten() * ce).sum() / w.double().sum()).item()
    assert loss(x, U, targets, ONE, weights=w, chunk_bytes=1 << 13).item() == pytest.approx(true, rel=3e-7)


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_the_unembedding_does_not_show_the_chunks(tied):
    """In bfloat16, 256 chunks: their sum is rounded once, as that of one chunk is."""
    x, U = (1 + torch.randn(1, 1 << 14, 4)).bfloat16(), torch.randn((8, 4) if tied else (4, 8)).bfloat16()
    U, targets = U.requires_grad_(), torch.randint(8, x.shape[:2])
    one, many = (
        torch.autograd.grad(loss(x, U, targets, ONE, tied=tied, chunk_bytes=size), U)[0] for size in (1 << 30, 1 << 11)
    )
    assert many.dtype == torch.bfloat16
    assert (many.float() - one.float()).abs().max() <= 2**-7 * one.abs().max()
