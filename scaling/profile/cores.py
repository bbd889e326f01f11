"""How long a thread was ready to run while the cores ran others: a rank is not slow for what the machine does besides.

Linux counts it for each thread (/proc/thread-self/schedstat, its second number, in nanoseconds); reading it takes a
microsecond. Elsewhere nothing is known.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from scaling.trace import Event, now

COUNTER = "/proc/thread-self/schedstat"


@dataclass
class Looks:
    """What each `look()` read, and when."""

    file: int | None
    read: list[tuple[float, bytes]] = field(default_factory=list)

    def look(self, event: Event | None = None, moment: str = "started") -> None:
        """Once as an event starts, and once as it ends."""
        if self.file is not None and moment in ("started", "ended"):
            self.read.append((now(), os.pread(self.file, 64, 0)))

    @property
    def waited(self) -> tuple[tuple[float, float], ...]:
        """(when, seconds that the thread has waited for a core so far)."""
        return tuple((when, int(text.split()[1]) * 1e-9) for when, text in self.read)


@contextmanager
def watched_cores() -> Iterator[Looks]:
    """Of the thread that opens it: look at the beginning, at the end, and when asked to."""
    looks = Looks(os.open(COUNTER, os.O_RDONLY) if os.path.exists(COUNTER) else None)
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
