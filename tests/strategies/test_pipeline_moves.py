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
from problems import B, D, F, close, squares
from test_pipeline import FSDP_TP, LAYERS, STAGE, problem, restored, trained_alone, weights_of

from scaling import launch, trace, tree
from scaling.mesh import AbstractMesh, Mesh
from scaling.schedules import ReduceGrads, make
from scaling.schedules.instructions import parts
from scaling.schedules.simulator import Deadlock
from scaling.strategies import pipeline
from scaling.strategies.stage import mlp


def moved(mesh, microbatches):
    schedule = make("1f1b", mesh.sizes["Z"], microbatches)
    params, In, Target = problem(mesh, schedule, weights_of(FSDP_TP))
    In, Target = (tree.shard(x, "In[B_X, D_Y]", mesh) for x in (In, Target))
    with trace.trace() as log:
        pipeline.value_and_grad(params, In, Target, mesh, schedule, squares, FSDP_TP)
    volume = Counter()
    for event in log.collectives():
        volume[event.op, "".join(event.axes)] += event.nbytes
    return volume


def test_bytes_on_each_axis(ranks):
    """Per rank, with l = L/Z layers: over X the weights and their gradients once a step, over Y four passes of the
    activations, over Z one activation and one dOut a microbatch."""
    l, float64, M = LAYERS // 2, 8, 4
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


