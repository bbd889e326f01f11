"""A Transformer's training step: predicted on a chip, stage by stage, and run for comparison."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from scaling.common import console
from scaling.cost.counted import CountedStep, Prediction, measured_row, others_idle, pipelined, price, weighted_sum
from scaling.hardware import Chip
from scaling.mesh import AbstractMesh
from scaling.plan import ledger, report
from scaling.plan.job import SCHEDULES, Layout
from scaling.strategies.transformer.types import slots_of
from scaling.train import dry
from scaling.train.programs import chunks_on, step_by_symbols
from scaling.train.settings import Settings, optimizer_of
from scaling.train.step import begin_state, drawn_params, local_shape, make_step


@dataclass(frozen=True)
class StepForecast:
    """The forecast of a Transformer's step: each stage, and the seconds of the whole step."""

    stages: tuple[Prediction, ...]
    seconds: float

    @property
    def fullest(self) -> Prediction:
        """The stage that takes longest."""
        return max(self.stages, key=lambda stage: stage.total)


def predict_transformer(
    settings: Settings, sizes: Mapping[str, int], chip: Chip, shape: Sequence[int] = ()
) -> StepForecast:
    """Price a Transformer's training step, stage by stage.

    Stages do the work of once per step, such as the optimizer's update, at the same time. `shape` is the slice of a
    torus that the mesh is laid on.

    Raises:
        ShardingError, ValueError: The arrays do not divide over the mesh, or the step does not fit.
    """
    Z, ranks, M = sizes.get("Z", 1), AbstractMesh(sizes).size(), settings.microbatches

    def count_stage(z: int, times: int = 1) -> CountedStep:
        some = replace(settings, batch=times * settings.batch, microbatches=times * M)
        return step_by_symbols(some, sizes, dry.busiest(sizes, z), "abstract", memory=False)

    def priced(step: CountedStep, on: Chip = chip) -> Prediction:
        return price(step, sizes, on, settings.dtype, shape)

    def seconds(stage: Prediction) -> float:
        return stage.total if chip.measured else stage.overlapped

    if Z == 1:
        return StepForecast((whole := priced(count_stage(0)),), seconds(whole))
    one, all_ = measured_row(chip, "Matmul", 1), measured_row(chip, "Matmul", ranks)
    faster = max(1.0, min(Z, one.bandwidth / all_.bandwidth)) if one and all_ else 1.0
    kinds: dict[tuple, tuple] = {}  # of stages: whether first, whether last, and the number of empty slots
    stages, slots = [], slots_of(settings.model, AbstractMesh(sizes), settings.pipeline_on(sizes))
    for z in range(Z):
        own = slots[z * len(slots) // Z : (z + 1) * len(slots) // Z]
        kind = z == 0, z == Z - 1, own.count(-1)
        if kind not in kinds:
            whole, twice = count_stage(z), count_stage(z, 2)
            each = weighted_sum([(1, twice), (-1, whole)])  # the work of all microbatches
            once = weighted_sum([(2, whole), (-1, twice)])  # and the step's work once
            beside = priced(each)
            alone = beside.own / faster + sum(t for t in priced(each, others_idle(chip)).comms.values())
            idle = idle_share(settings, sizes, each)
            kinds[kind] = priced(whole), seconds(beside), alone, seconds(priced(once)), idle
        stages.append(kinds[kind])
    whole, beside, alone, once, idles = zip(*stages, strict=True)
    return StepForecast(whole, pipelined(beside, M, alone, max(idles)) + max(once))


def idle_share(settings: Settings, sizes: Mapping[str, int], stage: CountedStep) -> float:
    """Return the idle time of a stage's schedule as a share of 1F1B's.

    A forward pass does one of three equal products of each layer, or one of four if the layer is computed again. So do
    the gradients of weights, but attention has none.
    """
    name = settings.pipeline.partition(":")[0]
    layout = Layout(schedule=name if name in SCHEDULES else "1f1b", chunks=chunks_on(settings, sizes))
    passes = 3 + (settings.remat == "block")
    weights = 1 - stage.attention.amount / stage.flops
    return float(ledger.idle(layout, weights, 1.0, passes - 1.0))


def cost_table(part: Prediction) -> str:
    """Return a table of a step's seconds: computing, and its collectives by kind, the most expensive first."""
    computing = ("products", part.math), ("between", part.between)
    rows = [(what, *[""] * 4, f"{1e3 * seconds:,.2f}", "") for what, seconds in computing]
    for line in sorted(part.lines, key=lambda line: -line.seconds):
        (op, axes, dtype, ahead), calls = line.kind, line.calls
        sizes = f"{calls.number:,.0f}", report.size(calls.amount)
        rows.append((op, "".join(axes), dtype, *sizes, f"{1e3 * line.seconds:,.2f}", "" if ahead else "waited for"))
    head = ["line", "over", "dtype", "calls", "V, all calls", "ms", ""]
    return console.table(rows, head, right=[False, False, False, True, True, True, False])


def transformer_step(settings: Settings, mesh) -> Callable[[], Any]:
    """Return a function that runs a training step on a mesh; each call continues from the last one."""
    config, optimizer = settings.model, optimizer_of(settings)
    params = drawn_params(settings, mesh)
    held, run = [params, begin_state(settings, mesh, optimizer, params)], make_step(settings, mesh, optimizer)
    make = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, config.V, local_shape(settings, mesh), generator=make) for _ in range(2))

    def once():
        held[0], held[1], _ = run(*held, (tokens, targets, None), donate=True)

    return once
