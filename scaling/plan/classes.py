"""The class of a forecast, and the error of published runs of that class (published.toml, `errors`)."""

import tomllib
from functools import cache
from pathlib import Path

import numpy as np

from scaling.cost.lanes import Amount
from scaling.hardware import Chip
from scaling.plan.job import SCHEDULES, Job, Layout
from scaling.plan.ledger import is_one

LONG = 32_768  # tokens of a sequence from which attention matters
STAGES = 35  # the most stages that a published run has
PART = 4096  # the fewest tokens in a chunk of a sequence in runs on GPUs; on TPUs only long sequences are split


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
    """Return the median error of the published runs of a job's class; None if there is no such run."""
    found = None if chip.efficiency_of or chip.measured else runs_table()["errors"].get(class_of(job, chip))
    return found and found[0]


def error_line(job: Job, chip: Chip) -> str:
    """Return what is known about a forecast's error, as a sentence without its full stop."""
    name = class_of(job, chip)
    if chip.efficiency_of:
        like = chip.efficiency_of
        return f"nothing says what share of its peaks a {chip.name} reaches, so the {like}'s is assumed; no run tells"
    if (error := usual_error(job, chip)) is None:
        return f"no published run of this class is known ({name}): take it as a guess"
    count = runs_table()["errors"][name][1]
    return f"{count} published run{'s' * (count > 1)} of this class ({name}) are off by {error:.0%} in the median"


def is_unusual(job: Job, chip: Chip, l: Layout) -> Amount:
    """Return whether no published run has such a layout.

    On GPUs these are short chunks of sequences, and all experts on every rank; on TPUs stages, experts over ranks, and
    short sequences in chunks; on both zb-h1, DualPipeV without experts, and more than STAGES stages.
    """
    experts = bool(job.work.copies)
    rare = ("zb-h1",) if experts else ("zb-h1", "dualpipev")
    found = (l.pipe > STAGES) | ((l.pipe > 1) & is_one(l.schedule, SCHEDULES, *rare))
    if chip.kind == "tpu":
        return found | (l.pipe > 1) | (l.expert > 1) | ((l.context > 1) & (job.seq < LONG))
    return found | ((l.context > 1) & (job.seq < PART * l.context)) | ((l.expert == 1) & experts)


def sure_seconds(job: Job, chip: Chip, l: Layout, forecast: Amount) -> Amount:
    """Return the forecast to choose by: layouts that no published run has count as slower, by their class's error."""
    return forecast * np.where(is_unusual(job, chip, l), 1 + (usual_error(job, chip) or 0.0), 1.0)
