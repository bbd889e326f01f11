"""The checked mode: ranks that are about to make different calls raise, all of them, and are told who calls what; who
does not come to a call is named, with where he waits or that he has ended. Of calls above them: test_alike.py."""

import os
import re
import time
from functools import partial

import pytest
import torch
from machine import on_ranks
from torch.utils.flop_counter import FlopCounterMode

from scaling import collectives as c
from scaling.mesh import Mesh, page
from scaling.mesh.meeting import MeetingByMessages, meeting
from scaling.mesh.page import LENGTH, PLACES
from scaling.spec import ShardingError

TWO, FOUR = on_ranks({"X": 2}), on_ranks({"X": 2, "Y": 2})
GATHER, SCATTER, SUM = "A[I_X, J] -> A[I, J]", "A[I, J] {U_X} -> A[I_X, J]", "A[I] {U_X} -> "


def gather(mesh, shape=(4, 2), dtype=torch.float32, line=GATHER):
    c.all_gather(line, torch.zeros(shape, dtype=dtype), mesh)


def total(mesh, axes="X", name="A"):
    return c.all_reduce(f"{name}[] {{U_{axes}}} -> {name}[]", torch.ones(()), mesh).item()


def said(line, shape="(4, 2)", dtype="float32"):
    return re.escape(f"{line} of {shape} {dtype}") + "\n"


def gathered(words, **options):
    return lambda mesh: gather(mesh, **options), words


def permuted(pairs):
    call = f"CollectivePermute A[I_X, J] -> A[I_X, J] by {tuple(pairs)}"
    return lambda mesh: c.ppermute("A[I_X, J]", torch.zeros(4, 2), mesh, "X", pairs), said(call)


def reduced(call, after, words, requires_grad=False, **options):
    """A call by some way to put parts together, or from some root."""
    kind, x = call.__name__.title().replace("_", ""), torch.ones(4, requires_grad=requires_grad)
    return lambda mesh: call(SUM + after, x, mesh, **options), said(f"{kind} {SUM}{after}{words}", "(4,)")


def in_some_way(way, words=""):
    """One line on shards of one shape, differentiated or observed."""
    call = lambda mesh: way(lambda x: c.all_gather(GATHER, x, mesh), torch.zeros(2, 2))  # noqa: E731
    return call, said(f"AllGather {GATHER}", "(2, 2)", f"float32{words}")


def counted(f, x):
    with FlopCounterMode(display=False):
        return f(x)


def with_grad(f, x):
    return f(x.requires_grad_())


def backward(mesh, uses_first):
    """A rank that does not use what it gathered first runs one collective of the backward less."""
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    first, second = c.all_gather("A[I_X] -> A[I]", a, mesh), c.all_gather("B[J_X] -> B[J]", b, mesh)
    torch.autograd.grad(second.sum() + (first.sum() if uses_first else 0), (a, b), allow_unused=True)
    total(mesh, name="N")


