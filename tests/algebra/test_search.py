"""The search for the cheapest way from one type to another, and for a product: its bound, how soon it ends, what it
gives there, and that nothing beats it."""

import itertools
import time

import pytest
import simulated
import torch
from array_types import MATRICES, SETTINGS, check, types
from hypothesis import given
from hypothesis import strategies as st

from scaling.algebra import layouts, matmul, permutation, reshard
from scaling.algebra.layouts import arrangements
from scaling.algebra.products import WAYS, few_ways
from scaling.algebra.resharding import COLLECTIVE, PlannedArray, shortest
from scaling.algebra.steps import FREE
from scaling.spec import Spec, parse


def test_equal_sizes_allow_a_permutation_between_axes():
    plan = reshard("A[I_X, J_Y]", "A[I_Y, J_X]", mesh={"X": 4, "Y": 4})
    assert [step.op for step in plan.steps] == ["CollectivePermute"]
    pairs = permutation(plan.steps[0], {"X": 4, "Y": 4})
    assert sorted(s for s, _ in pairs) == sorted(t for _, t in pairs) == list(range(16))
    assert (0, 0) in pairs  # a device on the diagonal keeps its block


TWELVE = "ABCDEFGHIJKL"
MANY = [  # (from, to, ops): over 12 axes, one step
    (f"W[M_{TWELVE}]", "W[M]", "AllGather"),
    ("W[M]", f"W[M_{TWELVE}]", "Slice"),
    (f"W[M_{TWELVE}, N]", f"W[M, N_{TWELVE}]", "AllToAll"),
    (f"W[M] {{U_{TWELVE}}}", "W[M]", "AllReduce"),
    (f"W[M] {{U_{TWELVE}}}", f"W[M_{TWELVE}]", "ReduceScatter"),
    (f"W[M_{TWELVE[:6]}, N] {{U_{TWELVE[6:]}}}", f"W[M_{TWELVE[:6]}, N_{TWELVE[6:]}]", "ReduceScatter"),
    (f"W[M_{TWELVE}]", f"W[M_{TWELVE[::-1]}]", "CollectivePermute"),
    ("W[M, N]", f"W[M, N] {{U_{TWELVE}}}", "Mask"),
    (f"W[M_{TWELVE}, N]", f"W[M, N] {{U_{TWELVE}}}", "Pad"),
    ("W[M_ABCDEF, N, K]", "W[M, N, K]", "AllGather"),
]


@pytest.mark.parametrize(("src", "dst", "op"), MANY)
@pytest.mark.parametrize("known", [False, True])
def test_one_step_over_many_axes_is_found_at_once(src, dst, op, known):
    began = time.process_time()
    plan = reshard(src, dst, mesh=dict.fromkeys(TWELVE, 2) if known else None)
    assert time.process_time() - began < 0.1
    assert [step.op for step in plan.steps] == [op]
    assert plan.note == ""


def test_a_plan_that_sends_no_more_than_is_missing_needs_no_note():
    """Nothing cheaper exists, however many plans there are."""
    plan = reshard(f"W[M_{TWELVE[:4]}, N_{TWELVE[4:8]}, K_{TWELVE[8:]}]", "W[M, N, K]")
    assert {step.op for step in plan.steps} == {"AllGather"}
    assert plan.note == ""


def without(axis: str, spec: Spec) -> Spec:
    dims = tuple((dim, tuple(a for a in axes if a != axis)) for dim, axes in spec.dims)
    return Spec(spec.name, dims, tuple(a for a in spec.unreduced if a != axis))


