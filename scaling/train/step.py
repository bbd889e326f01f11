"""One training step on a mesh: `step(params, opt_state, batch) -> (params, opt_state, metrics)`, pure."""

import math
from collections.abc import Callable

import torch

from scaling import optim
from scaling.models import transformer as model
from scaling.models.dropout import at_step
from scaling.strategies import transformer
from scaling.strategies.transformer.stages import stored_places
from scaling.train import guards
from scaling.train.settings import DTYPES, Settings


def drawn_params(settings: Settings, mesh, device: "str | None" = None, zero: int = 3, schedule=None) -> dict:
    """This rank's params as a run begins with them, drawn by the seed: no rank holds more than its shards."""
    config = settings.model
    types, places = transformer.specs(config, mesh, zero=zero, schedule=schedule), stored_places(config, mesh, schedule)
    return model.init(config, settings.seed, DTYPES[settings.dtype], device, mesh=mesh, specs=types, places=places)


def gradients(settings: Settings, mesh, zero: int = 3, schedule=None) -> Callable:
    """f(params, (tokens, targets, segments), step, scale) -> (loss, gradients, their norm)."""
    config, types = settings.model, transformer.specs(settings.model, mesh, zero=zero, schedule=schedule)
    sums = torch.promote_types(DTYPES[settings.dtype], torch.float32)

    def f(params, batch, step: int = 0, scale: float = 1.0):
        inputs, targets, segments = batch
        loss, grads = transformer.loss_and_grads(
            params, inputs, targets, config, mesh, segments=segments, microbatches=settings.microbatches,
            remat=settings.remat, keep_weights=settings.keep_weights, seed=at_step(settings.seed, step), sums=sums,
            scale=scale, zero=zero, schedule=schedule,
        )  # fmt: skip
        return loss, grads, optim.global_norm(grads, types, mesh)

    return f


def make_step(settings: Settings, mesh, optimizer: optim.Optimizer) -> Callable:
    """step(params, opt_state, (tokens, targets, segments), donate) -> (params, opt_state, {"loss", "grad_norm"}).

    With `norms`, metrics also have the norm of each leaf's gradient; with float16 the "scale" of the loss. There a step
    whose gradients are not finite leaves the params alone and halves the scale. ArithmeticError if that cannot help:
    without a scale, with one that is 1 already, or if the loss itself is not finite.
    """
    f, types = gradients(settings, mesh), transformer.specs(settings.model, mesh)
    moved = {"specs": types, "mesh": mesh} if settings.optimizer == "muon" else {}  # what is not elementwise

    def step(params, state, batch, donate: bool = False):
        number, scale, options = int(state["step"]) + 1, float(state.get("scale", 1.0)), dict(moved)
        loss, grads, norm = f(params, batch, number, scale)
        metrics = {"loss": loss, "grad_norm": norm}
        if "scale" in state:
            metrics["scale"], options["finite"] = scale, math.isfinite(norm.item())
        if scale <= 1 or not math.isfinite(loss.item()):
            guards.check_finite(loss, norm, grads, types, mesh, number)
        if settings.norms:
            metrics["norms"] = guards.leaf_norms(grads, types, mesh)
        clipped = optim.scaled_to(grads, norm, settings.clip, donate=True)
        params, state = optimizer.update(clipped, state, params, donate=donate, **options)
        return params, state, metrics

    return step
