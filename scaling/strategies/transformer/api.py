"""The loss of a Transformer and its gradients on a mesh; whole params to shards and back."""

from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.arguments import not_negative, one_of, positive, whole
from scaling.collectives import einsum
from scaling.collectives.checked import alike
from scaling.configs import Config
from scaling.models.inputs import check_ids, check_params, check_range, check_segments, check_weights
from scaling.spec import ShardingError
from scaling.strategies.axes import all_reduce
from scaling.strategies.context.layout import FORMS
from scaling.strategies.transformer import types
from scaling.strategies.transformer.ends import Terms, embed, embed_backward, head
from scaling.strategies.transformer.layer import REMAT
from scaling.strategies.transformer.moves import add_by_name, gathered_ends, reduced_ends
from scaling.strategies.transformer.placed import Placed
from scaling.strategies.transformer.stages import arranged_layers, forward_loss, slots_of, staged
from scaling.strategies.transformer.step import Problem, stacks_of


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
    stored = types.specs(config, mesh, zero=zero, schedule=schedule)
    check_batch(tokens, targets, config, mesh, microbatches, remat, context)
    positive(scale=scale)
    if sums is not None and not (isinstance(sums, torch.dtype) and sums.is_floating_point):
        raise ValueError(f"sums = {sums!r}: gradients are added up in floats\n  fix: give torch.float32, or None")
    terms = stated_terms(config, label_smoothing, z_loss)
    given = weights, segments, microbatches, ignore_index, context, sums, schedule
    if config.dropout and (seed is None or torch.compiler.is_compiling()):
        fix = "give seed=, another in each step" if seed is None else "run it without torch.compile"
        raise ValueError(f"{config.name}: dropout={config.dropout} draws random masks\n  fix: {fix}")
    told = {"label_smoothing": label_smoothing, "z_loss": z_loss, "scale": scale, "zero": zero, "seed": seed}
    told |= {"keep_weights": keep_weights}
    alike(mesh, "loss_and_grads", config=config, remat=remat, **told, **_told(params, tokens, *given))
    problem, (tokens, targets, w) = stated(params, tokens, targets, config, mesh, stored, terms, *given, seed)
    if schedule is not None and "Z" not in mesh.sizes:
        raise ShardingError(f"schedule={schedule!r:.60} on {mesh}, which has no stages\n  fix: give the mesh an axis Z")
    params = tree.map(Tensor.detach, params)
    run = staged if mesh.sizes.get("Z", 1) > 1 or schedule is not None else unstaged
    loss, grads = run(problem._replace(scale=scale), params, tokens, targets, w * scale, remat, keep_weights, schedule)
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
    stored = types.specs(config, mesh, zero=zero, schedule=schedule)
    check_batch(tokens, targets, config, mesh, 1, "none", context)
    terms = stated_terms(config, label_smoothing, z_loss)
    given = weights, segments, 1, ignore_index, context, None, schedule
    told = {"label_smoothing": label_smoothing, "z_loss": z_loss, "zero": zero}
    alike(mesh, "loss", config=config, **told, **_told(params, tokens, *given))
    problem, batch = stated(params, tokens, targets, config, mesh, stored, terms, *given)
    return forward_loss(problem, params, *batch, schedule)


def _told(params, tokens, weights, segments, microbatches, ignore_index, context, sums, schedule) -> dict[str, Any]:
    """What ranks compare, beside what decides the terms of the loss."""
    schedule = getattr(schedule, "name", schedule)
    told = {"tokens": tokens, "weights": weights, "segments": segments, "microbatches": microbatches, "sums": sums}
    return told | {"ignore_index": ignore_index, "context": context, "schedule": schedule, "params": params}


def stated_terms(config: Config, label_smoothing: float, z_loss: float) -> Terms:
    """ValueError for a share of the loss outside 0..1, or a coefficient below 0."""
    not_negative(label_smoothing=label_smoothing, z_loss=z_loss)
    if label_smoothing > 1:
        raise ValueError(f"label_smoothing = {label_smoothing!r}: is a share\n  fix: give a number from 0 to 1")
    return Terms(config.V, label_smoothing, z_loss)


