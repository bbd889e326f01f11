"""A Transformer's layers over pipeline stages (Part 5, Pipelining), under any schedule of `scaling.schedules`.

A stage is a `LayerGroup` of the layers that `types.layers_of` gives it. The first stage embeds, and the last has the
head. The stored vocabulary is split over Z, too. Each of its tables is sent to the stage that uses it, and its gradient
back:

    U[D_X, V_YZ] -> U[D_X, V_Y] {U_Z} -> U[D, V_Y]             gathered at the last stage, and there over X
    dU[D, V_Y] {U_X} -> dU[D_X, V_Y] {U_Z} -> dU[D_X, V_YZ]    reduced there, and scattered to all stages

A tied table is used by both ends, so all stages gather it, and its gradient is the sum of both. Dense layers before
those with experts are a separate stack. The first stage runs them before its layers. Every stage stores them, so their
gradient is unreduced over Z, like the last norm's.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_reduce, gather, ppermute, scatter, wait
from scaling.schedules import BackwardWeight, Schedule
from scaling.spec import parse, present
from scaling.strategies import pipeline
from scaling.strategies.stage import Stage
from scaling.strategies.transformer.ends import embed, embed_backward, head
from scaling.strategies.transformer.layer import ROWS
from scaling.strategies.transformer.layers import (
    LocalBatch,
    add_by_name,
    gather_leaves,
    group_layers,
    group_stage,
    move_ends,
    scatter_leaves,
    total_leaves,
)
from scaling.strategies.transformer.step import TrainStep, type_on_stage
from scaling.strategies.transformer.types import layers_of


def make_stage(
    step: TrainStep, batch: LocalBatch, dense: Any, ends: Mapping[str, Tensor]
) -> tuple[Stage, list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Return the stage for `scaling.strategies.pipeline`, and three collections that its run fills.

    The first collects the experts' extra terms of the loss. The second gets the gradients of the `dense` layers, on the
    stage that runs them. The third gets the embedding's gradients, on the first stage.

    If the schedule splits the backward into halves, the weight half computes the deferred products dW = A^T dOut, and
    adds all gradients to their sums. The first stage embeds each microbatch when its forward begins, so it never holds
    x or dx of the whole batch. With `reduce_each` a layer's gradients are reduced in the backward of each microbatch,
    while the embedding's and the unembedding's are reduced once.
    """
    config, contexts, ranges = step.config, batch.contexts, layers_of(step.config, step.schedule)
    extras, of_dense, embedding, M = [], [], {}, len(batch.contexts)
    halves = any(isinstance(part, BackwardWeight) for program in cast(Schedule, step.schedule) for part in program)
    tokens = batch.tokens.chunk(M)

    def prepare(params, mesh, s, out):
        tree.map(Tensor.zero_, out)
        out = [stack[: len(ranges[s])] for stack in tree.leaves(out)]
        return group_stage(step, {"dense": dense} | params, ranges[s], out=out)

    def embeds(chunk) -> bool:
        return chunk.first == len(config.dense)

    def forward(chunk, In, mesh, m):
        if embeds(chunk):
            In = embed(ends, tokens[m], contexts[m].learned, mesh, config)
        Out, extra, kept = chunk.run_forward(In, contexts[m])
        extras.append(extra / M)
        return Out, (kept, m)

    def backward_input(chunk, dOut, saved, mesh):
        (kept, m), rest = saved, ([] if halves else None)
        dx = chunk.run_backward(dOut, kept, contexts[m], step.options.scale / M, step.reduce_each, rest)
        if not embeds(chunk):
            return dx, rest
        if step.options.lora is None:
            dW = embed_backward(dx, tokens[m], contexts[m].learned, len(ends["embed"]), mesh, config)
            add_by_name(embedding, dW, step.sums)
        return None, rest

    def backward_weight(chunk, rests, mesh):
        for rest in filter(None, rests):
            while rest:
                loop, l, dW = rest.pop(0)
                loop.add(l, [*map(wait, dW)], step.reduce_each)
                if l == 0:
                    loop.settle()

    def finish(chunk):
        reduced = total_leaves(chunk.loop.result(), step.mesh, chunk.lines)
        for grad, g in zip(chunk.loop.grads, reduced, strict=True):
            grad.out.copy_(g)
        if chunk.below:
            of_dense.extend(chunk.below.loop.result())  # all stages make the sum over Z together

    stream = str(present(ROWS, step.mesh))
    stage = Stage({"In": stream, "Out": stream}, forward, backward_input, backward_weight, prepare, finish)
    return stage, extras, of_dense, embedding


