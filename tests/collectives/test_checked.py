"""The checked mode: ranks that are about to make different calls raise, all of them, and are told who calls what; who
does not come to a call is named, with where he waits or that he has ended."""

import os
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaling import collectives as c
from scaling.mesh import Mesh, page
from scaling.mesh.meeting import MeetingByMessages, meeting
from scaling.mesh.page import LENGTH, PLACES
from scaling.spec import ShardingError

MESH = {"X": 2, "Y": 2}
GATHER, SCATTER = "A[I_X, J] -> A[I, J]", "A[I, J] {U_X} -> A[I_X, J]"


def gather(mesh, shape=(4, 2), dtype=torch.float32, line=GATHER):
    c.all_gather(line, torch.zeros(shape, dtype=dtype), mesh)


def total(mesh, axes="X", name="A"):
    return c.all_reduce(f"{name}[] {{U_{axes}}} -> {name}[]", torch.ones(()), mesh).item()


def said(line, shape="(4, 2)", dtype="float32"):
    return f"{line} of {shape} {dtype}"


def permuted(pairs):
    call = f"CollectivePermute A[I_X, J] -> A[I_X, J] by {tuple(pairs)}"
    return lambda m: c.ppermute("A[I_X, J]", torch.zeros(4, 2), m, "X", pairs), said(call)


def reduced(call, line, words, **options):
    """A call by some way to put parts together, or from some root."""
    kind = call.__name__.title().replace("_", "")
    return lambda m: call(line, torch.ones(4), m, **options), said(f"{kind} {line} {words}".strip(), "(4,)")


def a_gradient_s(op, words):
    x, line = torch.ones(4, requires_grad=True), SUM + "A[I]"
    return lambda m: c.all_reduce(line, x, m, op=op), said(f"AllReduce {line}{words}", "(4,)")


def gathered(words, **options):
    return lambda m: gather(m, **options), words


SUM = "A[I] {U_X} -> "
USUAL = gathered(said(f"AllGather {GATHER}"))
# what the rank at X=0 does and is told to have said, and the one at X=1
ODD_ONES = {
    "op": (USUAL, (lambda m: c.reduce_scatter(SCATTER, torch.zeros(4, 2), m), said(f"ReduceScatter {SCATTER}"))),
    "type": (USUAL, gathered(said("AllGather B[I_X, J] -> B[I, J]"), line="B[I_X, J] -> B[I, J]")),
    "shape": (USUAL, gathered(said(f"AllGather {GATHER}", "(4, 3)"), shape=(4, 3))),
    "dtype": (USUAL, gathered(said(f"AllGather {GATHER}", dtype="float64"), dtype=torch.float64)),
    "differentiated": (
        USUAL,
        (lambda m: c.all_gather(GATHER, torch.zeros(2, 2, requires_grad=True), m), said(f"AllGather {GATHER}", (2, 2))),
    ),
    "pairs": (permuted([(0, 1)]), permuted([(1, 1)])),
    "root": [reduced(c.broadcast, SUM + "A[I]", f"with root {root}", root=root) for root in (0, 1)],
    "max and min": [reduced(c.reduce, SUM + "A[I] {U_X}", f"with root 0 by {op}", op=op) for op in ("max", "min")],
    "sum and min": [
        reduced(c.reduce_scatter, SUM + "A[I_X]", "", op="sum"),
        reduced(c.reduce_scatter, SUM + "A[I_X]", "by min", op="min"),
    ],
    "a gradient's": (a_gradient_s("sum", ""), a_gradient_s("mean", " by mean")),
}


def disagree(mesh, what):
    with pytest.raises(ShardingError) as error:
        ODD_ONES[what][mesh.coord["X"]][0](mesh)
    after = c.all_gather(GATHER, torch.full((1, 1), mesh.coord["X"] + 1.0), mesh)  # the group still works
    return str(error.value), after.flatten().tolist()


