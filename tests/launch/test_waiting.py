"""A rank that waits for another one too long is told for whom, and where the other one is."""

import os
import re
import time

import pytest
import torch
from machine import SOON
from processes import all_ended, hangs, total

from scaling.collectives import all_reduce, recv, send
from scaling.launch import RankError, run
from scaling.mesh import Mesh


@pytest.fixture
def little_grace(monkeypatch):
    """Where no other rank is to blame, it is not long looked for."""
    monkeypatch.setattr("scaling.launch.watch.GRACE", 0.1)


def ends_early(mesh):
    if mesh.rank:
        all_reduce("A[] {U_Y} -> A[]", torch.ones(()), mesh)
        all_reduce("A[] {U_X} -> A[]", torch.ones(()), mesh)


def test_a_rank_that_ends_early_is_named_by_those_that_wait_in_other_groups():
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        run(ends_early, {"X": 2, "Y": 2})
    assert time.monotonic() - began < SOON
    assert "the ranks wait for each other, each in another call\n  rank 0: the end of the run, waits for" in str(
        error.value
    )
    waits = r"\n  rank [12]: AllReduce A\[\] {U_[XY]} -> A\[\] of \(\) float32, waits for rank 0\n"
    assert re.search(waits, str(error.value)), error.value


@pytest.mark.slow
def test_a_rank_that_hangs_is_shown_where_it_is(tmp_path, little_grace):
    def f(mesh):
        (tmp_path / str(os.getpid())).touch()
        return hangs(mesh) if mesh.rank == 1 else total(mesh)

    began = time.monotonic()
    with pytest.raises(RankError) as error:
        run(f, {"X": 2}, timeout=0.5)
    assert time.monotonic() - began < SOON
    waited, shown = str(error.value).split("\nrank 1 was still running, here (most recent call first):\n")
    assert waited.startswith("rank 0 of 2 raised:")
    assert "Timed out" in waited
    assert "in total" in waited
    assert re.search(r"^  File .*processes.py., line \d+ in hangs\n", shown)
    assert len([*tmp_path.iterdir()]) == 2
    assert all_ended([int(path.name) for path in tmp_path.iterdir()], 0)


def spins_for_ever(mesh):
    while True:
        pass


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("how", [hangs, spins_for_ever])
def test_when_all_hang_they_are_shown_where_they_are(how, monkeypatch):
    monkeypatch.setattr("scaling.launch.watch.PATIENCE", 1)
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        run(how, {"X": 2}, timeout=1.0)
    assert time.monotonic() - began < 2.0 + SOON
    said, *shown = re.split(r"\nrank \d was still running, here \(most recent call first\):\n", str(error.value))
    assert re.match(r"all 2 ranks hang: none has (computed|sent or received anything) for \d s\n  fix: ", said)
    assert len(shown) == 2
    assert all(
        re.match(rf"  File .{how.__code__.co_filename}., line \d+ in {how.__name__}\n", stack) for stack in shown
    )


def computes(mesh, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        torch.ones(100, 100) @ torch.ones(100, 100)


@pytest.mark.sweep
@pytest.mark.slow
def test_ranks_that_compute_or_communicate_do_not_hang():
    run(computes, {"X": 2}, 2.5, timeout=0.5)

    def communicates(mesh):
        for _ in range(30):
            total(mesh)
            computes(mesh, 0.1)

    run(communicates, {"X": 2}, timeout=1.0)


def waits_for_a_message(mesh, receive):
    call = recv if receive else send
    return call("A[I]", torch.ones(2), mesh, "X", 0) if mesh.rank else None


@pytest.mark.slow
@pytest.mark.parametrize(("receive", "said"), [(True, "Recv A[I] from rank 0"), (False, "Send A[I] to rank 0")])
def test_who_waits_for_a_message_that_has_no_other_end_is_named_with_its_line(receive, said, little_grace):
    with pytest.raises(RankError) as error:
        run(waits_for_a_message, {"X": 2}, receive, timeout=0.5)
    assert str(error.value).startswith("rank 1 of 2 raised")
    assert f"TimeoutError: Timed out: {said} along X\n  rule: to each send belongs a recv" in str(error.value)


def makes_a_mesh_alone(mesh):
    if mesh.rank == 0:
        Mesh(mesh.sizes)
    time.sleep(30)


def test_a_mesh_that_one_rank_makes_alone_is_named(little_grace):
    with pytest.raises(RankError) as error:
        run(makes_a_mesh_alone, {"X": 2}, checked=False, timeout=0.5)
    message = str(error.value)
    assert "Timed out: Mesh(X=2), unchecked, on cpu: rank 0 makes this mesh, and not all others do\n" in message
    assert "fix: make it outside of what some ranks run alone" in message
