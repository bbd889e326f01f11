"""Ranks that are started here: their results, and every way for one to fail.

A failure has to end everyone soon (tests/sweeps/stress_deaths.py has how soon), name the rank, show where it was, and
leave no process behind.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from busy import SOON

from scaling.collectives import all_gather, all_reduce, recv, send
from scaling.launch import RankError, fit_mesh, parse_mesh, run
from scaling.launch.process import end_with_parent
from scaling.launch.watch import Rank
from scaling.mesh import Mesh
from scaling.spec import ShardingError


def total(mesh) -> float:
    """The number of ranks, by a collective over all axes."""
    axes = "".join(mesh.sizes)
    return all_reduce(f"A[] {{U_{axes}}} -> A[]", torch.ones(()), mesh).item()


def running(pid: int) -> bool:
    """Whether a process exists and has not ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def all_ended(pids, limit=SOON) -> bool:
    deadline = time.monotonic() + limit
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def test_results_come_in_rank_order_from_closures_too():
    here = []  # a rank changes its own copy

    def f(mesh, factor, shift):
        here.append(mesh.rank)
        whole = all_gather("A[I_XY] -> A[I]", torch.tensor([mesh.rank * factor + shift]), mesh)
        return mesh.rank, mesh.coord, whole, mesh.checked, torch.get_num_threads(), os.environ["WORLD_SIZE"]

    results = run(f, {"X": 2, "Y": 2}, 10, 1)
    assert [result[0] for result in results] == [0, 1, 2, 3]
    assert [result[1] for result in results] == [{"X": x, "Y": y} for x in (0, 1) for y in (0, 1)]
    assert all(torch.equal(result[2], torch.tensor([1, 11, 21, 31])) for result in results)
    assert all(result[3:] == (True, 1, "4") for result in results)
    assert here == []


def test_one_rank_runs_here():
    assert run(lambda mesh: (os.getpid(), mesh.size()), {"X": 1, "Y": 1}) == [(os.getpid(), 1)]
    with pytest.raises(KeyError, match="mine"):  # as it is: there is no other rank to tell of
        run(lambda mesh: {}["mine"], {"X": 1})


def test_what_makes_no_mesh_starts_no_rank():
    with pytest.raises(ShardingError, match="axis X has size 0"):
        run(total, {"X": 0, "Y": 2})


@pytest.mark.parametrize("sizes", [4, [4, 2], None])
def test_sizes_that_are_no_mapping(sizes):
    with pytest.raises(ShardingError, match="a mesh is given by the sizes of its axes"):
        run(total, sizes)


def test_no_file_stays_behind_nor_lies_there_meanwhile(tmp_path, monkeypatch):
    """What lay there while ranks run would stay behind if their parent were killed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def files(mesh):
        total(mesh)
        return [str(path) for path in tmp_path.iterdir()]

    assert run(files, {"X": 2}) == [[], []]
    assert [*tmp_path.iterdir()] == []


def test_a_rank_cannot_start_ranks():
    with pytest.raises(RankError) as error:
        run(lambda mesh: run(total, {"X": 2}), {"X": 2})
    assert "ShardingError: launch.run cannot start 2 ranks from a process that is a rank itself\n" in str(error.value)


def test_torchruns_ranks_start_none(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    with pytest.raises(ShardingError, match=r"2 ranks in each of torchrun's 4\n  fix: launch\.start"):
        run(total, {"X": 2})


def test_large_results_arrive():
    for rank, result in enumerate(run(lambda mesh: torch.full((3_000_000,), float(mesh.rank)), {"X": 2})):
        assert torch.equal(result, torch.full((3_000_000,), float(rank)))


def imported_by_a_pull(mesh):
    before = set(sys.modules)
    torch.func.vjp(torch.sin, torch.ones(2))[1](torch.ones(2))
    return sorted(set(sys.modules) - before)


def test_the_first_gradient_imports_nothing_in_a_forked_rank():
    assert run(imported_by_a_pull, {"X": 2}) == [[], []]


def test_ranks_may_use_threads_after_their_parent_did():
    """A forked process inherits OpenMP's record of threads that it does not have."""

    def product(mesh):
        x = torch.full((600, 600), 1.0)
        return torch.get_num_threads(), (x @ x).sqrt().mean().item()

    torch.set_num_threads(2)
    try:
        assert product(None) == (2, pytest.approx(600**0.5))
        assert [threads for threads, _ in run(product, {"X": 2}, threads=2)] == [2, 2]
        assert product(None)[0] == 2  # and so may the parent, after
    finally:
        torch.set_num_threads(1)


