"""A rank that fails ends the others soon, is named, shows where it was, and leaves no process behind.

tests/sweeps/stress_deaths.py measures how soon."""

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from machine import SOON
from processes import all_ended, hangs, total

from scaling.launch import RankError, run
from scaling.launch.process import end_with_parent
from scaling.launch.watch import DIED, LATE, LEFT, RAISED, Rank, Voice
from scaling.mesh.meeting import RankEnded


def raises(mesh):
    raise ValueError("boom")


def raises_what_cannot_be_printed(mesh):
    raise ValueError("boom \udcff")


def exits(code):
    return lambda mesh: sys.exit(code)


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
    "returns what cannot be pickled": (lambda mesh: lambda: 0, ["raised:", "cannot be pickled", "fix: return tensors"]),
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


def followed(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


# what ended a rank, the worst first: who died, who raised, whose wait timed out, who was left by another one
BLAME = [
    None,
    ValueError("the page said: request timed out, closed by peer"),
    RuntimeError("Timed out waiting 1000ms"),
    followed(KeyError("loss"), TimeoutError("not all ranks have come")),
    RuntimeError("Connection closed by peer"),
    followed(ValueError("no batch"), RankEnded("a rank has ended")),
]


def test_the_cause_is_blamed_before_what_follows_from_it():
    def failed(number: int, error: Exception | None) -> Rank:
        process = SimpleNamespace(start=lambda: None, exitcode=1 if error else -signal.SIGKILL)
        rank = Rank(number, SimpleNamespace(Pipe=multiprocessing.Pipe, Process=lambda **given: process), print)
        if error is not None:
            reader, writer = multiprocessing.Pipe(duplex=False)
            rank.pipe = reader
            Voice(writer, None).failure(number, error)
        return rank

    blames = [failed(number, error).failure().blame for number, error in enumerate(BLAME)]
    assert blames == [DIED, RAISED, LATE, LATE, LEFT, LEFT] == sorted(blames)


def test_who_is_to_blame_is_told_as_data_too():
    def f(mesh):
        return raises(mesh) if mesh.rank == 1 else total(mesh)

    with pytest.raises(RankError) as error:
        run(f, {"X": 2})
    failure = pickle.loads(pickle.dumps(error.value)).failure
    assert (failure.rank, failure.exception) == (1, "ValueError")
    assert failure.line == f"{__file__}:{raises.__code__.co_firstlineno + 1}"


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


def fails_beside_words_of_waiting(mesh):
    raise ValueError("boom")  # not timeout, "timed out" or "Timed out"


def test_a_failure_is_told_at_once_and_from_the_function_on(monkeypatch):
    """A rank whose source speaks of timeouts is not taken for one that waited too long for another: it is the cause."""
    monkeypatch.setattr("scaling.launch.watch.GRACE", 60.0)
    before = time.monotonic()
    with pytest.raises(RankError, match="boom") as caught:
        run(fails_beside_words_of_waiting, {"X": 2})
    assert time.monotonic() - before < 30
    places = [line for line in str(caught.value).splitlines() if line.startswith('  File "')]
    assert len(places) == 1
    assert places[0].endswith("in fails_beside_words_of_waiting")
