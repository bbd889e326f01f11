"""Pipelines executed on ranks: loss and gradients equal one device and torch's own pipelines; what stages send, each
message told from all others; and what ends a run that cannot go on."""

import os
import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from unittest.mock import patch

import pytest
import torch
from benchmarks import native
from machine import SOON, RankFailed, on_ranks
from problems import BLOCKS, D, F, close, one_device, same, squares, whole
from refused import evaluated, refused

from scaling import launch, trace, tree
from scaling.mesh import AbstractMesh, Mesh
from scaling.schedules import SCHEDULES, ReduceGrads, make, split_backward
from scaling.schedules.schedule import parts
from scaling.schedules.simulator import Deadlock
from scaling.strategies import fsdp_tp, pipeline
from scaling.strategies.stage import mlp, of_strategy

LAYERS = 8
BLOCK, BARE = BLOCKS[0], BLOCKS[2]
STAGE, FSDP_TP = mlp(*BLOCK), of_strategy(fsdp_tp.STRATEGY, *BLOCK)


def problem(mesh, schedule, stage=STAGE):
    """This rank's params, and the first batch: In and Target."""
    params, batches = whole(L=LAYERS)
    params = tree.shard(pipeline.arrange(params, schedule), weights_of(stage), mesh)
    return params, *tree.shard([*batches[0]], [stage.specs["In"]] * 2, mesh)


def weights_of(stage):
    return {name: type_ for name, type_ in stage.specs.items() if name.startswith("W")}


def restored(params, mesh, schedule, stage=STAGE):
    return pipeline.restore(tree.unshard(params, weights_of(stage), mesh), schedule)


def alone(block=BLOCK):
    (Loss,), (grads, _), _ = one_device(block=block, L=LAYERS, steps=1)
    return Loss, grads


def every_schedule(stages, *counts, marks=()):
    """Of so many microbatches, where those are enough."""
    too_few = {("interleaved", m) for m in counts if m % stages} | {("dualpipev", m) for m in counts if m < 2 * stages}
    cases = [(name, m, None) for name in SCHEDULES for m in counts if (name, m) not in too_few]
    cases += [case for case in (("gpipe", 8, 8), ("1f1b", 8, 3), ("interleaved", 8, 2)) if case[1] in counts]
    cases = [(*case, BLOCK if i % 3 else BARE, "") for i, case in enumerate(cases)]
    return pytest.param({"Z": stages}, cases, marks=marks, id=f"Z={stages} {counts}")


def by_way(mesh, way, names, marks=()):
    cases = [(name, 8, None, BLOCK, way) for name in names]
    return pytest.param(mesh, cases, marks=marks, id=f"{mesh} {way} {' '.join(names)}")


WAYS = [
    ({"Z": 2, "X": 2, "Y": 1}, "", ["dualpipev"]),
    ({"Z": 2, "X": 1, "Y": 2}, "", ["1f1b"]),
    ({"Z": 4}, "pairs", ["1f1b", "dualpipev"]),
    ({"Z": 2}, "unchecked", ["1f1b", "interleaved", "dualpipev"]),
]
CASES = [every_schedule(2, 1, 8), every_schedule(4, 8), *(by_way(*way) for way in WAYS)]
SWEEP = {"marks": pytest.mark.sweep}
SWEPT = [every_schedule(2, 4, 16, **SWEEP), every_schedule(4, 1, 4, 16, **SWEEP)]
SWEPT += [by_way(*way, ["gpipe", "interleaved", "zb-h1"], **SWEEP) for *way, _ in WAYS]


@pytest.mark.parametrize(("mesh", "cases"), CASES + SWEPT)
def test_equal_to_one_device(mesh, cases):
    """Loss and gradients, whole and in the model's order of layers; the loss to the bit on all stages.

    On axes X and Y with FSDP and tensor parallelism in each stage. "pairs": as on NCCL, with a process group for each
    direction and kind; "unchecked": on a mesh that compares nothing, the loss is reduced while the backward goes on.
    """
    wanted, channels = {block: alone(block) for block in {case[3] for case in cases}}, pipeline.Channels
    for name, microbatches, collect, block, way in cases:
        schedule = make(name, mesh.sizes["Z"], microbatches)
        schedule = split_backward(schedule, collect) if collect is not None else schedule
        at = Mesh(mesh.sizes, checked=False) if way == "unchecked" else mesh
        stage = FSDP_TP if "X" in mesh.sizes else mlp(*block)
        params, *batch = problem(at, schedule, stage)
        with patch.object(pipeline, "Channels", partial(channels, pairs=True if way == "pairs" else None)):
            Loss, grads = pipeline.value_and_grad(params, *batch, at, schedule, squares, stage)
        found = (Loss, restored(grads, at, schedule, stage))
        close({f"{name} {microbatches}": found}, wanted[block])
        assert (tree.unshard(Loss[None], "Loss[S_Z]", mesh) == Loss).all()


