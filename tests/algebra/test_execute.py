"""Running plans on ranks, and the law of cotangents through every kind of step."""

import pytest
import simulated
import torch
from array_types import types

from scaling.algebra import matmul, reshard
from scaling.algebra.steps import Plan, Step
from scaling.collectives import all_gather, run, shard
from scaling.collectives import reshard as run_reshard
from scaling.collectives.plans import run_steps
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, Spec, parse
from scaling.trace import trace

MESH, SHAPE = {"X": 2, "Y": 2}, (8, 4)


def dual(spec: Spec, mesh) -> Spec:
    """The type of the cotangent: unreduced where the array is replicated, and the other way round."""
    return Spec("d" + spec.name, spec.dims, tuple(sorted(spec.replicated(mesh))))


def pull_back(mesh, src, dst, shards, cotangents):
    at = tuple(mesh.coord.values())
    plan = reshard(src, dst, SHAPE, mesh)
    with trace() as log:
        result, back = torch.func.vjp(lambda x: run(plan, x, mesh), shards[at])
    moved = [(e.op, e.axes, str(e.before), str(e.after)) for e in log.collectives()]
    planned = [(s.op, s.axes, str(s.before), str(s.after)) for s in plan.collectives]
    return at, result.detach(), back(cotangents[at])[0], moved == planned


PAIRS = [
    ("A[I_X, J]", "A[I, J]"),
    ("A[I, J]", "A[I_X, J]"),
    ("A[I, J] {U_X}", "A[I, J_X]"),
    ("A[I, J_Y] {U_X}", "A[I, J_Y]"),
    ("A[I_X, J]", "A[I, J_X]"),
    ("A[I_XY, J]", "A[I_YX, J]"),
    ("A[I_XY, J]", "A[I_Y, J]"),
    ("A[I, J_Y]", "A[I, J_Y] {U_X}"),
    ("A[I_X, J]", "A[I, J] {U_X}"),
    ("A[I_X, J_Y]", "A[I_Y, J_X]"),
    ("A[I, J] {U_XY}", "A[I_X, J]"),
]


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_a_resharding_is_the_identity_and_so_is_its_transpose(ranks, src, dst):
    """What is pulled back stands for the same cotangent, in the dual type of the operand; events are the plan's."""
    src, dst = parse(src), parse(dst)
    whole, g = (torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    shards, cotangents = (simulated.scatter(s, x, MESH) for s, x in ((src, whole), (dual(dst, MESH), g)))
    answers = ranks(pull_back, MESH, src, dst, shards, cotangents)
    results = {at: result for at, result, _, _ in answers}
    back = {at: cotangent for at, _, cotangent, _ in answers}
    assert (simulated.gather(dst, results, SHAPE, MESH) - whole).abs().max() < 1e-12
    assert (simulated.gather(dual(src, MESH), back, SHAPE, MESH) - g).abs().max() < 1e-12
    assert all(same for _, _, _, same in answers)


def test_on_an_abstract_mesh():
    mesh = AbstractMesh({"X": 4, "Y": 4})
    for src in types("XY"):
        x = torch.empty(src.local_shape((32, 16), mesh), device="meta")
        for dst in types("XY"):
            assert run_reshard(f"{src} -> {dst}", x, mesh).shape == dst.local_shape((32, 16), mesh)


def test_plans_run_on_one_device():
    mesh = AbstractMesh({"X": 1, "Y": 1})
    plan = matmul("A[I_X, J_Y]", "B[J_Y, K_X]", "C[I, K]", mesh=mesh)
    assert run(plan, torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta"), mesh).shape == (2, 4)


def test_refusals():
    mesh = AbstractMesh({"X": 2})
    x = torch.empty(3, 4, device="meta")
    with pytest.raises(ShardingError, match="1 shards for 2 operands"):
        run(matmul("A[I, J]", "B[J, K]"), x, mesh)
    with pytest.raises(ShardingError, match="does not divide"):
        run_reshard("A[I, J] -> A[I_X, J]", x, mesh)
    with pytest.raises(ShardingError, match="its type has 1 dims"):
        run_reshard("A[I] -> A[I_X]", x, mesh)
    with pytest.raises(ShardingError, match="has one operand"):
        run_reshard("A[I] * B[I] -> A[I]", x, mesh)
    with pytest.raises(ShardingError, match="interleaved"):
        all_gather("A[I_XY] -> A[I_Y]", x[0], AbstractMesh({"X": 2, "Y": 2}))


def gathered_at_once(mesh, src, dst):
    shape = (4, 3, 8)[: len(parse(src).dims)]
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    step = Step("AllGather", parse(src).axes, parse(src), parse(dst))
    done = run(Plan((step.before,), step.after, (step,)), shard(src, whole, mesh), mesh)
    return torch.equal(done, shard(dst, whole, mesh))


@pytest.mark.parametrize("src", ["A[I_X, K, J_Y]", "A[I_Y, K, J_X]", "A[I, K, J_XY]", "A[I, K, J_YX]"])
def test_axes_of_several_dims_are_gathered_by_one_call(ranks, src):
    assert all(ranks(gathered_at_once, {"X": 2, "Y": 2}, src, "A[I, K, J]"))


@pytest.mark.parametrize("keep", [(), ("A[I_X, J]",)])
def test_an_array_goes_after_its_last_use(keep):
    mesh, source = AbstractMesh({"X": 2}), parse("A[I_X, J]")
    steps, keep = reshard(source, "A[I, J_X]").steps, tuple(map(parse, keep))
    held = run_steps(steps, {source: torch.empty(2, 8, device="meta")}, mesh, keep)
    assert set(held) == {*keep, steps[-1].after}
