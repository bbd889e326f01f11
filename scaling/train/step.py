"""Make the training step on a mesh: `step(params, opt_state, batch) -> (params, opt_state, metrics)`, pure.

`make_step` comes first, then the functions that it calls, and then the types, params and state that a run begins with.
`train.counting` counts the same code's step on an abstract mesh, without data.
"""

import warnings
from collections.abc import Callable, Mapping

import torch

from scaling import optim, tree
from scaling.common.limits import LIMITS, Limits
from scaling.configs import Config
from scaling.models import adapters, hf
from scaling.models import transformer as model
from scaling.models.dropout import at_step
from scaling.models.lora import adapter_specs
from scaling.models.moe import update_bias
from scaling.optim.clipping import norm_and_squares
from scaling.spec import Spec, present
from scaling.strategies import transformer
from scaling.strategies.transformer.types import stored_places
from scaling.strategies.zero import Updated
from scaling.train import guards
from scaling.train.settings import DTYPES, Settings


def make_step(settings: Settings, mesh, optimizer: optim.Optimizer, frozen: dict | None = None) -> Callable:
    """Return step(params, opt_state, (tokens, targets, segments), donate, read) -> (params, opt_state, metrics).

    Metrics are {"loss", "grad_norm", "squares"} (see `gradients`), and with float16 the "scale" of the loss. With
    float16, a step whose gradients are not finite leaves the params alone and halves the scale. In a run with adapters
    `params` are the adapters alone, and the others are `frozen`.

    The step raises ArithmeticError before it updates the params if halving cannot help: the loss is not finite, or the
    gradients are not finite and there is no scale or it is already 1. With `read=False` it does not read these values,
    so the host need not wait for the device, and the caller has to check them by `guards.check_finite`. That is for
    steps without a scale; with dropout the host still reads the number of the step.
    """
    check_compiled(settings, mesh.sizes)
    f, updated = gradients(settings, mesh, frozen=frozen), updated_part(settings, mesh)
    f = as_graph(f) if settings.compile else f
    types = updated.types
    moved = {"specs": types, "mesh": mesh} if settings.optimizer == "muon" else {}  # Muon is not elementwise

    def step(params, state, batch, donate: bool = False, read: bool = True):
        number = int(state["step"]) + 1 if read or settings.model.dropout else 0
        scale = float(state.get("scale", 1.0))
        loss, grads, loads, norm, squares = f(params, batch, number, scale)
        metrics = {"loss": loss, "grad_norm": norm, "squares": squares}
        metrics |= {"scale": scale} if "scale" in state else {}
        options = moved | (guards.check_scaled(state, loss, norm, squares, types, mesh, number) if read else {})
        clipped = optim.scaled_to(grads, norm, settings.clip, donate=True)
        shards, state = optimizer.update(clipped, state, updated.shards(params), donate=donate, **options)
        if loads and options.get("finite", True):
            shards, state = move_biases(shards, state, loads, settings.balancing)
        del grads, clipped
        return updated.whole(shards, params, donate), state, metrics

    return step


def gradients(settings: Settings, mesh, frozen: dict | None = None, limits: Limits = LIMITS) -> Callable:
    """Return f(params, (tokens, targets, segments), step, scale).

    It returns (loss, gradients, loads, the gradients' norm, the squares of leaves), where the loads are those of
    `split_loads` and the squares those of `optim.clipping.norm_and_squares`.
    `frozen`: the params that have no gradients; `limits`: as in StepOptions.
    """
    config, types = settings.model, trained_types(settings, mesh)
    sums, others = torch.promote_types(DTYPES[settings.dtype], torch.float32), frozen or {}
    options = settings.step_options(mesh.sizes)

    def f(params, batch, step: int = 0, scale: float = 1.0):
        inputs, targets, segments = batch
        seed = at_step(settings.seed, step) if config.dropout else None
        loss, grads = transformer.loss_and_grads(
            others | params, inputs, targets, config, mesh, segments=segments, seed=seed, sums=sums, scale=scale,
            limits=limits, loads=settings.balancing > 0, **options,
        )  # fmt: skip
        grads, loads = split_loads(grads, settings)
        return loss, grads, loads, *norm_and_squares(grads, types, mesh, limits.row)

    return f


