"""Training a Transformer on a mesh: `step(params, opt_state, batch) -> (params, opt_state, metrics)`, and its run.

A run's state is params, the optimizer's state and the number of steps: with the seed that decides all that follows. The
run writes metrics.jsonl and checkpoints; it stops, with a checkpoint, when it is asked to.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaling import optim, tree
from scaling.collectives import all_reduce
from scaling.configs import Config
from scaling.cost import transformer as tm
from scaling.models import transformer as model
from scaling.sizes import format_sizes
from scaling.spec import format_axes
from scaling.strategies import transformer
from scaling.strategies.axes import present
from scaling.train import checkpoint, tokens

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
STOP = "stop"  # a file of this name in the run's folder asks it to save and end


@dataclass(frozen=True)
class Settings:
    """What a run is made of beside its mesh. `batch`: sequences of the global batch, of `seq` tokens each."""

    model: Config
    data: str
    out: str
    batch: int = 32
    seq: int = 256
    steps: int = 200
    microbatches: int = 1
    lr: float = 1e-3
    warmup: int = 20
    schedule: str = "cosine"
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    dtype: str = "fp32"
    remat: str = "none"
    save_every: int = 100
    keep: int = 3
    eval_every: int = 100
    resume: bool = False


def rate(settings: Settings) -> Callable[[Tensor], Tensor]:
    """The learning rate by the number of updates: warmup, then cosine, wsd (down over the last tenth) or constant."""
    s = settings
    tail = max(1, s.steps // 10)

    def at(count: Tensor) -> Tensor:
        up = ((count + 1) / max(1, s.warmup)).clamp(max=1.0)
        if s.schedule == "cosine":
            gone = ((count - s.warmup) / max(1, s.steps - s.warmup)).clamp(0.0, 1.0)
            return s.lr * up * (0.1 + 0.45 * (1 + torch.cos(math.pi * gone)))
        if s.schedule == "wsd":
            return s.lr * up * ((s.steps - count) / tail).clamp(0.0, 1.0)
        return s.lr * up

    return at


def optimizer_of(settings: Settings) -> optim.Optimizer:
    """AdamW, float32 masters for bfloat16 params, no weight decay on norms, biases and embeddings."""
    options: dict[str, Any] = {"betas": (0.9, 0.95), "master": settings.dtype == "bf16"}
    lr = rate(settings)
    parts = {
        "decayed": optim.adamw(lr, weight_decay=settings.weight_decay, **options),
        "plain": optim.adamw(lr, weight_decay=0.0, **options),
    }

    def parted(x) -> dict[str, dict]:
        named: dict[str, dict] = {"decayed": {}, "plain": {}}
        for where, leaf in tree.named_leaves(x).items():
            named["decayed" if "W_" in where or "unembed" in where else "plain"][where] = leaf
        return named

    def update(grads, state, params, donate=False):
        g, p, new, states = parted(grads), parted(params), {}, {}
        for part, rule in parts.items():
            some, states[part] = rule.update(g[part], state[part], p[part], donate=donate)
            new |= some
        leaves = iter(new[where] for where in tree.named_leaves(params))
        return tree.map(lambda _: next(leaves), params), states

    return optim.Optimizer(
        lambda params: {part: parts[part].init(leaves) for part, leaves in parted(params).items()},
        update,
        lambda specs: {part: parts[part].state_specs(leaves) for part, leaves in parted(specs).items()},
    )


def local(x: Tensor, mesh) -> Tensor:
    """This rank's rows and tokens of x[B, T], whole on every rank."""
    return tree.shard(x.to(mesh.device), str(present("t[B_PXE, T_C]", mesh)), mesh)


