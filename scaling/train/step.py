"""One training step on a mesh: `step(params, opt_state, batch) -> (params, opt_state, metrics)`, pure."""

import math
from collections.abc import Callable
from typing import Any

import torch

from scaling import optim, tree
from scaling.collectives import all_gather, shard, wait
from scaling.models import transformer as model
from scaling.models.dropout import at_step
from scaling.strategies import transformer
from scaling.strategies.transformer.stages import stored_places
from scaling.train import guards
from scaling.train.settings import DTYPES, Settings


def drawn_params(settings: Settings, mesh, device: "str | None" = None, schedule=None) -> dict:
    """This rank's params as a run begins with them, drawn by the seed: no rank holds more than its shards."""
    config, places = settings.model, stored_places(settings.model, mesh, schedule)
    types = transformer.specs(config, mesh, zero=settings.zero, schedule=schedule)
    return model.init(config, settings.seed, DTYPES[settings.dtype], device, mesh=mesh, specs=types, places=places)


class Updated:
    """The part of the params that this rank updates, typed as the gradients.

    With ZeRO-1 and 2 that is a shard over X of what it holds; the new params are gathered after the update. Otherwise
    it is all of what it holds. No line depends on a schedule.
    """

    def __init__(self, settings: Settings, mesh):
        config, zero = settings.model, settings.zero
        self.types = transformer.grad_specs(config, mesh, zero=zero)
        held = tree.leaves(transformer.specs(config, mesh, zero=zero))
        self.mesh, self.moved = mesh, [*zip(held, tree.leaves(self.types), strict=True)]

    def shards(self, params) -> Any:
        """Return the shards to update, as copies where they are a part of the params."""
        leaves = zip(tree.leaves(params), self.moved, strict=True)
        own = [shard(f"{before} -> {after}", W, self.mesh) if before != after else W for W, (before, after) in leaves]
        return tree.unflatten(params, own)

    def whole(self, shards, params, donate: bool) -> Any:
        """Gather the updated shards; with `donate` into the params, leaf by leaf, the next one in flight."""
        found, coming = [], []
        for W, old, (before, after) in zip(tree.leaves(shards), tree.leaves(params), self.moved, strict=True):
            into = old if donate else None
            line = f"{after} -> {before}"
            coming.append(all_gather(line, W, self.mesh, async_op=True, out=into) if before != after else W)
            found += [wait(coming.pop(0))] if len(coming) > 1 else []
        return tree.unflatten(params, [*found, *map(wait, coming)])


def begin_state(settings: Settings, mesh, optimizer: optim.Optimizer, params) -> dict:
    """Return the optimizer's state for the part of the params that this rank updates."""
    return optimizer.init(Updated(settings, mesh).shards(params))


def gradients(settings: Settings, mesh, schedule=None) -> Callable:
    """f(params, (tokens, targets, segments), step, scale) -> (loss, gradients, their norm)."""
    config, zero = settings.model, settings.zero
    types = transformer.grad_specs(config, mesh, zero=zero, schedule=schedule)
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
    f, updated = gradients(settings, mesh), Updated(settings, mesh)
    types = updated.types
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
        shards, state = optimizer.update(clipped, state, updated.shards(params), donate=donate, **options)
        del grads, clipped
        return updated.whole(shards, params, donate), state, metrics

    return step
