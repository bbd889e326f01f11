"""Published runs beside the planner: `python -m scaling.plan published`.

For each run what its mesh is forecast to do, beside what was measured, and what the planner would take. The forecast's
efficiencies are the chip files', the same for every run; what a source leaves open the planner chooses. They are fitted
to these runs, so each class of runs is also judged by halves: one half says by what factor its class is off, and the
other half is judged beside it.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from scaling.common.console import Parser, complain
from scaling.configs import get
from scaling.hardware import Chip, chip
from scaling.plan.candidates import rank, search
from scaling.plan.classes import class_of, runs_table
from scaling.plan.evaluate import Estimate
from scaling.plan.job import AXES, Fixed, Job
from scaling.plan.report import folded

BETTER = 0.15  # the planner's layout is explained if it is faster by so much


@dataclass(frozen=True)
class PublishedRun:
    """A published run: the job, the chips, the mesh, tokens/s a chip as measured, and where that stands.

    `wanting`: what the forecast leaves out of it; `gave`: what it gave up against the planner's layout. Those that are
    not `compared` say how near forecasts are; the planner does not look for a better layout.
    """

    name: str
    job: Job
    chip: Chip
    chips: int
    mesh: tuple[tuple[str, int], ...]
    recipe: tuple[tuple[str, object], ...]
    measured: float
    source: str
    wanting: str = ""
    gave: str = ""
    compared: bool = True

    @property
    def where(self) -> str:
        return f"{self.name}, {self.chips:,} {self.chip.name}"


@dataclass(frozen=True)
class Beside:
    """A run beside the planner: the estimate of its own mesh, and the planner's best."""

    run: PublishedRun
    own: Estimate
    best: Estimate

    def rate(self, found: Estimate) -> float:
        """Tokens/s a chip of the forecast."""
        return self.run.job.batch / found.forecast / self.run.chips

    @property
    def error(self) -> float:
        """Of the forecast: +0.1 is 10% faster than measured."""
        return self.rate(self.own) / self.run.measured - 1

    @property
    def gain(self) -> float:
        """Of the planner's layout over the run's, both forecast."""
        return self.own.forecast / self.best.forecast - 1


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """All of published.toml."""
    table = runs_table()
    more = (dict(zip(table["keys"], row, strict=True)) for row in table["rows"])
    more = (row | row["recipe"] | {row["unit"]: row["value"], "count": "full", "compared": False} for row in more)
    return tuple(_read(row, table["sources"]) for row in (*table["run"], *more))


def _read(row: dict, sources: dict) -> PublishedRun:
    """One row of published.toml."""
    job = Job(get(row["model"]), row["sequences"] * row["seq"], row["seq"], row.get("dtype", "bf16"), *row["bytes"])
    keys = ("microbatches", "schedule", "chunks", "remat", "zero")
    measured = row.get("tokens") or 1e12 * row["tflops"] / token_flops(job, row["count"])
    return PublishedRun(
        row["name"], job, chip(row["chip"], row.get("variant")), row["chips"], tuple(row["mesh"].items()),
        tuple((key, row[key]) for key in keys if key in row), measured, sources[row["source"]],
        row.get("wanting", ""), row.get("gave", ""), row.get("compared", True),
    )  # fmt: skip


def token_flops(job: Job, count: str) -> float:
    """FLOPs of a token as a source counts them: of attention the whole square ("full"), or half of it ("causal")."""
    w = job.work
    return 6 * w.active + 3 * w.L * w.dots * (2 if count == "full" else 1)


def own_mesh(run: PublishedRun) -> Estimate:
    """The estimate of the published mesh; what the source leaves open is chosen."""
    sizes = dict.fromkeys(AXES, 1) | dict(run.mesh)
    own = search(
        run.job, run.chip, run.chips, Fixed(tuple(sizes.items()), **cast(dict[str, Any], dict(run.recipe)))
    ).found
    if not own:
        raise ValueError(
            f"{run.where}: the planner does not know the published mesh {dict(run.mesh)}"
            "\n  fix: write the mesh with the axes of scaling.plan.job"
        )
    return own[0]


def beside_planner(run: PublishedRun) -> Beside:
    """The run's own mesh, and the best of all by the planner."""
    own = own_mesh(run)
    best = search(run.job, run.chip, run.chips).found[0] if run.compared else own
    return Beside(run, own, best if rank(best) < rank(own) else own)


