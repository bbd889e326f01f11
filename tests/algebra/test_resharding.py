"""Every resharding between any two types of a matrix, done by simulated devices; and none dearer than it need be."""

import functools
import itertools

import pytest
import simulated
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling.algebra import permutation, reshard
from scaling.algebra.resharding import arrangements
from scaling.spec import ShardingError, Spec

SETTINGS = settings(deadline=None, derandomize=True, max_examples=40)


def types(axes: str, dims=("I", "J"), unreduced=True):
    """Every type of an array of these dims over these axes."""
    for split in arrangements(tuple(axes), len(dims)):
        idle = [axis for axis in axes if all(axis not in over for over in split)]
        for n in range(len(idle) + 1 if unreduced else 1):
            for partial in itertools.combinations(idle, n):
                yield Spec("A", tuple(zip(dims, split, strict=True)), partial)


def naive_bytes(src, dst, shape, mesh):
    """Reduce everything, gather everything; then slicing is free."""
    whole = src.with_unreduced(())
    sent = 0.0
    if src.unreduced:
        n = functools.reduce(lambda x, y: x * y, (mesh[a] for a in src.unreduced))
        sent += 2 * src.nbytes(shape, mesh, 1) * (n - 1) / n
    n = 1
    for axis in whole.axes:
        n *= mesh[axis]
    total = whole.nbytes(shape, mesh, 1) * n
    return sent + total * (n - 1) / n


@pytest.mark.parametrize(
    ("mesh", "shape"), [({"X": 2, "Y": 4}, (8, 16)), ({"X": 2, "Y": 2, "Z": 2}, (8, 8)), ({"X": 1, "Y": 3}, (3, 6))]
)
def test_every_pair_of_types(mesh, shape):
    """Each plan arrives at the array, and costs no more than to reduce and gather everything and slice."""
    whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    every, cheaper = list(types(mesh)), 0
    for src in every:
        done = {src: simulated.scatter(src, whole, mesh)}
        for dst in every:
            plan = reshard(src, dst, shape, mesh)
            for step in plan.steps:
                if step.after not in done:
                    done[step.after] = simulated.apply(step, [done[step.before]], mesh)
            assert (plan.steps[-1].after if plan.steps else src) == dst
            if not set(dst.unreduced) - set(src.unreduced):
                sent, naive = plan.wire_bytes(shape, mesh, 1), naive_bytes(src, dst, shape, mesh)
                assert src == dst or sent <= naive + 1e-9, f"{src} -> {dst}\n{plan}"
                cheaper += sent < naive - 1e-9
        for spec, shards in done.items():
            assert (simulated.gather(spec, shards, shape, mesh) - whole).abs().max() < 1e-12
    assert cheaper > len(every)


@pytest.mark.parametrize(
    ("src", "dst", "ops"),
    [
        ("A[I_XY]", "A[I]", ["AllGather"]),
        ("A[I_XY]", "A[I_X]", ["AllGather"]),
        ("A[I_XY]", "A[I_Y]", ["CollectivePermute", "AllGather"]),
        ("A[I_XY]", "A[I_YX]", ["CollectivePermute"]),
        ("A[I, J]", "A[I, J_X]", ["Slice"]),
        ("A[I, J] {U_X}", "A[I, J]", ["AllReduce"]),
        ("A[I, J] {U_XY}", "A[I, J] {U_Y}", ["AllReduce"]),
        ("A[I, J] {U_X}", "A[I_X, J]", ["ReduceScatter"]),
        ("A[I, J] {U_XY}", "A[I_YX, J]", ["ReduceScatter"]),
        ("A[I_X, J]", "A[I, J_X]", ["AllToAll"]),
        ("A[I_XY, J]", "A[I_X, J_Y]", ["AllToAll"]),
        ("A[I, J]", "A[I, J] {U_X}", ["Mask"]),
        ("A[I_X, J]", "A[I, J] {U_X}", ["Pad"]),
        ("A[I_X, J]", "A[I_X, J]", []),
    ],
)
def test_plans_known_by_hand(src, dst, ops):
    for mesh in (None, {"X": 2, "Y": 4}, {"Y": 4, "X": 2}):
        plan = reshard(src, dst, mesh=mesh)
        assert [step.op for step in plan.steps] == ops
        assert plan.case is None
        assert [str(step.after) for step in plan.steps][-1:] == ([dst] if ops else [])


def test_only_minor_axes_are_gathered():
    step = reshard("A[I_XY]", "A[I_Y]", mesh={"X": 2, "Y": 4}).steps[1]
    assert (str(step), step.axes) == ("A[I_Y] = AllGather_X(A[I_YX])", ("X",))


