"""Pipelines that do not fit are refused, and a stage whose rank dies ends the run."""

import os
import signal
from dataclasses import replace
from time import perf_counter

import pytest
from machine import SOON
from pipeline_problem import OPTIONS, WEIGHTS, close, loss, one_device, problem, reference, train

from scaling import launch, tree
from scaling.mesh import Mesh
from scaling.schedules import ReduceGrads, make
from scaling.schedules.simulator import Deadlock
from scaling.strategies import pipeline
from scaling.strategies.stage import mlp


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
    grads, Loss = reference(whole, In, Target, OPTIONS)
    for other in edits(schedule):
        try:
            found, dW = pipeline.value_and_grad(params, In, Target, mesh, other, loss, mlp(**OPTIONS))
        except (ValueError, Deadlock):
            refused += 1
        else:
            close([found, pipeline.restore(tree.unshard(dW, WEIGHTS, mesh), schedule)], [Loss, grads])
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


def unchecked(mesh, name):
    """As `train`, on a mesh that compares nothing: the loss is then reduced while the backward goes on."""
    free = Mesh(mesh.sizes, checked=False)
    return train(free, name, 8, None, "mlp", OPTIONS, None)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipev"])
def test_unchecked(ranks, name):
    expected = one_device(OPTIONS)
    for actual in ranks(unchecked, {"Z": 2}, name):
        close(list(actual), list(expected))
