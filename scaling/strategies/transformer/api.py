"""The loss of a Transformer and its gradients on a mesh; whole params to shards and back."""

import torch
from torch import Tensor

from scaling import tree
from scaling.configs import Config
from scaling.models.inputs import check_params
from scaling.strategies.transformer import types
from scaling.strategies.transformer.asked import AskedStep, stated
from scaling.strategies.transformer.stages import arranged_layers, forward_loss, slots_of, staged
from scaling.strategies.transformer.step import unstaged


def shard(params, config: Config, mesh, *, zero: int = 3, schedule=None):
    """Whole params, as of `models.transformer`, -> this rank's, typed as `specs`. Nothing is sent.

    On stages, layers lie in the order of the `schedule`, padded with zeros to a whole number a virtual stage; so is
    the vocabulary where |Y| |Z| does not divide it.
    """
    check_params(params, config)
    slots = slots_of(config, mesh, schedule)
    arranged = params | {"layers": tree.map(lambda W: arranged_layers(W, slots), params["layers"])}
    arranged |= _tables(params, types.padded_sizes(config, mesh)["V"])
    return tree.shard(arranged, types.specs(config, mesh, zero=zero, schedule=schedule), mesh)


def unshard(params, config: Config, mesh, *, zero: int = 3, schedule=None):
    """The inverse of `shard`: the whole params, or gradients, on every rank."""
    whole = tree.unshard(params, types.specs(config, mesh, zero=zero, schedule=schedule), mesh)
    slots = slots_of(config, mesh, schedule)
    layers = tree.map(lambda W: W[[slots.index(l) for l in range(config.sizes["L"])]], whole["layers"])
    return whole | {"layers": layers} | _tables(whole, config.V)


def _tables(params: dict, V: int) -> dict[str, Tensor]:
    """The tables of the vocabulary with V entries, if they have not: cut, or padded with zeros."""
    if len(params["embed"]) == V:
        return {}
    tables = {name: params[name] for name in ("embed", "unembed") if name in params}
    pads = {"embed": (0, 0, 0, V - len(params["embed"])), "unembed": (0, V - len(params["embed"]))}
    return {name: torch.nn.functional.pad(table, pads[name]) for name, table in tables.items()}


def loss_and_grads(
    params: dict,
    tokens: Tensor,
    targets: Tensor,
    config: Config,
    mesh,
    *,
    weights: Tensor | None = None,
    segments: Tensor | None = None,
    microbatches: int = 1,
    schedule=None,
    remat: str = "none",
    keep_weights: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    context: str = "zigzag",
    seed: int | None = None,
    zero: int = 3,
    sums: torch.dtype | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, dict]:
    """(loss[], the same on every rank; grads typed as params) of tokens, targets int64[B_PXE, T_C] in plain order.

    loss = sum(w ce) / sum(w) over the global batch, 0 where sum(w) is 0, plus the experts' auxiliary terms of Config
    (their mean over microbatches). `weights`[B_PXE, T_C]: w, by default 1, and 0 where the target is `ignore_index`.
    `segments`: ids of packed documents. `label_smoothing` and `z_loss` as in `ends.Terms`. `context`: the form of
    attention over C. `remat`: which activations a layer keeps for its backward (`layer.REMAT`). `keep_weights`: weights
    stay gathered to the end of the step; else they are thrown away after each use and gathered again. Neither changes
    a bit of the gradients. `zero`: as given to `specs`. `sums`: the dtype in which gradients are added up over
    microbatches and ranks, and returned; by default the params'. `scale`: what cotangents are multiplied by on their
    way, and gradients divided by at the end: for float16, a power of two. `seed`: of dropout, another in each step,
    needed where Config has dropout: the same elements are dropped on every mesh. ShardingError or ValueError for what
    does not fit, before anything is sent.
    """
    step = AskedStep(
        "loss_and_grads", config, zero, schedule, microbatches, remat, keep_weights, context, ignore_index,
        label_smoothing, z_loss, sums, scale, seed is not None,
    )  # fmt: skip
    problem, batch = stated(step, params, tokens, targets, weights, segments, mesh, seed)
    params = tree.map(Tensor.detach, params)
    run = staged if mesh.sizes.get("Z", 1) > 1 or schedule is not None else unstaged
    loss, grads = run(problem, params, *batch)
    if scale != 1:
        loss, grads = loss / scale, tree.map(lambda g: g.mul_(1 / scale), grads)
    return loss, {name: grads[name] for name in params}


@torch.no_grad()
def loss(
    params: dict,
    tokens: Tensor,
    targets: Tensor,
    config: Config,
    mesh,
    *,
    weights: Tensor | None = None,
    segments: Tensor | None = None,
    schedule=None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    context: str = "zigzag",
    zero: int = 3,
) -> Tensor:
    """The loss alone, as `loss_and_grads` gives it of one microbatch without dropout: nothing is kept for a backward
    pass."""
    forward = AskedStep(
        "loss", config, zero, schedule, context=context, ignore_index=ignore_index, label_smoothing=label_smoothing,
        z_loss=z_loss,
    )  # fmt: skip
    problem, batch = stated(forward, params, tokens, targets, weights, segments, mesh)
    return forward_loss(problem, params, *batch)
