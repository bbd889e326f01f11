"""What pipeline stages send and when, each message told from all others; and what ends a run that cannot go on."""

import os
import signal
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from time import perf_counter

import pytest
import torch
from machine import SOON, RankFailed
from test_pipeline import OPTIONS, WEIGHTS, B, D, F, L, close, loss, one_device, problem

from scaling import launch, trace, tree
from scaling.mesh import AbstractMesh, Mesh
from scaling.schedules import ReduceGrads, make
from scaling.schedules.instructions import Backward, Forward, ForwardBackward
from scaling.schedules.simulator import Deadlock
from scaling.strategies import fsdp_tp, pipeline
from scaling.strategies.pipeline import _spans
from scaling.strategies.stage import mlp, of_strategy

FSDP_TP = of_strategy(fsdp_tp.STRATEGY)


def moved(mesh, microbatches):
    schedule = make("1f1b", mesh.sizes["Z"], microbatches)
    specs = {name: spec for name, spec in FSDP_TP.specs.items() if name.startswith("W")}
    whole, In, Target = problem()
    params = tree.shard(whole, specs, mesh)
    In, Target = (tree.shard(x, "In[B_X, D_Y]", mesh) for x in (In, Target))
    with trace.trace() as log:
        pipeline.value_and_grad(params, In, Target, mesh, schedule, loss, FSDP_TP)
    volume = Counter()
    for event in log.collectives():
        volume[event.op, "".join(event.axes)] += event.nbytes
    return volume


def test_bytes_on_each_axis(ranks):
    """Per rank, with l = L/Z layers: over X the weights and their gradients once a step, over Y four passes of the
    activations, over Z one activation and one dOut a microbatch."""
    l, float64, M = L // 2, 8, 4
    weights, rows = 2 * l * D * F // 2 * float64, B // 2 * D * float64
    for volume in ranks(moved, {"Z": 2, "X": 2, "Y": 2}, M):
        assert volume == {
            ("AllGather", "X"): weights,
            ("ReduceScatter", "X"): weights,
            ("AllGather", "Y"): 2 * l * rows,
            ("ReduceScatter", "Y"): 2 * l * rows,
            ("Send", "Z"): rows // 2,
            ("Recv", "Z"): rows // 2,
            ("AllReduce", "XYZ"): float64,
        }


