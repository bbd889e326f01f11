"""A Transformer's layers over pipeline stages (Part 5, Pipelining), under any schedule of `scaling.schedules`.

Virtual stages get L layers as evenly as they divide, the first ones one more; in store each has the same number of
slots, the empty ones zeros, which are never run. The first stage embeds, the last has the head. In store the vocabulary
is split over Z, too; each of its tables goes to the stage that uses it, and its gradient back:

    U[D_X, V_YZ] -> U[D_X, V_Y] {U_Z} -> U[D, V_Y]             gathered at the last stage, and there over X
    dU[D, V_Y] {U_X} -> dU[D_X, V_Y] {U_Z} -> dU[D_X, V_YZ]    reduced there, and scattered to all stages

A tied table is used by both ends: all stages gather it, and its gradient is the sum of both. Dense layers before those
with experts, a stack of their own, are run by the first stage before its layers: every stage stores them, and their
gradient is unreduced over Z, as the last norm's is.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_reduce, gather, ppermute, scatter, wait
from scaling.configs import Config
from scaling.models.leaves import STACKS, without
from scaling.schedules import Schedule, make
from scaling.spec import parse, present
from scaling.strategies import pipeline
from scaling.strategies.layers import Layers
from scaling.strategies.stage import Stage
from scaling.strategies.transformer.ends import embed, embed_backward, head
from scaling.strategies.transformer.layer import ROWS
from scaling.strategies.transformer.moves import (
    ENDS,
    TOKENS,
    add_by_name,
    gathered_ends,
    moves_of,
    reduced_ends,
    totalled,
)
from scaling.strategies.transformer.step import Problem, TransformerLayers
from scaling.strategies.transformer.types import padded_sizes


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
    """The layers of each virtual stage, counted in their stack. ValueError if there are more stages than layers."""
    V, L = 1 if schedule is None else schedule.virtual_stages, config.L - config.dense_layers
    if V > L:
        raise ValueError(
            f"{config.name}: L={config.L} layers cannot fill {V} stages\n  fix: use fewer stages or chunks"
        )
    bounds = [s * (L // V) + min(s, L % V) for s in range(V + 1)]
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


def stored_places(config: Config, mesh, schedule: "Schedule | str | None" = None) -> dict[str, list[int]]:
    """Of each place of the stored stack [L_Z], and of the vocabulary [V_YZ] where it is padded, its index in the model;
    -1 for none."""
    found = {"L": slots_of(config, mesh, schedule)}
    more = padded_sizes(config, mesh)["V"] - config.V
    return found | ({"V": [*range(config.V), *[-1] * more]} if more else {})


def arranged_layers(W: Tensor, slots: list[int]) -> Tensor:
    """W[L, ...] in the order of the slots, zeros in the empty ones."""
    if slots == list(range(len(W))):
        return W
    empty = torch.tensor([l < 0 for l in slots], device=W.device).view(-1, *[1] * (W.dim() - 1))
    return W[[max(l, 0) for l in slots]].masked_fill(empty, 0)


def stage_of(problem: Problem, dense: Any, schedule: Schedule) -> tuple[Stage, list[Tensor], list]:
    """(the stage for `scaling.strategies.pipeline`, a list to which the layers' extra terms are added, one for the
    gradients of the `dense` layers, on the stage that runs them).

    The vjp of a layer gives dx and dW at once, so that the weight half of a backward has nothing left to do.
    """
    mesh, contexts = problem.mesh, problem.contexts
    ranges, extras, before, M = layers_of(problem.asked.config, schedule), [], [], len(contexts)

    def prepare(params, mesh, s, out):
        tree.map(Tensor.zero_, out)
        out = [stack[: len(ranges[s])] for stack in tree.leaves(out)]
        return TransformerLayers(problem, {"dense": dense, "layers": params}, ranges[s], out, late=True)

    def forward(chunk, In, mesh, m):
        Out, extra, kept = chunk.run(In, contexts[m])
        extras.append(extra / M)
        return Out, (kept, contexts[m])

    def backward_input(chunk, dOut, saved, mesh):
        return chunk.run_back(dOut, *saved, problem.asked.scale / M), None

    def finish(chunk):
        for grad, g in zip(chunk.grads, tree.leaves(chunk.result()), strict=True):
            grad.out.copy_(g)
        if chunk.before:
            before.extend(Layers.result(chunk.before))  # all stages make the sum over Z together

    stream = str(present(ROWS, mesh))
    stage = Stage({"In": stream, "Out": stream}, forward, backward_input, lambda *_: None, prepare, finish)
    return stage, extras, before


def staged(problem: Problem, params: dict, tokens: Tensor, targets: Tensor, w: Tensor) -> tuple[Tensor, dict]:
    """(loss, grads) by a pipeline's schedule over Z."""
    asked, mesh, _, _, terms, sums, contexts = problem
    config, schedule = asked.config, cast(Schedule, resolved(asked.schedule, mesh, len(contexts)))  # Z > 1 here
    stage, extras, before = stage_of(problem, params.get("dense"), schedule)
    homes = homes_of(config, mesh, schedule)
    ends, first = stage_ends(params, problem, homes), schedule.placement[0] == mesh.coord["Z"]
    if first:
        x = embed(ends["embed"], tokens, mesh, config.embed_scale)
    else:
        rows = (len(tokens), tokens.shape[1] // mesh.sizes.get("Y", 1), config.D)
        x = params["embed"].new_empty(()).expand(rows)  # its shape is what counts: it takes no room
    rows = torch.arange(len(tokens), device=tokens.device)

    def loss_of(ends, x, some):
        loss, dx, dW = head(ends, x, targets[some], w[some], terms, config.eps, mesh)
        return loss, dW, dx

    last = {name: W for name, W in ends.items() if name != "embed" or config.tied}
    given = params["layers"], last, x, rows, mesh, schedule, loss_of, stage
    out = empty_gradients(problem, "layers", params["layers"])
    loss, grads = pipeline.with_ends(*given, dtype=sums, differentiated=True, out=out)
    dends: dict[str, Any] = {**cast(dict, grads.head)}
    if first:
        dE = {"embed": embed_backward(grads.dIn, tokens, len(ends["embed"]), mesh, config.embed_scale)}
        add_by_name(dends, dE, sums)
    extra: Any = 0.0
    if config.moe:
        extra = all_reduce("Loss[] {U_ZPXECY} -> Loss[]", torch.stack(extras).sum(), mesh)
    done: dict[str, Any] = ends_gradients(dends, params, problem, homes)
    if config.dense_layers:
        done["dense"] = dense_gradients(before, params["dense"], problem)
    return loss + extra * asked.scale, {"layers": grads.params} | done


def empty_gradients(problem: Problem, stack: str, params: Any) -> Any:
    """Return a tree of tensors, of any values, that can receive the reduced gradients of a stack's params."""
    like = zip(tree.leaves(params), problem.grad_shapes(stack, params), strict=True)
    return tree.unflatten(params, [W.new_empty(shape, dtype=problem.sums) for W, shape in like])


def dense_gradients(before: list, params: dict, problem: Problem) -> dict:
    """Of the dense layers, from the stage that runs them to all: the others' part of the sum over Z is zeros."""
    found = before or tree.leaves(tree.map(Tensor.zero_, empty_gradients(problem, "dense", params)))
    moves = moves_of(tree.leaves(problem.reduced["dense"]), problem.mesh, ENDS, stack=True)
    return tree.unflatten(params, totalled(found, moves, problem.mesh))


def homes_of(config: Config, mesh, schedule: Schedule | None) -> dict[str, int]:
    """{a table of the vocabulary that is stored over Z: the place along Z of the stage that alone uses it}."""
    if schedule is None or config.tied or mesh.sizes["Z"] == 1:
        return {}
    return {"embed": schedule.placement[0], "unembed": schedule.placement[-1]}


def stage_ends(params: Mapping, problem: Problem, homes: Mapping[str, int]) -> dict[str, Tensor]:
    """What this stage uses of the params outside the layers, gathered."""
    stored, mesh = problem.stored, problem.mesh
    coming = {
        name: gather(_line_there(stored[name]), params[name], mesh, root=home, async_op=True)
        for name, home in homes.items()
    }
    tables = {name: wait(pending) for name, pending in coming.items()}
    tables = {name: W for name, W in tables.items() if mesh.coord["Z"] == homes[name]}
    common = {name: W for name, W in params.items() if name not in homes}
    return gathered_ends(tables, _at_home(stored), mesh) | gathered_ends(common, stored, mesh)


def ends_gradients(dW: Mapping, params: Mapping, problem: Problem, homes: Mapping[str, int]) -> dict[str, Tensor]:
    """Gradients of what this stage used of the ends, unreduced over what splits the tokens -> all, typed as params."""
    reduced, mesh = problem.reduced, problem.mesh
    there = _at_home(reduced)
    tables = reduced_ends({name: g for name, g in dW.items() if name in homes}, there, mesh, TOKENS)
    done: dict[str, Any] = reduced_ends({name: g for name, g in dW.items() if name not in homes}, reduced, mesh)
    for name, home in homes.items():
        if name not in tables:
            shape = parse(there[name]).local_shape(padded_sizes(problem.asked.config, mesh), mesh)
            tables[name] = params[name].new_zeros(shape, dtype=problem.sums)
        done[name] = scatter(_line_back(reduced[name]), tables[name], mesh, root=home, async_op=True)
    return tree.map(wait, done)


def _at_home(stored: Mapping) -> dict[str, str]:
    """The types of the tables where they are used, before they are gathered over X."""
    return {name: without(text, ("Z",)) for name, text in stored.items() if name not in STACKS}


@lru_cache(maxsize=4096)
def _line_there(stored: str) -> str:
    return f"{stored} -> {parse(without(stored, ('Z',))).with_unreduced(['Z'])}"


@lru_cache(maxsize=4096)
def _line_back(stored: str) -> str:
    return f"{parse(without(stored, ('Z',))).with_unreduced(['Z'])} -> {stored}"


def forward_loss(problem: Problem, params: dict, tokens: Tensor, targets: Tensor, w: Tensor) -> Tensor:
    """Loss[] of one microbatch, the same on every rank. Over Z one stage computes at a time."""
    asked, mesh, _, _, terms, _, (at,) = problem
    config, schedule, z = asked.config, placed(asked.schedule, mesh), mesh.coord.get("Z", 0)
    stages = layers_of(config, schedule)
    owners = [0] if schedule is None else [*schedule.placement]
    mine = [s for s, owner in enumerate(owners) if owner == z]
    own = {s: tree.map(lambda W, c=c: W.unflatten(0, (len(mine), -1))[c], params["layers"]) for c, s in enumerate(mine)}
    ends = stage_ends(params, problem, homes_of(config, mesh, schedule))
    if "embed" in ends:
        x = embed(ends["embed"], tokens, mesh, config.embed_scale)
    else:  # it comes from another stage
        x = params["embed"].new_empty(len(tokens), tokens.shape[1] // mesh.sizes.get("Y", 1), config.D)
    extra = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
    for s, layers in enumerate(stages):
        if s in mine:
            x, more, _ = TransformerLayers(problem, params | {"layers": own[s]}, layers).run(x, at)
            extra = extra + more
        if s + 1 < len(stages) and owners[s] != owners[s + 1]:
            x = ppermute(str(present(ROWS, mesh)), x, mesh, "Z", [(owners[s], owners[s + 1])])
    loss = head(ends, x, targets, w, terms, config.eps, mesh, False)[0] if z == owners[-1] else torch.zeros_like(extra)
    return all_reduce("Loss[] {U_ZPXECY} -> Loss[]", loss + extra, mesh)
