"""A rank that fails ends the others soon, is named, shows where it was, and leaves no process behind; one that waits
too long for another is told for whom. `tests/sweeps/fuzz.py deaths` measures how soon. Processes count as hanging that
sleep, not those that get no processor."""

import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time

import pytest
import torch
from machine import SOON, all_ended, hangs, total
from torch.distributed.distributed_c10d import ProcessGroupGloo

from scaling.collectives import all_reduce, recv, send
from scaling.launch import RankError, run
from scaling.launch.ranks import end_with_parent
from scaling.launch.watch import DIED, LATE, LEFT, RAISED, Pulse, blame_of
from scaling.mesh import Mesh
from scaling.mesh.meeting import RankEnded


def failed(fn, sizes, *args, **options) -> RankError:
    """What a run ends with, which it does soon."""
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        run(fn, sizes, *args, **options)
    assert time.monotonic() - began < SOON
    return error.value


class Odd(Exception):
    def __init__(self, a, b):  # cannot be pickled
        super().__init__(a)


def raises_what_is_odd(mesh):
    raise Odd("boom \udcff", 2)  # cannot be printed either


def on_rank_1(does):
    """While the others wait for it in a collective."""
    return lambda mesh: does(mesh) if mesh.rank == 1 else total(mesh)


def ends_early(mesh):
    if mesh.rank:
        all_reduce("A[] {U_Y} -> A[]", torch.ones(()), mesh)
        all_reduce("A[] {U_X} -> A[]", torch.ones(()), mesh)


def spins(mesh):
    while mesh.rank != 1:
        pass
    os._exit(3)


def leaves_a_child(mesh):
    if mesh.rank == 0:
        hangs(mesh)
    if os.fork() == 0:
        time.sleep(SOON)  # it keeps the pipes of its parent open
        os._exit(0)
    os._exit(3)


def makes_a_mesh_alone(mesh):
    if mesh.rank == 0:
        Mesh(mesh.sizes)
    time.sleep(30)


def loops_for_ever(mesh):
    while True:
        pass


def waits_for_a_message(call):
    return lambda mesh: call("A[I]", torch.ones(2), mesh, "X", 0) if mesh.rank else None


TWO, THREE, HASTY = {"X": 2}, {"X": 3}, {"timeout": 0.5}
RULE = r"along X, at .*failures\.py:\d+\n  no answer from rank 0 within \d\.\d s .*\n  rule: to each send"
WAITS = "the ranks wait for each other, each in another call\n  rank 0: the end of the run, waits for"
BOTH = r"(\nrank \d was still running, here \(most recent call first\):\n  File .*, line \d+ in %s\n(?s:.*)){2}$"
# (what the ranks do, the mesh, options) -> what the message says
FAILURES = {
    "raises what cannot be pickled": (on_rank_1(raises_what_is_odd), THREE, {},
        "^rank 1 of 3 raised", r"Odd: boom \\udcff", "in raises_what_is_odd"),
    "sys.exit(0)": (on_rank_1(lambda mesh: sys.exit(0)), THREE, {},
        "^rank 1 of 3 raised:\nTraceback", "SystemExit: 0"),
    "os._exit(0)": (on_rank_1(lambda mesh: os._exit(0)), THREE, {},
        "^rank 1 of 3 ended with exit code 0, so the other ranks were ended"),
    "SIGKILL": (on_rank_1(lambda mesh: os.kill(os.getpid(), signal.SIGKILL)), THREE, {},
        "^rank 1 of 3 was killed by SIGKILL"),
    "returns what cannot be pickled": (on_rank_1(lambda mesh: lambda: 0), THREE, {},
        "^rank 1 of 3 raised:", "cannot be pickled", "fix: return tensors"),
    "returns early": (on_rank_1(lambda mesh: None), THREE, {},
        r"^rank \d of 3 ", "do not make the same call", "rank 1: the end of the run"),
    "returns, and others wait in several groups": (ends_early, {"X": 2, "Y": 2}, {}, WAITS,
        r"\n  rank [12]: AllReduce A\[\] {U_[XY]} -> A\[\] of \(\) float32, waits for rank 0\n"),
    "dies, others compute": (spins, TWO, {}, "^rank 1 of 2 ended with exit code 3"),
    "dies, a child lives on": (leaves_a_child, TWO, {}, "^rank 1 of 2 ended with exit code 3"),
    # who waits too long is told for whom, and where the other one is
    "hangs": (on_rank_1(hangs), TWO, HASTY, "^rank 0 of 2 raised:", "Timed out", "in total",
        r"\nrank 1 was still running, here \(most recent call first\):\n  File .*machine.py., line \d+ in hangs\n"),
    "recv without send": (waits_for_a_message(recv), TWO, HASTY,
        "^rank 1 of 2 raised", r"TimeoutError: Timed out: Recv A\[I\] from rank 0 " + RULE),
    "send without recv": (waits_for_a_message(send), TWO, HASTY,
        "^rank 1 of 2 raised", r"TimeoutError: Timed out: Send A\[I\] to rank 0 " + RULE),
    "a mesh of one rank": (makes_a_mesh_alone, TWO, HASTY | {"checked": False},
        r"Timed out: Mesh\(X=2\), unchecked, on cpu: rank 0 makes this mesh, and not all others do\n",
        "fix: make it outside of what some ranks run alone"),
    "all sleep": (hangs, TWO, {"timeout": 1.0},
        r"^all 2 ranks hang: none has computed for \d s\n  fix: ", BOTH % "hangs"),
    "all loop": (loops_for_ever, TWO, {"timeout": 1.0},
        r"^all 2 ranks hang: none has sent or received anything for \d s\n  fix: ", BOTH % "loops_for_ever"),
}  # fmt: skip