def split_loads(grads: dict, settings: Settings) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return the gradients with zeros for the biases of experts, and the loads[L, E] by stack that were there."""
    if not settings.balancing:
        return grads, {}
    loads = {stack: dW["bias"] for stack, dW in grads.items() if isinstance(dW, dict) and "bias" in dW}
    return grads | {stack: grads[stack] | {"bias": torch.zeros_like(load)} for stack, load in loads.items()}, loads


def move_biases(params: dict, state: dict, loads: Mapping, rate: float) -> tuple[dict, dict]:
    """Return params and state after the biases of experts, and their masters, moved by `rate` toward an even load."""

    def moved(held: dict) -> dict:
        own = {
            stack: held[stack] | {"bias": update_bias(held[stack]["bias"], load, rate)} for stack, load in loads.items()
        }
        return held | own

    if "rest" in state:  # Muon's state, in which the other leaves have a separate one
        params, rest = move_biases(params, state["rest"], loads, rate)
        return params, state | {"rest": rest}
    if "master" not in state:
        return moved(params), state
    master = moved(state["master"])
    rounded = {}
    for stack in loads:
        rounded[stack] = params[stack] | {"bias": master[stack]["bias"].to(params[stack]["bias"].dtype)}
    return params | rounded, state | {"master": master}


def check_compiled(settings: Settings, sizes: Mapping[str, int]) -> None:
    """Check that the step of a run with `--compile` is one graph that serves all steps; else ValueError."""
    reasons = {
        "experts": settings.model.moe and "the host reads how many rows each expert gets",
        "mesh axis Z": sizes.get("Z", 1) > 1 and "the stages of a pipeline send and receive from Python",
        "linear layers": settings.model.linear and "chunks of the gated delta rule are arranged in Python",
        "--precision": settings.precision and "products of values with scales run line by line",
        "dropout": settings.model.dropout and "each step draws by a seed of its own",
        "--dtype fp16": settings.dtype == "fp16" and "the scale of the loss changes",
    }
    if settings.compile and (found := [(what, why) for what, why in reasons.items() if why]):
        what, why = found[0]
        raise ValueError(f"--compile with {what}\n  rule: {why}, and a graph has no such step\n  fix: leave one out")


def as_graph(f: Callable) -> Callable:
    """Return the function of `gradients` as one graph. The step's number and the loss's scale do not change it."""
    run = torch.compile(lambda params, batch: f(params, batch), fullgraph=True, dynamic=False)

    def one_graph(params, batch, step: int = 0, scale: float = 1.0):
        with warnings.catch_warnings():  # caches hold constants, so tracing through them changes nothing
            warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
            return run(params, batch)

    return one_graph


def batch_type(mesh) -> Spec:
    """Return the type of a batch's tokens on this mesh."""
    return present("t[B_PXE, T_C]", mesh)


def local(x: torch.Tensor, mesh) -> torch.Tensor:
    """Return this rank's rows and tokens of x[B, T], which is whole on every rank."""
    return tree.shard(x.to(mesh.device), batch_type(mesh), mesh)


def batch_slices(batch: int, length: int, mesh) -> tuple[slice, ...]:
    """Return (rows, tokens): which of a batch's rows, and which tokens of a row, this rank trains on."""
    return batch_type(mesh).slices({"B": batch, "T": length}, mesh, mesh.coord)


def to_mesh(x: torch.Tensor, mesh) -> torch.Tensor:
    """t[B_PXE, T_C] of this rank -> the same on the mesh's device, with its type declared."""
    return tree.declare(x.to(mesh.device, non_blocking=True).contiguous(), batch_type(mesh), mesh)


def local_shape(settings: Settings, mesh) -> tuple[int, ...]:
    """Return the shape of this rank's tokens."""
    return batch_type(mesh).local_shape({"B": settings.batch, "T": settings.seq}, mesh)


