"""The class of a forecast, and the error of published runs of that class (published.toml, `errors`)."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from scaling.configs import get
from scaling.cost.lanes import Amount
from scaling.hardware import Chip, chip
from scaling.plan.job import AXES, SCHEDULES, Job, Layout
from scaling.plan.ledger import is_one

LONG = 32_768  # tokens of a sequence from which attention matters
PART = 4096  # the fewest tokens in a published run's chunk of a sequence
NODE = 8  # chips within which no published run has stages
GUESS = 0.1  # the median error of a class that has no run


@cache
def runs_table() -> dict:
    """Return the table of published.toml."""
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def run_rows() -> Iterator[dict]:
    """Yield each published run as a table. Runs listed in `rows` serve only to measure the error of forecasts."""
    table = runs_table()
    yield from table["run"]
    for row in (dict(zip(table["keys"], one, strict=True)) for one in table["rows"]):
        yield row | row["recipe"] | {row["unit"]: row["value"], "count": "full", "compared": False}


@cache
def run_chips() -> frozenset[str]:
    """Return the names of the chips of published runs."""
    return frozenset(row["chip"] for row in run_rows())


def class_of(job: Job, chip: Chip) -> str:
    """Return the class of a job on a chip, such as "experts on GPUs"."""
    what = "experts" if job.work.copies else "dense models"
    long = ", sequences of 32k and more" if job.seq >= LONG else ""
    return f"{what} on {'TPUs' if chip.kind == 'tpu' else 'GPUs'}{long}"


def usual_error(job: Job, chip: Chip) -> float | None:
    """Return the median error of the published runs of a job's class; None if there is no such run."""
    found = None if chip.efficiency_of or chip.measured else runs_table()["errors"].get(class_of(job, chip))
    return found and found[0]


def error_line(job: Job, chip: Chip) -> str:
    """Return a sentence, without its full stop, on how far such forecasts are off."""
    name = class_of(job, chip)
    if chip.efficiency_of:
        like = chip.efficiency_of
        return f"no run says what share of its peaks {chip.name} reaches, so the {like}'s share is assumed"
    if (error := usual_error(job, chip)) is None:
        return f"no published run of this class is known ({name}): take it as a guess"
    count = runs_table()["errors"][name][1]
    which = f"{count} published run{'s' * (count > 1)} of this class ({name})"
    unlike = "" if chip.name.partition(":")[0] in run_chips() else f", none of them on {chip.name}"
    return f"{which} {'are' if count > 1 else 'is'} off by {error:.0%} in the median{unlike}"


def family(l: Layout) -> Amount:
    """Return a bit mask of the axes that a layout splits: pipe, context, expert, tensor and FSDP.

    Axes of replicas do not count.
    """
    split = l.pipe > 1, l.context > 1, l.expert > 1, l.tensor > 1, l.zero == 3
    return sum(np.where(one, 1 << i, 0) for i, one in enumerate(split))


@dataclass(frozen=True)
class Practice:
    """The layouts of published runs of a class: their families and schedules, and the largest size of each axis."""

    families: tuple[int, ...]
    schedules: tuple[str, ...]
    most: Mapping[str, int]


@cache
def practice(kind: str, experts: bool, long: bool) -> Practice:
    """Return the layouts that published runs use on such chips, with or without experts.

    Runs with sequences of `LONG` or more count only for jobs with such sequences, because these runs split them.
    """
    families, schedules = {0}, {"1f1b"}
    most: dict[str, int] = dict.fromkeys(AXES, 1)
    for run in run_rows():
        if ("tpu" if chip(run["chip"]).kind == "tpu" else "gpu") != kind:
            continue
        mesh = dict.fromkeys(AXES, 1) | run["mesh"]
        most = {axis: max(most[axis], size) for axis, size in mesh.items()}
        if (get(run["model"]).E > 1) == experts and (long or run["seq"] < LONG):
            families.add(int(family(Layout(**mesh, zero=3 if mesh["fsdp"] > 1 else 1))))
            schedules.add(run.get("schedule", "1f1b"))
    return Practice(tuple(families), tuple(schedules), most)


def is_unusual(job: Job, chip: Chip, l: Layout) -> Amount:
    """Return whether a layout is unlike any published run: its family, schedule, a longer axis, or shorter chunks."""
    usual = practice("tpu" if chip.kind == "tpu" else "gpu", bool(job.work.copies), job.seq >= LONG)
    found = np.logical_not(np.isin(family(l), usual.families)) | ((l.context > 1) & (job.seq < PART * l.context))
    found = found | ((l.pipe > 1) & np.logical_not(is_one(l.schedule, SCHEDULES, *usual.schedules)))
    for axis in ("pipe", "context", "expert", "tensor"):
        found = found | (getattr(l, axis) > usual.most[axis])
    return found | ((l.pipe > 1) & (l.chips <= NODE))


def sure_seconds(job: Job, chip: Chip, l: Layout, forecast: Amount) -> Amount:
    """Return the seconds to rank by: the forecast, longer by the share `unsure` if no published run has the layout."""
    return forecast * np.where(is_unusual(job, chip, l), 1 + unsure(job, chip), 1.0)


def unsure(job: Job, chip: Chip) -> float:
    """Return three times the median error of forecasts, as a share; 19 of 20 forecasts are off by less."""
    error = usual_error(job, chip)
    return 0.0 if chip.measured else 3 * (GUESS if error is None else error)
