"""One model, three witnesses: the planner's ledger, the closed forms of Part 5, and the strategies' own code traced on
abstract meshes."""

from dataclasses import replace

import pytest
import torch

from scaling import cost
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.plan import Job, Layout, Stack, evaluate
from scaling.plan.network import book
from scaling.spec import parse
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel
from scaling.trace import trace

V5P = chip("v5p")
LINKS = cost.Links(V5P.flops(), V5P.ici_bw, V5P.ici_bw, Z=V5P.link_bw, P=V5P.dcn_bw)
NAMES = {(False, False): "dp", (True, False): "fsdp", (False, True): "tp", (True, True): "fsdp_tp"}
LAYOUTS = [  # of the book's stack; the sizes by the book's letters
    ({}, {"zero": 1}),
    ({"X": 64}, {"data": 64, "zero": 0}),
    ({"X": 64}, {"fsdp": 64, "zero": 3}),
    ({"Y": 4}, {"tensor": 4}),
    ({"X": 256, "Y": 8}, {"fsdp": 256, "tensor": 8, "zero": 3}),
    ({"X": 32, "Y": 4, "Z": 4}, {"fsdp": 32, "tensor": 4, "pipe": 4, "zero": 3, "microbatches": 8, "reduce": "once"}),
    ({"X": 16, "Z": 8, "P": 2}, {"fsdp": 16, "pipe": 8, "pod": 2, "zero": 3, "microbatches": 16, "reduce": "once"}),
    ({"X": 512, "Y": 4, "P": 4}, {"fsdp": 512, "tensor": 4, "pod": 4, "zero": 3}),
]


def planned(fields: dict, batch: int, L: int = 16, D: int = 8192, F: int = 32768):
    """With as many rings for the mesh axes as there are axes; the torus has enough."""
    job, layout = Job(Stack(L, D, F), batch, seq=1), Layout(**fields)
    rings = {axis: 1 for axis, size in layout.sizes.items() if size > 1 and axis != "pod"}
    return evaluate(job, book(V5P, layout.sizes, rings, layout.zero), layout)


def closed_form(name: str, shape: cost.LayerShape, L: int, mesh: dict, M: int) -> list[cost.Cost]:
    """Forward and backward of L layers on one chip: FSDP gathers its weights for each microbatch and reduces gradients
    once, stages send activations, and pods reduce each chip's share of the gradients."""
    P, Z, X, Y = (mesh.get(axis, 1) for axis in "PZXY")
    one, found = replace(shape, B=shape.B / P), []
    for way in ("forward", "backward"):
        layer = cost.layer(name, one, LINKS, X, Y, way).scaled(L / Z)
        times = dict(layer.axes)
        if "fsdp" in name:
            gathered = L / Z * cost.layer_bytes(name, one, X, Y, "forward")["X"] / LINKS.X
            times["X"] = gathered * (M + (way == "backward"))
        if Z > 1:
            times["Z"] = cost.pipeline_comms(one.B / (X * Y), one.D, LINKS.Z, Z, M)
        if P > 1 and way == "backward":
            times["P"] = 2 * 2 * one.params * L / (X * Y * Z) / LINKS.P
        found.append(cost.Cost(layer.math, tuple(times.items())))
    return found


@pytest.mark.parametrize(("mesh", "fields"), LAYOUTS)
@pytest.mark.parametrize("batch", [2**20, 2**23])
def test_the_planner_equals_the_closed_form(mesh, fields, batch):
    found = planned(fields, batch)
    shape, M, Z = cost.LayerShape(batch, 8192, 32768), fields.get("microbatches", 1), mesh.get("Z", 1)
    name = NAMES[fields.get("zero") == 3, mesh.get("Y", 1) > 1]
    passes = closed_form(name, shape, 16, mesh, M)
    flops = 3 * found.layout.microbatches * found.compute.linear
    assert flops == pytest.approx(16 * cost.layer_flops(shape) / found.chips, rel=1e-12)
    for ours, theirs in zip(found.cost.parts, passes, strict=True):
        assert ours.math == pytest.approx(theirs.math)
        assert sorted(t for _, t in ours.axes) == pytest.approx(sorted(t for _, t in theirs.axes))
    assert found.bubble == pytest.approx((Z - 1) / (M + Z - 1))
    both = passes[0] + passes[1]
    assert found.bound == pytest.approx(both.lower / (1 - found.bubble), rel=0.01)
    assert found.worst == pytest.approx(both.upper / (1 - found.bubble), rel=0.01)


@pytest.mark.parametrize(("X", "Y"), [(1, 1), (4, 1), (1, 4), (4, 2), (2, 8)])
@pytest.mark.parametrize(("B", "D", "F", "L"), [(64, 32, 48, 2), (128, 64, 16, 3)])
def test_the_planner_equals_the_trace_of_the_strategies(X, Y, B, D, F, L):
    module = fsdp_tp if X > 1 < Y else fsdp if X > 1 else tensor_parallel if Y > 1 else data_parallel
    mesh = AbstractMesh({"X": X, "Y": Y})
    sizes = {"B": B, "D": D, "F": F}

    def local(name, stacked):
        spec = parse(module.SPECS[name])
        shape = spec.local_shape({dim: sizes[dim] for dim in spec.dim_names}, mesh)
        return torch.empty((L, *shape) if stacked else shape, dtype=torch.bfloat16, device="meta")

    params = {name: local(name, True) for name in ("W_in", "W_out")}
    with trace() as log:
        Out, saved = module.forward(params, local("In", False), mesh, activation="none")
        module.backward(torch.empty_like(Out), saved, params, mesh)
    moved = dict.fromkeys("XY", 0)
    for event in log.collectives():
        if mesh.size(event.axes) > 1:
            moved["".join(event.axes)] += event.nbytes * (2 if event.op == "AllReduce" else 1)
    found = planned(({"fsdp": X, "zero": 3} if X > 1 else {}) | {"tensor": Y}, B, L, D, F)
    assert (found.bytes.get("fsdp", 0), found.bytes.get("tensor", 0)) == (moved["X"], moved["Y"])
    assert 3 * found.compute.linear == log.flops


def test_data_parallelism_equals_its_trace():
    mesh = AbstractMesh({"X": 8})
    params = {"W_in": torch.empty(2, 16, 64, device="meta"), "W_out": torch.empty(2, 64, 16, device="meta")}
    with trace() as log:
        Out, saved = data_parallel.forward(params, torch.empty(4, 16, device="meta"), mesh)
        data_parallel.backward(Out, saved, params, mesh)
    job = Job(Stack(2, 16, 64), 32, seq=1, dtype="fp32", grad_bytes=4)
    fp32 = replace(V5P, peaks=(("fp32", 1e14),))
    for zero in (0, 1):
        layout = Layout(data=8, zero=zero)
        found = evaluate(job, book(fp32, layout.sizes, {"data": 1}, zero), layout)
        assert found.bytes == {"data": log.book_bytes}
