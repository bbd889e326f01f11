"""Training steps on meshes of so many ranks, predicted from a chip file alone and run: how far off, and in which order.

Of the book's stack by each strategy, and of a Transformer on every kind of axis. Kendall's tau counts the pairs of
layouts that the prediction puts in the right order, less those that it puts in the wrong one, over all pairs.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from types import ModuleType

import torch
from tabulate import tabulate

from scaling.configs import Config, get
from scaling.hardware import Chip
from scaling.measure.rates import timed
from scaling.mesh import Mesh
from scaling.plan import predict as stack
from scaling.plan.predict import Size
from scaling.plan.transformer_step import predict_transformer, transformer_step
from scaling.spec.sizes import format_sizes
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel
from scaling.train.settings import DTYPES, Settings

SIZE = Size(4, 512, 512, 2048)
MODEL = get("tiny").with_(L=4, D=256, F=1024, N=8, K=4, H=32)
SETTINGS = Settings(MODEL, "", "", batch=16, seq=128)
STRATEGIES: dict[str, ModuleType] = {"DP": data_parallel, "FSDP": fsdp, "TP": tensor_parallel, "FSDP+TP": fsdp_tp}


@dataclass(frozen=True)
class StepLayout:
    """A training step on a mesh: of the book's stack by a strategy, or of a Transformer."""

    sizes: dict[str, int]
    strategy: str = ""
    size: Size = SIZE
    settings: Settings = SETTINGS

    @property
    def job(self) -> str:
        return f"{self.strategy} {self.size}" if self.strategy else words(self.settings)

    def predicted(self, chip: Chip, dtype: str = "fp32") -> float:
        """Seconds of a step."""
        if self.strategy:
            return stack.predict(STRATEGIES[self.strategy], self.size, self.sizes, chip, dtype).total
        return predict_transformer(self.settings, self.sizes, chip).seconds

    def prepared(self, mesh, dtype: str = "fp32") -> Callable:
        """A function that runs a step on this rank."""
        if not self.strategy:
            return transformer_step(self.settings, mesh)
        module, make = STRATEGIES[self.strategy], torch.Generator().manual_seed(mesh.rank)

        def drawn(shape):
            return (torch.randn(shape, generator=make) * self.size.D**-0.5).to(DTYPES[dtype])

        params, In = stack.make_shards(module, self.size, mesh, drawn)
        return partial(stack.sgd_step, module, params, In, mesh)


def words(s: Settings) -> str:
    extra = f" M={s.microbatches}" if s.microbatches > 1 else ""
    config: Config = s.model
    return f"Transformer L={config.L} D={config.D} {s.batch} x {s.seq}{extra}"


def layouts(ranks: int) -> list[StepLayout]:
    """Ten of so many ranks, if 4 divides them."""
    half, micro = ranks // 2, Settings(MODEL, "", "", batch=16, seq=128, microbatches=4)
    found = [StepLayout({axis: ranks}, name) for name, axis in (("DP", "X"), ("FSDP", "X"), ("TP", "Y"))]
    found += [StepLayout({"X": half, "Y": 2}, "FSDP+TP")] if half > 1 else []
    found += [StepLayout({axis: ranks}) for axis in "XY"]
    meshes = ({"P": half, "X": 2}, {"X": half, "Y": 2}, {"C": 2, "Y": half}) if half > 1 else ()
    found += [StepLayout(dict(sizes)) for sizes in meshes]
    return [*found, StepLayout({"Z": 2, "X": half} if half > 1 else {"Z": 2}, settings=micro)]


@dataclass(frozen=True)
class Check:
    """A step as predicted and as measured, in seconds."""

    layout: StepLayout
    predicted: float
    seconds: float

    @property
    def error(self) -> float:
        """Relative: +0.2 if the prediction is 20% too long."""
        return self.predicted / self.seconds - 1


def run_all(mesh, steps: Sequence[StepLayout], repeats: int, dtype: str) -> list[float]:
    """Seconds of each step, on this rank."""
    found = []
    for step in steps:
        on = Mesh(step.sizes)
        found.append(timed(step.prepared(on, dtype), on, repeats))
    return found


def checked(chip: Chip, steps: Sequence[StepLayout], per_rank: Sequence[Sequence[float]], dtype: str) -> list[Check]:
    """Of what each rank measured: the slowest one's."""
    slowest = (max(times) for times in zip(*per_rank, strict=True))
    return [Check(step, step.predicted(chip, dtype), t) for step, t in zip(steps, slowest, strict=True)]


def tau(checks: Sequence[Check]) -> float:
    """Kendall's, from -1 to 1."""
    signs = [(a.predicted - b.predicted) * (a.seconds - b.seconds) for a, b in combinations(checks, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / max(1, len(signs))


def median_error(checks: Sequence[Check]) -> float:
    return statistics.median(abs(c.error) for c in checks)


def table(checks: Sequence[Check]) -> str:
    rows = [
        (c.layout.job, format_sizes(c.layout.sizes), f"{1e3 * c.predicted:.1f}", f"{1e3 * c.seconds:.1f}",
         f"{c.error:+.0%}")
        for c in checks
    ]  # fmt: skip
    align = ("left", "left", "right", "right", "right")
    head = ["step", "mesh", "predicted ms", "measured ms", "error"]
    lines = [tabulate(rows, head, "simple", disable_numparse=True, colalign=align), ""]
    lines.append(f"median error {median_error(checks):.0%}, Kendall's tau of all {tau(checks):.2f}")
    for name, some in (("the stack", [c for c in checks if c.layout.strategy]),
                       ("the Transformer", [c for c in checks if not c.layout.strategy])):  # fmt: skip
        if len(some) > 2:
            lines.append(f"of {name}: median error {median_error(some):.0%}, tau {tau(some):.2f}")
    return "\n".join(lines)


def as_dict(check: Check) -> dict:
    """Seconds."""
    return {"step": check.layout.job, "mesh": check.layout.sizes, "predicted": check.predicted,
            "measured": check.seconds, "error": check.error}  # fmt: skip