def stated(
    params,
    tokens,
    targets,
    config,
    mesh,
    stored,
    terms,
    weights,
    segments,
    microbatches,
    ignore_index,
    context,
    sums,
    schedule=None,
    seed=None,
) -> tuple[Problem, tuple[Tensor, Tensor, Tensor]]:
    """(the problem, (tokens, targets and weights in the order of the form of attention, the weights' sum 1))."""
    if not torch.compiler.is_compiling():
        sizes = types.padded_sizes(config, mesh) | {"L": len(slots_of(config, mesh, schedule))}
        fix = "transformer.shard(params, config, mesh, ...), with the same zero and schedule"
        dtype = getattr(params.get("embed"), "dtype", None) if isinstance(params, dict) else None
        tree.check(params, stored, sizes, mesh, dtype, fix=fix)
        tree.check_floats(params)
    if weights is not None:
        check_weights(weights, targets)
    if segments is not None:
        check_segments(segments, targets)
    w = (targets != ignore_index).to(torch.float32) if weights is None else weights
    w = w.to(torch.promote_types(params["embed"].dtype, torch.float32)) * (targets != ignore_index)
    check_range("targets", targets, config.V, w)
    total = einsum("w[B_PXE, T_C] -> total[] {U_PXEC}", w)
    total = all_reduce("total[] {U_PXEC} -> total[]", total, mesh)
    w = w / torch.where(total == 0, 1, total)
    at = Placed(config, mesh, context, segments, tokens.shape, params["embed"].dtype, seed)
    problem = Problem(config, mesh, stored, at.contexts(microbatches), terms, sums or params["embed"].dtype)
    return problem, (at.placed(tokens), at.placed(targets), at.placed(w))


def unstaged(problem: Problem, params: dict, tokens: Tensor, targets: Tensor, w: Tensor, remat: str, keep: bool, _):
    """(loss, grads) where every rank has all layers."""
    config, mesh, stored, contexts, terms, sums, scale = problem
    ends = gathered_ends(params, stored, mesh)
    stacks = stacks_of(problem, params, remat, keep)
    losses, dends, grads, M, size = [], {}, {}, len(contexts), len(ends["embed"])
    batches = zip(contexts, *(x.chunk(M) for x in (tokens, targets, w)), strict=True)
    for m, (at, some, wanted, share) in enumerate(batches):
        x, last = embed(ends["embed"], some, mesh), m == M - 1
        if last and not config.tied:
            del ends["embed"]  # a table of the vocabulary is not held longer than it is used
        x, extra, kept = stacks.run(x, at)
        losses.append(extra * scale / M)
        loss, dx, dW = head(ends, x, wanted, share, terms, config.eps, mesh)
        add_by_name(dends, dW, sums)
        del x, dW
        if last:
            ends.clear()
            tables = {name: dends.pop(name) for name in [*dends] if name != "embed"}
            grads = reduced_ends(tables, stored, mesh)
            del tables
        dx = stacks.run_back(dx, kept, at, scale / M, last=last)
        add_by_name(dends, {"embed": embed_backward(dx, some, size, mesh)}, sums)
        losses.append(loss)
    grads |= reduced_ends(dends, stored, mesh)
    loss = all_reduce("Loss[] {U_PXECY} -> Loss[]", torch.stack(losses).sum(), mesh)
    return loss, grads | {name: layers.result() for name, layers in stacks.engines.items()}


def check_batch(
    tokens: Tensor, targets: Tensor, config: Config, mesh, microbatches: int, remat: str, context: str
) -> None:
    """ValueError or ShardingError, before anything is sent, for a batch that does not fit the model or the mesh."""
    one_of("remat", remat, tuple(REMAT))
    one_of("context", context, FORMS)
    whole(microbatches=microbatches)
    if config.moe and remat not in ("none", "block"):
        raise ValueError(f'remat="{remat}" cannot be used with experts\n  fix: choose remat="block" or "none"')
    if config.moe and config.capacity is not None and context == "zigzag" and mesh.sizes.get("C", 1) > 1:
        raise ValueError(
            f"{config.name}: experts with a capacity keep the first tokens of the batch, but zig-zag reorders them\n"
            '  fix: choose context="ring", or capacity=None'
        )
    check_ids("tokens", tokens)
    check_ids("targets", targets, tokens.shape)
    if len(tokens) % microbatches:
        raise ValueError(
            f"{len(tokens)} rows on each rank do not make {microbatches} microbatches of one size\n"
            f"  fix: give a number of rows that {microbatches} divides"
        )
    if tokens.shape[1] % mesh.sizes.get("Y", 1):
        raise ShardingError(
            f"x[B, T_CY, D]: {tokens.shape[1]} tokens of each sequence on a rank do not divide over Y="
            f"{mesh.sizes['Y']}\n  fix: make T a multiple of |C| |Y|"
        )
    if torch.compiler.is_compiling():  # which looks at no values
        if config.moe or mesh.sizes.get("Z", 1) > 1:
            why = "experts get as many rows as choose them" if config.moe else "stages wait for each other's messages"
            raise ValueError(
                f"{config.name}: {why}, which a compiled graph cannot express\n  fix: run it without torch.compile"
            )
        return
    check_range("tokens", tokens, config.V)