def raises(mesh):
    raise ValueError("boom")


def raises_what_cannot_be_printed(mesh):
    raise ValueError("boom \udcff")


def exits(code):
    return lambda mesh: sys.exit(code)


def hangs(mesh):
    time.sleep(60)


class Odd(Exception):
    def __init__(self, a, b):  # cannot be pickled
        super().__init__(a)


def raises_what_cannot_be_pickled(mesh):
    raise Odd(1, 2)


def segfaults(mesh):
    faulthandler.disable()  # pytest's: its report would stand in the middle of the tests'
    ctypes.string_at(0)


# what one rank does while the others wait for it in a collective -> what the message says
FAILURES = {
    "raises": (raises, ["raised:\nTraceback", "in raises", "ValueError: boom"]),
    "raises what cannot be pickled": (raises_what_cannot_be_pickled, ["Odd: 1", "in raises_what_cannot"]),
    "raises what cannot be printed": (raises_what_cannot_be_printed, ["in raises_what_cannot", "boom \\udcff"]),
    "sys.exit(3)": (exits(3), ["raised:\nTraceback", "SystemExit: 3"]),
    "sys.exit(0)": (exits(0), ["raised:\nTraceback", "SystemExit: 0"]),
    "os._exit(0)": (lambda mesh: os._exit(0), ["ended with exit code 0, so the other ranks were ended"]),
    "SIGKILL": (lambda mesh: os.kill(os.getpid(), signal.SIGKILL), ["was killed by SIGKILL"]),
    "SIGTERM": (lambda mesh: os.kill(os.getpid(), signal.SIGTERM), ["was killed by SIGTERM"]),
    "segfault": (segfaults, ["was killed by SIGSEGV"]),
    "returns what cannot be pickled": (lambda mesh: lambda: 0, ["raised:", "pickle"]),
    "returns early": (lambda mesh: None, ["do not make the same call", "rank 1: the end of the run"]),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failing_rank_ends_the_others_and_is_named(how, tmp_path):
    def f(mesh):
        (tmp_path / str(os.getpid())).touch()
        return FAILURES[how][0](mesh) if mesh.rank == 1 else total(mesh)

    began = time.monotonic()
    with pytest.raises(RankError) as error:
        run(f, {"X": 3})
    assert time.monotonic() - began < SOON
    assert re.match(r"rank \d of 3 " if how == "returns early" else "rank 1 of 3 ", str(error.value))
    for words in FAILURES[how][1]:
        assert words in str(error.value)
    assert not re.search("ranks.py.*in _(rank|work)\n", str(error.value))  # what started it is of no interest
    assert all_ended([int(path.name) for path in tmp_path.iterdir()], 0)


def test_a_failing_rank_ends_those_that_do_not_wait_for_it(tmp_path):
    def f(mesh):
        if mesh.rank == 1:
            raises(mesh)
        time.sleep(10)  # only if nobody ends it
        (tmp_path / "lives on").touch()

    with pytest.raises(RankError, match="boom"):
        run(f, {"X": 2})
    assert [*tmp_path.iterdir()] == []


def test_ctrl_c_is_left_to_the_parent():
    """A terminal sends it to all processes; a rank that raised would be taken for the failing one."""

    def f(mesh):
        os.kill(os.getpid(), signal.SIGINT)
        return total(mesh)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background would ignore it
    try:
        assert run(f, {"X": 2}) == [2.0, 2.0]
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.fixture
def little_grace(monkeypatch):
    """Where no other rank is to blame, it is not long looked for."""
    monkeypatch.setattr("scaling.launch.watch.GRACE", 0.1)


def ends_early(mesh):
    if mesh.rank:
        all_reduce("A[] {U_Y} -> A[]", torch.ones(()), mesh)
        all_reduce("A[] {U_X} -> A[]", torch.ones(()), mesh)


def test_the_cause_is_blamed_before_what_follows_from_it():
    def failed(number: int, text: str, code: int | None) -> Rank:
        context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=lambda **given: process)
        process = SimpleNamespace(start=lambda: None, exitcode=code)
        rank = Rank(number, context, print)
        rank.error = (float(number), text) if text else None
        return rank

    ended = [
        failed(4, "", -signal.SIGKILL),
        failed(3, "ValueError: boom", 1),
        failed(2, "RuntimeError: Timed out waiting 1000ms", 1),
        failed(1, "RuntimeError: Connection closed by peer", 1),
        failed(5, "ShardingError: a rank has ended", 1),
    ]
    assert [rank.number for rank in sorted(ended, key=Rank.failure)] == [4, 3, 2, 1, 5]


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
    assert re.search(r"^  File .*test_launch.py., line \d+ in hangs\n", shown)
    assert len([*tmp_path.iterdir()]) == 2
    assert all_ended([int(path.name) for path in tmp_path.iterdir()], 0)


