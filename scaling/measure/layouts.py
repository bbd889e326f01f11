"""Predict a Transformer's training step on several meshes from a chip file alone, run it, and compare.

The meshes are taken from the ranking that `python -m scaling.train --plan` makes. The comparison says how far off each
prediction is, and whether the order of the meshes is right: Kendall's tau counts the pairs of meshes in the right order
minus the pairs in the wrong one, over all pairs.
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
from scaling.measure.network import barrier
from scaling.mesh import Mesh
from scaling.plan.choose import choices
from scaling.plan.transformer_step import transformer_step
from scaling.spec.sizes import format_sizes
from scaling.train.settings import Settings

MODEL = get("tiny").with_(L=4, D=256, F=1024, N=8, K=4, H=32)
SETTINGS = Settings(MODEL, "", "", batch=16, seq=128, microbatches=2)
MOST = 10  # the number of meshes that are run


@dataclass(frozen=True)
class Check:
    """A step on a mesh of these sizes as predicted and as measured, in seconds."""

    sizes: dict[str, int]
    predicted: float
    seconds: float

    @property
    def error(self) -> float:
        """The relative error: +0.2 if the prediction is 20% too long."""
        return self.predicted / self.seconds - 1


def check_steps(settings: Settings, chip: Chip, ranks: int, rounds: int, most: int = MOST) -> list[Check]:
    """Predict and run a step on at most `most` meshes of `ranks` ranks, spread evenly over the planner's ranking.

    Raises:
        ValueError: no mesh suits.
    """
    found, refused = choices(settings, ranks, chip)
    if not found:
        raise ValueError(f"no mesh of {ranks} ranks suits: {refused[0]}\n  fix: use another number of ranks")
    tried = [found[i * (len(found) - 1) // (most - 1)] for i in range(most)] if len(found) > most > 1 else found[:most]
    per_rank = launch.run(take_turns, {"X": ranks}, settings, [each.sizes for each in tried], rounds, checked=False)
    slowest = map(max, zip(*per_rank, strict=True))
    return [Check(each.sizes, each.seconds, seconds) for each, seconds in zip(tried, slowest, strict=True)]


def take_turns(mesh, settings: Settings, meshes: Sequence[dict[str, int]], rounds: int) -> list[float]:
    """Return the seconds of the step on each mesh, on this rank: the lower quartile of all rounds.

    The meshes take turns, step by step, so that other work on the machine affects all of them alike.
    """
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
    """Return Kendall's tau, from -1 to 1."""
    signs = [(a.predicted - b.predicted) * (a.seconds - b.seconds) for a, b in combinations(checks, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / max(1, len(signs))


def median_error(checks: Sequence[Check]) -> float:
    """Return the median of the relative errors, without sign."""
    return statistics.median(abs(c.error) for c in checks)


def table(checks: Sequence[Check]) -> str:
    """Return the predictions and measurements as a table with their summary."""
    rows = [(format_sizes(c.sizes), f"{1e3 * c.predicted:.1f}", f"{1e3 * c.seconds:.1f}", f"{c.error:+.0%}")
            for c in checks]  # fmt: skip
    shown = tables.table(rows, ["mesh", "predicted ms", "measured ms", "error"])
    return f"{shown}\n\nmedian error {median_error(checks):.0%}, Kendall's tau {tau(checks):.2f}"


def as_dict(check: Check) -> dict:
    """Return one check with its times in seconds, as --json prints it."""
    return {"mesh": check.sizes, "predicted": check.predicted, "measured": check.seconds, "error": check.error}
