"""What a step is asked for: refused where it does not fit, worked out once, and agreed on by all ranks each time.

A run asks for the same step thousands of times. What follows from its settings, and from the shapes of params and
batch, is kept on the mesh; what lies in the batch is looked at each time.
"""

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import einsum
from scaling.collectives.checked import agree, spoken
from scaling.common.arguments import not_negative, one_of, positive, whole
from scaling.configs import Config
from scaling.mesh import Group
from scaling.models.inputs import check_ids, check_range, check_segments, check_weights
from scaling.spec import ShardingError
from scaling.strategies.axes import all_reduce
from scaling.strategies.context.layout import FORMS
from scaling.strategies.transformer import types
from scaling.strategies.transformer.ends import Terms
from scaling.strategies.transformer.layer import REMAT
from scaling.strategies.transformer.placed import Placed
from scaling.strategies.transformer.stages import slots_of
from scaling.strategies.transformer.step import Problem

LIKE = attrgetter("shape", "dtype", "device", "layout")


class AskedStep(NamedTuple):
    """The arguments of `loss_and_grads` beside params and batch. `seeded`: whether there is a seed for dropout."""

    call: str
    config: Config
    zero: int = 3
    schedule: Any = None
    microbatches: int = 1
    remat: str = "none"
    keep_weights: bool = False
    context: str = "zigzag"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    sums: Any = None
    scale: float = 1.0
    seeded: bool = False


class Stated(NamedTuple):
    """What follows from it: the types of the params as they are stored; the ranks that have to agree, and on what."""

    stored: dict
    terms: Terms
    group: Group | None
    told: str


def stated(
    asked: AskedStep,
    params: dict,
    tokens: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    segments: Tensor | None,
    mesh,
    seed: int | None = None,
) -> tuple[Problem, tuple[Tensor, Tensor, Tensor]]:
    """(the problem, (tokens, targets and weights in the order of the form of attention, the weights' sum `scale`)).

    ShardingError or ValueError for what does not fit, before anything is sent.
    """
    config, batch = asked.config, (tokens, targets, weights, segments)
    key = _key_of(asked, params, batch)
    before = mesh.lines.get(key) if key is not None else None
    known = before or _settled(asked, params, batch, mesh)
    check_range("tokens", tokens, config.V)
    if known.group is not None:
        agree(known.group, f"{known.told}, seed={seed}")
    if before is None:
        _check_fit(asked, known, params, batch, mesh)
        if key is not None:
            mesh.lines[key] = known
    dtype = params["embed"].dtype
    w = (targets != asked.ignore_index).to(torch.float32) if weights is None else weights
    w = w.to(torch.promote_types(dtype, torch.float32)) * (targets != asked.ignore_index)
    check_range("targets", targets, config.V, w)
    total = einsum("w[B_PXE, T_C] -> total[] {U_PXEC}", w)
    total = all_reduce("total[] {U_PXEC} -> total[]", total, mesh)
    w = w / torch.where(total == 0, 1, total) * asked.scale
    at = Placed(config, mesh, asked.context, segments, tokens.shape, dtype, seed)
    given = known.stored, at.contexts(asked.microbatches), known.terms, asked.sums or dtype
    problem = Problem(config, mesh, *given, asked.scale, asked.remat, asked.keep_weights, asked.schedule)
    return problem, (at.placed(tokens), at.placed(targets), at.placed(w))


def _key_of(asked: AskedStep, params: dict, batch: tuple[Tensor | None, ...]) -> tuple | None:
    """All that decides what is refused, but the values of the batch. None of what is refused anyway, or compiled."""
    if torch.compiler.is_compiling():
        return None
    try:
        given = [x for x in batch if x is not None]
        shapes = *map(LIKE, tree.leaves(params)), *map(LIKE, given), *map(type, batch)
        key = (asked, *map(type, asked), tree.structure(params), *shapes)  # True and 1 are equal, and may be refused
        hash(key)
    except (AttributeError, TypeError):  # no tensor, or no settings
        return None
    return key


def _settled(asked: AskedStep, params: dict, batch: tuple, mesh) -> Stated:
    """What follows from the settings. ShardingError or ValueError where they, or the batch's shapes, do not fit."""
    config, (tokens, targets, weights, segments), compiling = asked.config, batch, torch.compiler.is_compiling()
    stored = types.specs(config, mesh, zero=asked.zero, schedule=asked.schedule)
    check_batch(tokens, targets, asked, mesh)
    positive(scale=asked.scale)
    if asked.sums is not None and not (isinstance(asked.sums, torch.dtype) and asked.sums.is_floating_point):
        raise ValueError(f"sums = {asked.sums!r}: gradients are added up in floats\n  fix: give torch.float32, or None")
    not_negative(label_smoothing=asked.label_smoothing, z_loss=asked.z_loss)
    if asked.label_smoothing > 1:
        raise ValueError(f"label_smoothing = {asked.label_smoothing!r}: is a share\n  fix: give a number from 0 to 1")
    if asked.call == "loss_and_grads" and config.dropout and (not asked.seeded or compiling):
        fix = "give seed=, another in each step" if not asked.seeded else "run it without torch.compile"
        raise ValueError(f"{config.name}: dropout={config.dropout} draws random masks\n  fix: {fix}")
    group, told = None, ""
    if mesh.checked and mesh.size() > 1 and not compiling:
        named = asked._replace(schedule=getattr(asked.schedule, "name", asked.schedule))._asdict()
        named |= {"tokens": tokens, "weights": weights, "segments": segments, "params": params}
        group, told = mesh.group([*mesh.sizes]), spoken(named.pop("call"), named)
    return Stated(stored, Terms(config.V, asked.label_smoothing, asked.z_loss), group, told)


def _check_fit(asked: AskedStep, known: Stated, params: dict, batch: tuple, mesh) -> None:
    """ShardingError or ValueError unless params, weights and segments are those of the model and the batch."""
    config, (_, targets, weights, segments) = asked.config, batch
    if not torch.compiler.is_compiling():
        sizes = types.padded_sizes(config, mesh) | {"L": len(slots_of(config, mesh, asked.schedule))}
        fix = "transformer.shard(params, config, mesh, ...), with the same zero and schedule"
        dtype = getattr(params.get("embed"), "dtype", None) if isinstance(params, dict) else None
        tree.check(params, known.stored, sizes, mesh, dtype, fix=fix)
        tree.check_floats(params)
    if weights is not None:
        check_weights(weights, targets)
    if segments is not None:
        check_segments(segments, targets)
    if asked.schedule is not None and "Z" not in mesh.sizes:
        what = f"schedule={asked.schedule!r:.60} on {mesh}, which has no stages"
        raise ShardingError(f"{what}\n  fix: give the mesh an axis Z")


def check_batch(tokens: Tensor, targets: Tensor, asked: AskedStep, mesh) -> None:
    """ValueError or ShardingError for a batch that does not fit the model or the mesh, whatever its values."""
    config, remat, context, microbatches = asked.config, asked.remat, asked.context, asked.microbatches
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
    if torch.compiler.is_compiling() and (config.moe or mesh.sizes.get("Z", 1) > 1):
        why = "experts get as many rows as choose them" if config.moe else "stages wait for each other's messages"
        raise ValueError(
            f"{config.name}: {why}, which a compiled graph cannot express\n  fix: run it without torch.compile"
        )
