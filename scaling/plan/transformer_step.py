"""A Transformer's training step: predicted on a chip, stage by stage, and run to compare."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scaling import tree
from scaling.hardware import Chip
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.plan.counted import CountedStep, Prediction, count_call, measured_row, others_idle, pipelined, price
from scaling.strategies import transformer
from scaling.strategies.transformer.stages import slots_of
from scaling.train.dry import local_shape, step_shapes
from scaling.train.settings import DTYPES, Settings, optimizer_of
from scaling.train.step import gradients, make_step

UPDATE = 7  # passes of AdamW over params: of them, their gradients and both moments three are written


def counted_transformer(settings: Settings, sizes: Mapping[str, int], z: int = 0) -> CountedStep:
    """What a Transformer's training step does on each device of stage z."""
    mesh = AbstractMesh(sizes, {"Z": z} if z else None)
    params, (tokens, targets, _) = step_shapes(settings, mesh)
    f = gradients(settings, mesh)
    found = count_call(lambda: f(params, (tokens, targets, None)))
    for W in tree.leaves(params):
        found.plain.add(UPDATE * W.nbytes)
    return found


@dataclass(frozen=True)
class StepForecast:
    """A Transformer's step: what each stage is forecast to take, and the whole step."""

    stages: tuple[Prediction, ...]
    seconds: float

    @property
    def fullest(self) -> Prediction:
        return max(self.stages, key=lambda stage: stage.total)


def predict_transformer(settings: Settings, sizes: Mapping[str, int], chip: Chip) -> StepForecast:
    """Price a Transformer's training step, stage by stage. ShardingError or ValueError for what does not fit."""
    Z, ranks = sizes.get("Z", 1), AbstractMesh(sizes).size()
    counts = [counted_transformer(settings, sizes, z) for z in range(Z)]
    stages = tuple(price(did, sizes, chip, settings.dtype) for did in counts)
    one, all_ = measured_row(chip, "Matmul", 1), measured_row(chip, "Matmul", ranks)
    faster = max(1.0, min(Z, one.bandwidth / all_.bandwidth)) if one and all_ else 1.0
    alone = []
    for did, stage in zip(counts, stages, strict=True):
        comms = sum(seconds for _, seconds in price(did, sizes, others_idle(chip), settings.dtype).comms)
        alone.append(stage.own / faster + comms)
    return StepForecast(stages, pipelined(stages, settings.microbatches, alone))


def transformer_step(settings: Settings, mesh) -> Callable[[], Any]:
    """A function that runs one training step on a mesh, again and again, each from where the last one ended."""
    config, optimizer = settings.model, optimizer_of(settings)
    types, slots = transformer.specs(config, mesh), slots_of(config, mesh, None)
    params = model.init(config, 0, DTYPES[settings.dtype], mesh=mesh, specs=types, slots=slots)
    held, run = [params, optimizer.init(params)], make_step(settings, mesh, optimizer)
    make = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, config.V, local_shape(settings, mesh), generator=make) for _ in range(2))

    def once():
        held[0], held[1], _ = run(*held, (tokens, targets, None), donate=True)

    return once
