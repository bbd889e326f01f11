"""The loss of a Transformer and its gradients on a mesh; whole params to shards and back.

Start at `loss_and_grads`: it looks up the `TrainStep` that its options resolve to on this mesh (`step.resolve`), lays
out the batch, and runs the layers (`layers.run_all_layers`), or the stages (`stages.run_stages`) if the mesh has some.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import optree
import torch
from torch import Tensor

from scaling import collectives, tree
from scaling.collectives import all_gather, all_reduce, einsum
from scaling.configs import Config
from scaling.mesh.meeting import agree
from scaling.models.attention import fused, in_chunks, shared_mask
from scaling.models.dropout import dropout
from scaling.models.inputs import check_params, check_range
from scaling.models.latent import padded
from scaling.models.layer import Context, all_kept, scale_by, used_gains
from scaling.models.lora import Lora
from scaling.models.rope import check_positions, layer_tables, restarted
from scaling.scaled import products_of
from scaling.spec import ShardingError, present
from scaling.strategies import context as ring
from scaling.strategies.transformer import types
from scaling.strategies.transformer.ends import token_logprobs
from scaling.strategies.transformer.layers import LocalBatch, run_all_layers
from scaling.strategies.transformer.lora import factor_gradients
from scaling.strategies.transformer.stages import forward_loss, forward_stages, run_stages
from scaling.strategies.transformer.step import StepOptions, TrainStep, check_fit, resolve

LIKE = attrgetter("shape", "dtype", "device", "layout")


def loss_and_grads(
    params: dict,
    tokens: Tensor,
    targets: Tensor,
    config: Config,
    mesh,
    *,
    weights: Tensor | None = None,
    segments: Tensor | None = None,
    seed: int | None = None,
    options: StepOptions | None = None,
    **changes: Any,
) -> tuple[Tensor, dict]:
    """Return (loss[], equal on every rank; grads typed as params).

    loss = sum(w ce) / sum(w) over the global batch, 0 where sum(w) is 0, plus the experts' auxiliary terms of Config
    (their mean over microbatches).

    Args:
        params: This rank's, typed as `specs`.
        tokens: int64[B_PXE, T_C], in plain order.
        targets: The tokens to predict, typed as `tokens`.
        config: The model.
        mesh: The mesh.
        weights: w[B_PXE, T_C], by default 1, and 0 where the target is `ignore_index`.
        segments: The ids of packed documents, [B_PXE, T_C], on the mesh's device or, so that the host need not wait for
            a GPU before it reads them, on the host.
        seed: The seed of dropout, different in each step, needed if Config has dropout. Every mesh drops equal
            elements.
        options: Other options.
        **changes: Fields of `options` that replace its own: `microbatches=4, remat="block"`.

    Raises:
        ShardingError: or ValueError, for what does not fit, before anything is sent.
    """
    mesh, given = mesh.optional, (tokens, targets, weights, segments)
    step = look_up_step(replace(options or StepOptions(), **changes), config, params, given, mesh, seed)
    batch = batch_of(step, *given, seed)
    params = used_gains(tree.map(Tensor.detach, params), config)
    loss, grads = (run_all_layers if step.schedule is None else run_stages)(step, params, batch)
    if (scale := step.options.scale) != 1:
        counts = [dW["bias"] for dW in grads.values() if step.options.loads and isinstance(dW, dict) and "bias" in dW]
        loss = loss / scale
        for g in tree.leaves(grads):
            g.mul_(1 if any(g is count for count in counts) else 1 / scale)
    if "norm" in grads:
        grads["norm"] = scale_by(grads["norm"], 1 / config.logit_scale)  # of the gain that is stored
    return loss, grads


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
    options: StepOptions | None = None,
    **changes: Any,
) -> Tensor:
    """Return the loss alone, as `loss_and_grads` computes it for one microbatch without dropout.

    Nothing is saved for a backward pass.
    """
    mesh, given = mesh.optional, (tokens, targets, weights, segments)
    alone = {"remat": "none", "microbatches": 1, "keep_weights": False, "sums": None, "scale": 1.0}
    options = replace(replace(options or StepOptions(), **changes), **alone)
    step = look_up_step(options, config, params, given, mesh, backward=False)
    return forward_loss(step, used_gains(params, config), batch_of(step, *given))


@torch.no_grad()
def logprobs(
    params: dict, tokens: Tensor, targets: Tensor, config: Config, mesh, *, zero: int = 3, lora: Lora | None = None
) -> Tensor:
    """tokens[B_PXE, T_C], targets[B_PXE, T_C] -> logprobs[B_PXE, T_C], the targets', on a mesh without stages.

    Any loss that is a function of these log-probabilities can be trained: give `loss_and_grads`, with mean=False,
    weights that are minus the derivative of the loss by them.
    """
    mesh, given = mesh.optional, (tokens, targets, None, None)
    step = look_up_step(StepOptions(context="ring", zero=zero, lora=lora), config, params, given, mesh, backward=False)
    if mesh.sizes.get("Z", 1) > 1:
        raise ShardingError(f"logprobs on {mesh}: stages Z are not computed\n  fix: give the ranks of Z to X or Y")
    batch = batch_of(step, *given)
    ends, x, _ = forward_stages(step, used_gains(params, config), batch)
    return token_logprobs(ends, x, batch.targets, config, mesh)


def look_up_step(
    options: StepOptions, config: Config, params: dict, batch: Sequence, mesh, seed: int | None = None, backward=True
) -> TrainStep:
    """Return the step resolved for this mesh, which keeps it for the next call with equal options and shapes.

    Raises:
        ShardingError: or ValueError, for what does not fit, before anything is sent.
    """
    key = cache_key(options, config, params, batch, seed is not None, backward)
    known = mesh.lines.get(key) if key is not None else None
    step = known or resolve(options, config, params, batch, mesh, seed is not None, backward)
    check_range("tokens", batch[0], config.V)
    if step.group is not None:
        agree(step.group, f"{step.call}, seed={seed}")
    if known is None:
        check_fit(step, params, batch)
        if key is not None:
            mesh.lines[key] = step
    return step


def cache_key(options: StepOptions, config: Config, params: Any, batch: Sequence, *flags: bool) -> tuple | None:
    """Return the cache key: everything that validation depends on, except the batch's values.

    It is None for arguments that are refused anyway, and while compiling.
    """
    if torch.compiler.is_compiling():
        return None
    asked = [*vars(options).values()]
    try:
        leaves, structure = optree.tree_flatten(params)
        shapes = *map(LIKE, leaves), *map(LIKE, filter(torch.is_tensor, batch)), *map(type, batch)
        key = (*asked, *map(type, asked), config, *flags, structure, *shapes)  # True and 1 are equal, one is refused
        hash(key)
    except (AttributeError, TypeError):  # no tensor, or no settings
        return None
    return key


def batch_of(step: TrainStep, tokens, targets, weights, segments, seed: int | None = None) -> LocalBatch:
    """Return this rank's LocalBatch, whose tokens are in the order that the form of attention needs.

    A target that is `ignore_index` gets weight 0. With `mean`, weights are divided by their sum over the global batch.
    All are then multiplied by `scale`. They are float32, or float64 if the params are.
    """
    options, mesh, dtype = step.options, step.mesh, step.dtype
    w = (targets != options.ignore_index).to(torch.float32) if weights is None else weights
    w = w.to(torch.promote_types(dtype, torch.float32)) * (targets != options.ignore_index)
    check_range("targets", targets, step.config.V, w)
    total = einsum("w[B_PXE, T_C] -> total[] {U_PXEC}", w)
    total = all_reduce("total[] {U_PXEC} -> total[]", total, mesh)
    w = w / torch.where(total == 0, 1, total) * options.scale if options.mean else w * options.scale
    contexts = contexts_of(step, tokens.shape, segments, seed)
    return LocalBatch(in_form(tokens, step), in_form(targets, step), in_form(w, step), contexts)


def in_form(x: Tensor, step: TrainStep) -> Tensor:
    """Return x[B, T_C], of tokens in plain order, in the order that the form of attention needs."""
    zigzag = step.options.context == "zigzag" and step.mesh.sizes.get("C", 1) > 1
    return ring.to_zigzag(x, 1, step.mesh, "C") if zigzag else x


def contexts_of(step: TrainStep, shape: Sequence[int], segments: Tensor | None, seed: int | None) -> list[Context]:
    """Return the Context of each microbatch: how its tokens are rotated, masked and dropped.

    All three depend on the tokens' positions in the sequence, and so on the form of attention over C. Dropout depends
    on their rows in the global batch as well.

    Args:
        step: The resolved step.
        shape: The shape of this rank's tokens [B_PXE, T_C].
        segments: The ids of packed documents, [B_PXE, T_C] in plain order, or None. They may be on the host.
        seed: The seed of dropout, or None to drop nothing.
    """
    config, mesh, form, M, (rows, t) = step.config, step.mesh, step.options.context, step.options.microbatches, shape
    split, length = mesh.sizes.get("C", 1) > 1, t * mesh.sizes.get("C", 1)
    none: list[Any] = [None] * M

    # Positions: places[T_C] in the sequence, and for packed documents `restarts`, which begin anew in each document.
    places = ring.positions(form, t, mesh, "C") if split else torch.arange(t, device=mesh.device)
    check_positions(config, length, segments is not None)
    rope = partial(layer_tables, config, dtype=step.dtype, length=length)
    tables = rope(places) if segments is None else ()
    restarts, ids = none, none
    if segments is not None and split:
        segments = segments.to(mesh.device)
        restart = restarted(all_gather("s[B_PXE, T_C] -> s[B_PXE, T]", segments, mesh))
        restart = collectives.shard("s[B_PXE, T] -> s[B_PXE, T_C]", restart, mesh)
        restarts, ids = in_form(restart.contiguous(), step).chunk(M), in_form(segments, step).chunk(M)
    elif segments is not None:
        restarts, ids = restarted(segments).chunk(M), segments.chunk(M)

    # Attention: over C or by a fused kernel, then what the model adds; its masks are made once per pass and window.
    attend = partial(ring.attention, mesh=mesh, axis="C", form=form) if split else fused
    attend = partial(padded, attend) if config.latent else attend
    attend = partial(attend, cap=config.score_cap) if config.score_cap is not None else attend
    host = torch.device("cpu") if mesh.device.type == "cuda" else mesh.device  # where the ends of chunks are read

    def masks(window: int | None, restart: Tensor | None, segments: Tensor | None) -> dict[str, Any]:
        if config.chunked:
            at = places if split else torch.arange(t, device=host if restart is None else restart.device)
            positions = at if restart is None else restart
            window, segments = in_chunks(window, length, at, positions, segments)
        if split:
            return {"window": window, "segments": None if segments is None else segments.expand(rows // M, -1)}
        scored = config.score_cap is not None or config.sinks
        return {"mask": shared_mask(window, t, segments, step.dtype, mesh.device, scored, step.limits.span)}

    # Dropout: by the seed, a row's index in the global batch, and a token's position.
    samples, dropping = none, {}
    if config.dropout and seed is not None:
        samples = torch.arange(rows * mesh.size([axis for axis in "PXE" if axis in mesh.sizes]), device=mesh.device)
        samples = tree.shard(samples, present("s[B_PXE]", mesh), mesh).chunk(M)
        positions = tree.shard(places, present("p[T_Y]", mesh), mesh)
        dropping = {"rate": config.dropout, "seed": seed, "positions": positions}

    # Products with weights, their gradients, and what experts count: alike in all microbatches.
    alike: dict[str, Any] = {"einsum": einsum, "adapters": factor_gradients if step.options.lora else None}
    alike["loads"] = step.options.loads
    if precision := step.options.precision:
        alike["einsum"] = products_of(precision, types.padded_sizes(config, mesh), step.inside)

    contexts = []
    for restart, segment, sample_rows in zip(restarts, ids, samples, strict=True):
        with_segments = partial(masks, restart=restart, segments=segment)
        restart = None if restart is None else restart.to(mesh.device)
        positions = places if restart is None else restart
        drop = all_kept if sample_rows is None else partial(dropout, samples=sample_rows, **dropping)
        at = Context(config, step.inside, tables or rope(positions), attend, drop, with_segments, **alike)
        if config.learned_positions:
            learned = positions.expand(rows // M, -1).contiguous()
            at = at._replace(learned=tree.shard(learned, present("p[B, T_Y]", mesh), mesh))
        contexts.append(at._replace(places=restart))
    return contexts


def shard(params, config: Config, mesh, *, zero: int = 3, schedule=None):
    """Return this rank's shards, typed as `specs`, of the whole params of `models.transformer`. Nothing is sent.

    On stages, layers are in the order of the `schedule`, padded with zeros to a whole number per virtual stage. The
    vocabulary is padded if |Y| |Z| does not divide it.
    """
    check_params(params, config)
    slots = types.slots_of(config, mesh, schedule)
    arranged = params | {"layers": tree.map(lambda W: arranged_layers(W, slots), params["layers"])}
    arranged |= _tables(params, types.padded_sizes(config, mesh)["V"])
    return tree.shard(arranged, types.specs(config, mesh, zero=zero, schedule=schedule), mesh)


def unshard(params, config: Config, mesh, *, zero: int = 3, schedule=None):
    """Invert `shard`: return the whole params, or gradients, on every rank."""
    found = tree.unshard(params, types.specs(config, mesh, zero=zero, schedule=schedule), mesh)
    slots = types.slots_of(config, mesh, schedule)
    layers = tree.map(lambda W: W[[slots.index(l) for l in range(config.sizes["L"])]], found["layers"])
    return found | {"layers": layers} | _tables(found, config.V)


def _tables(params: dict, V: int) -> dict[str, Tensor]:
    """Cut the tables of the vocabulary to V entries, or pad them with zeros."""
    more = V - len(params["embed"])
    pads = {"embed": (0, 0, 0, more), "unembed": (0, more), "b_unembed": (0, more)} if more else {}
    return {name: torch.nn.functional.pad(params[name], pad) for name, pad in pads.items() if name in params}


def arranged_layers(W: Tensor, slots: list[int]) -> Tensor:
    """Return W[L, ...] in the order of the slots, with zeros in the empty ones."""
    if slots == list(range(len(W))):
        return W
    empty = torch.tensor([l < 0 for l in slots], device=W.device).view(-1, *[1] * (W.dim() - 1))
    return W[[max(l, 0) for l in slots]].masked_fill(empty, 0)
