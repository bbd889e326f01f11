"""Tell whether ranks hang, from what Linux counts of their threads: processor time, and bytes read and written."""

import os
import threading
import time
from pathlib import Path

IDLE = 0.02  # share of one processor: a thread that uses less is waiting
PATIENCE = 5  # timeouts for which ranks may compute without any communication
TICK = os.sysconf("SC_CLK_TCK")


class Pulse:
    """Watches whether all ranks hang.

    They hang if none has computed for `timeout` seconds, or none has read or written for 5 times as long.

    A thread computes if it uses more than 2% of a processor between two looks. A thread that waits for a lock or sleeps
    uses none, and a thread of gloo, which wakes a hundred times a second to look for messages, uses about 0.1%. A rank
    has one of those for each process group, so each thread is judged alone and not by their sum. A thread that would
    compute if it had a processor counts as computing, since on a busy machine it may get none for long. Such a thread
    is ready to run at two looks and has not gone to sleep between them, unlike one that woke for a moment.

    Seconds in which this process could not look do not count, whether it lacked a processor or the machine was
    suspended. A rank that loops for ever computes, but neither sends nor receives. On GPUs (`sockets` False), where
    NCCL moves bytes that Linux does not count, silence is not held against a rank. A long wait for something outside,
    and very long computing without communication, look like a hang: there a longer timeout helps.
    """

    def __init__(self, pids: list[int], timeout: float, sockets: bool):
        self.pids, self.every = pids, min(max(timeout / 20, 0.2), 5.0)
        self.idle = timeout + 1.0  # a collective's own timeout says more, so it should come first
        self.mute = PATIENCE * self.idle if sockets else float("inf")
        self.looked = time.monotonic()
        self.still = self.silent = 0.0  # seconds without computing; without reading or writing
        self.used, self.bytes, self.ready = _counts(pids)

    def stopped(self) -> str:
        """Return which activity has stopped and for how long, in words; "" while there is hope."""
        gap = time.monotonic() - self.looked
        if gap < self.every or not os.path.exists("/proc/self/io"):
            return ""
        used, moved, ready = _counts(self.pids)
        self.looked += gap
        self.still, self.silent = (since + min(gap, 2 * self.every) for since in (self.still, self.silent))
        computed = any(seconds - self.used.get(thread, 0.0) > IDLE * gap for thread, seconds in used.items())
        if computed or ready.items() & self.ready.items():
            self.still = 0.0
        self.used, self.ready = used, ready
        if moved != self.bytes:
            self.bytes, self.silent = moved, 0.0
        if self.still > self.idle:
            what = f"computed for {self.still:.0f} s"
        elif self.silent > self.mute:
            what = f"sent or received anything for {self.silent:.0f} s"
        else:
            return ""
        who = f"all {len(self.pids)} ranks hang: none has" if len(self.pids) > 1 else "this rank hangs: it has not"
        return f"{who} {what}\n  fix: the traceback below shows where; if it may take so long, pass a longer timeout\n"


def _counts(pids: list[int]) -> tuple[dict[str, float], int, dict[str, str]]:
    """Return (each thread's processor seconds, the bytes that all processes have read and written, the ready threads).

    A ready thread is one that has a processor or waits for one; its value is how often it has gone to sleep so far. The
    ended children of a process are counted together.
    """
    used: dict[str, float] = {}
    moved, ready, me = 0, {}, str(threading.get_native_id())  # this thread, which only looks
    for pid in map(str, pids):
        try:
            threads = [place for place in Path(f"/proc/{pid}/task").iterdir() if place.name != me]
            used |= {thread.name: _seconds(thread) for thread in threads}
            used[f"{pid}, children"] = sum(map(int, _stat(Path(f"/proc/{pid}"))[13:15])) / TICK
            moved += sum(int(line.split()[1]) for line in Path(f"/proc/{pid}/io").read_text().splitlines()[:2])
            ready |= {thread.name: _sleeps(thread) for thread in threads if _stat(thread)[0] == "R"}
        except OSError:  # the process, or one of its threads, has just ended
            continue
    return used, moved, ready


def _stat(place: Path) -> list[str]:
    """Return Linux's counts for a process or thread, from its state on."""
    return (place / "stat").read_text().rpartition(")")[2].split()


def _seconds(thread: Path) -> float:
    """Return how many seconds a thread has had a processor."""
    try:
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    except OSError:  # this Linux counts only in ticks
        return sum(map(int, _stat(thread)[11:13])) / TICK


def _sleeps(thread: Path) -> str:
    """Return how often a thread has given its processor up to wait for something."""
    lines = (thread / "status").read_text().splitlines()
    return next((line for line in lines if line.startswith("voluntary_ctxt_switches")), "")