def test_an_axis_of_size_1_costs_nothing():
    """Wherever it stands in either type, as many bytes are sent as without it."""
    shape = (4, 4)
    for src, dst in itertools.product(types("XY"), repeat=2):
        sent = reshard(src, dst, shape, {"X": 2, "Y": 1}).wire_bytes(shape, {"X": 2, "Y": 1}, 4)
        alone = reshard(without("Y", src), without("Y", dst), shape, {"X": 2}).wire_bytes(shape, {"X": 2}, 4)
        assert sent == alone, (src, dst)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("src", "dst", "bounded"),
    [
        ("W[M_AB, N_CD, K_EF]", "W[M, N, K]", False),
        ("W[M_AB, N_CD, K_EF]", "W[M_E, N_FA, K_BD]", False),
        pytest.param("W[M_ABC, N_DEF, K]", "W[M_F, N_BA, K_CDE]", True, marks=pytest.mark.sweep),
        pytest.param("W[M_AB, N, K_C] {U_DEF}", "W[M_DA, N_EC, K]", True, marks=pytest.mark.sweep),
        ("W[M_BA, N, K_C]", "W[M_DA, N, K_EC] {U_BF}", True),
        (f"W[M_{TWELVE[:4]}, N_{TWELVE[4:8]}, K_{TWELVE[8:]}]", f"W[M_{TWELVE[7:3:-1]}, N_{TWELVE[:3]}, K]", True),
    ],
)
def test_the_search_ends_at_its_bound_and_says_so(src, dst, bounded):
    """Of three dims over six axes and more: within seconds a plan that is right, done here by up to 64 devices."""
    src, dst = parse(src), parse(dst)
    mesh = dict.fromkeys(dict.fromkeys(src.axes + src.unreduced + dst.axes + dst.unreduced), 2)
    began = time.process_time()
    plan = reshard(src, dst, mesh=mesh)
    assert time.process_time() - began < 3
    assert plan.note == ("more axes than can be searched: a cheaper plan may exist" if bounded else "")
    assert str(plan).endswith(f"({plan.note})") == bounded
    for before, step in zip((src, *(step.after for step in plan.steps)), plan.steps, strict=False):
        assert step.before == before
    assert plan.steps[-1].after == dst
    if len(mesh) < 7:
        whole = torch.randn((8, 8, 8), dtype=torch.float64)
        done = simulated.execute(plan.steps, {src: simulated.scatter(src, whole, mesh)}, mesh)
        assert (simulated.gather(dst, done[dst], whole.shape, mesh) - whole).abs().max() < 1e-12


@SETTINGS
@given(st.data())
def test_no_plan_is_beaten_by_the_unguided_search(data):
    """Dijkstra's algorithm from the source to every layout, without bound or guess, finds nothing cheaper."""
    axes = data.draw(st.sampled_from(["XY", "XYZ"]))
    mesh = {axis: data.draw(st.sampled_from([1, 2, 3]), axis) for axis in axes} if data.draw(st.booleans()) else None
    dims = "IJK"[: data.draw(st.integers(1, 3 if len(axes) == 2 else 2))]
    src, dst = (data.draw(st.sampled_from(list(types(axes, dims)))) for _ in range(2))
    within = layouts.setting((src, dst), mesh, [axis for axis in dst.unreduced if axis not in src.unreduced])
    found = shortest({layouts.layout(src): (0, 0, 0)}, PlannedArray(src, None), within)
    cost, _, steps = found[layouts.layout(dst)].key
    plan = reshard(src, dst, mesh=mesh)
    sizes = dict.fromkeys(dims, within.whole)
    sent = plan.wire_bytes(sizes, within.sizes, 1) * within.whole / within.whole ** len(dims)
    moved = sum(step.op not in FREE for step in plan.steps)
    assert (sent, (moved, len(plan.steps) - moved)) == (pytest.approx(cost), divmod(steps, COLLECTIVE))


def test_planning_is_quick():
    a, b, out = parse("A[I_X, J_Y]"), parse("B[J_Y, K_X]"), parse("C[I, K]")
    matmul(a, b, out, MATRICES, {"X": 2, "Y": 2})
    times = []
    for _ in range(100):
        start = time.perf_counter()
        matmul(a, b, out, MATRICES, {"X": 2, "Y": 2})
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ("A[I_ABC, J]", "B[J, K_DEF]", "C[I_ABC, K_DEF]"),
        ("A[I, J_ABCDEF]", "B[J_ABCDEF, K]", "C[I, K]"),
        ("A[I_AB, J_C]", "B[J_CD, K_EF]", "C[I_F, K_AB]"),
        ("A[I_ABC, J]", "B[J_DEF]", "C[I_ABC]"),
        ("A[I_ABC, J]", "B[J_DE]", "C[I_ABC]"),
    ],
)
def test_beyond_the_bound_the_rules_decide(a, b, out):
    """Six axes are too many ways: a plan by the four cases, at once, right on 64 devices, which says so."""
    mesh, sizes = dict.fromkeys("ABCDEF", 2), dict.fromkeys("IJK", 64)
    began = time.process_time()
    plan = matmul(a, b, out, sizes, mesh)
    assert time.process_time() - began < 1
    assert plan.note in str(plan).splitlines()[-1]
    assert plan.note
    assert plan == matmul(a, b, out, mesh=mesh)
    check(plan, parse(a), parse(b), parse(out), sizes, mesh)


@pytest.mark.parametrize("axes", range(6))
@pytest.mark.parametrize(("a", "b"), [("A[I, J]", "B[J]"), ("A[I, J]", "B[J, K]"), ("A[I, J, K]", "B[K, L, M]")])
def test_the_bound_is_of_all_ways_to_split_a_product(a, b, axes):
    a, b = parse(a), parse(b)
    ways = arrangements(tuple("PQRST"[:axes]), len({*a.dim_names, *b.dim_names}))
    few = len(list(itertools.islice(ways, WAYS + 1))) <= WAYS
    assert few_ways(a, b, axes) is few
