"""What stages send, on ranks and on an abstract mesh, and when."""

from itertools import pairwise

import torch
from pipeline_problem import WEIGHTS, B, D, F, L, fsdp_tp, loss, problem

from scaling import trace, tree
from scaling.mesh import AbstractMesh
from scaling.schedules import make
from scaling.schedules.instructions import Backward, Forward, ForwardBackward
from scaling.strategies import fsdp_tp as fsdp_tp_listing
from scaling.strategies import pipeline
from scaling.strategies.pipeline import _spans
from scaling.strategies.stage import of_strategy

FSDP_TP_SPECS = of_strategy(fsdp_tp_listing.STRATEGY).specs


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