@pytest.mark.parametrize("what", ODD_ONES)
def test_a_disagreement_is_an_error_on_every_rank_that_names_ranks_and_lines(ranks, what):
    for r, (message, after) in enumerate(ranks(disagree, MESH, what)):
        assert "the ranks along X do not make the same call" in message
        for x, (_, words) in enumerate(ODD_ONES[what]):
            assert f"\n  rank {2 * x + r % 2}: {words}\n" in message
        assert "rule: all ranks of a group run the same lines in the same order" in message
        assert after == [1.0, 2.0]


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


def backwards(mesh):
    """Rank 1 does not use what it gathered first, and so runs one collective of the backward less."""
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    first, second = c.all_gather("A[I_X] -> A[I]", a, mesh), c.all_gather("B[J_X] -> B[J]", b, mesh)
    loss = second.sum() + (first.sum() if mesh.coord["X"] == 0 else 0)
    with pytest.raises(ShardingError) as error:  # noqa: PT012
        torch.autograd.grad(loss, (a, b), allow_unused=True)
        total(mesh, name="N")
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


# (what rank 0 does, what rank 1 does) with one line on shards of one shape -> how, in words
PATHS = {
    "requires_grad": (lambda f, x: f(x), with_grad, ["", ", differentiated"]),
    "no_grad": (with_grad, under_no_grad, [", differentiated", ""]),
    "a mode": (counted, lambda f, x: f(x), [", under FlopCounterMode", ""]),
    "torch.func": (lambda f, x: f(x), lambda f, x: torch.func.vjp(f, x)[0], ["", ", differentiated"]),
}


def go_two_ways(mesh, what):
    with pytest.raises(ShardingError) as error:
        PATHS[what][mesh.rank](lambda x: c.all_gather(GATHER, x, mesh), torch.zeros(2, 2))
    x = torch.full((1, 1), mesh.rank + 1.0)
    return str(error.value), [way(lambda x: c.all_gather(GATHER, x, mesh), x.clone()) for way in PATHS[what][:2]]


@pytest.mark.parametrize("what", PATHS)
def test_ranks_that_differentiate_or_observe_one_line_in_different_ways(ranks, what):
    for message, together in ranks(go_two_ways, {"X": 2}, what):
        for rank, how in enumerate(PATHS[what][2]):
            assert f"\n  rank {rank}: AllGather {GATHER} of (2, 2) float32{how}\n" in message
        assert all(torch.equal(whole.detach(), torch.tensor([[1.0], [2.0]])) for whole in together)


def many(mesh):
    """Meetings are counted on past what two bytes hold."""
    held = meeting(mesh.group(("X",)).pg)
    held.number = (held.number | 0xFFFF) - 4  # the same on all ranks: their calls were
    assert [total(mesh) for _ in range(12)] == [2.0] * 12
    with pytest.raises(ShardingError):
        gather(mesh, shape=(4 + mesh.rank, 2))


def long_lines(mesh):
    """Calls that differ only after many letters."""
    names = [f"A{'a' * LENGTH}{end}" for end in ("b", "c")]
    with pytest.raises(ShardingError, match="do not make the same call"):
        c.all_gather(f"{names[mesh.rank]}[I_X] -> A[I]", torch.zeros(2), mesh)


def a_slice_sends_nothing(mesh):
    if mesh.rank == 1:
        c.shard("A[I] -> A[I_X]", torch.zeros(4), mesh)
    gather(mesh)


def late_in_turn(mesh):
    """Who has waited long does not wait any more."""
    for late in range(2):
        time.sleep(0.4 if mesh.rank == late else 0)  # the other one looks who waits for whom
        for _ in range(PLACES + 1):  # until the places of that meeting are another's
            gather(mesh, (1 + late, 1))


@pytest.mark.parametrize("holds", [many, long_lines, a_slice_sends_nothing, late_in_turn], ids=lambda f: f.__name__)
def test_of_two_ranks(ranks, holds):
    ranks(holds, {"X": 2})