def make_step(settings: Settings, mesh, optimizer: optim.Optimizer) -> Callable:
    """step(params, opt_state, (tokens, targets, segments), donate) -> (params, opt_state, {"loss", "grad_norm"})."""
    config, types = settings.model, transformer.specs(settings.model, mesh)

    def step(params, state, batch, donate: bool = False):
        inputs, targets, segments = batch
        loss, grads = transformer.loss_and_grads(
            params, inputs, targets, config, mesh, segments=segments, microbatches=settings.microbatches,
            remat=settings.remat, seed=settings.seed,
        )  # fmt: skip
        grads, norm = optim.clip_by_global_norm(grads, types, mesh, settings.clip)
        params, state = optimizer.update(grads, state, params, donate=donate)
        return params, state, {"loss": loss, "grad_norm": norm}

    return step


def evaluate(params, batches: tokens.Batches, settings: Settings, mesh, count: int = 4) -> float:
    """The mean loss of a few held-out batches, nats a token."""
    losses = []
    for i in range(min(count, max(1, batches.sequences // batches.batch))):
        some, targets, ids = [local(x, mesh) for x in batches.at(i)]
        losses.append(transformer.loss_and_grads(params, some, targets, settings.model, mesh, segments=ids)[0].item())
    return sum(losses) / len(losses)


def run(mesh, settings: Settings, initial: Mapping | None = None) -> dict:
    """Train on every rank of a mesh; returns {"step", "loss", "valid"}. `initial`: whole params to begin with."""
    torch.manual_seed(settings.seed)
    config, out, first = settings.model, Path(settings.out), mesh.rank == 0
    corpus = tokens.load(settings.data)
    if (top := int(corpus.tokens.max())) >= config.V:
        raise ValueError(
            f"{settings.data}: token {top} lies outside the vocabulary of {config.name}, 0..{config.V - 1}"
        )
    train, valid = tokens.split(corpus, settings.batch, settings.seq, settings.seed)
    optimizer, types = optimizer_of(settings), transformer.specs(config, mesh)
    specs = {"params": types, "optimizer": optimizer.state_specs(types)}
    dtype = DTYPES[settings.dtype]
    if settings.resume and checkpoint.complete(out):
        loaded, begun = checkpoint.load(out, specs, mesh)
        params, state = loaded["params"], loaded["optimizer"]
    else:
        whole = model.init(config, settings.seed, dtype) if initial is None else initial
        params, begun = transformer.shard(whole, config, mesh), 0
        state = optimizer.init(params)
    step, result = make_step(settings, mesh, optimizer), {"step": begun, "loss": math.nan, "valid": math.nan}
    per_step, flops = settings.batch * settings.seq, 6 * tm.num_params(config)
    saved = begun
    for number in range(begun, settings.steps):
        began = time.perf_counter()
        batch = [local(x, mesh) for x in train.at(number)]
        params, state, metrics = step(params, state, batch, donate=True)
        loss, norm = metrics["loss"].item(), metrics["grad_norm"].item()
        if not math.isfinite(loss + norm):
            raise ArithmeticError(
                f"step {number + 1}: the loss is {loss}, the gradients' norm {norm}; saved last: step {saved}"
            )
        seconds = time.perf_counter() - began
        result |= {"step": number + 1, "loss": loss}
        record = {"step": number + 1, "loss": loss, "grad_norm": norm, "seconds": round(seconds, 4)}
        record |= {"tokens_per_second": round(per_step / seconds, 1), "flops_per_second": per_step * flops / seconds}
        last, asked = number + 1 == settings.steps, stop_asked(out, mesh)
        if last or asked or (settings.eval_every and (number + 1) % settings.eval_every == 0):
            result["valid"] = record["valid"] = evaluate(params, valid, settings, mesh)
        if first:
            with open(out / "metrics.jsonl", "a") as log:
                log.write(json.dumps(record) + "\n")
            report(record, settings)
        if last or asked or (settings.save_every and (number + 1) % settings.save_every == 0):
            held = {"params": params, "optimizer": state, "data": {"sequences": (number + 1) * settings.batch}}
            checkpoint.save(out, held, specs, mesh, number + 1, keep=settings.keep)
            saved = number + 1
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