@on_ranks({"Z": 2})
@pytest.mark.parametrize(("name", "theirs"), [("1f1b", "Schedule1F1B"), ("interleaved", "ScheduleInterleaved1F1B")])
def test_equal_to_pipelines_of_torch(mesh, name, theirs):
    """The loss, and the gradients of this rank's layers, by torch.distributed.pipelining's schedule of that name."""
    (W, batches), schedule, blocks = whole(L=LAYERS), make(name, 2, 8), []
    given = *problem(mesh, schedule), mesh, schedule, squares, mlp(*BLOCKS[1])
    Loss, grads = pipeline.value_and_grad(*given)

    def stage(first, last):
        blocks.extend(map(native.Block, W["W_in"][first:last], W["W_out"][first:last]))
        return torch.nn.Sequential(*blocks[first - last :])

    chunks = schedule.virtual_stages // 2
    step = native.staged(stage, LAYERS, chunks, theirs, 8, mesh, *batches[0], squares, "sgd", 1.0, False)
    losses = tree.unshard(step()[None].double(), "Loss[S_Z]", mesh)
    layers = {"W_in": [block.up for block in blocks], "W_out": [block.down for block in blocks]}
    wanted = {name: torch.stack([layer.weight.grad.T for layer in own]) for name, own in layers.items()}
    close((Loss, grads), (losses.sum(), wanted))


@on_ranks({"Z": 2})
def test_measured_timeline(mesh):
    """Steps that ran as one share its time."""
    schedule = make("dualpipev", 2, 8)
    given = *problem(mesh, schedule), mesh, schedule
    lopsided = lambda Out, Target: squares(Out, Target) + (Out * Target.square()).sum()  # noqa: E731
    *measured, timeline = pipeline.measure(*given, lopsided)
    plain = pipeline.value_and_grad(*given, lopsided)
    assert same([*measured], [*plain])
    assert (timeline.name, timeline.live) == ("dualpipev, measured", (2.5, 2.5))
    assert 0 < timeline.bubble < 1
    for rank, program in enumerate(schedule):
        own = [span for span in timeline.spans if span.rank == rank]
        assert [span.step for span in own] == [part for step in program for part in parts(step)]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(own))


