"""Whether ranks hang, as read from what Linux counts of their threads: processor time, and bytes read and written."""

import os
import threading
import time
from pathlib import Path

IDLE = 0.02  # of one processor, by one thread: less is waiting
PATIENCE = 5  # timeouts for which ranks may compute without a word to each other
TICK = os.sysconf("SC_CLK_TCK")


class Pulse:
    """All ranks hang if for `timeout` seconds none has computed, or for 5 times as long none has read or written.

    A thread computes that takes more than 2% of a processor from one look to the next. One that waits for a lock or
    sleeps takes none, and one of gloo's, which wakes a hundred times a second to look for messages, takes about 0.1%. A
    rank has one of those for each process group, so threads are judged one by one and not by their sum. A thread that
    would compute, had it a processor, counts as computing, since on a machine that does much else it may get none for
    long: it is ready to run at two looks and has not gone to sleep between them, as one that woke for a moment has.

    Seconds do not count in which this process itself could not look, for want of a processor or since the machine was
    suspended. A rank that loops for ever computes, but neither sends nor receives. On GPUs (`sockets` False), where
    NCCL moves bytes that Linux does not count, that is not held against it. What cannot be told from a hang is a long
    wait for something outside, and very long computing without a word: there a longer timeout helps.
    """

    def __init__(self, pids: list[int], timeout: float, sockets: bool):
        self.pids, self.every = pids, min(max(timeout / 20, 0.2), 5.0)
        self.idle = timeout + 1.0  # a collective that times out says more, and is to be first
        self.mute = PATIENCE * self.idle if sockets else float("inf")
        self.looked = time.monotonic()
        self.still = self.silent = 0.0  # seconds for which none has computed; for which none has read or written
        self.used, self.bytes, self.ready = _counts(pids)

    def stopped(self) -> str:
        """Return what has stopped and for how long, in words; "" while there is hope."""
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
    """Return (each thread's processor seconds, the bytes that all processes have read and written, the threads that are
    ready to run). Of a thread that is ready, with a processor or without, there is how often it has gone to sleep so
    far. A process's children count together, once they have ended."""
    used: dict[str, float] = {}
    moved, ready, me = 0, {}, str(threading.get_native_id())  # this thread runs, but only looks
    for pid in map(str, pids):
        try:
            threads = [place for place in Path(f"/proc/{pid}/task").iterdir() if place.name != me]
            used |= {thread.name: _seconds(thread) for thread in threads}
            used[f"{pid}, children"] = sum(map(int, _stat(Path(f"/proc/{pid}"))[13:15])) / TICK
            moved += sum(int(line.split()[1]) for line in Path(f"/proc/{pid}/io").read_text().splitlines()[:2])
            ready |= {thread.name: _sleeps(thread) for thread in threads if _stat(thread)[0] == "R"}
        except OSError:  # it, or one of its threads, has ended meanwhile
            continue
    return used, moved, ready


def _stat(place: Path) -> list[str]:
    """Return what Linux counts of a process or thread, from its state on."""
    return (place / "stat").read_text().rpartition(")")[2].split()


def _seconds(thread: Path) -> float:
    """Return how long a thread has had a processor."""
    try:
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    except OSError:  # this Linux counts in ticks alone
        return sum(map(int, _stat(thread)[11:13])) / TICK


def _sleeps(thread: Path) -> str:
    """Return how often a thread has given its processor up to wait for something."""
    lines = (thread / "status").read_text().splitlines()
    return next((line for line in lines if line.startswith("voluntary_ctxt_switches")), "")