def judged_runs(rows: Sequence[Beside]) -> list[tuple[Beside, float]]:
    """Return each run with its error beside the median error of the other half of its class, chips and dtype alike."""
    alike: dict[tuple, list[Beside]] = {}
    for row in rows:
        run = row.run
        alike.setdefault((class_of(run.job, run.chip), run.chip.efficiency, run.job.dtype), []).append(row)
    found = []
    for group in alike.values():
        for half, other in ((group[::2], group[1::2]), (group[1::2], group[::2])):
            usual = statistics.median(1 + row.error for row in other) if other else 1.0
            found += [(row, (1 + row.error) / usual - 1) for row in half]
    return found


def class_errors(rows: Sequence[Beside]) -> dict[str, tuple[float, int]]:
    """Return for each class the median error of its runs, as `judged_runs` has them, and their number."""
    by_class: dict[str, list[float]] = {}
    for row, error in judged_runs(rows):
        by_class.setdefault(class_of(row.run.job, row.run.chip), []).append(abs(math.log1p(error)))
    return {name: (math.expm1(statistics.median(errors)), len(errors)) for name, errors in by_class.items()}


def how_near(errors: Sequence[float]) -> str:
    sizes = [abs(math.log1p(error)) for error in errors]
    return (
        f"{len(errors)} runs: median error {math.expm1(statistics.median(sizes)):.0%}, largest "
        f"{max(errors, key=abs):+.0%}; {sum(size <= math.log(1.15) for size in sizes)} within 15%"
    )


def table(rows: list[Beside]) -> str:
    """What is printed, at most 100 columns wide."""
    sources = list(dict.fromkeys(row.run.source for row in rows))
    lines = ["Tokens/s a chip: measured, and forecast for the same mesh", ""]
    for row in rows:
        numbers = f"{row.run.measured:>9,.0f}{row.rate(row.own):>9,.0f}{row.error:>+7.0%}"
        lines.append(f"{row.run.where + f' [{sources.index(row.run.source) + 1}]':<70}{numbers}")
        lines.append(f"    {row.own.name}; {row.own.layout.recipe}")
        if row.best is not row.own:
            better = f"{row.best.name}; {row.best.layout.recipe}"
            lines.append(f"    the planner: {better}: {row.rate(row.best):,.0f} ({row.gain:+.0%})")
        if row.run.wanting:
            lines.append(f"    left out of the forecast: {row.run.wanting}")
        if row.gain > BETTER:
            lines.append(f"    given up: {row.run.gave}")
    lines += [
        "",
        how_near([row.error for row in rows]),
        "No number is fitted to one run: the efficiencies of chips.toml are each generation's.",
    ]
    if len(rows) > 1:
        lines.append("Each class by halves, each half beside what the other one says of the forecast's error:")
        lines += [f"  {name}: median {error:.0%}, {count} runs" for name, (error, count) in class_errors(rows).items()]
    lines += [
        "",
        *(f"[{i + 1}] {source}" for i, source in enumerate(sources)),
    ]
    return folded(lines)


def as_dict(row: Beside) -> dict:
    """A row as data. Tokens/s a chip."""
    return {
        "run": row.run.name, "chip": row.run.chip.name, "chips": row.run.chips, "mesh": dict(row.run.mesh),
        "recipe": row.own.layout.recipe, "measured": row.run.measured, "forecast": row.rate(row.own),
        "error": row.error, "best": row.best.name, "best_recipe": row.best.layout.recipe,
        "best_forecast": row.rate(row.best), "gain": row.gain, "wanting": row.run.wanting,
        "gave": row.run.gave, "source": row.run.source,
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = Parser(prog="python -m scaling.plan published", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args(arguments)
    wanted = [run for run in published_runs() if args.only.lower() in run.where.lower()]
    if not wanted:
        names = ", ".join(sorted({run.name for run in published_runs()}))
        complain(f"error: no run is called {args.only!r}\n  fix: choose among {names}")
        return 2
    rows = [beside_planner(run) for run in wanted]
    print(json.dumps([as_dict(row) for row in rows], indent=1) if args.json else table(rows))
    unsaid = [row for row in rows if (row.gain > BETTER and not row.run.gave)]
    unsaid += [row for row in rows if row.run.compared and abs(row.error) > BETTER and not row.run.wanting]
    for row in unsaid:
        complain(f"{row.run.where}: published.toml does not say why")
    return int(bool(unsaid))