def stored_layout(settings: Settings, mesh) -> tuple[dict, dict[str, list[int]]]:
    """Return the types in which the model's params are stored, and the places of their slots (`stored_places`)."""
    config, schedule = settings.model, settings.pipeline_on(mesh.sizes)
    return transformer.specs(config, mesh, zero=settings.zero), stored_places(config, mesh, schedule)


def drawn_params(settings: Settings, mesh, device: "str | None" = None) -> dict:
    """Draw this rank's params, and adapters if any, by the seed; no rank holds more than its shards."""
    types, places = stored_layout(settings, mesh)
    given = settings.model, settings.seed, DTYPES[settings.dtype], device
    params = model.init(*given, mesh=mesh, specs=types, places=places)
    return params | new_adapters(settings, mesh, types, device)


def initial_params(settings: Settings, mesh) -> dict:
    """Return the params that a run begins with, and its adapters: the weights of a folder, or drawn by the seed."""
    if not settings.weights:
        return drawn_params(settings, mesh)
    types, places = stored_layout(settings, mesh)
    _, params = hf.load_sharded(settings.weights, types, mesh, DTYPES[settings.dtype], places=places)
    return params | new_adapters(settings, mesh, types)


def new_adapters(settings: Settings, mesh, types: dict, device: "str | None" = None) -> dict:
    """Return {"lora": adapters}, read from a folder or drawn so that they change nothing yet; {} without adapters."""
    config, dtype, lora = settings.model, DTYPES[settings.dtype], settings.adapters
    if lora is None:
        return {}
    if not settings.lora_from or device == "meta":
        return {"lora": adapters.init(config, lora, settings.seed, dtype, device, mesh=mesh, specs=types)}
    whole = tree.map(lambda x: x.to(mesh.device, dtype), adapters.load(settings.lora_from, config)[1])
    return {"lora": tree.shard(whole, adapter_specs(config, lora, types), mesh)}


def options_of_adapters(folder: str, config: Config) -> dict:
    """Return the settings that match a PEFT folder's adapters; {} without a folder."""
    if not folder:
        return {}
    lora, _ = adapters.load(folder, config)
    return {"lora": lora.rank, "lora_on": ",".join(lora.on), "lora_alpha": lora.alpha}


def split_frozen(settings: Settings, params: dict) -> tuple[dict, dict]:
    """Split params, or their types, into (the frozen ones, the trained ones); without adapters none are frozen."""
    if not settings.adapters:
        return {}, params
    return {name: W for name, W in params.items() if name != "lora"}, {"lora": params["lora"]}


def with_adapters(params: dict, settings: Settings, mesh) -> dict:
    """Merge a run's adapters, if it has any, into its weights; return params of the same types."""
    if settings.adapters is None:
        return params
    frozen, own = split_frozen(settings, params)
    types = transformer.specs(settings.model, mesh)
    return adapters.merged(frozen, own["lora"], settings.adapters, settings.model, types)


def held_types(settings: Settings, mesh) -> dict:
    """Return the types in which the trained params are stored."""
    return split_frozen(settings, transformer.specs(settings.model, mesh, **settings.layout(mesh.sizes)))[1]


def trained_types(settings: Settings, mesh) -> dict:
    """Return the types of the trained params' gradients."""
    if settings.adapters:
        return held_types(settings, mesh)
    return transformer.grad_specs(settings.model, mesh, zero=settings.zero)


def updated_part(settings: Settings, mesh) -> Updated:
    """Return the part of the trained params that this rank updates, typed as the gradients.

    With ZeRO-1 and 2 this part is a shard over X of the params that the rank holds. Otherwise it is all of them.
    """
    return Updated(held_types(settings, mesh), trained_types(settings, mesh), mesh)


def begin_state(settings: Settings, mesh, optimizer: optim.Optimizer, params) -> dict:
    """Return the optimizer's state for the part of the params that this rank updates."""
    return optimizer.init(updated_part(settings, mesh).shards(params))
