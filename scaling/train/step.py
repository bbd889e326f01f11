"""One training step on a mesh: `step(params, opt_state, batch) -> (params, opt_state, metrics)`, pure."""

from collections.abc import Callable

import torch

from scaling import optim
from scaling.strategies import transformer
from scaling.train import guards
from scaling.train.settings import DTYPES, Settings


def gradients(settings: Settings, mesh) -> Callable:
    """f(params, (tokens, targets, segments)) -> (loss, gradients, the clipped ones, the norm that they had)."""
    config, types = settings.model, transformer.specs(settings.model, mesh)
    sums = torch.promote_types(DTYPES[settings.dtype], torch.float32)

    def f(params, batch):
        inputs, targets, segments = batch
        loss, grads = transformer.loss_and_grads(
            params, inputs, targets, config, mesh, segments=segments, microbatches=settings.microbatches,
            remat=settings.remat, seed=settings.seed, sums=sums,
        )  # fmt: skip
        return loss, grads, *optim.clip_by_global_norm(grads, types, mesh, settings.clip)

    return f


def make_step(settings: Settings, mesh, optimizer: optim.Optimizer) -> Callable:
    """step(params, opt_state, (tokens, targets, segments), donate) -> (params, opt_state, {"loss", "grad_norm"}).

    With `norms`, metrics also have the norm of each leaf's gradient. ArithmeticError if one is not finite.
    """
    f, types = gradients(settings, mesh), transformer.specs(settings.model, mesh)

    def step(params, state, batch, donate: bool = False):
        loss, grads, clipped, norm = f(params, batch)
        guards.check_finite(loss, norm, grads, types, mesh, int(state["step"]) + 1)
        metrics = {"loss": loss, "grad_norm": norm}
        if settings.norms:
            metrics["norms"] = guards.leaf_norms(grads, types, mesh)
        params, state = optimizer.update(clipped, state, params, donate=donate)
        return params, state, metrics

    return step
