"""The loss of a Transformer and its gradients on a mesh; whole params to shards and back.

A run asks for the same step thousands of times. What follows from its settings, and from the shapes of params and
batch, is worked out once, or refused, and kept on the mesh; what lies in the batch is looked at each time.
"""

from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_reduce, einsum
from scaling.collectives.checked import agree, spoken
from scaling.common.arguments import not_negative, one_of, positive, whole
from scaling.configs import Config
from scaling.mesh import Group
from scaling.models.inputs import check_ids, check_params, check_range, check_segments, check_weights
from scaling.models.layer import scale_by
from scaling.models.lora import Lora
from scaling.models.params import used_gains
from scaling.spec import ShardingError
from scaling.strategies.context.layout import FORMS
from scaling.strategies.transformer import types
from scaling.strategies.transformer.contexts import contexts_of, in_form
from scaling.strategies.transformer.ends import Terms
from scaling.strategies.transformer.layer import REMAT
from scaling.strategies.transformer.stages import arranged_layers, forward_loss, slots_of, staged
from scaling.strategies.transformer.step import AskedStep, Problem, forward_logprobs, unstaged

LIKE = attrgetter("shape", "dtype", "device", "layout")


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
    found = tree.unshard(params, types.specs(config, mesh, zero=zero, schedule=schedule), mesh)
    slots = slots_of(config, mesh, schedule)
    layers = tree.map(lambda W: W[[slots.index(l) for l in range(config.sizes["L"])]], found["layers"])
    return found | {"layers": layers} | _tables(found, config.V)


def _tables(params: dict, V: int) -> dict[str, Tensor]:
    """The tables of the vocabulary with V entries, if they have not: cut, or padded with zeros."""
    more = V - len(params["embed"])
    pads = {"embed": (0, 0, 0, more), "unembed": (0, more)} if more else {}
    return {name: torch.nn.functional.pad(params[name], pad) for name, pad in pads.items() if name in params}


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
    lora: Lora | None = None,
    mean: bool = True,
) -> tuple[Tensor, dict]:
    """(loss[], the same on every rank; grads typed as params) of tokens, targets int64[B_PXE, T_C] in plain order.

    loss = sum(w ce) / sum(w) over the global batch, 0 where sum(w) is 0, plus the experts' auxiliary terms of Config
    (their mean over microbatches). `weights`[B_PXE, T_C]: w, by default 1, and 0 where the target is `ignore_index`.
    `segments`: ids of packed documents. `label_smoothing` and `z_loss` as in `ends.Terms`. `context`: the form of
    attention over C. `remat`: which activations a layer keeps for its backward (`layer.REMAT`). `keep_weights`: weights
    stay gathered to the end of the step; else they are thrown away after each use and gathered again. Neither changes
    a bit of the gradients. `zero`: as given to `specs` and `grad_specs`. `sums`: the dtype in which gradients are added
    up over microbatches and ranks, and returned; by default the params'. `scale`: what cotangents are multiplied by on
    their way, and gradients divided by at the end: for float16, a power of two. `seed`: of dropout, another in each
    step, needed where Config has dropout: the same elements are dropped on every mesh. ShardingError or ValueError
    for what does not fit, before anything is sent. `lora`: params["lora"] holds adapters, of which alone there are
    gradients, {"lora": ...}. Without `mean` the loss is sum(w ce), and w are numbers of either sign.
    """
    mesh = mesh.optional
    step = AskedStep(
        config, remat, zero, schedule, microbatches, keep_weights, context, ignore_index, label_smoothing, z_loss, sums,
        scale, seeded=seed is not None, lora=lora, mean=mean,
    )  # fmt: skip
    problem, batch = stated(step, params, tokens, targets, weights, segments, mesh, seed)
    params = used_gains(tree.map(Tensor.detach, params), config)
    run = staged if mesh.sizes.get("Z", 1) > 1 or schedule is not None else unstaged
    loss, grads = run(problem, params, *batch)
    if scale != 1:
        loss, grads = loss / scale, tree.map(lambda g: g.mul_(1 / scale), grads)
    if lora is None:
        grads["norm"] = scale_by(grads["norm"], 1 / config.logit_scale)  # of the gain that is stored
    return loss, {name: grads[name] for name in (params if lora is None else ("lora",))}


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
    lora: Lora | None = None,
) -> Tensor:
    """Return the loss of `loss_and_grads`, of one microbatch without dropout; nothing is kept for a backward."""
    mesh, terms = mesh.optional, (ignore_index, label_smoothing, z_loss)
    step = AskedStep(config, "none", zero, schedule, 1, False, context, *terms, backward=False, lora=lora)
    problem, batch = stated(step, params, tokens, targets, weights, segments, mesh)
    return forward_loss(problem, used_gains(params, config), *batch)


