"""Compare ranks' times: one clock for all ranks, and the time for which a thread waited for a core.

On one machine `perf_counter` is the same clock for all. Across machines each rank exchanges messages with rank 0. The
quickest exchange tells most, since the other clock was read somewhere between sending and receiving (as in NTP).

A rank is not called slow for other work of the machine. Linux counts for each thread how long it was ready to run while
the cores ran others (/proc/thread-self/schedstat, the second number, in nanoseconds); reading it takes a microsecond.
Other systems have no such count.
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
    """Return a text that is equal for two processes if they share a clock."""
    return BOOT.read_text().strip() if BOOT.exists() else socket.gethostname()


def offset(exchanges: Iterable[tuple[float, float, float]]) -> float:
    """Return the seconds to add to this clock, from (sent, the other's time, received) of several exchanges.

    The error is at most half of the quickest exchange's duration, received - sent.
    """
    sent, theirs, received = min(exchanges, key=lambda each: each[2] - each[0])
    return theirs - (sent + received) / 2


def offset_to_first() -> float:
    """Return the seconds to add to this rank's clock to get rank 0's; all ranks of the world call it."""
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
    """The counter's text at each `look()`, and when it was read."""

    file: int | None
    read: list[tuple[float, bytes]] = field(default_factory=list)

    def look(self) -> None:
        """Read the counter."""
        if self.file is not None:
            self.read.append((now(), os.pread(self.file, 64, 0)))

    def waited(self, later: float = 0.0) -> tuple[tuple[float, float], ...]:
        """Return (when, seconds that the thread has waited for a core so far), with `later` added to the clock."""
        return tuple((when + later, int(text.split()[1]) * 1e-9) for when, text in self.read)


@contextmanager
def core_waits() -> Iterator[CoreWaits]:
    """Watch the opening thread's counter: at the beginning, at the end, and when asked to."""
    looks = CoreWaits(os.open(COUNTER, os.O_RDONLY) if os.path.exists(COUNTER) else None)
    looks.look()
    try:
        yield looks
        looks.look()
    finally:
        if looks.file is not None:
            os.close(looks.file)


def waited_within(waited: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Return the seconds waited for a core between the last look before `start` and the first look after `end`."""
    if not waited:
        return 0.0
    first = max(0, bisect_right(waited, start, key=lambda look: look[0]) - 1)
    last = min(len(waited) - 1, bisect_left(waited, end, key=lambda look: look[0]))
    return max(0.0, waited[last][1] - waited[first][1])
