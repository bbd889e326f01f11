"""Pipelines executed on ranks: loss, gradients and two AdamW steps equal one device and torch's own pipelines."""

import os
import signal
from itertools import pairwise
from time import perf_counter

import pytest
import torch
from busy import SOON
from torch.func import functional_call

from scaling import launch, trace, tree
from scaling.collectives import all_reduce
from scaling.mesh import AbstractMesh, Mesh
from scaling.models.mlp import MLPConfig, MLPStack
from scaling.optim import adamw
from scaling.schedules import SCHEDULES, make, split_backward
from scaling.strategies import fsdp_tp as fsdp_tp_listing
from scaling.strategies import pipeline
from scaling.strategies.stage import from_function, mlp, of_strategy

L, D, F, B = 8, 6, 10, 32
WEIGHTS = {"W_in": "W_in[L_Z, D, F]", "W_out": "W_out[L_Z, F, D]"}
FSDP_TP_SPECS = of_strategy(fsdp_tp_listing.STRATEGY).specs
OPTIONS = {"activation": "gelu", "residual": True, "norm": True}


def fsdp_tp(**options):
    return of_strategy(fsdp_tp_listing.STRATEGY, **options)


def problem():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    params = {"W_in": normal(L, D, F) * D**-0.5, "W_out": normal(L, F, D) * F**-0.5}
    return params, normal(B, D), normal(B, D)


def loss(Out, Target):
    """The mean over B = 32 rows of the squared error, as the terms of the rows at hand."""
    return (Out - Target).square().sum() / B


def reference(params, In, Target, options):
    stack = MLPStack(MLPConfig(L=L, D=D, F=F, **options))
    return torch.func.grad_and_value(lambda p: loss(functional_call(stack, p, (In,)), Target))(params)


def train(mesh, name, microbatches, chunks, stage, options, collect=None, steps=2):
    """Losses, the first gradients and the params after AdamW steps, whole and in the model's order of layers."""
    schedule = make(name, mesh.sizes["Z"], microbatches, chunks)
    schedule = split_backward(schedule, collect) if collect is not None else schedule
    kinds = {"mlp": mlp, "vjp": lambda **o: from_function(stack_of(o)), "fsdp_tp": fsdp_tp}
    specs = {name: spec for name, spec in kinds[stage](**options).specs.items() if name.startswith("W")}
    whole, In, Target = problem()
    if stage == "fsdp_tp":
        In, Target = (tree.shard(x, "In[B_X, D_Y]", mesh) for x in (In, Target))
    params = tree.shard(pipeline.arrange(whole, schedule), specs, mesh)
    optimizer = adamw(1e-2)
    state, losses, first = optimizer.init(params), [], None
    for _ in range(steps):
        Loss, grads = pipeline.value_and_grad(params, In, Target, mesh, schedule, loss, kinds[stage](**options))
        first = grads if first is None else first
        losses.append(float(Loss))
        params, state = optimizer.update(grads, state, params)
    return losses, *(pipeline.restore(tree.unshard(x, specs, mesh), schedule) for x in (first, params))


def stack_of(options):
    def f(params, In):
        config = MLPConfig(L=len(params["W_in"]), D=D, F=F, **options)
        return functional_call(MLPStack(config), params, (In,))

    return f


def one_device(options, steps=2):
    params, In, Target = problem()
    optimizer = adamw(1e-2)
    state, losses, first = optimizer.init(params), [], None
    for _ in range(steps):
        grads, Loss = reference(params, In, Target, options)
        first = grads if first is None else first
        losses.append(float(Loss))
        params, state = optimizer.update(grads, state, params)
    return losses, first, params


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


