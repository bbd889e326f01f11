"""Training a Transformer on a mesh: `step(params, opt_state, batch) -> (params, opt_state, metrics)`, and its run.

A run's state is params, the optimizer's state and the number of sequences seen: with the seed that decides all that
follows. The run writes metrics.jsonl and checkpoints; it stops, with a checkpoint, when it is asked to.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from scaling import optim, tree
from scaling.collectives import all_reduce
from scaling.cost import transformer as tm
from scaling.models import hf
from scaling.models import transformer as model
from scaling.profile.steps import watched
from scaling.sizes import format_sizes
from scaling.spec import format_axes
from scaling.strategies import transformer
from scaling.strategies.transformer.stages import slots_of
from scaling.train import checkpoint, guards
from scaling.train.batches import ahead
from scaling.train.evaluate import evaluate, local
from scaling.train.inputs import inputs
from scaling.train.settings import DTYPES, Settings, optimizer_of

STOP = "stop"  # a file of this name in the run's folder asks it to save and end


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


def begun(settings: Settings, mesh, optimizer: optim.Optimizer, types: dict) -> tuple[dict, int]:
    """(state, step) that a run begins with: of the latest checkpoint, an HF folder's weights, or drawn by the seed.

    No rank holds more than its shards.
    """
    config, out, dtype = settings.model, Path(settings.out), DTYPES[settings.dtype]
    slots = slots_of(config, mesh, None)
    if settings.resume and checkpoint.complete(out):
        specs = state_specs(optimizer, types)
        state, step = checkpoint.load(out, specs, mesh, places={"L": slots})
        tree.check(state["params"], types, config.sizes | {"L": len(slots)}, mesh)
        if (seed := state["data"]["seed"]) != settings.seed:
            raise ValueError(
                f"{out}: was begun with --seed {seed}, not {settings.seed}\n  fix: give the same, or another --out"
            )
        return state, step
    if settings.weights:
        _, params = hf.load_sharded(settings.weights, types, mesh, dtype, slots=slots)
    else:
        params = model.init(config, settings.seed, dtype, mesh=mesh, specs=types, slots=slots)
    return {"params": params, "optimizer": optimizer.init(params), "data": {"sequences": 0, "seed": settings.seed}}, 0


def state_specs(optimizer: optim.Optimizer, types: dict) -> dict:
    """The types of a run's state; what is not a tensor has none."""
    return {"params": types, "optimizer": optimizer.state_specs(types)}


def run(mesh, settings: Settings) -> dict:
    """Train on every rank of a mesh; returns {"step", "loss", "valid"}."""
    config, out, first = settings.model, Path(settings.out), mesh.rank == 0
    train, valid = inputs(settings)
    optimizer, types = optimizer_of(settings), transformer.specs(config, mesh)
    held, start = begun(settings, mesh, optimizer, types)
    params, state, seen = held["params"], held["optimizer"], held["data"]["sequences"]
    step, result = make_step(settings, mesh, optimizer), {"step": start, "loss": math.nan, "valid": math.nan}
    per_step, flops = settings.batch * settings.seq, 6 * tm.num_params(config)
    specs, places = state_specs(optimizer, types), {"L": slots_of(config, mesh, None)}
    losses, coming = guards.Losses(), ahead(train, seen, settings.batch)
    for number in watched(range(start + 1, settings.steps + 1), settings.profile, mesh.rank):
        began = time.perf_counter()
        whole = next(coming)
        if settings.guard_every and (number - start) % settings.guard_every == 1:
            held = {"params": params, "optimizer": state, "batch": list(whole)}
            guards.check_replicas(held, specs | {"batch": ["t[B, T]"] * 3}, mesh, number)
        params, state, metrics = step(params, state, [local(x, mesh) for x in whole], donate=True)
        loss, norm = metrics["loss"].item(), metrics["grad_norm"].item()
        seen += settings.batch
        seconds = time.perf_counter() - began
        result |= {"step": number, "loss": loss}
        record = {"step": number, "loss": loss, "grad_norm": norm, "seconds": round(seconds, 4)}
        record |= {"tokens_per_second": round(per_step / seconds, 1), "flops_per_second": per_step * flops / seconds}
        last, asked = number == settings.steps, stop_asked(out, mesh)
        if last or asked or (settings.eval_every and number % settings.eval_every == 0):
            result["valid"] = record["valid"] = evaluate(params, valid, settings, mesh)
        if first:
            with open(out / "metrics.jsonl", "a") as log:
                log.write(json.dumps(record) + "\n")
            report(record, settings)
            if jump := losses.jump(loss, number):
                print(f"warning: {jump}", flush=True)
        if last or asked or (settings.save_every and number % settings.save_every == 0):
            held = {"params": params, "optimizer": state, "data": {"sequences": seen, "seed": settings.seed}}
            checkpoint.save(out, held, specs, mesh, number, keep=settings.keep, places=places)
        if asked:
            break
    return result


def stop_asked(out: Path, mesh) -> bool:
    """Whether this run is to save and end: rank 0 has seen the file, and all agree."""
    asked = torch.tensor(float(mesh.rank == 0 and (out / STOP).exists()), device=mesh.device)
    axes = [axis for axis, size in mesh.sizes.items() if size > 1]
    return bool(all_reduce(f"n[] {{U_{format_axes(axes)}}} -> n[]", asked, mesh) if axes else asked)


def report(record: Mapping, settings: Settings) -> None:
    """One line of progress, from rank 0."""
    valid = f"  valid {record['valid']:.4f}" if "valid" in record else ""
    rate_, norm = record["tokens_per_second"], record["grad_norm"]
    print(f"step {record['step']:>6}/{settings.steps}  loss {record['loss']:.4f}  norm {norm:.2f}  "
          f"{rate_:,.0f} tokens/s{valid}", flush=True)  # fmt: skip


def describe(settings: Settings, sizes: Mapping[str, int]) -> str:
    """What is about to run, in a line."""
    s = settings
    params = tm.num_params(s.model)
    where = f"{s.batch} x {s.seq} tokens a step, {os.path.abspath(s.out)}"
    return f"{s.model.name}: {params:,} params on {format_sizes(sizes)}, {where}"
