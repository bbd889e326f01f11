"""How long a thread was ready to run while the cores ran others: a rank is not slow for what the machine does besides.

Linux counts it for each thread (/proc/thread-self/schedstat, its second number, in nanoseconds); reading it takes a
microsecond. Elsewhere nothing is known.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress

from scaling.trace import Event, now

COUNTER = "/proc/thread-self/schedstat"


class Watched(list[Event]):
    """The events of a trace; as each is added, `waited` gets (now, seconds that this thread has waited for a core)."""

    def __init__(self):
        super().__init__()
        self.waited: list[tuple[float, float]] = []
        self.file: int | None = None
        with suppress(OSError):
            self.file = os.open(COUNTER, os.O_RDONLY)
        self.look()

    def append(self, event: Event) -> None:
        super().append(event)
        self.look()

    def look(self) -> None:
        if self.file is not None:
            self.waited.append((now(), int(os.pread(self.file, 64, 0).split()[1]) * 1e-9))

    def close(self) -> None:
        self.look()
        if self.file is not None:
            os.close(self.file)
            self.file = None


def within(waited: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds waited for a core from start to end, and from there to where it was looked at before and after."""
    if not waited:
        return 0.0
    first = max(0, bisect_right(waited, start, key=lambda look: look[0]) - 1)
    last = min(len(waited) - 1, bisect_left(waited, end, key=lambda look: look[0]))
    return max(0.0, waited[last][1] - waited[first][1])
