"""A Transformer's training step on meshes of so many ranks, forecast from a chip file alone and run: how far off, and
in which order. The meshes are those that `python -m scaling.train --plan` chooses from.

Kendall's tau counts the pairs of meshes that the forecast puts in the right order, less those that it puts in the wrong
one, over all pairs.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from time import perf_counter

from scaling import launch
from scaling.common import tables
from scaling.configs import get
from scaling.hardware import Chip
from scaling.measure.lines import barrier
from scaling.mesh import Mesh
from scaling.plan.choose import choices
from scaling.plan.transformer_step import transformer_step
from scaling.spec.sizes import format_sizes
from scaling.train.settings import Settings

MODEL = get("tiny").with_(L=4, D=256, F=1024, N=8, K=4, H=32)
SETTINGS = Settings(MODEL, "", "", batch=16, seq=128, microbatches=2)
MOST = 10  # meshes that are run


@dataclass(frozen=True)
class Check:
    """A step on a mesh of these sizes as forecast and as measured, in seconds."""

    sizes: dict[str, int]
    predicted: float
    seconds: float

    @property
    def error(self) -> float:
        """Relative: +0.2 if the prediction is 20% too long."""
        return self.predicted / self.seconds - 1


def check_steps(settings: Settings, chip: Chip, ranks: int, rounds: int, most: int = MOST) -> list[Check]:
    """A run's step on the meshes of so many ranks, on at most so many of them from the fastest to the slowest that the
    planner finds. ValueError if none suits."""
    found, refused = choices(settings, ranks, chip)
    if not found:
        raise ValueError(f"no mesh of {ranks} ranks suits: {refused[0]}\n  fix: use another number of ranks")
    tried = [found[i * (len(found) - 1) // (most - 1)] for i in range(most)] if len(found) > most > 1 else found[:most]
    per_rank = launch.run(take_turns, {"X": ranks}, settings, [each.sizes for each in tried], rounds, checked=False)
    slowest = map(max, zip(*per_rank, strict=True))
    return [Check(each.sizes, each.seconds, seconds) for each, seconds in zip(tried, slowest, strict=True)]


def take_turns(mesh, settings: Settings, meshes: Sequence[dict[str, int]], rounds: int) -> list[float]:
    """Seconds of the step on each mesh, on this rank: the lower quartile of so many. The meshes take turns, step by
    step, so that whatever else the machine does meets all alike."""
    ready = [transformer_step(settings, Mesh(sizes)) for sizes in meshes]
    found: list[list[float]] = [[] for _ in meshes]
    for turn in range(rounds + 1):
        for once, seconds in zip(ready, found, strict=True):
            barrier(mesh)
            start = perf_counter()
            once()
            seconds += [perf_counter() - start] if turn else []
    return [sorted(seconds)[len(seconds) // 4] for seconds in found]


def tau(checks: Sequence[Check]) -> float:
    """Kendall's, from -1 to 1."""
    signs = [(a.predicted - b.predicted) * (a.seconds - b.seconds) for a, b in combinations(checks, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / max(1, len(signs))


def median_error(checks: Sequence[Check]) -> float:
    return statistics.median(abs(c.error) for c in checks)


def table(checks: Sequence[Check]) -> str:
    rows = [(format_sizes(c.sizes), f"{1e3 * c.predicted:.1f}", f"{1e3 * c.seconds:.1f}", f"{c.error:+.0%}")
            for c in checks]  # fmt: skip
    shown = tables.table(rows, ["mesh", "predicted ms", "measured ms", "error"])
    return f"{shown}\n\nmedian error {median_error(checks):.0%}, Kendall's tau {tau(checks):.2f}"


def as_dict(check: Check) -> dict:
    """Seconds."""
    return {"mesh": check.sizes, "predicted": check.predicted, "measured": check.seconds, "error": check.error}
