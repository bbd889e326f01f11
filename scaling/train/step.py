"""One training step on a mesh: `step(params, opt_state, batch) -> (params, opt_state, metrics)`, pure."""

from collections.abc import Callable

import torch

from scaling import optim
from scaling.strategies import transformer
from scaling.train import guards
from scaling.train.settings import DTYPES, Settings


def make_step(settings: Settings, mesh, optimizer: optim.Optimizer) -> Callable:
    """step(params, opt_state, (tokens, targets, segments), donate) -> (params, opt_state, {"loss", "grad_norm"})."""
    config, types = settings.model, transformer.specs(settings.model, mesh)

    def step(params, state, batch, donate: bool = False):
        inputs, targets, segments = batch
        loss, grads = transformer.loss_and_grads(
            params, inputs, targets, config, mesh, segments=segments, microbatches=settings.microbatches,
            remat=settings.remat, seed=settings.seed, sums=torch.promote_types(DTYPES[settings.dtype], torch.float32),
        )  # fmt: skip
        clipped, norm = optim.clip_by_global_norm(grads, types, mesh, settings.clip)
        guards.check_finite(loss, norm, grads, types, mesh, int(state["step"]) + 1)
        params, state = optimizer.update(clipped, state, params, donate=donate)
        return params, state, {"loss": loss, "grad_norm": norm}

    return step
