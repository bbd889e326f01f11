"""Published runs beside the planner: what they did and measured, what is forecast for their mesh, what it would
take."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scaling.configs import Config, get
from scaling.hardware import Chip, chip
from scaling.plan.job import Job


@dataclass(frozen=True)
class Run:
    """A published run: the job, the chips, the mesh, tokens/s a chip as measured, and where it stands."""

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


@cache
def runs() -> tuple[Run, ...]:
    data = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
    return tuple(read(row, data) for row in data["run"])


def read(row: dict, data: dict) -> Run:
    """One row of published.toml."""
    name = row["model"]
    config = Config(name=name, **data["models"][name]) if name in data["models"] else get(name)
    params, grads, optimizer = row["bytes"]
    job = Job(
        config, row["sequences"] * row["seq"], row["seq"], row.get("dtype", "bf16"), params, grads, optimizer,
    )  # fmt: skip
    recipe = tuple((key, row[key]) for key in ("microbatches", "schedule", "chunks", "remat", "zero") if key in row)
    tokens = row.get("tokens") or 1e12 * row["tflops"] / token_flops(job, row["count"])
    return Run(
        row["name"], job, chip(row["chip"], row.get("variant")), row["chips"], tuple(row["mesh"].items()), recipe,
        tokens, data["sources"][row["source"]], row.get("wanting", ""), row.get("gave", ""),
    )  # fmt: skip


def token_flops(job: Job, count: str) -> float:
    """FLOPs of a token as a source counts them: of attention the whole square ("full"), or half of it ("causal")."""
    w = job.work
    return 6 * w.active + 3 * w.L * w.dots * (2 if count == "full" else 1)