CASES = [(name, m, None, "mlp", None) for name in SCHEDULES for m in (1, 4, 8, 16)]
CASES += [("gpipe", 8, None, "mlp", 8), ("1f1b", 8, None, "mlp", 3), ("interleaved", 8, None, "vjp", 2)]
CASES += [(name, 8, None, "vjp", None) for name in ("1f1b", "zb-h1", "dualpipev")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "counts"),
    [
        (2, (1, 8)),
        (4, (8,)),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in ((2, (4, 16)), (4, (1, 4, 16)))),
    ],
)
def test_every_schedule_equals_one_device(ranks, stages, counts):
    expected, plain = one_device(OPTIONS), one_device({"activation": "relu", "residual": False, "norm": False})
    for i, (name, microbatches, chunks, stage, collect) in enumerate(CASES):
        try:
            make(name, stages, microbatches)
        except ValueError:
            continue
        if microbatches not in counts:
            continue
        options = OPTIONS if i % 3 else {"activation": "relu", "residual": False, "norm": False}
        everyone = ranks(train, {"Z": stages}, name, microbatches, chunks, stage, options, collect)
        for losses, grads, params in everyone:
            close(losses, (expected if i % 3 else plain)[0])
            close((grads, params), (expected if i % 3 else plain)[1:])
        assert len({tuple(losses) for losses, _, _ in everyone}) == 1  # the same bits on every rank


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["1f1b", "interleaved", "dualpipev", *(pytest.param(n, marks=pytest.mark.sweep) for n in ("gpipe", "zb-h1"))],
)
def test_with_fsdp_and_tensor_parallelism(ranks, name):
    expected = one_device(OPTIONS, steps=1)
    for actual in ranks(train, {"Z": 2, "X": 2, "Y": 2}, name, 4, None, "fsdp_tp", OPTIONS, None, 1):
        close(list(actual), list(expected))


def moved(mesh, microbatches):
    schedule = make("1f1b", mesh.sizes["Z"], microbatches)
    specs = {name: spec for name, spec in FSDP_TP_SPECS.items() if name.startswith("W")}
    whole, In, Target = problem()
    params = tree.shard(whole, specs, mesh)
    In, Target = (tree.shard(x, "In[B_X, D_Y]", mesh) for x in (In, Target))
    with trace.trace() as log:
        pipeline.value_and_grad(params, In, Target, mesh, schedule, loss, fsdp_tp())
    volume = {}
    for event in log.collectives():
        key = event.op, event.axes
        volume[key] = volume.get(key, 0) + event.nbytes
    return volume


def test_bytes_on_each_axis(ranks):
    """Per rank, with l = L/Z layers: over X the weights and their gradients once a step, over Y four passes of the
    activations, over Z one activation and one dOut a microbatch."""
    l, float64, M = L // 2, 8, 4
    weights, rows = 2 * l * D * F // 2 * float64, B // 2 * D * float64
    for volume in ranks(moved, {"Z": 2, "X": 2, "Y": 2}, M):
        scattered = rows * 2 * l
        assert volume.pop(("AllGather", ("X",))) == volume.pop(("ReduceScatter", ("X",))) == weights
        assert volume.pop(("AllGather", ("Y",))) == 2 * l * rows
        assert volume.pop(("ReduceScatter", ("Y",))) == scattered
        assert volume.pop(("Send", ("Z",))) == volume.pop(("Recv", ("Z",))) == rows // 2
        assert volume.pop(("AllReduce", ("X", "Y", "Z"))) == float64
        assert not volume


