"""Compare published runs with the planner: `python -m scaling.plan published`.

For each run this prints the forecast of its mesh, the measured speed, and the layout that the planner would choose. The
efficiencies are in the chip files, and are equal for all runs. The planner chooses whatever a source leaves open. The
efficiencies are fitted to these runs, so the forecasts are also tested on runs that they are not fitted to: half of a
class, a publication, or a whole class is left out, its forecasts are corrected by the median error of the other runs on
such chips, and the remaining errors are reported.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from scaling.common.console import Parser, complain, complaining
from scaling.configs import get
from scaling.hardware import Chip, chip
from scaling.plan.candidates import rank, search
from scaling.plan.classes import class_of, run_rows, runs_table
from scaling.plan.evaluate import Estimate
from scaling.plan.job import AXES, Fixed, Job
from scaling.plan.report import folded, several

BETTER = 0.15  # the planner's layout needs an explanation if it is faster by this share


@dataclass(frozen=True)
class PublishedRun:
    """A published run: the job, the chips, the mesh, the measured tokens/s per chip, and the source.

    `wanting`: the parts of the run that the forecast omits; `gave`: its disadvantages against the planner's layout.
    Runs that are not `compared` only say how near forecasts are, and the planner does not look for a better layout.
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
        """The run's name and chips."""
        return f"{self.name}, {self.chips:,} {self.chip.name}"


@dataclass(frozen=True)
class Beside:
    """A published run, with the estimates of its mesh and of the planner's best layout."""

    run: PublishedRun
    own: Estimate
    best: Estimate

    def rate(self, found: Estimate) -> float:
        """Return the tokens/s per chip of a forecast."""
        return self.run.job.batch / found.forecast / self.run.chips

    @property
    def error(self) -> float:
        """The error of the forecast: +0.1 is 10% faster than measured."""
        return self.rate(self.own) / self.run.measured - 1

    @property
    def gain(self) -> float:
        """The gain of the planner's layout over the run's, both forecast."""
        return self.own.forecast / self.best.forecast - 1


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Return all runs of published.toml."""
    return tuple(_read(row, runs_table()["sources"]) for row in run_rows())


def _read(row: dict, sources: dict) -> PublishedRun:
    """Read one row of published.toml."""
    job = Job(get(row["model"]), row["sequences"] * row["seq"], row["seq"], row.get("dtype", "bf16"), *row["bytes"])
    keys = ("microbatches", "schedule", "chunks", "remat", "zero")
    measured = row.get("tokens") or 1e12 * row["tflops"] / token_flops(job, row["count"])
    return PublishedRun(
        row["name"], job, chip(row["chip"], row.get("variant")), row["chips"], tuple(row["mesh"].items()),
        tuple((key, row[key]) for key in keys if key in row), measured, sources[row["source"]],
        row.get("wanting", ""), row.get("gave", ""), row.get("compared", True),
    )  # fmt: skip


def token_flops(job: Job, count: str) -> float:
    """Return FLOPs of a token as a source counts them: attention's whole square ("full"), or half of it ("causal")."""
    w = job.work
    return 6 * w.active + 3 * w.L * w.dots * (2 if count == "full" else 1)


def own_mesh(run: PublishedRun) -> Estimate:
    """Return the estimate of the published mesh; the planner chooses whatever the source does not state."""
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
    """Estimate a run's mesh and the planner's best layout."""
    own = own_mesh(run)
    best = search(run.job, run.chip, run.chips).found[0] if run.compared else own
    return Beside(run, own, best if rank(best) < rank(own) else own)


def errors_without(rows: Sequence[Beside], what: str) -> list[float]:
    """Return log(forecast / measured) of each run, less the median of other runs on alike chips.

    With the run, `what` is left out: "half", every second run of its class, "publication", the runs of its class with
    one source, or "class", so that the median is of other classes.
    """
    classes = [class_of(row.run.job, row.run.chip) for row in rows]
    alike = [
        (row.run.chip.efficiency, row.run.job.dtype, "" if what == "class" else name)
        for row, name in zip(rows, classes, strict=True)
    ]
    part = {
        "half": [alike[:i].count(one) % 2 for i, one in enumerate(alike)],
        "publication": [row.run.source for row in rows],
        "class": classes,
    }[what]
    found = []
    for i, row in enumerate(rows):
        others = [1 + rows[j].error for j in range(len(rows)) if alike[j] == alike[i] and part[j] != part[i]]
        found.append(math.log((1 + row.error) / (statistics.median(others) if others else 1.0)))
    return found


def median(errors: Iterable[float]) -> float:
    """Return the median size of errors in logarithms, as a share."""
    return math.expm1(statistics.median(map(abs, errors)))


def class_errors(rows: Sequence[Beside]) -> dict[str, tuple[float, int]]:
    """Return for each class the median error of its runs where halves are left out, and their number."""
    by_class: dict[str, list[float]] = {}
    for row, error in zip(rows, errors_without(rows, "half"), strict=True):
        by_class.setdefault(class_of(row.run.job, row.run.chip), []).append(error)
    return {name: (median(errors), len(errors)) for name, errors in by_class.items()}


def how_near(errors: Sequence[float]) -> str:
    """Return the median and the largest error as a sentence."""
    logs = [math.log1p(error) for error in errors]
    near = sum(abs(log) <= math.log(1.15) for log in logs)
    return (
        f"{len(errors)} runs: median error {median(logs):.0%}, largest {max(errors, key=abs):+.0%}; {near} within 15%"
    )


def table(rows: list[Beside]) -> str:
    """Return the table as text, at most 100 columns wide."""
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
        lines.append("Runs that are left out, corrected by the median error of the other runs on such chips:")
        whole = {
            f"{what} by {what}": (median(errors_without(rows, what)), len(rows)) for what in ("publication", "class")
        }
        halves = {f"half of {name}": found for name, found in class_errors(rows).items()}
        lines += [
            f"  {name}: median {error:.0%}, {several(count, 'run')}"
            for name, (error, count) in (whole | halves).items()
        ]
    lines += [
        "",
        *(f"[{i + 1}] {source}" for i, source in enumerate(sources)),
    ]
    return folded(lines)


def chosen_rows(arguments: list[str], prog: str, about: str, found: Sequence[tuple[str, Any]]) -> list:
    """Return the values of `found` whose names contain `--only`; ValueError if none does."""
    parser = Parser(prog=f"python -m scaling.plan {prog}", description=about.partition("\n")[0])
    parser.add_argument("--only", default="", help="those whose name contains this")
    args = parser.parse_args(arguments)
    kept = [value for name, value in found if args.only.lower() in name.lower()]
    if not kept:
        names = ", ".join(dict.fromkeys(name.partition(",")[0] for name, _ in found))
        raise ValueError(f"nothing is called {args.only!r}\n  fix: choose among {names}")
    return kept


@complaining(ValueError, code=2)
def main(arguments: list[str]) -> int:
    """Print the comparison; return the exit status, 1 if a difference is not explained."""
    runs = [(run.where, run) for run in published_runs()]
    rows = [beside_planner(run) for run in chosen_rows(arguments, "published", __doc__ or "", runs)]
    print(table(rows))
    unsaid = [row for row in rows if (row.gain > BETTER and not row.run.gave)]
    unsaid += [row for row in rows if row.run.compared and abs(row.error) > BETTER and not row.run.wanting]
    for row in unsaid:
        complain(f"{row.run.where}: published.toml does not say why")
    return int(bool(unsaid))
