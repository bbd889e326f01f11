"""Running plans on ranks, and the law of cotangents through every kind of step."""

import itertools

import pytest
import simulated
import torch
from array_types import types
from refused import refused

from scaling.algebra import matmul, reshard
from scaling.collectives import reshard as run_reshard
from scaling.collectives import run
from scaling.collectives.plans import run_steps
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, Spec, parse
from scaling.trace import trace

MESH = {"X": 2, "Y": 2}


def dual(spec: Spec, mesh) -> Spec:
    """The type of the cotangent: unreduced where the array is replicated, and the other way round."""
    return Spec("d" + spec.name, spec.dims, tuple(sorted(spec.replicated(mesh))))


def pull_back(mesh, cases, at_once):
    """Of each case the coordinate, the result, what is pulled back, and whether events are the plan's."""
    at, found = tuple(mesh.coord.values()), []
    for src, dst, shape, shards, cotangents in cases:
        plan = reshard(src, dst, shape, mesh, cost=(lambda step: 1.0) if at_once else None)
        assert [step.op for step in plan.steps] == ["AllGather"] or not at_once
        with trace() as log:
            result, back = torch.func.vjp(lambda x, plan=plan: run(plan, x, mesh), shards[at])
        moved = [(e.op, e.axes, str(e.before), str(e.after)) for e in log.collectives()]
        planned = [(s.op, s.axes, str(s.before), str(s.after)) for s in plan.collectives]
        same = len(moved) == 1 if at_once else moved == planned
        found.append((at, result.detach(), back(cotangents[at])[0], same))
    return found


PAIRS = [(str(src), str(dst)) for src, dst in itertools.product(types("XY"), repeat=2)][::7]  # in which all ops occur
AT_ONCE = [  # axes of several dims, by one call
    ("A[I_X, J_Y]", "A[I, J]"),
    ("A[I_Y, J_X]", "A[I, J]"),
    ("A[J_Y, K, I_X]", "A[J, K, I]"),
    ("A[I, K, J_XY]", "A[I, K, J]"),
    ("A[I, K, J_YX]", "A[I, K, J]"),
]


@pytest.mark.parametrize(("pairs", "at_once"), [(PAIRS, False), (AT_ONCE, True)], ids=["pairs", "at once"])
def test_a_resharding_is_the_identity_and_so_is_its_transpose(ranks, pairs, at_once):
    """What is pulled back stands for the same cotangent, in the dual type of the operand; events are the plan's."""
    wanted, cases = [], []
    for src, dst in (map(parse, pair) for pair in pairs):
        shape = (8, 4, 12)[: len(src.dims)]
        whole, g = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
        shards, cotangents = (simulated.scatter(s, x, MESH) for s, x in ((src, whole), (dual(dst, MESH), g)))
        cases.append((src, dst, shape, shards, cotangents))
        wanted.append((whole, g))
    answers = ranks(pull_back, MESH, cases, at_once)
    for (src, dst, shape, *_), (whole, g), *case in zip(cases, wanted, *answers, strict=True):
        results, back = ({at: each[i] for at, *each in case} for i in (0, 1))
        assert (simulated.gather(dst, results, shape, MESH) - whole).abs().max() < 1e-12, (src, dst)
        assert (simulated.gather(dual(src, MESH), back, shape, MESH) - g).abs().max() < 1e-12, (src, dst)
        assert all(same for *_, same in case), (src, dst)


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


TWO, X = AbstractMesh({"X": 2}), torch.empty(3, 4, device="meta")
test_refused = refused(
    {
        "a shard too few": (lambda: run(matmul("A[I, J]", "B[J, K]"), X, TWO), "1 shards for 2 operands"),
        "a dim that does not divide": (lambda: run_reshard("A[I, J] -> A[I_X, J]", X, TWO), "does not divide"),
        "a dim too many": (lambda: run_reshard("A[I] -> A[I_X]", X, TWO), "its type has 1 dims"),
        "two operands": (lambda: run_reshard("A[I] * B[I] -> A[I]", X, TWO), "has one operand"),
    },
    ShardingError,
)


@pytest.mark.parametrize("keep", [(), ("A[I_X, J]",)])
def test_an_array_goes_after_its_last_use(keep):
    mesh, source = AbstractMesh({"X": 2}), parse("A[I_X, J]")
    steps, keep = reshard(source, "A[I, J_X]").steps, tuple(map(parse, keep))
    held = run_steps(steps, {source: torch.empty(2, 8, device="meta")}, mesh, keep)
    assert set(held) == {*keep, steps[-1].after}