def marks_of(how: str) -> list:
    return [pytest.mark.slow] * bool(FAILURES[how][2]) + [pytest.mark.sweep] * how.startswith("all")


@pytest.mark.parametrize("how", [pytest.param(how, marks=marks_of(how)) for how in FAILURES])
def test_a_failing_rank_ends_the_others_and_is_named(how, tmp_path, monkeypatch):
    program, sizes, options, *words = FAILURES[how]
    if options:  # where no other rank is to blame, it is not long looked for
        monkeypatch.setattr("scaling.launch.watch.GRACE", 0.1)
    if how == "all loop":  # else that takes longer
        monkeypatch.setattr("scaling.launch.watch.PATIENCE", 1)

    def f(mesh):
        (tmp_path / str(os.getpid())).touch()
        return program(mesh)

    message = str(failed(f, sizes, **options))
    for each in words:
        assert re.search(each, message), message
    if how not in ("hangs", "all sleep", "all loop"):  # of which the whole stack is shown
        assert not re.search("ranks.py.*in _(rank|work)\n", message)  # what started it is of no interest
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2 or not options  # else some may not have begun
    assert all_ended(pids, 0)


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


def test_the_cause_is_blamed_before_what_follows_from_it():
    """The worst first: who raised, whose wait timed out, who was left by another one."""
    late, left = KeyError("loss"), ValueError("no batch")
    late.__cause__, left.__cause__ = TimeoutError("not all ranks have come"), RankEnded("a rank has ended")
    raised = ValueError("the page said: request timed out, closed by peer")
    errors = raised, RuntimeError("Timed out waiting 1000ms"), late, RuntimeError("Connection closed by peer"), left
    assert [blame_of(error) for error in errors] == [RAISED, LATE, LATE, LEFT, LEFT]
    assert DIED < RAISED < LATE < LEFT


def test_a_rank_that_begins_after_its_parent_has_died_ends_at_once():
    process = multiprocessing.get_context("fork").Process(target=end_with_parent, args=(os.getppid(),))
    process.start()
    process.join()
    assert process.exitcode == 1


def raises(mesh):
    raise ValueError("boom")  # not timeout, "timed out" or "Timed out"


def test_a_failure_is_reported_at_once_with_its_traceback_and_as_data(monkeypatch):
    """A rank whose source speaks of timeouts is not taken for one that waited too long for another: it is the cause."""
    monkeypatch.setattr("scaling.launch.watch.GRACE", 2 * SOON)
    error = failed(on_rank_1(raises), TWO)
    places = [line for line in str(error).splitlines() if line.startswith('  File "')]
    assert [place.rpartition(" in ")[2] for place in places] == ["<lambda>", "raises"]
    failure = pickle.loads(pickle.dumps(error)).failure
    assert (failure.rank, failure.exception) == (1, "ValueError")
    assert failure.line == f"{__file__}:{raises.__code__.co_firstlineno + 1}"


@pytest.mark.sweep
@pytest.mark.slow
def test_ranks_that_compute_or_communicate_do_not_hang():
    def computes(mesh, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            torch.ones(100, 100) @ torch.ones(100, 100)

    def communicates(mesh):
        for _ in range(30):
            total(mesh)
            computes(mesh, 0.1)

    run(computes, TWO, 2.5, timeout=0.5)
    run(communicates, TWO, timeout=1.0)


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="what Linux counts of processes")


