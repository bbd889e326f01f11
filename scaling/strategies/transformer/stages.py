"""A Transformer's layers over pipeline stages (Part 5, Pipelining), under any schedule of `scaling.schedules`.

Virtual stages get L layers as evenly as they divide, the first ones one more; in store each has the same number of
slots, the empty ones zeros, which are never run. The first stage embeds, the last has the head (`stage_ends`).
"""

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from scaling import tree
from scaling.configs import Config
from scaling.schedules import Schedule, make
from scaling.strategies import pipeline
from scaling.strategies.axes import all_reduce as reduce_present
from scaling.strategies.axes import present
from scaling.strategies.stage import Stage
from scaling.strategies.transformer.ends import embed, embed_backward, head
from scaling.strategies.transformer.layer import ROWS
from scaling.strategies.transformer.stage_ends import ends_gradients, homes_of, stage_ends
from scaling.strategies.transformer.step import Problem, TransformerLayers, add_by_name


def resolved(schedule: "Schedule | str | None", mesh, microbatches: int) -> Schedule | None:
    """The schedule as an object: 1F1B unless one is named or given; None without stages."""
    Z = mesh.sizes.get("Z", 1)
    if schedule is None and Z == 1:
        return None
    if not isinstance(schedule, Schedule):
        schedule = make(schedule or "1f1b", Z, microbatches)
    if schedule.stages != Z or schedule.microbatches != microbatches:
        raise ValueError(
            f"{schedule.name}: is of {schedule.stages} stages and {schedule.microbatches} microbatches, but the mesh "
            f"has Z={Z} and microbatches={microbatches}\n  fix: make it with these"
        )
    return schedule


def placed(schedule: "Schedule | str | None", mesh) -> Schedule | None:
    """A schedule that holds the layers alike, whatever the number of microbatches."""
    if isinstance(schedule, Schedule):
        return schedule
    return resolved(schedule, mesh, 2 * mesh.sizes.get("Z", 1))


def layers_of(config: Config, schedule: Schedule | None) -> list[range]:
    """The layers of each virtual stage. ValueError if there are more stages than layers."""
    V = 1 if schedule is None else schedule.virtual_stages
    if V > config.L:
        raise ValueError(
            f"{config.name}: L={config.L} layers cannot fill {V} stages\n  fix: use fewer stages or chunks"
        )
    bounds = [s * (config.L // V) + min(s, config.L % V) for s in range(V + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def slots_of(config: Config, mesh, schedule: "Schedule | str | None") -> list[int]:
    """Which layer each place of the stored stack [L_Z] holds; -1 for none."""
    schedule = placed(schedule, mesh)
    stages = layers_of(config, schedule)
    if schedule is None:
        return list(stages[0])
    depth, slots = max(map(len, stages)), []
    for rank in range(schedule.stages):
        for s in schedule.stages_of(rank):
            slots += [*stages[s], *[-1] * (depth - len(stages[s]))]
    return slots


def arranged_layers(W: Tensor, slots: list[int]) -> Tensor:
    """W[L, ...] in the order of the slots, zeros in the empty ones."""
    if slots == list(range(len(W))):
        return W
    empty = torch.tensor([l < 0 for l in slots], device=W.device).view(-1, *[1] * (W.dim() - 1))
    return W[[max(l, 0) for l in slots]].masked_fill(empty, 0)


def stage_of(problem: Problem, schedule: Schedule, remat: str, keep: bool) -> tuple[Stage, list[Tensor]]:
    """(the stage for `scaling.strategies.pipeline`, a list to which the layers' extra terms are added).

    The vjp of a layer gives dx and dW at once, so that the weight half of a backward has nothing left to do.
    """
    config, mesh, contexts = problem.config, problem.mesh, problem.contexts
    ranges, extras, M = layers_of(config, schedule), [], len(contexts)

    def prepare(params, mesh, s, out):
        tree.map(Tensor.zero_, out)
        out = [stack[: len(ranges[s])] for stack in tree.leaves(out)]
        return TransformerLayers(problem, params, remat, ranges[s], keep, out, late=True)

    def forward(chunk, In, mesh, m):
        Out, extra, kept = chunk.run(In, contexts[m])
        extras.append(extra / M)
        return Out, (kept, contexts[m])

    def backward_input(chunk, dOut, saved, mesh):
        return chunk.run_back(dOut, *saved, problem.scale / M), None

    def finish(chunk):
        for into, g in zip(chunk.out, tree.leaves(chunk.result()), strict=True):
            into.copy_(g)

    stream = str(present(ROWS, mesh))
    return Stage({"In": stream, "Out": stream}, forward, backward_input, lambda *_: None, prepare, finish), extras


def staged(
    problem: Problem, params: dict, tokens: Tensor, targets: Tensor, w: Tensor, remat: str, keep: bool, schedule
):
    """(loss, grads) by a pipeline's schedule over Z."""
    config, mesh, contexts, terms, sums = problem.config, problem.mesh, problem.contexts, problem.terms, problem.sums
    schedule = cast(Schedule, resolved(schedule, mesh, len(contexts)))  # Z > 1 here
    stage, extras = stage_of(problem, schedule, remat, keep)
    homes = homes_of(config, mesh, schedule)
    ends, first = stage_ends(params, problem, homes), schedule.placement[0] == mesh.coord["Z"]
    if first:
        x = embed(ends["embed"], tokens, mesh)
    else:
        rows = (len(tokens), tokens.shape[1] // mesh.sizes.get("Y", 1), config.D)
        x = params["embed"].new_empty(rows)
    rows = torch.arange(len(tokens), device=tokens.device)

    def loss_of(ends, x, some):
        return head(ends, x, targets[some], w[some], terms, config.eps, mesh)

    last = {name: W for name, W in ends.items() if name != "embed" or config.tied}
    loss, grads = pipeline.with_ends(params["layers"], last, x, rows, mesh, schedule, loss_of, stage, dtype=sums)
    dends: dict[str, Any] = {**cast(dict, grads.head)}
    if first:
        dE = {"embed": embed_backward(grads.dIn, tokens, len(ends["embed"]), mesh)}
        add_by_name(dends, dE, sums)
    extra: Any = 0.0
    if config.moe:
        extra = reduce_present("Loss[] {U_ZPXECY} -> Loss[]", torch.stack(extras).sum(), mesh)
    done = ends_gradients(dends, params, problem, homes)
    return loss + extra * problem.scale, {"layers": grads.params} | done
