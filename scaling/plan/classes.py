"""The class of a forecast, and how far published runs of that class are off it (published.toml, `errors`)."""

import tomllib
from functools import cache
from pathlib import Path

import numpy as np

from scaling.cost.lanes import Amount
from scaling.hardware import Chip
from scaling.plan.job import SCHEDULES, Job, Layout
from scaling.plan.ledger import is_one

LONG = 32_768  # tokens of a sequence, from which attention weighs
STAGES = 35  # the most stages that a published run has
PART = 4096  # the fewest tokens of a part of a sequence that a run on GPUs has; those on TPUs cut only long ones


@cache
def runs_table() -> dict:
    """Return the table of published.toml."""
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def class_of(job: Job, chip: Chip) -> str:
    """Return the class of a job on a chip, such as "experts on GPUs"."""
    what = "experts" if job.work.copies else "dense models"
    long = ", sequences of 32k and more" if job.seq >= LONG else ""
    return f"{what} on {'TPUs' if chip.kind == 'tpu' else 'GPUs'}{long}"


def usual_error(job: Job, chip: Chip) -> float | None:
    """Return the median error of the published runs of a job's class; None where there is no such run."""
    found = None if chip.efficiency_of or chip.measured else runs_table()["errors"].get(class_of(job, chip))
    return found and found[0]


def error_line(job: Job, chip: Chip) -> str:
    """Return what is known of a forecast's error, as a sentence without its end."""
    name = class_of(job, chip)
    if chip.efficiency_of:
        like = chip.efficiency_of
        return f"nothing says what share of its peaks a {chip.name} reaches, so the {like}'s is assumed; no run tells"
    if (error := usual_error(job, chip)) is None:
        return f"no published run of this class is known ({name}): take it as a guess"
    count = runs_table()["errors"][name][1]
    return f"{count} published run{'s' * (count > 1)} of this class ({name}) are off by {error:.0%} in the median"


def is_unusual(job: Job, chip: Chip, l: Layout) -> Amount:
    """Return whether no published run is laid out so.

    On GPUs these are short parts of sequences, and experts that are all on every rank; on TPUs stages, experts apart,
    and short sequences in parts; anywhere zb-h1, DualPipeV without experts, and more than STAGES stages.
    """
    experts = bool(job.work.copies)
    rare = ("zb-h1",) if experts else ("zb-h1", "dualpipev")
    found = (l.pipe > STAGES) | ((l.pipe > 1) & is_one(l.schedule, SCHEDULES, *rare))
    if chip.kind == "tpu":
        return found | (l.pipe > 1) | (l.expert > 1) | ((l.context > 1) & (job.seq < LONG))
    return found | ((l.context > 1) & (job.seq < PART * l.context)) | ((l.expert == 1) & experts)


def sure_seconds(job: Job, chip: Chip, l: Layout, forecast: Amount) -> Amount:
    """Return a forecast to choose by: a layout that no published run has counts as slower by its class's error."""
    return forecast * np.where(is_unusual(job, chip, l), 1 + (usual_error(job, chip) or 0.0), 1.0)
