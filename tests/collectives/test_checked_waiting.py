"""Who does not come to a call of a checked mesh is named, with where he waits or that he has ended."""

import os
import time

import pytest
import torch
from checked_calls import GATHER, MESH, gather

from scaling import collectives as c
from scaling.mesh import Mesh
from scaling.mesh.meeting import meeting
from scaling.mesh.page import PLACES
from scaling.spec import ShardingError


def across(mesh):
    """Each rank waits for another one, in a circle: 0 along Y for 1, 1 along X for 3, 3 along Y for 2, 2 for 0."""
    axis = "Y" if mesh.coord["X"] == mesh.coord["Y"] else "X"
    with pytest.raises(ShardingError) as error:
        c.all_reduce(f"A[] {{U_{axis}}} -> A[]", torch.ones(()), mesh)
    return str(error.value), c.all_reduce("A[] {U_XY} -> A[]", torch.ones(()), mesh).item()


def test_ranks_that_wait_for_each_other_in_different_groups_are_told_so(ranks):
    for message, after in ranks(across, MESH):
        assert "the ranks wait for each other, each in another call\n" in message
        for rank, axis, other in [(0, "Y", 1), (1, "X", 3), (2, "X", 0), (3, "Y", 2)]:
            call = f"AllReduce A[] {{U_{axis}}} -> A[] of () float32"
            assert f"\n  rank {rank}: {call}, waits for rank {other}\n" in message
        assert after == 4.0


def late(mesh):
    hasty = Mesh(mesh.sizes, checked=True, timeout=0.5)
    message = ""
    if mesh.rank == 0:
        with pytest.raises(TimeoutError) as error:
            gather(hasty)
        message = str(error.value)
    c.all_reduce("A[] {U_X} -> A[]", torch.ones(()), mesh)
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
    c.all_reduce("A[] {U_X} -> A[]", torch.ones(()), mesh)
    return message


def late_in_turn(mesh):
    for late in range(2):
        time.sleep(0.4 if mesh.rank == late else 0)  # the other one looks who waits for whom
        for _ in range(PLACES + 1):  # until the places of that meeting are another's
            gather(mesh, (1 + late, 1))
    return True


def test_who_has_waited_long_does_not_wait_any_more(ranks):
    assert all(ranks(late_in_turn, {"X": 2}))


def test_a_rank_that_is_gone_is_not_waited_for(ranks):
    message, _ = ranks(gone, {"X": 2})
    assert message.startswith("a rank has ended\n  rank 0: AllGather ")
    assert "\n  rank 1: has ended\n" in message


def waits_elsewhere(mesh, told):
    hasty, message = Mesh(mesh.sizes, checked=True, timeout=0.5), ""
    meeting(hasty.group(("Y",)).pg).timeout = 60.0
    if mesh.rank == 0:
        with pytest.raises(TimeoutError) as error:
            c.all_reduce("A[] {U_X} -> A[]", torch.ones(()), hasty)
        message = str(error.value)
        told.touch()
    if mesh.rank in (2, 3):
        while mesh.rank == 3 and not told.exists():
            time.sleep(0.02)
        c.all_reduce("B[] {U_Y} -> B[]", torch.ones(()), hasty)
    c.all_reduce("A[] {U_XY} -> A[]", torch.ones(()), mesh)
    return message


@pytest.mark.slow
def test_of_who_does_not_come_it_is_told_where_he_waits(ranks, tmp_path):
    message = ranks(waits_elsewhere, MESH, tmp_path / "told")[0]
    assert "\n  rank 2: AllReduce B[] {U_Y} -> B[] of () float32, waits for rank 3\n" in message
