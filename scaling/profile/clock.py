"""What a rank's times can be held against: one clock for all ranks, and how long a thread waited for a core.

On one machine `perf_counter` is the same clock. Across machines each rank exchanges messages with rank 0: the quickest
exchange tells best, since the other's time was read somewhere between sending and receiving (as NTP does it).

A rank is not slow for what the machine does besides: Linux counts for each thread how long it was ready to run while
the cores ran others (/proc/thread-self/schedstat, its second number, in nanoseconds); reading it takes a microsecond.
Elsewhere nothing is known.
"""

import os
import socket
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from scaling.trace import now

BOOT = Path("/proc/sys/kernel/random/boot_id")
COUNTER = "/proc/thread-self/schedstat"
ROUNDS = 16


def machine() -> str:
    """What is the same for two processes if they share a clock."""
    return BOOT.read_text().strip() if BOOT.exists() else socket.gethostname()


def offset(exchanges: Iterable[tuple[float, float, float]]) -> float:
    """Seconds to add to the own clock, from (sent, the other's time, received) of several exchanges.

    Wrong by at most half of the quickest one's duration, received - sent.
    """
    sent, theirs, received = min(exchanges, key=lambda each: each[2] - each[0])
    return theirs - (sent + received) / 2


def offset_to_first() -> float:
    """What to add to this rank's clock to have rank 0's; all ranks of the world call it."""
    if not dist.is_initialized():
        return 0.0
    machines: list = [None] * dist.get_world_size()
    dist.all_gather_object(machines, machine())
    if len(set(machines)) == 1:
        return 0.0
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    exchanges = []
    for rank in range(1, len(machines)):
        for _ in range(ROUNDS if dist.get_rank() in (0, rank) else 0):
            time = torch.zeros(1, dtype=torch.float64, device=device)
            if dist.get_rank() == rank:
                sent = now()
                dist.send(time, 0)
                dist.recv(time, 0)
                exchanges.append((sent, time.item(), now()))
            else:
                dist.recv(time, rank)
                dist.send(time.fill_(now()), rank)
    return offset(exchanges) if exchanges else 0.0


@dataclass
class CoreWaits:
    """What each `look()` read, and when."""

    file: int | None
    read: list[tuple[float, bytes]] = field(default_factory=list)

    def look(self) -> None:
        if self.file is not None:
            self.read.append((now(), os.pread(self.file, 64, 0)))

    def waited(self, later: float = 0.0) -> tuple[tuple[float, float], ...]:
        """(when, seconds that the thread has waited for a core so far), on a clock that is so much ahead."""
        return tuple((when + later, int(text.split()[1]) * 1e-9) for when, text in self.read)


@contextmanager
def core_waits() -> Iterator[CoreWaits]:
    """Of the thread that opens it: look at the beginning, at the end, and when asked to."""
    looks = CoreWaits(os.open(COUNTER, os.O_RDONLY) if os.path.exists(COUNTER) else None)
    looks.look()
    try:
        yield looks
        looks.look()
    finally:
        if looks.file is not None:
            os.close(looks.file)


def waited_within(waited: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds waited for a core from start to end, and from there to where it was looked at before and after."""
    if not waited:
        return 0.0
    first = max(0, bisect_right(waited, start, key=lambda look: look[0]) - 1)
    last = min(len(waited) - 1, bisect_left(waited, end, key=lambda look: look[0]))
    return max(0.0, waited[last][1] - waited[first][1])
