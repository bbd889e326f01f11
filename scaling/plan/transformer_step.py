"""A Transformer's training step: predicted on a chip, stage by stage, and run to compare."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scaling.cost.counted import CountedStep, Prediction, measured_row, others_idle, pipelined, price
from scaling.hardware import Chip
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.strategies.transformer.stages import stored_places
from scaling.train import dry
from scaling.train.dry import local_shape
from scaling.train.settings import DTYPES, Settings, optimizer_of
from scaling.train.step import make_step


@dataclass(frozen=True)
class StepForecast:
    """A Transformer's step: what each stage is forecast to take, and the whole step."""

    stages: tuple[Prediction, ...]
    seconds: float

    @property
    def fullest(self) -> Prediction:
        return max(self.stages, key=lambda stage: stage.total)


def predict_transformer(
    settings: Settings, sizes: Mapping[str, int], chip: Chip, shape: Sequence[int] = ()
) -> StepForecast:
    """Price a Transformer's training step, stage by stage; of rows that are one document each. `shape`: of the slice of
    a torus that the mesh is laid on. ShardingError or ValueError for what does not fit."""
    Z, ranks, dtype = sizes.get("Z", 1), AbstractMesh(sizes).size(), settings.dtype
    kinds: dict[tuple, CountedStep] = {}  # of stages: the first, the last, and those between by their number of layers

    def did(z: int) -> CountedStep:
        kind = z == 0, z == Z - 1, z < settings.model.sizes["L"] % Z
        if kind not in kinds:
            coord = {"Z": z} if z else None
            kinds[kind] = dry.counted(settings, sizes, coord, "abstract", documents=False, memory=False)
        return kinds[kind]

    def seconds(stage: Prediction) -> float:
        return stage.total if chip.measured else stage.overlapped

    stages = tuple(price(did(z), sizes, chip, dtype, shape) for z in range(Z))
    one, all_ = measured_row(chip, "Matmul", 1), measured_row(chip, "Matmul", ranks)
    faster = max(1.0, min(Z, one.bandwidth / all_.bandwidth)) if one and all_ else 1.0
    alone = []
    for z, stage in enumerate(stages):
        comms = sum(each for _, each in price(did(z), sizes, others_idle(chip), dtype, shape).comms)
        alone.append(stage.own / faster + comms)
    return StepForecast(stages, pipelined([seconds(stage) for stage in stages], settings.microbatches, alone))


def transformer_step(settings: Settings, mesh) -> Callable[[], Any]:
    """A function that runs one training step on a mesh, again and again, each from where the last one ended."""
    config, optimizer = settings.model, optimizer_of(settings)
    types, places = transformer.specs(config, mesh), stored_places(config, mesh)
    params = model.init(config, 0, DTYPES[settings.dtype], mesh=mesh, specs=types, places=places)
    held, run = [params, optimizer.init(params)], make_step(settings, mesh, optimizer)
    make = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, config.V, local_shape(settings, mesh), generator=make) for _ in range(2))

    def once():
        held[0], held[1], _ = run(*held, (tokens, targets, None), donate=True)

    return once