@torch.no_grad()
def logprobs(
    params: dict, tokens: Tensor, targets: Tensor, config: Config, mesh, *, zero: int = 3, lora: Lora | None = None
) -> Tensor:
    """tokens[B_PXE, T_C], targets[B_PXE, T_C] -> logprobs[B_PXE, T_C], those of the targets, on a mesh without stages.

    A loss that is any function of them has the gradients that `loss_and_grads` gives, with mean=False, for weights that
    are minus its derivative by them.
    """
    mesh = mesh.optional
    asked = AskedStep(config, "none", zero, None, 1, False, "ring", backward=False, lora=lora)
    problem, (tokens, targets, _) = stated(asked, params, tokens, targets, None, None, mesh)
    if mesh.sizes.get("Z", 1) > 1:
        raise ShardingError(f"logprobs on {mesh}: stages Z are not computed\n  fix: give the ranks of Z to X or Y")
    return forward_logprobs(problem, params, tokens, targets)


class Stated(NamedTuple):
    """Of an `AskedStep`: the types of the stored params and of the gradients; the ranks that have to agree on what."""

    stored: dict
    reduced: dict
    group: Group | None
    told: str


def stated(
    asked: AskedStep, params: dict, tokens: Tensor, targets: Tensor, weights: Tensor | None, segments: Tensor | None,
    mesh, seed: int | None = None,
) -> tuple[Problem, tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
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
    w = w / torch.where(total == 0, 1, total) * asked.scale if asked.mean else w * asked.scale
    terms = Terms(config.V, asked.label_smoothing, asked.z_loss)
    contexts = contexts_of(asked, mesh, tokens.shape, segments, dtype, seed)
    problem = Problem(asked, mesh, known.stored, known.reduced, terms, asked.sums or dtype, contexts)
    return problem, (in_form(tokens, asked, mesh), in_form(targets, asked, mesh), in_form(w, asked, mesh))


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
    layout = {"zero": asked.zero, "schedule": asked.schedule}
    stored = types.specs(config, mesh, **layout, lora=asked.lora)
    reduced = stored if asked.lora else types.grad_specs(config, mesh, **layout)
    check_batch(tokens, targets, asked, mesh)
    positive(scale=asked.scale)
    if asked.sums is not None and not (isinstance(asked.sums, torch.dtype) and asked.sums.is_floating_point):
        raise ValueError(f"sums = {asked.sums!r}: gradients are added up in floats\n  fix: give torch.float32, or None")
    not_negative(label_smoothing=asked.label_smoothing, z_loss=asked.z_loss)
    if asked.label_smoothing > 1:
        raise ValueError(f"label_smoothing = {asked.label_smoothing!r}: is a share\n  fix: give a number from 0 to 1")
    if asked.backward and config.dropout and (not asked.seeded or compiling):
        fix = "give seed=, another in each step" if not asked.seeded else "run it without torch.compile"
        raise ValueError(f"{config.name}: dropout={config.dropout} draws random masks\n  fix: {fix}")
    if not mesh.checked or mesh.size() == 1 or compiling:
        return Stated(stored, reduced, None, "")
    named = asked._replace(schedule=getattr(asked.schedule, "name", asked.schedule))._asdict()
    named |= {"tokens": tokens, "weights": weights, "segments": segments, "params": params}
    call, group = "loss_and_grads" if asked.backward else "loss", mesh.group([*mesh.sizes])
    return Stated(stored, reduced, group, spoken(call, named))


def _check_fit(asked: AskedStep, known: Stated, params: dict, batch: tuple, mesh) -> None:
    """ShardingError or ValueError unless params, weights and segments are those of the model and the batch."""
    config, (_, targets, weights, segments) = asked.config, batch
    if not torch.compiler.is_compiling():
        sizes = types.padded_sizes(config, mesh) | {"L": len(slots_of(config, mesh, asked.schedule))}
        sizes |= {"R": asked.lora.rank} if asked.lora else {}
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
