"""The checked mode: ranks that are about to make different calls raise, all of them, and are told who calls what."""

import pytest
import torch
from checked_calls import GATHER, MESH, SCATTER, gather
from torch.utils.flop_counter import FlopCounterMode

from scaling import collectives as c
from scaling.mesh import Mesh, page
from scaling.mesh.meeting import MeetingByMessages, meeting
from scaling.mesh.page import LENGTH
from scaling.spec import ShardingError

# what rank 1 along X does -> what every rank is told that it said; all others gather float32 [4, 2]
ODD_ONES = {
    "op": (lambda m: c.reduce_scatter(SCATTER, torch.zeros(4, 2), m), f"ReduceScatter {SCATTER} of (4, 2) float32"),
    "type": (lambda m: gather(m, line="B[I_X, J] -> B[I, J]"), "AllGather B[I_X, J] -> B[I, J] of (4, 2) float32"),
    "shape": (lambda m: gather(m, shape=(4, 3)), f"AllGather {GATHER} of (4, 3) float32"),
    "dtype": (lambda m: gather(m, dtype=torch.float64), f"AllGather {GATHER} of (4, 2) float64"),
    "asynchronous": (
        lambda m: c.all_gather(GATHER, torch.zeros(2, 2), m, async_op=True),
        f"AllGather {GATHER} of (2, 2) float32",
    ),
    "differentiated": (
        lambda m: c.all_gather(GATHER, torch.zeros(2, 2, requires_grad=True), m),
        f"AllGather {GATHER} of (2, 2) float32",
    ),
    "permutation": (
        lambda m: c.ppermute("A[I_X, J]", torch.zeros(4, 2), m, "X", [(0, 1)]),
        "CollectivePermute A[I_X, J] -> A[I_X, J] by ((0, 1),) of (4, 2) float32",
    ),
}


def disagree(mesh, what):
    with pytest.raises(ShardingError) as error:
        ODD_ONES[what][0](mesh) if mesh.coord["X"] == 1 else gather(mesh)
    after = c.all_gather(GATHER, torch.full((1, 1), mesh.coord["X"] + 1.0), mesh)  # the group still works
    return str(error.value), after.flatten().tolist()


@pytest.mark.parametrize("what", ODD_ONES)
def test_a_disagreement_is_an_error_on_every_rank_that_names_ranks_and_lines(ranks, what):
    for r, (message, after) in enumerate(ranks(disagree, MESH, what)):
        y = r % 2
        assert "the ranks along X do not make the same call" in message
        assert f"\n  rank {y}: AllGather {GATHER} of (4, 2) float32\n" in message
        assert f"\n  rank {2 + y}: {ODD_ONES[what][1]}\n" in message
        assert "rule: all ranks of a group run the same lines in the same order" in message
        assert after == [1.0, 2.0]


def reduced_otherwise(mesh, name, ops):
    with pytest.raises(ShardingError, match="do not make the same call") as error:
        REDUCED[name](torch.ones(4, 2), mesh, ops[mesh.coord["X"]])
    return str(error.value)


REDUCED = {
    "all_reduce": lambda x, m, op: c.all_reduce("A[I, J] {U_X} -> A[I, J]", x, m, op=op),
    "reduce_scatter": lambda x, m, op: c.reduce_scatter(SCATTER, x, m, op=op),
    "reduce": lambda x, m, op: c.reduce("A[I, J] {U_X} -> A[I, J] {U_X}", x, m, op=op),
    "a gradient's": lambda x, m, op: c.all_reduce("A[I, J] {U_X} -> A[I, J]", x.requires_grad_(), m, op=op),
}


@pytest.mark.parametrize("ops", [("sum", "mean"), ("mean", "max"), ("max", "min"), ("sum", "min")], ids="-".join)
@pytest.mark.parametrize("name", REDUCED)
def test_ranks_that_put_their_parts_together_in_different_ways(ranks, name, ops):
    for message in ranks(reduced_otherwise, {"X": 2}, name, ops):
        for op in ops:
            assert op == "sum" or f" by {op} of (4, 2) float32" in message