def test_on_an_abstract_mesh():
    stages, D, F = 16, 8192, 32768
    schedule, In = make("1f1b", stages, 4), torch.empty(64, D // 4, device="meta")
    params = {
        "W_in": torch.empty(1, D // 8, F // 4, device="meta"),
        "W_out": torch.empty(1, F // 4, D // 8, device="meta"),
    }
    for z in (0, 3, 15):
        mesh = AbstractMesh({"Z": stages, "X": 8, "Y": 4}, {"Z": z, "X": 0, "Y": 0})
        with trace.trace() as log:
            Loss, grads = pipeline.value_and_grad(params, In, In, mesh, schedule, squares, FSDP_TP)
        assert Loss.is_meta
        assert grads["W_in"].shape == params["W_in"].shape
        assert log.count("Send") == log.count("Recv") == 4 * ((z > 0) + (z < 15))
        assert {event.async_op for event in log.events if event.op == "Send"} == {True}  # nobody waits for it
        assert {event.async_op for event in log.events if event.op == "Recv"} == {False}
        assert log.count("AllGather", "X") == 2


def timed(mesh, name):
    schedule = make(name, mesh.sizes["Z"], 8)
    given = *problem(mesh, schedule), mesh, schedule
    lopsided = lambda Out, Target: squares(Out, Target) + (Out * Target.square()).sum()  # noqa: E731
    *measured, timeline = pipeline.measure(*given, lopsided)
    plain = pipeline.value_and_grad(*given, lopsided)
    return timeline, all(map(torch.equal, tree.leaves(measured), tree.leaves(plain)))


@pytest.mark.parametrize(("name", "live"), [("1f1b", (2, 1)), ("dualpipev", (2.5, 2.5))])
def test_measured_timeline(ranks, name, live):
    """Steps that ran as one share its time."""
    for timeline, same in ranks(timed, {"Z": 2}, name):
        assert same
        assert timeline.live == live
        assert 0 < timeline.bubble < 1
        assert timeline.name == f"{name}, measured"
        for rank, program in enumerate(make(name, 2, 8)):
            own = [span for span in timeline.spans if span.rank == rank]
            assert [span.step for span in own] == [part for step in program for part in parts(step)]
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(own))


BROKEN = {
    "fewer columns": lambda Out: Out[:, :-1],
    "fewer rows": lambda Out: Out[:1],
    "bfloat16": torch.Tensor.bfloat16,
    "float64": torch.Tensor.double,
}


def broken(mesh, change, half):
    """A pipeline of which each stage's result of one kind, or the batch of one rank, is changed."""

    def changed(function):
        def wrapped(*args):
            x, rest = function(*args)
            return BROKEN[change](x), rest

        return wrapped

    schedule, stage = make("1f1b", 2, 2), mlp()
    params, In, _ = tree.map(torch.Tensor.float, problem(mesh, schedule))
    if half == "batch":
        In = BROKEN[change](In) if mesh.rank == 1 else In
    else:
        stage = stage._replace(**{half: changed(getattr(stage, half))})
    mesh = Mesh(mesh.sizes, timeout=20)  # unchecked: in the checked mode the ranks would compare their batches first
    pipeline.value_and_grad(params, In, In, mesh, schedule, lambda Out, In: Out.sum(), stage)


SENT = "this rank sends x[B, D] of (8, 16) float32\n"


@pytest.mark.parametrize(
    ("change", "half", "words"),
    [
        ("fewer columns", "forward", "SendActivation x[B, D]\n  stage 0 hands on torch.float32 (8, 15) on cpu"),
        ("bfloat16", "forward", "hands on torch.bfloat16 (8, 16) on cpu, but microbatches of In are torch.float32"),
        ("fewer rows", "backward_input", "SendGrad x[B, D]\n  stage 1 hands on torch.float32 (1, 16) on cpu"),
        ("fewer columns", "batch", SENT + "  rank 1 expects x[B, D] of (8, 15) float32\n  rule: what is received"),
        ("float64", "batch", SENT + "  rank 1 expects x[B, D] of (8, 16) float64\n  rule: what is received"),
    ],
)
def test_a_stage_hands_on_what_the_next_one_waits_for(ranks, change, half, words):
    with pytest.raises(RankFailed) as error:
        ranks(broken, {"Z": 2}, change, half)
    assert words in str(error.value)


def wrong(mesh):
    """What does not fit is refused, on every rank alike."""
    fits = make("1f1b", 2, 4)
    kept = tuple(step for step in fits[1] if not isinstance(step, ReduceGrads))
    params, In, Target = problem(mesh, fits)
    for schedule, words in (
        (make("1f1b", 4, 4), "without Z=4"),
        (make("1f1b", 2, 5), "5 microbatches"),
        (replace(fits, programs=(fits[0], kept)), r"holds the virtual stages \[1\].*of \[\]"),
        (make("gpipe" if mesh.rank else "1f1b", 2, 4), "same call"),
    ):
        with pytest.raises(ValueError, match=words):
            pipeline.value_and_grad(params, In, Target, mesh, schedule, squares)


def test_what_does_not_fit_is_refused(ranks):
    ranks(wrong, {"Z": 2})


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
    schedule, refused, run = make(name, 2, 4 if name == "dualpipev" else 2), 0, 0
    losses, grads, _ = trained_alone()
    given = *problem(mesh, schedule), mesh
    for other in edits(schedule):
        try:
            found, dW = pipeline.value_and_grad(*given, other, squares, mlp(*STAGE))
        except (ValueError, Deadlock):
            refused += 1
        else:
            close([found, restored(dW, mesh, schedule)], [losses[0], grads])
            run += 1
    return refused, run


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "dualpipev"])
def test_an_edited_schedule_is_refused_before_it_starts_or_right(ranks, name):
    for refused, run in ranks(edited, {"Z": 2}, name):
        assert refused > 30
        assert run > 5


def dies(mesh, how):
    schedule, stage, calls = make("1f1b", 4, 8), mlp(), []

    def fails(weights, dOut, saved, mesh):
        calls.append(1)
        if mesh.rank == 1 and len(calls) == 3:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("mid-schedule")
        return stage.backward_input(weights, dOut, saved, mesh)

    given = *problem(mesh, schedule), mesh, schedule
    pipeline.value_and_grad(*given, squares, stage._replace(backward_input=fails))


@pytest.mark.parametrize(("how", "said"), [("raises", "ArithmeticError: mid-schedule"), ("killed", "SIGKILL")])
def test_a_rank_that_dies_ends_the_run(how, said):
    start = perf_counter()
    with pytest.raises(launch.RankError, match=f"(?s)rank 1 of 4.*{said}"):
        launch.run(dies, {"Z": 4}, how)
    assert perf_counter() - start < SOON