USUAL = gathered(said(f"AllGather {GATHER}"))
# what rank 0 does and all are told that it said, and rank 1
DIFFER = {
    "op": (USUAL, (lambda mesh: c.reduce_scatter(SCATTER, torch.zeros(4, 2), mesh), said(f"ReduceScatter {SCATTER}"))),
    "type": (USUAL, gathered(said("AllGather B[I_X, J] -> B[I, J]"), line="B[I_X, J] -> B[I, J]")),
    "shape": (USUAL, gathered(said(f"AllGather {GATHER}", "(4, 3)"), shape=(4, 3))),
    "dtype": (USUAL, gathered(said(f"AllGather {GATHER}", dtype="float64"), dtype=torch.float64)),
    "pairs": (permuted([(0, 1)]), permuted([(1, 1)])),
    "root": [reduced(c.broadcast, "A[I]", f" with root {root}", root=root) for root in (0, 1)],
    "max and min": [reduced(c.reduce, "A[I] {U_X}", f" with root 0 by {op}", op=op) for op in ("max", "min")],
    "sum and min": [reduced(c.reduce_scatter, "A[I_X]", "", op="sum"),
                    reduced(c.reduce_scatter, "A[I_X]", " by min", op="min")],
    "a gradient's": [reduced(c.all_reduce, "A[I]", "", requires_grad=True),
                     reduced(c.all_reduce, "A[I]", " by mean", requires_grad=True, op="mean")],
    "requires_grad": (in_some_way(lambda f, x: f(x)), in_some_way(with_grad, ", differentiated")),
    "no_grad": (in_some_way(with_grad, ", differentiated"), in_some_way(torch.no_grad()(with_grad))),
    "a mode": (in_some_way(counted, ", under FlopCounterMode"), in_some_way(lambda f, x: f(x))),
    "torch.func": (in_some_way(lambda f, x: f(x)), in_some_way(torch.func.vjp, ", differentiated")),
    "a backward": (
        (partial(backward, uses_first=True), said("ReduceScatter dA[I] {U_X} -> dA[I_X]", "(4,)")),
        (partial(backward, uses_first=False), said("AllReduce N[] {U_X} -> N[]", "()")),
    ),
}  # fmt: skip


def refused(call, mesh) -> str:
    """The error of a call that is none of a kind; the group can still be used."""
    with pytest.raises(ShardingError) as error:
        call(mesh)
    assert c.all_gather("A[I_X] -> A[I]", torch.tensor([mesh.coord["X"]]), mesh).tolist() == [0, 1]
    return str(error.value)


def are_told(message, words) -> None:
    """Of each rank's call, and the rule."""
    assert "the ranks along X do not make the same call" in message
    assert "rule: all ranks of a group run the same lines in the same order" in message
    for rank, each in enumerate(words):
        assert re.search(f"\n  rank {rank}: {each}", message), message


@TWO
@pytest.mark.parametrize("what", DIFFER)
def test_a_disagreement_is_an_error_on_every_rank_that_names_ranks_and_lines(mesh, what):
    are_told(refused(DIFFER[what][mesh.rank][0], mesh), [words for _, words in DIFFER[what]])


@FOUR
def test_ranks_of_a_group_are_named_by_their_places_in_the_run_those_that_agree_together(mesh):
    axes = "YX" if mesh.rank == 2 else "XY"
    everyone = refused(lambda mesh: c.all_gather(f"A[I_{axes}] -> A[I]", torch.zeros(3), mesh), mesh)
    along_x = refused(lambda mesh: gather(mesh, (4, mesh.coord["X"])), mesh)
    assert "the ranks along X, Y" in everyone or "the ranks along Y, X" in everyone
    assert "\n  ranks [0, 1, 3]: AllGather A[I_XY] -> A[I] of (3,) float32\n" in everyone
    assert "\n  rank 2: AllGather A[I_YX] -> A[I] of (3,) float32\n" in everyone
    for x in (0, 1):
        assert f"\n  rank {2 * x + mesh.rank % 2}: AllGather {GATHER} of (4, {x}) float32\n" in along_x


@TWO
def test_meetings_are_counted_on_past_what_two_bytes_hold(mesh):
    held = meeting(mesh.group(("X",)).pg)
    held.number = (held.number | 0xFFFF) - 4  # the same on all ranks: their calls were
    assert [total(mesh) for _ in range(12)] == [2.0] * 12
    with pytest.raises(ShardingError):
        gather(mesh, shape=(4 + mesh.rank, 2))


@TWO
def test_calls_that_differ_only_after_many_letters(mesh):
    line = f"A{'a' * LENGTH}{'bc'[mesh.rank]}[I_X, J] -> A[I, J]"
    assert "make the same call\n  ranks [0, 1]: AllGather Aaa" in refused(partial(gather, line=line), mesh)