def test_counts_are_the_books():
    mesh, sizes = {"X": 4, "Y": 2}, {"I": 8, "J": 16}
    for src, dst, nbytes, wire in [
        ("A[I_X, J_Y]", "A[I, J_Y]", 128, 96),
        ("A[I, J_Y] {U_X}", "A[I_X, J_Y]", 128, 96),
        ("A[I, J_Y] {U_X}", "A[I, J_Y]", 128, 192),
        ("A[I_X, J]", "A[I, J_X]", 256, 48),
        ("A[I_XY, J]", "A[I_YX, J]", 32, 32),
    ]:
        (step,) = reshard(src, dst, sizes, mesh).steps
        assert (step.nbytes(sizes, mesh, "bf16"), step.wire_bytes(sizes, mesh, "bf16")) == (nbytes, wire)
        assert step.gather_bytes(sizes, mesh, 2) == nbytes * (2 if step.op == "AllReduce" else 1)


def test_steps_must_divide():
    """J has 2 columns: no plan may split it over X=4, even on the way."""
    mesh, sizes = {"X": 4, "Y": 2}, {"I": 8, "J": 2}
    plan = reshard("A[I_XY, J]", "A[I_Y, J]", sizes, mesh)
    assert all(step.after.axes_of("J") in ((), ("Y",)) for step in plan.steps)
    with pytest.raises(ShardingError, match="does not divide"):
        reshard("A[I, J]", "A[I, J_X]", sizes, mesh)


def test_equal_sizes_allow_a_permutation_between_axes():
    plan = reshard("A[I_X, J_Y]", "A[I_Y, J_X]", mesh={"X": 4, "Y": 4})
    assert [step.op for step in plan.steps] == ["CollectivePermute"]
    pairs = permutation(plan.steps[0], {"X": 4, "Y": 4})
    assert sorted(s for s, _ in pairs) == sorted(t for _, t in pairs) == list(range(16))
    assert (0, 0) in pairs  # a device on the diagonal keeps its block


def test_a_cost_function_finds_the_idle_links():
    """Part 3, Question 2: with Z idle, slicing over it first and gathering over X and Z takes half the time."""
    mesh, sizes = {"X": 4, "Y": 4, "Z": 4}, {"B": 1024, "D": 4096}

    def seconds(step):
        return step.gather_bytes(sizes, mesh, "bf16") / (9e10 * len(step.axes))

    plan = reshard("In[B_X, D_Y]", "In[B, D_Y]", sizes, mesh, cost=seconds)
    assert [step.op for step in plan.steps] == ["Slice", "AllGather"]
    assert sum(map(seconds, plan.steps)) == pytest.approx(11.65e-6, rel=1e-3)


def test_errors_name_the_rule():
    with pytest.raises(ShardingError, match="keeps the dims"):
        reshard("A[I, J]", "A[J, I]")
    with pytest.raises(ShardingError, match="unknown mesh axis Z"):
        reshard("A[I_Z]", "A[I]", mesh={"X": 2})


@SETTINGS
@given(st.data())
def test_any_two_types_of_any_array(data):
    mesh = {axis: data.draw(st.sampled_from([1, 2, 3, 4]), axis) for axis in data.draw(st.sampled_from(["X", "XY"]))}
    dims = "IJK"[: data.draw(st.integers(1, 3))]
    shape = tuple(data.draw(st.sampled_from([12, 24])) for _ in dims)
    whole = torch.randn(shape, dtype=torch.float64)
    src, dst = (data.draw(st.sampled_from(list(types(mesh, dims)))) for _ in range(2))
    if any(n % spec_part for s in (src, dst) for n, spec_part in zip(shape, parts(s, mesh), strict=True)):
        return
    plan = reshard(src, dst, shape, mesh)
    done = simulated.execute(plan.steps, {src: simulated.scatter(src, whole, mesh)}, mesh)
    assert (simulated.gather(dst, done[dst], shape, mesh) - whole).abs().max() < 1e-12
    back = reshard(dst, src, shape, mesh).wire_bytes(shape, mesh, 1)
    if not src.unreduced and not dst.unreduced and not set(mesh) - set(src.axes) and not set(mesh) - set(dst.axes):
        assert back == pytest.approx(plan.wire_bytes(shape, mesh, 1))  # fully sharded: there and back cost the same


def parts(spec, mesh):
    return [functools.reduce(lambda n, axis: n * mesh[axis], axes, 1) for _, axes in spec.dims]


def reshard_on_rank(mesh, cases, shape):
    from scaling.collectives import reshard as run
    from scaling.collectives import shard, unshard

    whole, errors = torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape), []
    for src, dst in cases:
        start = src.with_unreduced(())
        local = shard(f"{start.with_name('')}", whole, mesh) / mesh.size(src.unreduced)
        result = run(f"{src} -> {dst}", local, mesh)
        errors.append((unshard(str(dst), result, mesh) - whole).abs().max().item())
    return max(errors)


def test_on_real_ranks(ranks):
    every = list(types("XY"))
    pairs = list(itertools.product(every, every))
    assert max(ranks(reshard_on_rank, {"X": 2, "Y": 2}, pairs[::9], (4, 8))) < 1e-12