def moved_abstract(mesh):
    schedule = make("1f1b", mesh.sizes["Z"], 4)
    L, D, F = mesh.sizes["Z"], 8192, 32768
    params = {
        "W_in": torch.empty(1, D // 8, F // 4, device="meta"),
        "W_out": torch.empty(1, F // 4, D // 8, device="meta"),
    }
    In = torch.empty(64, D // 4, device="meta")
    with trace.trace() as log:
        Loss, grads = pipeline.value_and_grad(params, In, In, mesh, schedule, loss, fsdp_tp())
    assert Loss.is_meta
    assert grads["W_in"].shape == params["W_in"].shape
    assert schedule.stages == L
    return log


def test_on_an_abstract_mesh():
    for z in (0, 3, 15):
        log = moved_abstract(AbstractMesh({"Z": 16, "X": 8, "Y": 4}, {"Z": z, "X": 0, "Y": 0}))
        assert log.count("Send") == log.count("Recv") == 4 * ((z > 0) + (z < 15))
        assert {event.async_op for event in log.events if event.op == "Send"} == {True}  # nobody waits for it
        assert {event.async_op for event in log.events if event.op == "Recv"} == {False}
        assert log.count("AllGather", "X") == 2


def roll(mesh, microbatches):
    whole, In, Target = problem()
    params = tree.shard(whole, WEIGHTS, mesh)

    def terms(params, In):  # Loss[] {U_Z}: the last stage's alone
        Out = pipeline.rolled(params, In, mesh, microbatches)
        return loss(Out, Target) if mesh.coord["Z"] == mesh.sizes["Z"] - 1 else (0 * Out).sum()

    (grads, dIn), Loss = torch.func.grad_and_value(terms, argnums=(0, 1))(params, In)
    return Loss, grads, dIn


@pytest.mark.parametrize("microbatches", [1, 4])
def test_rolled_by_ppermute_and_vjp(ranks, microbatches):
    params, In, Target = problem()
    stack = MLPStack(MLPConfig(L=L, D=D, F=F, residual=False, norm=False))

    def f(params, In):
        return loss(functional_call(stack, params, (In,)), Target)

    (grads, dIn), Loss = torch.func.grad_and_value(f, argnums=(0, 1))(params, In)
    each = ranks(roll, {"Z": 2}, microbatches)
    close(sum(one[0] for one in each), Loss)
    close(sum(one[2] for one in each), dIn)  # dIn {U_Z}: In is replicated
    close({name: torch.cat([one[1][name] for one in each]) for name in grads}, grads)


def pairs(mesh, name, microbatches):
    """As on NCCL: a process group for each direction and kind."""
    original = pipeline.Channels
    pipeline.Channels = lambda *args: original(*args, pairs=True)
    try:
        return train(mesh, name, microbatches, None, "mlp", OPTIONS, None)
    finally:
        pipeline.Channels = original


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipev"])
def test_channels_of_two_ranks(ranks, name):
    expected = one_device(OPTIONS)
    for actual in ranks(pairs, {"Z": 2}, name, 8):
        close(list(actual), list(expected))


class Layers(torch.nn.Module):
    """The same stack as an ordinary module, for torch's own pipelines."""

    def __init__(self, params):
        super().__init__()
        self.W_in, self.W_out = (torch.nn.Parameter(params[name].clone()) for name in ("W_in", "W_out"))

    def forward(self, In):
        return stack_of(OPTIONS)({"W_in": self.W_in, "W_out": self.W_out}, In)


def both(mesh, name, microbatches):
    """(loss, grads) of this rank's layers, ours and torch.distributed.pipelining's (loss None off the last stage)."""
    from torch.distributed import pipelining

    schedule, group = make(name, mesh.sizes["Z"], microbatches), mesh.group(("Z",)).pg
    whole, In, Target = problem()
    params = tree.shard(pipeline.arrange(whole, schedule), WEIGHTS, mesh)
    Loss, grads = pipeline.value_and_grad(params, In, Target, mesh, schedule, loss, mlp(**OPTIONS))

    own, modules, stages = schedule.stages_of(mesh.coord["Z"]), [], []
    for c, stage in enumerate(own):
        modules.append(Layers(tree.map(lambda W, c=c: W.unflatten(0, (len(own), -1))[c], params)))
        stages.append(pipelining.PipelineStage(modules[-1], stage, schedule.virtual_stages, "cpu", group=group))
    kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
    kind = kinds.get(name, pipelining.ScheduleInterleaved1F1B)
    run = kind(stages if name == "interleaved" else stages[0], microbatches, loss_fn=loss, scale_grads=False)
    losses, last = [], own[-1] == schedule.virtual_stages - 1
    run.step(*([In] if own[0] == 0 else []), **({"target": Target, "losses": losses} if last else {}))
    their_grads = {name: torch.cat([getattr(module, name).grad for module in modules]) for name in params}
    return (Loss, grads), (sum(losses) if last else None, their_grads)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_equal_to_torch(ranks, name, stages):
    each = ranks(both, {"Z": stages}, name, 8)
    for (Loss, grads), (their_loss, their_grads) in each:
        close(grads, their_grads)
        if their_loss is not None:
            close(Loss, their_loss.detach())
    assert sum(their_loss is not None for _, (their_loss, _) in each) == 1


def timed(mesh):
    whole, In, Target = problem()
    params = tree.shard(whole, WEIGHTS, mesh)
    schedule = make("1f1b", mesh.sizes["Z"], 8)
    lopsided = lambda Out, Target: loss(Out, Target) + (Out * Target.square()).sum()  # noqa: E731
    *measured, timeline = pipeline.measure(params, In, Target, mesh, schedule, lopsided)
    plain = pipeline.value_and_grad(params, In, Target, mesh, schedule, lopsided)
    return timeline, [[torch.equal(a, b) for a, b in zip(*map(tree.leaves, both), strict=True)]
                      for both in zip(measured, plain, strict=True)]  # fmt: skip


def test_measured_timeline(ranks):
    for timeline, same in ranks(timed, {"Z": 2}):
        assert same == [[True], [True, True]]
        assert len(timeline.compute) == 2 * 2 * 8
        assert timeline.live == (2, 1)
        assert 0 < timeline.bubble < 1
        assert timeline.name == "1f1b, measured"
        assert [span.step for span in timeline.spans if span.rank == 1] == list(make("1f1b", 2, 8)[1])
        for rank in range(2):
            own = [span for span in timeline.spans if span.rank == rank]
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(own))


def ends(mesh, name):
    """(Loss, gradients of embedding, layers, head) with the embedding before and the head behind the pipeline."""
    schedule = make(name, mesh.sizes["Z"], 8)
    whole, In, Target = problem()
    params, E = tree.shard(pipeline.arrange(whole, schedule), WEIGHTS, mesh), torch.eye(D, dtype=torch.float64)
    Loss, grads = pipeline.with_ends(params, {"E": E}, In @ E, Target, mesh, schedule, head_loss, mlp(**OPTIONS))
    dIn = all_reduce("dIn[B, D] {U_Z} -> dIn[B, D]", grads.dIn, mesh)
    dE = all_reduce("dE[D, E] {U_Z} -> dE[D, E]", grads.head["E"], mesh)
    return Loss, dIn, pipeline.restore(tree.unshard(grads.params, WEIGHTS, mesh), schedule), dE


def head_loss(head, Out, Target):
    return loss(Out @ head["E"], Target)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipev"])
def test_ends_of_a_model(ranks, name):
    params, In, Target = problem()
    E = torch.eye(D, dtype=torch.float64)

    def f(In, params, E):
        return head_loss({"E": E}, stack_of(OPTIONS)(params, In), Target)

    grads, Loss = torch.func.grad_and_value(f, argnums=(0, 1, 2))(In, params, E)
    for actual in ranks(ends, {"Z": 2}, name):
        close(actual, (Loss, *grads))


def wrong(mesh, what):
    params, In, Target = problem()
    params = tree.shard(params, WEIGHTS, mesh)
    stages, microbatches = (4, 4) if what == "stages" else (2, 5) if what == "rows" else (2, 4)
    name = "gpipe" if what == "schedule" and mesh.rank else "1f1b"
    with pytest.raises(ValueError, match={"stages": "without Z=4", "rows": "5 microbatches"}.get(what, "same call")):
        pipeline.value_and_grad(params, In, Target, mesh, make(name, stages, microbatches), loss)


@pytest.mark.parametrize("what", ["stages", "rows", "schedule"])
def test_what_does_not_fit_is_refused(ranks, what):
    ranks(wrong, {"Z": 2}, what)


def dies(mesh, how):
    params, In, Target = problem()
    params = tree.shard(params, WEIGHTS, mesh)
    stage, calls = mlp(), []

    def fails(weights, dOut, saved, mesh):
        calls.append(1)
        if mesh.rank == 1 and len(calls) == 3:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("mid-schedule")
        return stage.backward_input(weights, dOut, saved, mesh)

    pipeline.value_and_grad(params, In, Target, mesh, make("1f1b", 4, 8), loss, stage._replace(backward_input=fails))


@pytest.mark.parametrize(("how", "said"), [("raises", "ArithmeticError: mid-schedule"), ("killed", "SIGKILL")])
def test_a_rank_that_dies_ends_the_run(how, said):
    start = perf_counter()
    with pytest.raises(launch.RankError, match=f"(?s)rank 1 of 4.*{said}"):
        launch.run(dies, {"Z": 4}, how)
    assert perf_counter() - start < SOON


def unchecked(mesh, name):
    """As `train`, on a mesh that compares nothing: the loss is then reduced while the backward goes on."""
    free = Mesh(mesh.sizes, checked=False)
    return train(free, name, 8, None, "mlp", OPTIONS, None)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipev"])
def test_unchecked(ranks, name):
    expected = one_device(OPTIONS)
    for actual in ranks(unchecked, {"Z": 2}, name):
        close(list(actual), list(expected))


def test_rolled_moves_up_between_ticks_alone():
    """M + Z - 1 ticks: nothing moves up after the last of them."""
    mesh = AbstractMesh({"Z": 4})
    params = {"W_in": torch.empty(2, D, F, device="meta"), "W_out": torch.empty(2, F, D, device="meta")}
    with trace.trace() as log:
        Out = pipeline.rolled(params, torch.empty(6, D, device="meta"), mesh, microbatches=3)
    assert Out.shape == (6, D)
    assert log.count("CollectivePermute", "Z") == 3 + 4 - 2
