"""Which processes count as hanging: those that sleep, not those that get no processor."""

import os
import signal
import sys
import threading
import time

import pytest
from torch.distributed.distributed_c10d import ProcessGroupGloo

from scaling.launch.watch import Pulse

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what Linux counts of processes")


def spins():
    while True:
        pass


def starved():
    """As on a machine that does much else: it runs when nobody else wants its processor."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    spins()


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


@pytest.mark.slow
def test_which_processes_count_as_hanging():
    doing = [starved, spins, thread_spins, sleeps, looks_for_messages]
    pids = [forked(do) for do in (*doing, spins)]
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


def test_time_in_which_the_watcher_could_not_look_does_not_count(now, monkeypatch):
    """It got no processor itself: a look after a minute tells as much as one look."""
    monkeypatch.setattr("scaling.launch.watch._counts", lambda pids: ({}, 0, {}))
    pulse = Pulse([os.getpid()], 2.0, sockets=True)
    said = [pulse.stopped() for now[0] in (60, 120, 180, *(180 + 0.25 * i for i in range(1, 20)))]
    assert said[:3] == [""] * 3
    assert "has not computed for 3 s" in next(filter(None, said))


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