def by_messages(mesh, what):
    """As between machines, where no memory is shared."""
    kept, page._map = page._map, lambda *_: None
    try:
        apart = Mesh(mesh.sizes, checked=True, timeout=60)
    finally:
        page._map = kept
    assert isinstance(meeting(apart.group(("X",)).pg), MeetingByMessages)
    with pytest.raises(ShardingError, match=r"rank 0: .* float32\n  rank 1: .* float32, under FlopCounterMode"):
        (counted if mesh.rank == 1 else under_no_grad)(lambda x: c.all_gather(GATHER, x, apart), torch.ones(1, 1))
    return disagree(apart, what)


@pytest.mark.parametrize("what", ["op", "pairs"])
def test_ranks_that_share_no_memory_compare_by_messages(ranks, what):
    for message, after in ranks(by_messages, {"X": 2}, what):
        for rank, (_, words) in enumerate(ODD_ONES[what]):
            assert f"\n  rank {rank}: {words}\n" in message
        assert after == [1.0, 2.0]


# Who does not come


def across(mesh):
    """Each rank waits for another one, in a circle: 0 along Y for 1, 1 along X for 3, 3 along Y for 2, 2 for 0."""
    with pytest.raises(ShardingError) as error:
        total(mesh, "Y" if mesh.coord["X"] == mesh.coord["Y"] else "X")
    return str(error.value), total(mesh, "XY")


def test_ranks_that_wait_for_each_other_in_different_groups_are_told_so(ranks):
    for message, after in ranks(across, MESH):
        assert "the ranks wait for each other, each in another call\n" in message
        for rank, axis, other in [(0, "Y", 1), (1, "X", 3), (2, "X", 0), (3, "Y", 2)]:
            call = f"AllReduce A[] {{U_{axis}}} -> A[] of () float32"
            assert f"\n  rank {rank}: {call}, waits for rank {other}\n" in message
        assert after == 4.0


def late(mesh):
    hasty, message = Mesh(mesh.sizes, checked=True, timeout=0.5), ""
    if mesh.rank == 0:
        with pytest.raises(TimeoutError) as error:
            gather(hasty)
        message = str(error.value)
    total(mesh)
    gather(hasty)  # the meeting that was not held is the next one
    return message


def test_who_does_not_come_in_time_is_named(ranks):
    message, _ = ranks(late, {"X": 2})
    assert message.startswith("Timed out: not all ranks have come within 0.5 s\n")
    assert f"\n  rank 0: AllGather {GATHER} of (4, 2) float32, waits for rank 1\n" in message
    assert "\n  rank 1: has not come, and waits in no other call on this mesh\n" in message


def gone(mesh):
    """As under torchrun, where nobody else watches for ranks that end well but early."""
    fresh, message = Mesh(mesh.sizes, checked=True, timeout=60), ""
    if mesh.rank == 1:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        meeting(fresh.group(("X",)).pg).page.set_pid(child)
    else:
        with pytest.raises(ShardingError) as error:
            gather(fresh)
        message = str(error.value)
    total(mesh)
    return message


def test_a_rank_that_is_gone_is_not_waited_for(ranks):
    message, _ = ranks(gone, {"X": 2})
    assert message.startswith("a rank has ended\n  rank 0: AllGather ")
    assert "\n  rank 1: has ended\n" in message


def waits_elsewhere(mesh, told):
    hasty, message = Mesh(mesh.sizes, checked=True, timeout=0.5), ""
    meeting(hasty.group(("Y",)).pg).timeout = 60.0
    if mesh.rank == 0:
        with pytest.raises(TimeoutError) as error:
            total(hasty)
        message = str(error.value)
        told.touch()
    if mesh.rank in (2, 3):
        while mesh.rank == 3 and not told.exists():
            time.sleep(0.02)
        total(hasty, "Y", "B")
    total(mesh, "XY")
    return message


def test_of_who_does_not_come_it_is_told_where_he_waits(ranks, tmp_path):
    message = ranks(waits_elsewhere, MESH, tmp_path / "told")[0]
    assert "\n  rank 2: AllReduce B[] {U_Y} -> B[] of () float32, waits for rank 3\n" in message