def spins(mesh):
    while mesh.rank != 1:
        pass
    os._exit(3)


@pytest.mark.slow
def test_a_death_is_noticed_while_the_others_compute():
    """A dead process cannot always be waited for at once."""
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(RankError, match="rank 1 of 3 ended with exit code 3"):
            run(spins, {"X": 3})
        assert time.monotonic() - began < SOON


def leaves_a_child(mesh):
    if mesh.rank == 0:
        hangs(mesh)
    if os.fork() == 0:
        time.sleep(SOON)  # it keeps the pipes of its parent open
        os._exit(0)
    os._exit(3)


def test_a_death_is_noticed_while_a_child_lives_on():
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 ended with exit code 3"):
        run(leaves_a_child, {"X": 2})
    assert time.monotonic() - began < SOON


def spins_for_ever(mesh):
    while True:
        pass


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("how", [hangs, spins_for_ever])
def test_when_all_hang_they_are_shown_where_they_are(how, monkeypatch):
    monkeypatch.setattr("scaling.launch.pulse.PATIENCE", 1)
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        run(how, {"X": 2}, timeout=1.0)
    assert time.monotonic() - began < 2.0 + SOON
    said, *shown = re.split(r"\nrank \d was still running, here \(most recent call first\):\n", str(error.value))
    assert re.match(r"all 2 ranks hang: none has (computed|sent or received anything) for \d s\n  fix: ", said)
    assert len(shown) == 2
    assert all(re.match(rf"  File .*test_launch.py., line \d+ in {how.__name__}\n", stack) for stack in shown)


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


def test_eight_ranks_are_soon_through_their_first_collective():
    """0.05 s of a processor for each, which other programs on the machine hardly change; no rank imports anything."""

    def f(mesh):
        total(mesh)
        return time.process_time()

    assert max(run(f, {"X": 4, "Y": 2})) < 0.5


@pytest.mark.parametrize("text", ["X=4,Y=2", " X = 4 , Y=2 "])
def test_meshes_are_read_from_the_command_line(text):
    assert parse_mesh(text) == {"X": 4, "Y": 2}
    assert [*parse_mesh("Y=2,X=4")] == ["Y", "X"]
    assert parse_mesh("data=2") == {"data": 2}


BAD_MESHES = {
    "": "cannot read ''",
    "X=4,": "cannot read ''",
    "X:4": "cannot read 'X:4'; write axes and sizes as in X=4,Y=2",
    "X=-1": "cannot read 'X=-1'",
    "X=4,X=2": "axis X is given twice",
    "X=0": "axis X has size 0",
    "XY=4": "'XY' cannot name a mesh axis",
}


@pytest.mark.parametrize("text", BAD_MESHES)
def test_bad_meshes_on_the_command_line(text):
    with pytest.raises(ShardingError) as error:
        parse_mesh(text)
    assert BAD_MESHES[text] in str(error.value)


def test_a_default_mesh_is_fitted_to_torchruns_ranks(monkeypatch):
    for world, fitted in {"1": (4, 2), "4": (2, 2), "2": (1, 2), "16": (8, 2), "3": (4, 2)}.items():
        monkeypatch.setenv("WORLD_SIZE", world)
        assert tuple(fit_mesh({"X": 4, "Y": 2}).values()) == fitted


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


def lives_with(parent: int, say) -> None:
    end_with_parent(parent)
    say.send(os.getpid())
    time.sleep(60)


def has_a_child(say) -> None:
    multiprocessing.get_context("fork").Process(target=lives_with, args=(os.getpid(), say)).start()
    time.sleep(60)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a killed parent leaves its ranks")
def test_a_rank_dies_with_its_parent_however_that_ends():
    ours, theirs = multiprocessing.Pipe()
    parent = multiprocessing.get_context("fork").Process(target=has_a_child, args=(theirs,))
    parent.start()
    child = ours.recv()
    parent.kill()
    parent.join()
    began = time.monotonic()
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2]:
        assert time.monotonic() < began + SOON, "it lives on"
        time.sleep(0.01)


def test_a_rank_that_begins_after_its_parent_has_died_ends_at_once():
    process = multiprocessing.get_context("fork").Process(target=end_with_parent, args=(os.getppid(),))
    process.start()
    process.join()
    assert process.exitcode == 1


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