@pytest.mark.parametrize("z", [0, 3, 15])
def test_bytes_on_each_axis(z):
    """Per rank, with l layers: over X the weights and their gradients once a step, over Y four passes of the
    activations, over Z one activation and one dOut a microbatch to and from each neighbour."""
    sizes, l, rows, D, F = {"Z": 16, "X": 8, "Y": 4}, 2, 64, 8192, 32768
    mesh, schedule = AbstractMesh(sizes, {"Z": z, "X": 0, "Y": 0}), make("1f1b", 16, 4)
    shapes = (rows, D // 4), (l, D // 8, F // 4), (l, F // 4, D // 8)
    In, W_in, W_out = (torch.empty(shape, device="meta") for shape in shapes)
    with trace.trace() as log:
        Loss, grads = pipeline.value_and_grad({"W_in": W_in, "W_out": W_out}, In, In, mesh, schedule, squares, FSDP_TP)
    assert (Loss.shape, grads["W_in"].shape) == ((), W_in.shape)
    moved, neighbours = Counter(), (z > 0) + (z < 15)
    for event in log.collectives():
        moved[event.op, "".join(event.axes)] += event.nbytes
    weights, stream, own = 2 * l * D * F // 4 * 4, 2 * l * rows * D * 4, neighbours * In.nbytes
    assert moved == {
        ("AllGather", "X"): weights,
        ("ReduceScatter", "X"): weights,
        ("AllGather", "Y"): stream,
        ("ReduceScatter", "Y"): stream,
        ("Send", "Z"): own,
        ("Recv", "Z"): own,
        ("AllReduce", "XYZ"): 4,
    }
    assert (log.count("AllGather", "X"), log.count("Send")) == (2 * l, 4 * neighbours)
    waited = {(event.op, event.async_op) for event in log.events if event.op in ("Send", "Recv")}
    assert waited == {("Send", True), ("Recv", False)}  # nobody waits for what is sent


def staged(schedule=None, rank=0, L=4, stage=STAGE):
    """One rank's run of a pipeline of two stages."""
    mesh = AbstractMesh({"Z": 2}, {"Z": rank})
    In, W_in, W_out = (torch.empty(shape, device="meta") for shape in ((16, D), (L, D, F), (L, F, D)))
    given = {"W_in": W_in, "W_out": W_out}, In, In, mesh, schedule or make("1f1b", 2, 4), squares, stage
    return pipeline.value_and_grad(*given)


def handing_on(half, change):
    """A stage of which one function hands on another x."""

    def changed(*args):
        x, rest = getattr(STAGE, half)(*args)
        return change(x), rest

    return STAGE._replace(**{half: changed})


FITS = make("1f1b", 2, 4)
NARROW, HALF = handing_on("forward", lambda Out: Out[:, :-1]), handing_on("forward", torch.Tensor.bfloat16)
SHORT = handing_on("backward_input", lambda dIn: dIn[:1])
UNREDUCED = replace(FITS, programs=(FITS[0], tuple(step for step in FITS[1] if not isinstance(step, ReduceGrads))))
REFUSED = r"""
call                                    words of its error
staged(make('1f1b', 4, 4))              without Z=4\n  fix: make the schedule with
staged(make('1f1b', 2, 5))              5 microbatches
staged(UNREDUCED)                       rank 1 holds the virtual stages [1], and reduces the gradients of []
staged(make('interleaved', 2, 4), L=3)  params["W_in"] has 3 layers here, not a multiple of 2
staged(stage=NARROW)                    SendActivation x[B, D]\n  stage 0 hands on torch.float32 (4, 15) on meta
staged(stage=HALF)
    hands on torch.bfloat16 (4, 16) on meta, but microbatches of In are torch.float32
staged(rank=1, stage=SHORT)             SendGrad x[B, D]\n  stage 1 hands on torch.float32 (1, 16) on meta
"""
test_what_does_not_fit_is_refused = refused(evaluated(REFUSED, globals()))


def another_batch(mesh, dtype, width):
    params, In, _ = problem(mesh, FITS)
    In = In[:, :width].to(dtype) if mesh.rank == 1 else In
    mesh = Mesh(mesh.sizes, timeout=20)  # unchecked: in the checked mode the ranks would compare their batches first
    pipeline.value_and_grad(params, In, In, mesh, FITS, squares, STAGE)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, D), (torch.float64, D - 1)])
def test_a_stage_sends_what_the_next_one_waits_for(ranks, dtype, width):
    with pytest.raises(RankFailed) as error:
        ranks(another_batch, {"Z": 2}, dtype, width)
    what = f"(4, {width}) {dtype}".replace("torch.", "")
    found = f"this rank sends x[B, D] of (4, 16) float64\n  rank 1 expects x[B, D] of {what}\n"
    assert f"{found}  rule: what is received" in str(error.value)


def edits(schedule):
    """The schedule with one instruction of one rank left out, done twice, or put behind the next one."""
    for rank, program in enumerate(schedule):
        for i, step in enumerate(program):
            behind = (*program[i + 1 : i + 2], step)
            for steps, replaced in (((), 1), ((step, step), 1), (behind, 2)):
                changed = (*program[:i], *steps, *program[i + replaced :])
                yield replace(schedule, programs=(*schedule.programs[:rank], changed, *schedule.programs[rank + 1 :]))


@on_ranks({"Z": 2})
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipev"])
def test_an_edited_schedule_is_refused_before_it_starts_or_right(mesh, name):
    schedule, stopped, run = make(name, 2, 4 if name == "dualpipev" else 2), 0, 0
    given, wanted = (*problem(mesh, schedule), mesh), alone()
    for other in edits(schedule):
        try:
            found, dW = pipeline.value_and_grad(*given, other, squares, STAGE)
        except (ValueError, Deadlock):
            stopped += 1
        else:
            close((found, restored(dW, mesh, schedule)), wanted)
            run += 1
    assert stopped > 30
    assert run > 5


def dies(mesh):
    calls = []

    def fails(*args):
        calls.append(1)
        if mesh.rank == 1 and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return STAGE.backward_input(*args)

    schedule = make("1f1b", 4, 8)
    given = *problem(mesh, schedule), mesh, schedule
    pipeline.value_and_grad(*given, squares, STAGE._replace(backward_input=fails))


def test_a_rank_that_dies_ends_the_run():
    start = perf_counter()
    with pytest.raises(launch.RankError, match=r"(?s)rank 1 of 4.*SIGKILL"):
        launch.run(dies, {"Z": 4})
    assert perf_counter() - start < SOON