def one_of_four(mesh):
    axes = "YX" if mesh.rank == 2 else "XY"
    with pytest.raises(ShardingError) as error:
        c.all_gather(f"A[I_{axes}] -> A[I]", torch.zeros(3), mesh)
    return str(error.value)


def test_over_several_axes_the_ranks_that_agree_are_named_together(ranks):
    for message in ranks(one_of_four, MESH):
        assert "the ranks along X, Y" in message or "the ranks along Y, X" in message
        assert "\n  ranks [0, 1, 3]: AllGather A[I_XY] -> A[I] of (3,) float32\n" in message
        assert "\n  rank 2: AllGather A[I_YX] -> A[I] of (3,) float32\n" in message


def different_roots_and_pairs(mesh):
    x, messages = torch.zeros(4), []
    for call in [
        lambda: c.broadcast("A[I] {U_X} -> A[I]", x, mesh, root=mesh.coord["X"]),
        lambda: c.ppermute("A[I]", x, mesh, "X", [(mesh.coord["X"], 1)]),
    ]:
        with pytest.raises(ShardingError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_ranks_that_name_different_roots_or_pairs(ranks):
    for r, (root, pairs) in enumerate(ranks(different_roots_and_pairs, MESH)):
        assert f"\n  rank {r % 2}: Broadcast A[I] {{U_X}} -> A[I] with root 0 of (4,) float32\n" in root
        assert f"\n  rank {2 + r % 2}: Broadcast A[I] {{U_X}} -> A[I] with root 1 of (4,) float32\n" in root
        assert f"\n  rank {r % 2}: CollectivePermute A[I] -> A[I] by ((0, 1),) of (4,) float32\n" in pairs
        assert f"\n  rank {2 + r % 2}: CollectivePermute A[I] -> A[I] by ((1, 1),) of (4,) float32\n" in pairs


def backwards(mesh):
    """Rank 1 does not use what it gathered first, and so runs one collective of the backward less."""
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    first, second = c.all_gather("A[I_X] -> A[I]", a, mesh), c.all_gather("B[J_X] -> B[J]", b, mesh)
    loss = second.sum() + (first.sum() if mesh.coord["X"] == 0 else 0)

    def backward_and_norm():
        grads = torch.autograd.grad(loss, (a, b), allow_unused=True)
        c.all_reduce("N[] {U_X} -> N[]", sum(g.sum() for g in grads if g is not None), mesh)

    with pytest.raises(ShardingError) as error:
        backward_and_norm()
    return str(error.value)


def test_a_backward_that_differs_between_ranks(ranks):
    for message in ranks(backwards, {"X": 2}):
        assert "\n  rank 0: ReduceScatter dA[I] {U_X} -> dA[I_X] of (4,) float32\n" in message
        assert "\n  rank 1: AllReduce N[] {U_X} -> N[] of () float32\n" in message


def counted(f, x):
    with FlopCounterMode(display=False):
        return f(x)


def with_grad(f, x):
    return f(x.requires_grad_())


def under_no_grad(f, x):
    with torch.no_grad():
        return f(x.requires_grad_())


def under_grad(f, x):
    return torch.func.vjp(f, x)[0]


# (what rank 0 does, what rank 1 does) with one line on shards of one shape -> how, in words
PATHS = {
    "requires_grad": (lambda f, x: f(x), with_grad, ["", ", differentiated"]),
    "no_grad": (with_grad, under_no_grad, [", differentiated", ""]),
    "a mode": (counted, lambda f, x: f(x), [", under FlopCounterMode", ""]),
    "torch.func": (lambda f, x: f(x), under_grad, ["", ", differentiated"]),
}


def go_two_ways(mesh, what):
    with pytest.raises(ShardingError) as error:
        PATHS[what][mesh.rank](lambda x: c.all_gather(GATHER, x, mesh), torch.zeros(2, 2))
    after = c.all_gather(GATHER, torch.full((1, 1), mesh.rank + 1.0), mesh)
    return str(error.value), after.flatten().tolist()


@pytest.mark.parametrize("what", PATHS)
def test_ranks_that_differentiate_or_observe_one_line_in_different_ways(ranks, what):
    for message, after in ranks(go_two_ways, {"X": 2}, what):
        for rank, how in enumerate(PATHS[what][2]):
            assert f"\n  rank {rank}: AllGather {GATHER} of (2, 2) float32{how}\n" in message
        assert after == [1.0, 2.0]


def one_way(mesh):
    x = torch.full((1, 2), mesh.rank + 1.0)
    ways = [*(side for first, second, _ in PATHS.values() for side in (first, second)), counted]
    results = [way(lambda x: c.all_gather(GATHER, x, mesh), x.clone()).detach() for way in ways]
    with pytest.raises(ShardingError, match=r"rank 1: AllGather .* of \(3, 2\) float32\n"):
        counted(lambda x: c.all_gather(GATHER, x, mesh), torch.zeros(2 + mesh.rank, 2))
    return results


def test_ranks_that_go_one_way_agree_and_what_is_observed_is_compared_too(ranks):
    for results in ranks(one_way, {"X": 2}):
        assert all(torch.equal(result, torch.tensor([[1.0, 1.0], [2.0, 2.0]])) for result in results)


def many(mesh):
    held = meeting(mesh.group(("X",)).pg)
    held.number = (held.number | 0xFFFF) - 4  # the same on all ranks: their calls were
    sums = [c.all_reduce("A[] {U_X} -> A[]", torch.tensor(float(i)), mesh).item() for i in range(12)]
    with pytest.raises(ShardingError):
        gather(mesh, shape=(4 + mesh.rank, 2))
    return sums


def test_meetings_are_counted_on_past_what_two_bytes_hold(ranks):
    for sums in ranks(many, {"X": 2}):
        assert sums == [2.0 * i for i in range(12)]


def by_messages(mesh, what):
    """As between machines, where no memory is shared."""
    kept, page._map = page._map, lambda *_: None
    try:
        apart = Mesh(mesh.sizes, checked=True, timeout=60)
    finally:
        page._map = kept
    assert isinstance(meeting(apart.group(("X",)).pg), MeetingByMessages)
    with pytest.raises(ShardingError) as error:
        ODD_ONES[what][0](apart) if mesh.coord["X"] == 1 else gather(apart)
    with pytest.raises(ShardingError, match=r"rank 0: .* float32\n  rank 1: .* float32, under FlopCounterMode"):
        (counted if mesh.coord["X"] == 1 else under_no_grad)(lambda x: c.all_gather(GATHER, x, apart), torch.ones(1, 1))
    return str(error.value), c.all_gather(GATHER, torch.full((1, 1), mesh.rank + 1.0), apart).flatten().tolist()


@pytest.mark.parametrize("what", ["op", "shape", "permutation"])
def test_ranks_that_share_no_memory_compare_by_messages(ranks, what):
    for message, after in ranks(by_messages, {"X": 2}, what):
        assert f"\n  rank 0: AllGather {GATHER} of (4, 2) float32\n" in message
        assert f"\n  rank 1: {ODD_ONES[what][1]}\n" in message
        assert after == [1.0, 2.0]


def long_lines(mesh):
    names = [f"A{'a' * LENGTH}{end}" for end in ("b", "c")]
    line = f"{names[mesh.coord['X']]}[I_X] -> A[I]"
    with pytest.raises(ShardingError, match="do not make the same call"):
        c.all_gather(line, torch.zeros(2), mesh)


def test_calls_that_differ_only_after_many_letters(ranks):
    ranks(long_lines, {"X": 2})


def a_slice_sends_nothing(mesh):
    if mesh.coord["X"] == 1:
        c.shard("A[I] -> A[I_X]", torch.zeros(4), mesh)
    gather(mesh)


def test_a_local_slice_need_not_be_agreed_on(ranks):
    ranks(a_slice_sends_nothing, {"X": 2})


def unchecked(mesh):
    quick = Mesh({"X": 2}, timeout=60)
    assert not quick.checked
    gather(quick)


def test_by_default_a_mesh_is_not_checked(ranks):
    ranks(unchecked, {"X": 2})