def computes():
    while True:
        pass


def starved():
    """As on a machine that does much else: it runs when nobody else wants its processor."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    computes()


def sleeps():
    time.sleep(60)


def thread_spins():
    """As a rank that waits for what a thread of its own is to send."""
    threading.Thread(target=starved).start()
    sleeps()


def looks_for_messages():
    """As a rank of many process groups that waits: each has a thread of gloo's that wakes a hundred times a second."""
    devices = [ProcessGroupGloo.create_device(interface="lo") for _ in range(60)]
    while devices:
        time.sleep(0.01)


def forked(do) -> int:
    """A process that does something, on the first of this one's processors."""
    core = {min(os.sched_getaffinity(0))}
    if pid := os.fork():
        return pid
    try:
        os.sched_setaffinity(0, core)
        do()
    finally:
        os._exit(0)


def quick(pid: int, sockets: bool) -> Pulse:
    """One that need not be waited for long."""
    pulse = Pulse([pid], 0.2, sockets)
    pulse.every, pulse.idle = 0.1, 0.4
    return pulse


@ON_LINUX
@pytest.mark.slow
def test_which_processes_count_as_hanging():
    doing = [starved, computes, thread_spins, sleeps, looks_for_messages]
    pids = [forked(do) for do in (*doing, computes)]
    try:
        time.sleep(0.1)
        pulses = {do.__name__: quick(pid, sockets=True) for do, pid in zip(doing, pids, strict=False)}
        said, began = {}, time.monotonic()
        while (waited := time.monotonic() - began) < 1.0 or (len(said) < 2 and waited < 30):
            time.sleep(0.05)
            said |= {name: words for name, pulse in pulses.items() if (words := pulse.stopped())}
        assert {*said} == {"sleeps", "looks_for_messages"}, said
        assert all("has not computed" in words for words in said.values())
    finally:
        for pid in pids:  # all before one is waited for: a starved process also dies only when it gets the processor
            os.kill(pid, 9)
        for pid in pids:
            os.waitpid(pid, 0)


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The watcher's clock."""
    clock = [0.0]
    monkeypatch.setattr("scaling.launch.watch.time.monotonic", lambda: clock[0])
    return clock


@ON_LINUX
@pytest.mark.parametrize(
    ("computes", "moves", "sockets", "said"),
    [  # processor seconds and bytes a second; a timeout of 2 s, one more, and 5 times as long; looks each 0.25 s
        (0.0, 0, True, (3.25, "computed for 3 s")),
        (0.015, 1, True, (3.25, "computed for 3 s")),
        (0.025, 0, True, (15.25, "sent or received anything for 15 s")),
        (0.025, 0, False, None),
        (0.025, 1, True, None),
    ],
)
def test_ranks_hang_after_a_timeout(computes, moves, sockets, said, now, monkeypatch):
    counts = lambda pids: ({"1": 7 + computes * now[0]}, 7 + moves * int(4 * now[0]), {})  # noqa: E731
    monkeypatch.setattr("scaling.launch.watch._counts", counts)
    pulse = Pulse([1, 2], 2.0, sockets)
    found = ((now[0], pulse.stopped()) for now[0] in (0.25 * i for i in range(1, 200)))
    first = next(((when, text) for when, text in found if text), None)
    assert (first and first[0]) == (said and said[0])
    assert said is None or f"all 2 ranks hang: none has {said[1]}" in str(first)


@ON_LINUX
def test_time_in_which_the_watcher_could_not_look_does_not_count(now, monkeypatch):
    """It got no processor itself: a look after a minute tells as much as one look."""
    monkeypatch.setattr("scaling.launch.watch._counts", lambda pids: ({}, 0, {}))
    pulse = Pulse([os.getpid()], 2.0, sockets=True)
    said = [pulse.stopped() for now[0] in (60, 120, 180, *(180 + 0.25 * i for i in range(1, 20)))]
    assert said[:3] == [""] * 3
    assert "has not computed for 3 s" in next(filter(None, said))


@ON_LINUX
def test_a_process_that_watches_itself_is_not_taken_to_compute():
    """As a rank of torchrun's does, by a thread."""

    def looks():
        pulse = quick(os.getpid(), sockets=False)
        while not (said := pulse.stopped()):
            time.sleep(0.05)
        os._exit(3 if said.startswith("this rank hangs: it has not computed") else 4)

    def watches():
        signal.alarm(30)
        threading.Thread(target=looks).start()
        sleeps()

    assert os.waitstatus_to_exitcode(os.waitpid(forked(watches), 0)[1]) == 3