def run_stages(step: TrainStep, params: dict, batch: LocalBatch) -> tuple[Tensor, dict]:
    """Return the loss and the gradients by a pipeline's schedule over Z."""
    config, mesh, schedule = step.config, step.mesh, cast(Schedule, step.schedule)
    trained = "layers" if step.options.lora is None else "lora"
    tokens, targets, weights, _ = batch
    ends = stage_ends(params, step)
    stage, extras, of_dense, embedding = make_stage(step, batch, params.get("dense"), ends)
    shape = len(tokens), tokens.shape[1] // mesh.sizes.get("Y", 1), config.D
    x = params["embed"].new_empty(()).expand(shape)  # only its shape is read: it takes no memory
    rows = torch.arange(len(tokens), device=tokens.device)

    def loss_of(ends, x, some):
        chunk = step.limits.chunk
        given = ends, x, targets[some], weights[some], step.terms, config, mesh
        loss, dx, dW = head(*given, frozen=trained == "lora", chunk_bytes=chunk)
        return loss, dW, dx

    last = {name: W for name, W in ends.items() if name != "positions" and (name != "embed" or config.tied)}
    given = staged_params(params), last, x, rows, mesh, schedule, loss_of, stage
    out = empty_gradients(step, trained, params[trained])
    loss, grads = pipeline.with_ends(*given, dtype=step.sums, differentiated=True, out=out, ahead=step.limits.ahead)
    extra: Any = 0.0
    if config.moe:
        extra = all_reduce("Loss[] {U_ZPXECY} -> Loss[]", torch.stack(extras).sum(), mesh)
    loss = loss + extra * step.options.scale
    if trained == "lora":
        return loss, {"lora": grads.params}
    end_gradients: dict[str, Any] = {**cast(dict, grads.head)}
    add_by_name(end_gradients, embedding, step.sums)
    if config.learned_positions and "positions" not in end_gradients:  # its sum over Z is of all stages
        end_gradients["positions"] = torch.zeros_like(ends["positions"], dtype=step.sums)
    done: dict[str, Any] = ends_gradients(end_gradients, params, step)
    if "dense" in params:  # the other stages' part of the sum over Z is zeros
        found = of_dense or [*map(Tensor.zero_, tree.leaves(empty_gradients(step, "dense", params["dense"])))]
        done["dense"] = tree.unflatten(params["dense"], total_leaves(found, mesh, step.lines["dense"]))
    return loss, {"layers": grads.params} | done


def staged_params(params: dict) -> dict[str, Any]:
    """Return the params whose dim L is split over stages: the layers', and their adapters' if they have any."""
    return {name: params[name] for name in ("layers", "lora") if name in params}


def empty_gradients(step: TrainStep, stack: str, params: Any) -> Any:
    """Return a tree of tensors, of any values, that can receive the reduced gradients of a stack's params."""
    like = zip(tree.leaves(params), step.grad_shapes(stack), strict=True)
    return tree.unflatten(params, [W.new_empty(shape, dtype=step.sums) for W, shape in like])


def stage_ends(params: dict, step: TrainStep) -> dict[str, Tensor]:
    """Gather the params outside the layers that this stage uses."""
    mesh, vocab_stages, coming, z = step.mesh, step.vocab_stages, {}, step.mesh.coord.get("Z", 0)
    for name, stage in vocab_stages.items():
        line = f"{step.stored[name]} -> {parse(type_on_stage(step.stored[name])).with_unreduced(['Z'])}"
        coming[name] = gather(line, params[name], mesh, root=stage, async_op=True)
    held = params | tree.map(wait, coming)
    local = {name: W for name, W in held.items() if vocab_stages.get(name, z) == z}
    return tree.map(wait, move_ends(gather_leaves, local, mesh, step.lines))


def ends_gradients(dW: Mapping, params: Mapping, step: TrainStep) -> dict[str, Tensor]:
    """Reduce this stage's gradients of the ends, unreduced over the axes of the tokens, to their stored types."""
    mesh, lines = step.mesh, step.lines
    done = move_ends(total_leaves, move_ends(scatter_leaves, dW, mesh, lines), mesh, lines)
    for name, stage in step.vocab_stages.items():
        there = parse(type_on_stage(step.reduced[name]))
        if name not in done:
            shape = there.local_shape(step.sizes, mesh)
            done[name] = params[name].new_zeros(shape, dtype=step.sums)
        line = f"{there.with_unreduced(['Z'])} -> {step.reduced[name]}"
        done[name] = scatter(line, done[name], mesh, root=stage, async_op=True)  # pyright: ignore[reportArgumentType]
    return tree.map(wait, done)


def forward_stages(step: TrainStep, params: dict, batch: LocalBatch) -> tuple[dict, Tensor, Tensor]:
    """Run one microbatch forward, over Z one stage at a time.

    Returns:
        The gathered ends that this stage uses; x[B_PXE, T_CY, D], the last layer's result on the last stage; and the
        sum of the extra terms of this stage's layers.
    """
    config, mesh, schedule, z = step.config, step.mesh, step.schedule, step.mesh.coord.get("Z", 0)
    tokens, (at,) = batch.tokens, batch.contexts
    stages = layers_of(config, schedule)
    owners = [0] if schedule is None else [*schedule.placement]
    mine = [s for s, owner in enumerate(owners) if owner == z]
    held = staged_params(params)
    own = {s: tree.map(lambda W, c=c: W.unflatten(0, (len(mine), -1))[c], held) for c, s in enumerate(mine)}
    ends = stage_ends(params, step)
    if "embed" in ends:
        x = embed(ends, tokens, at.learned, mesh, config)
    else:  # it comes from another stage
        x = params["embed"].new_empty(len(tokens), tokens.shape[1] // mesh.sizes.get("Y", 1), config.D)
    extra = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
    for s, layers in enumerate(stages):
        if s in mine:
            chunk = group_layers(step, params) if schedule is None else group_stage(step, params | own[s], layers)
            x, more, _ = chunk.run_forward(x, at)
            extra = extra + more
        if s + 1 < len(stages) and owners[s] != owners[s + 1]:
            x = ppermute(str(present(ROWS, mesh)), x, mesh, "Z", [(owners[s], owners[s + 1])])
    return ends, x, extra


def forward_loss(step: TrainStep, params: dict, batch: LocalBatch) -> Tensor:
    """Return Loss[] of one microbatch, the same on every rank."""
    config, mesh, loss = step.config, step.mesh, 0.0
    ends, x, extra = forward_stages(step, params, batch)
    if step.schedule is None or mesh.coord["Z"] == step.schedule.placement[-1]:
        loss = head(ends, x, batch.targets, batch.weights, step.terms, config, mesh, gradients=False)[0]
    return all_reduce("Loss[] {U_ZPXECY} -> Loss[]", extra + loss, mesh)
