"""A Transformer's layers over pipeline stages (Part 5, Pipelining), under any schedule of `scaling.schedules`.

A stage is a `LayerStack` of some layers; `types` says which. The first stage embeds, the last has the head. In store
the vocabulary is split over Z, too; each of its tables goes to the stage that uses it, and its gradient back:

    U[D_X, V_YZ] -> U[D_X, V_Y] {U_Z} -> U[D, V_Y]             gathered at the last stage, and there over X
    dU[D, V_Y] {U_X} -> dU[D_X, V_Y] {U_Z} -> dU[D_X, V_YZ]    reduced there, and scattered to all stages

A tied table is used by both ends: all stages gather it, and its gradient is the sum of both. Dense layers before those
with experts, a stack of their own, are run by the first stage before its layers: every stage stores them, and their
gradient is unreduced over Z, as the last norm's is.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_reduce, gather, ppermute, scatter, wait
from scaling.models.leaves import without
from scaling.schedules import Schedule
from scaling.spec import parse, present
from scaling.strategies import pipeline
from scaling.strategies.stage import Stage
from scaling.strategies.transformer.ends import embed, embed_backward, head
from scaling.strategies.transformer.layer import ROWS
from scaling.strategies.transformer.layers import (
    LayerStack,
    LocalBatch,
    add_by_name,
    gather_ends,
    reduce_ends,
    total_leaves,
)
from scaling.strategies.transformer.step import TOKENS, TrainStep, lines_of
from scaling.strategies.transformer.types import layers_of, padded_sizes


def stage_of(step: TrainStep, batch: LocalBatch, dense: Any) -> tuple[Stage, list[Tensor], list[Tensor]]:
    """Return the stage for `scaling.strategies.pipeline`, and two lists that its run fills.

    They are the layers' extra terms, and the gradients of the `dense` layers on the stage that runs them. The vjp of a
    layer gives dx and dW at once, so that the weight half of a backward has nothing left to do.
    """
    contexts, ranges = batch.contexts, layers_of(step.config, step.schedule)
    extras, of_dense, M = [], [], len(batch.contexts)

    def prepare(params, mesh, s, out):
        tree.map(Tensor.zero_, out)
        first, count = ranges[s].start, len(ranges[s])
        out = [stack[:count] for stack in tree.leaves(out)]
        return LayerStack(step, {"dense": dense, "layers": params}, first=first, count=count, out=out, late=True)

    def forward(chunk, In, mesh, m):
        Out, extra, kept = chunk.forward(In, contexts[m])
        extras.append(extra / M)
        return Out, (kept, contexts[m])

    def backward_input(chunk, dOut, saved, mesh):
        return chunk.backward(dOut, *saved, step.options.scale / M), None

    def finish(chunk):
        for grad, g in zip(chunk.engine.grads, chunk.reduced_gradients(), strict=True):
            grad.out.copy_(g)
        if chunk.below:
            of_dense.extend(chunk.below.engine.result())  # all stages make the sum over Z together

    stream = str(present(ROWS, step.mesh))
    stage = Stage({"In": stream, "Out": stream}, forward, backward_input, lambda *_: None, prepare, finish)
    return stage, extras, of_dense


def run_stages(step: TrainStep, params: dict, batch: LocalBatch) -> tuple[Tensor, dict]:
    """Return the loss and the gradients by a pipeline's schedule over Z."""
    config, mesh, schedule = step.config, step.mesh, cast(Schedule, step.schedule)
    tokens, targets, weights, _ = batch
    stage, extras, of_dense = stage_of(step, batch, params.get("dense"))
    homes = homes_of(step)
    ends, first = stage_ends(params, step, homes), schedule.placement[0] == mesh.coord["Z"]
    if first:
        x = embed(ends["embed"], tokens, mesh, config.embed_scale)
    else:
        rows = (len(tokens), tokens.shape[1] // mesh.sizes.get("Y", 1), config.D)
        x = params["embed"].new_empty(()).expand(rows)  # its shape is what counts: it takes no room
    rows = torch.arange(len(tokens), device=tokens.device)

    def loss_of(ends, x, some):
        chunk = step.options.limits.chunk
        loss, dx, dW = head(ends, x, targets[some], weights[some], step.terms, config, mesh, chunk_bytes=chunk)
        return loss, dW, dx

    last = {name: W for name, W in ends.items() if name != "embed" or config.tied}
    given = params["layers"], last, x, rows, mesh, schedule, loss_of, stage
    out = empty_gradients(step, "layers", params["layers"])
    loss, grads = pipeline.with_ends(*given, dtype=step.sums, differentiated=True, out=out)
    dends: dict[str, Any] = {**cast(dict, grads.head)}
    if first:
        add_by_name(
            dends, {"embed": embed_backward(grads.dIn, tokens, len(ends["embed"]), mesh, config.embed_scale)}, step.sums
        )
    extra: Any = 0.0
    if config.moe:
        extra = all_reduce("Loss[] {U_ZPXECY} -> Loss[]", torch.stack(extras).sum(), mesh)
    done: dict[str, Any] = ends_gradients(dends, params, step, homes)
    if "dense" in params:  # the other stages' part of the sum over Z is zeros
        found = of_dense or [*map(Tensor.zero_, tree.leaves(empty_gradients(step, "dense", params["dense"])))]
        done["dense"] = tree.unflatten(params["dense"], total_leaves(found, mesh, step.lines["dense"]))
    return loss + extra * step.options.scale, {"layers": grads.params} | done


def empty_gradients(step: TrainStep, stack: str, params: Any) -> Any:
    """Return a tree of tensors, of any values, that can receive the reduced gradients of a stack's params."""
    leaves = tree.leaves(params)
    like = zip(leaves, step.grad_shapes(stack, leaves), strict=True)
    return tree.unflatten(params, [W.new_empty(shape, dtype=step.sums) for W, shape in like])


def homes_of(step: TrainStep) -> dict[str, int]:
    """Return the index along Z of the stage that alone uses a table of the vocabulary, by the table's name."""
    if step.schedule is None or step.config.tied or step.mesh.sizes["Z"] == 1:
        return {}
    return {"embed": step.schedule.placement[0], "unembed": step.schedule.placement[-1]}


def stage_ends(params: Mapping, step: TrainStep, homes: Mapping[str, int]) -> dict[str, Tensor]:
    """Gather what this stage uses of the params outside the layers."""
    stored, mesh = step.stored, step.mesh
    coming = {
        name: gather(_line_there(stored[name]), params[name], mesh, root=home, async_op=True)
        for name, home in homes.items()
    }
    tables = {name: wait(pending) for name, pending in coming.items()}
    tables = {name: W for name, W in tables.items() if mesh.coord["Z"] == homes[name]}
    common = {name: W for name, W in params.items() if name not in homes}
    return gather_ends(tables, mesh, home_lines(step, homes)) | gather_ends(common, mesh, step.lines)


def ends_gradients(dW: Mapping, params: Mapping, step: TrainStep, homes: Mapping[str, int]) -> dict[str, Tensor]:
    """Reduce this stage's gradients of the ends, unreduced over what splits the tokens, and type them as the params."""
    reduced, mesh = step.reduced, step.mesh
    tables = reduce_ends({name: g for name, g in dW.items() if name in homes}, mesh, home_lines(step, homes))
    common = {name: g for name, g in dW.items() if name not in homes}
    done: dict[str, Any] = reduce_ends(common, mesh, step.lines)
    for name, home in homes.items():
        if name not in tables:
            shape = parse(_at_home(reduced[name])).local_shape(padded_sizes(step.config, mesh), mesh)
            tables[name] = params[name].new_zeros(shape, dtype=step.sums)
        done[name] = scatter(_line_back(reduced[name]), tables[name], mesh, root=home, async_op=True)
    return tree.map(wait, done)


def home_lines(step: TrainStep, homes: Mapping[str, int]) -> dict:
    """Return the lines of the tables where they are used: they are gathered and reduced over X there."""
    both = [_at_home(step.stored[name]) for name in homes], [_at_home(step.reduced[name]) for name in homes]
    return dict(zip(homes, lines_of(*both, step.mesh, TOKENS), strict=True))


def _at_home(stored: str) -> str:
    """Return the type of a table where it is used, before it is gathered over X."""
    return without(stored, ("Z",))


@lru_cache(maxsize=4096)
def _line_there(stored: str) -> str:
    return f"{stored} -> {parse(_at_home(stored)).with_unreduced(['Z'])}"


@lru_cache(maxsize=4096)
def _line_back(stored: str) -> str:
    return f"{parse(_at_home(stored)).with_unreduced(['Z'])} -> {stored}"


def forward_loss(step: TrainStep, params: dict, batch: LocalBatch) -> Tensor:
    """Return Loss[] of one microbatch, the same on every rank. Over Z one stage computes at a time."""
    config, mesh, schedule, z = step.config, step.mesh, step.schedule, step.mesh.coord.get("Z", 0)
    tokens, targets, weights, (at,) = batch
    stages = layers_of(config, schedule)
    owners = [0] if schedule is None else [*schedule.placement]
    mine = [s for s, owner in enumerate(owners) if owner == z]
    own = {s: tree.map(lambda W, c=c: W.unflatten(0, (len(mine), -1))[c], params["layers"]) for c, s in enumerate(mine)}
    ends = stage_ends(params, step, homes_of(step))
    if "embed" in ends:
        x = embed(ends["embed"], tokens, mesh, config.embed_scale)
    else:  # it comes from another stage
        x = params["embed"].new_empty(len(tokens), tokens.shape[1] // mesh.sizes.get("Y", 1), config.D)
    extra = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
    for s, layers in enumerate(stages):
        if s in mine:
            chunk = LayerStack(step, params | {"layers": own[s]}, first=layers.start, count=len(layers))
            x, more, _ = chunk.forward(x, at)
            extra = extra + more
        if s + 1 < len(stages) and owners[s] != owners[s + 1]:
            x = ppermute(str(present(ROWS, mesh)), x, mesh, "Z", [(owners[s], owners[s + 1])])
    if z == owners[-1]:
        loss = head(ends, x, targets, weights, step.terms, config, mesh, gradients=False)[0]
    else:
        loss = torch.zeros_like(extra)
    return all_reduce("Loss[] {U_ZPXECY} -> Loss[]", loss + extra, mesh)