def moved_abstract(mesh):
    schedule = make("1f1b", mesh.sizes["Z"], 4)
    L, D, F = mesh.sizes["Z"], 8192, 32768
    params = {
        "W_in": torch.empty(1, D // 8, F // 4, device="meta"),
        "W_out": torch.empty(1, F // 4, D // 8, device="meta"),
    }
    In = torch.empty(64, D // 4, device="meta")
    with trace.trace() as log:
        Loss, grads = pipeline.value_and_grad(params, In, In, mesh, schedule, loss, FSDP_TP)
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


def test_steps_that_ran_as_one_share_its_time():
    step = ForwardBackward(Forward(0, 1), Backward(2, 0))
    first, second = _spans(3, [step], 5.0, 9.0)
    assert (first.start, first.end, second.start, second.end) == (5.0, 7.0, 7.0, 9.0)


BROKEN = {
    "fewer columns": lambda Out: Out[:, :-1],
    "fewer rows": lambda Out: Out[:1],
    "a dim more": lambda Out: Out[None],
    "bfloat16": torch.Tensor.bfloat16,
    "float64": torch.Tensor.double,
}


def broken(mesh, change, half):
    """A pipeline of which each stage's result of one kind, or the batch of one rank, is changed."""
    params, In, _ = tree.map(torch.Tensor.float, problem())
    params, stage = tree.shard(params, WEIGHTS, mesh), mlp()
    if half == "forward":
        stage = stage._replace(forward=changed(stage.forward, change))
    if half == "backward":
        stage = stage._replace(backward_input=changed(stage.backward_input, change))
    if half == "batch" and mesh.rank == 1:
        In = BROKEN[change](In)
    mesh = Mesh(mesh.sizes, timeout=20)  # unchecked: in the checked mode the ranks would compare their batches first
    return pipeline.value_and_grad(params, In, In, mesh, make("1f1b", 2, 2), lambda Out, In: Out.sum(), stage)


def changed(function, change):
    def wrapped(*args):
        x, rest = function(*args)
        return BROKEN[change](x), rest

    return wrapped


SENT = "this rank sends x[B, D] of (16, 6) float32\n"


@pytest.mark.parametrize(
    ("change", "half", "words"),
    [
        ("fewer columns", "forward", "SendActivation x[B, D]\n  stage 0 hands on torch.float32 (16, 5) on cpu"),
        ("bfloat16", "forward", "hands on torch.bfloat16 (16, 6) on cpu, but microbatches of In are torch.float32"),
        ("float64", "forward", "hands on torch.float64"),
        ("a dim more", "forward", "hands on torch.float32 (1, 16, 6)"),
        ("fewer rows", "backward", "SendGrad x[B, D]\n  stage 1 hands on torch.float32 (1, 6) on cpu"),
        ("fewer columns", "batch", SENT + "  rank 1 expects x[B, D] of (16, 5) float32\n  rule: what is received"),
        ("float64", "batch", SENT + "  rank 1 expects x[B, D] of (16, 6) float64\n  rule: what is received"),
    ],
)
def test_a_stage_hands_on_what_the_next_one_waits_for(ranks, change, half, words):
    with pytest.raises(RankFailed) as error:
        ranks(broken, {"Z": 2}, change, half)
    assert words in str(error.value)


def wrong(mesh, what):
    params, In, Target = problem()
    params = tree.shard(params, WEIGHTS, mesh)
    stages, microbatches = (4, 4) if what == "stages" else (2, 5) if what == "rows" else (2, 4)
    schedule = make("gpipe" if what == "schedule" and mesh.rank else "1f1b", stages, microbatches)
    if what == "reductions":
        kept = [[step for step in program if not isinstance(step, ReduceGrads)] for program in schedule]
        schedule = replace(schedule, programs=(schedule[0], tuple(kept[1])))
    said = {"stages": "without Z=4", "rows": "5 microbatches", "reductions": r"holds the virtual stages \[1\].*of \[\]"}
    with pytest.raises(ValueError, match=said.get(what, "same call")):
        pipeline.value_and_grad(params, In, Target, mesh, schedule, loss)


@pytest.mark.parametrize("what", ["stages", "rows", "schedule", "reductions"])
def test_what_does_not_fit_is_refused(ranks, what):
    ranks(wrong, {"Z": 2}, what)


def edits(schedule):
    """The schedule with one instruction of one rank left out, done twice, or put behind the next one."""
    for rank, program in enumerate(schedule):
        for i, step in enumerate(program):
            behind = (*program[i + 1 : i + 2], step)
            for steps, replaced in (((), 1), ((step, step), 1), (behind, 2)):
                changed = (*program[:i], *steps, *program[i + replaced :])
                yield replace(schedule, programs=(*schedule.programs[:rank], changed, *schedule.programs[rank + 1 :]))


def edited(mesh, name):
    """(how many edits of a schedule are refused, how many run), where those that run must give one device's result."""
    whole, In, Target = problem()
    schedule, refused, run = make(name, 2, 4 if name == "dualpipev" else 2), 0, 0
    params = tree.shard(pipeline.arrange(whole, schedule), WEIGHTS, mesh)
    (Loss, _), grads, _ = one_device(OPTIONS)
    for other in edits(schedule):
        try:
            found, dW = pipeline.value_and_grad(params, In, Target, mesh, other, loss, mlp(**OPTIONS))
        except (ValueError, Deadlock):
            refused += 1
        else:
            close([float(found), pipeline.restore(tree.unshard(dW, WEIGHTS, mesh), schedule)], [Loss, grads])
            run += 1
    return refused, run


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "dualpipev"])
def test_an_edited_schedule_is_refused_before_it_starts_or_right(ranks, name):
    for refused, run in ranks(edited, {"Z": 2}, name):
        assert refused > 30
        assert run > 5


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