@TWO
def test_nothing_is_compared_where_nothing_is_sent(mesh):
    """By a slice that one rank makes, nor where a device is alone along an axis: its mask is no other's."""
    if mesh.rank == 1:
        c.shard("A[I] -> A[I_X]", torch.zeros(4), mesh)
    gather(mesh)
    other = Mesh({"X": 1, "Y": 2}, checked=True, timeout=60)
    assert c.masked("x[B] {U_X}", torch.ones(2), torch.ones(2) > 0, other).tolist() == [1.0, 1.0]


@TWO
def test_who_has_waited_long_does_not_wait_any_more(mesh):
    for late in range(2):
        time.sleep(0.4 if mesh.rank == late else 0)  # the other one looks who waits for whom
        for _ in range(PLACES + 1):  # until the places of that meeting are another's
            gather(mesh, (1 + late, 1))


@TWO
def test_ranks_that_share_no_memory_compare_by_messages(mesh):
    """As between machines."""
    kept, page._map = page._map, lambda *_: None
    try:
        apart = Mesh(mesh.sizes, checked=True, timeout=60)
    finally:
        page._map = kept
    assert isinstance(meeting(apart.group(("X",)).pg), MeetingByMessages)
    for what in ("op", "pairs", "a mode"):
        test_a_disagreement_is_an_error_on_every_rank_that_names_ranks_and_lines(apart, what)


# Who does not come


def called_in_vain(call, error, mesh) -> str:
    with pytest.raises(error) as told:
        call(mesh)
    return str(told.value)


@FOUR
def test_ranks_that_wait_for_each_other_in_different_groups_are_told_so(mesh):
    """In a circle: 0 waits along Y for 1, 1 along X for 3, 3 along Y for 2, 2 for 0."""
    axis = "Y" if mesh.coord["X"] == mesh.coord["Y"] else "X"
    message = called_in_vain(partial(total, axes=axis), ShardingError, mesh)
    assert "the ranks wait for each other, each in another call\n" in message
    for rank, axis, other in [(0, "Y", 1), (1, "X", 3), (2, "X", 0), (3, "Y", 2)]:
        call = f"AllReduce A[] {{U_{axis}}} -> A[] of () float32"
        assert f"\n  rank {rank}: {call}, waits for rank {other}\n" in message
    assert total(mesh, "XY") == 4


@TWO
def test_a_late_rank_is_named(mesh):
    hasty = Mesh(mesh.sizes, checked=True, timeout=0.5)
    if mesh.rank == 0:
        message = called_in_vain(gather, TimeoutError, hasty)
        assert "Timed out: not all ranks have come within 0.5 s\n" in message
        assert f"\n  rank 0: AllGather {GATHER} of (4, 2) float32, waits for rank 1\n" in message
        assert "\n  rank 1: has not come, and waits in no other call on this mesh\n" in message
    total(mesh)
    gather(hasty)  # the meeting that was not held is the next one


@TWO
def test_a_rank_that_has_ended_is_named(mesh):
    """As under torchrun, where nobody else watches for ranks that end well but early."""
    fresh = Mesh(mesh.sizes, checked=True, timeout=60)
    if mesh.rank == 1:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        meeting(fresh.group(("X",)).pg).page.set_pid(child)
    else:
        message = called_in_vain(gather, ShardingError, fresh)
        assert "a rank has ended\n  rank 0: AllGather " in message
        assert "\n  rank 1: has ended\n" in message
    total(mesh)


@FOUR
def test_a_rank_that_waits_in_another_call_is_named_with_it(mesh, tmp_path):
    hasty, told = Mesh(mesh.sizes, checked=True, timeout=0.5), tmp_path / "told"
    meeting(hasty.group(("Y",)).pg).timeout = 60.0
    if mesh.rank == 0:
        message = called_in_vain(total, TimeoutError, hasty)
        told.touch()
        assert "\n  rank 2: AllReduce B[] {U_Y} -> B[] of () float32, waits for rank 3\n" in message
    if mesh.rank in (2, 3):
        while mesh.rank == 3 and not told.exists():
            time.sleep(0.02)
        total(hasty, "Y", "B")
    total(mesh, "XY")
