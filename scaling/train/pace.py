"""How fast each rank is: a step's seconds, and those of them in which the rank stood still for a collective.

Ranks that work together take equally long; what tells a slow one is that it never waits for the others.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field

import torch

from scaling.trace import Log
from scaling.train.guards import everyone

SHARE, LEAST = 0.12, 0.025  # of a step, and seconds, by which a rank is slower than the others before it is named


def still(log: Log) -> float:
    """Seconds of this rank in collectives, waiting for others and for the data, of what a trace saw."""
    return sum(e.end - (e.waited if e.async_op else e.called) for e in log.collectives() if e.op != "Send")


@dataclass
class Pace:
    """The latest steps of this rank: (seconds, of these standing still)."""

    steps: deque = field(default_factory=lambda: deque(maxlen=64))

    def add(self, seconds: float, stood: float) -> None:
        self.steps.append((seconds, min(stood, seconds)))

    def slow(self, mesh, step: int) -> str:
        """A warning that names ranks that all others wait for, or nothing; and the steps are forgotten.

        All ranks call it. Of a rank's steps the quickest counts: whatever else the machine does only adds.
        """
        quickest = [min(seconds - stood for seconds, stood in self.steps), min(seconds for seconds, _ in self.steps)]
        self.steps.clear()
        pace = everyone(torch.tensor(quickest, dtype=torch.float64), mesh).tolist()
        return "; ".join(found) if (found := slow_ranks([work for work, _ in pace], pace[0][1], mesh, step)) else ""


def slow_ranks(work: list[float], step_seconds: float, mesh, step: int) -> list[str]:
    """Of each rank's working seconds a step: those much longer than their peers', the ranks of the same stage."""
    at, found = [mesh.coord_of(rank) for rank in range(len(work))], []
    for rank, mine in enumerate(work):
        others = [w for r, w in enumerate(work) if r != rank and at[r].get("Z") == at[rank].get("Z")]
        usual = statistics.median(others) if others else mine
        if mine - usual > max(SHARE * step_seconds, LEAST):
            where = ", ".join(f"{axis}={i}" for axis, i in at[rank].items())
            found.append(f"step {step}: rank {rank} ({where}) is slow: it works {mine * 1e3:.0f} ms a step, its peers "
                         f"{usual * 1e3:.0f} ms, and they wait for it")  # fmt: skip
    return found
