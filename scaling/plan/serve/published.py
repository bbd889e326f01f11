"""Compare published serving figures with their bounds: `python -m scaling.plan serve published`.

The bound is the step's (weights and KV caches read, FLOPs; all overlapped), without collectives. The rest of a measured
step is explained by three causes, none of them fitted to a row: memory that is read at less than its peak (a share with
its source), the collectives if nothing hides them, and a remainder, which is negative if collectives are hidden.
"""

import statistics
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scaling.common import console
from scaling.common.console import complain, complaining
from scaling.configs import Config, get
from scaling.cost import decoding, serving
from scaling.hardware import Chip, chip
from scaling.plan.published import chosen_rows
from scaling.plan.report import folded


@dataclass(frozen=True)
class PublishedStep:
    """A published decode step: `rate` tokens/s of each request, `batch` sequences of `context` over all replicas."""

    group: str
    config: Config
    chip: Chip
    shape: tuple[int, ...]
    replicas: int
    weights: str
    kv: str
    batch: int
    context: int
    rate: float
    memory: float

    @property
    def chips(self) -> int:
        """The chips of one replica."""
        return self.shape[0] if len(self.shape) == 1 else self.shape[0] * self.shape[1]

    @property
    def own(self) -> int:
        """The number of sequences on one replica."""
        return self.batch // self.replicas

    @property
    def seconds(self) -> float:
        """Measured seconds of a step."""
        return 1 / self.rate

    @property
    def step(self) -> serving.DecodeStep:
        """The decode step at the measured tensor parallelism, with each cache full and stored once."""
        sizes = {"Y": self.chips}
        load = serving.load(self.config, self.weights, self.kv)
        moved = decoding.collectives("heads", self.config, self.own, sizes)
        comms = sum(decoding.collective_seconds(one, self.chip, self.shape, sizes) for one in moved)
        return serving.step(load, self.own, self.context, self.chip, self.chips, comms=comms)

    @property
    def bound(self) -> float:
        """Seconds by the roofline: reading caches, then the slower of reading weights and computing."""
        return self.step.kv + max(self.step.weights, self.step.math)

    @property
    def slower(self) -> float:
        """Additional seconds because memory is read at less than its peak."""
        return self.step.kv / self.memory + max(self.step.weights / self.memory, self.step.math) - self.bound

    @property
    def rest(self) -> float:
        """Seconds that nothing explains; negative if collectives are hidden."""
        return self.seconds - self.bound - self.slower - self.step.comms


@cache
def data() -> dict:
    """Return the table of published.toml."""
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def measured_steps(group: dict) -> Iterator[PublishedStep]:
    """Yield the measured steps of one group of published.toml."""
    hardware, memory = chip(group["chip"]), group["memory"][0]
    for batch, context, rate in group.get("rows", ()):
        yield PublishedStep(
            group["name"], get(group["model"]), hardware, tuple(group["shape"]), group.get("replicas", 1),
            group["weights"], group["kv"], batch, context, rate, memory,
        )  # fmt: skip
    for name, gpus, rate in group.get("runs", ()):
        yield PublishedStep(
            group["name"], get(name), hardware, (gpus,), 1, group["weights"], group["kv"], 1, group["context"], rate,
            memory,
        )  # fmt: skip


def table(groups: list[dict]) -> str:
    """Return the table as text, at most 100 columns wide."""
    head = ["model", "chips", "B", "S", "tok/s", "ms", "bound", "share", "memory", "coll.", "rest"]
    sources = list(dict.fromkeys(group["source"] for group in groups))
    lines = ["ms a step as published, its bound, and what may have come on top", ""]
    shares = []
    for group in groups:
        found = list(measured_steps(group))
        shares += [one.bound / one.seconds for one in found]
        lines.append(
            f"{group['name']} on {found[0].chip.name}: weights {group['weights']}, KV cache {group['kv']}, bf16 FLOPs "
            f"[{sources.index(group['source']) + 1}]"
        )
        body = [
            (one.config.name, one.chips * one.replicas, one.batch, one.context, f"{one.rate:g}",
             *(f"{1e3 * t:.2f}" for t in (one.seconds, one.bound)), f"{one.bound / one.seconds:.0%}",
             *(f"{1e3 * t:+.2f}" for t in (one.slower, one.step.comms, one.rest))) for one in found
        ]  # fmt: skip
        lines += [console.table(body, head)]
        lines += [f"  {group['says']}", ""]
    lines += [
        "share: bound / measured. On top, each in ms: memory: HBM read at "
        + "; ".join(dict.fromkeys(f"{share:.0%} of its peak ({where})" for share, where in
                                  (group["memory"] for group in groups)))
        + ". coll.: the collectives of TP if nothing hides them. rest: what is left; negative where they are hidden.",
        f"{len(shares)} steps: none beats its bound; the median is {statistics.median(shares):.0%} of it.",
        "",
        *(f"[{i + 1}] {data()['sources'][source]}" for i, source in enumerate(sources)),
    ]  # fmt: skip
    return folded(lines)


@complaining(ValueError, code=2)
def main(arguments: list[str]) -> int:
    """Print the published figures; return the exit status, 1 if one beats its bound."""
    named_groups = [(group["name"], group) for group in data()["group"]]
    groups = chosen_rows(arguments, "serve published", __doc__ or "", named_groups)
    print(table(groups))
    beaten = [one for group in groups for one in measured_steps(group) if one.seconds < one.bound]
    for one in beaten:
        complain(f"{one.group}: {one.config.name}, batch {one.batch}: beats its bound")
    return int(bool(beaten))
