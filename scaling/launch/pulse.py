"""Whether processes still do anything, by what Linux counts of them: processor time, and bytes read and written."""

import os
import threading
import time
from pathlib import Path

IDLE = 0.02  # of one processor, all processes together: less is waiting
PATIENCE = 5  # timeouts for which ranks may compute without a word to each other
TICK = os.sysconf("SC_CLK_TCK")


class Pulse:
    """All ranks hang if for `timeout` seconds none has computed, or for 5 times as long none has read or written.

    A rank that waits for a lock or sleeps takes no processor time. One that would compute, had it a processor, counts
    as computing: on a machine that does much else it may get none for long. Nor do seconds count in which this process
    itself could not look, for want of a processor or since the machine was suspended. One that loops for ever computes,
    but neither sends nor receives; on GPUs (`sockets` False), where NCCL moves bytes that Linux does not count, that is
    not held against it. What cannot be told from a hang is a long wait for something outside, and very long computing
    without a word: there a longer timeout helps.
    """

    def __init__(self, pids: list[int], timeout: float, sockets: bool):
        self.pids, self.every = pids, min(max(timeout / 20, 0.2), 5.0)
        self.idle = timeout + 1.0  # a collective that times out says more, and is to be first
        self.mute = PATIENCE * self.idle if sockets else float("inf")
        self.looked = time.monotonic()
        self.still = self.silent = 0.0  # seconds for which none has computed; for which none has read or written
        self.used, self.bytes, _ = _counts(pids)

    def stopped(self) -> str:
        """What has stopped and for how long, in words; empty while there is hope."""
        gap = time.monotonic() - self.looked
        if gap < self.every or not os.path.exists("/proc/self/io"):
            return ""
        used, moved, ready = _counts(self.pids)
        self.looked += gap
        self.still, self.silent = (since + min(gap, 2 * self.every) for since in (self.still, self.silent))
        if ready or used - self.used > IDLE * self.still:
            self.used, self.still = used, 0.0
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


def _counts(pids: list[int]) -> tuple[float, int, bool]:
    """(processor seconds, bytes read and written), of the processes and their children together; and whether one of
    their threads is ready to run, with a processor or waiting for one."""
    used, moved, ready, me = 0, 0, False, str(threading.get_native_id())  # this thread runs, but only looks
    for pid in pids:
        try:
            stat = _stat(Path(f"/proc/{pid}"))
            moved += sum(int(line.split()[1]) for line in Path(f"/proc/{pid}/io").read_text().splitlines()[:2])
            threads = [at for at in Path(f"/proc/{pid}/task").iterdir() if at.name != me]
            ready = ready or any(_stat(thread)[0] == "R" for thread in threads)
        except OSError:  # it has ended meanwhile
            continue
        used += sum(map(int, stat[11:15]))
    return used / TICK, moved, ready


def _stat(place: Path) -> list[str]:
    """What Linux says of a process or thread, from its state on."""
    return (place / "stat").read_text().rpartition(")")[2].split()
