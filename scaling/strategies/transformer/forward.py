"""The forward pass alone, on any mesh: layer after layer, stage after stage, with nothing kept for a backward pass."""

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import ppermute
from scaling.strategies.axes import all_reduce, present
from scaling.strategies.transformer.ends import embed, head
from scaling.strategies.transformer.layer import ROWS
from scaling.strategies.transformer.stage_ends import homes_of, stage_ends
from scaling.strategies.transformer.stages import layers_of, placed
from scaling.strategies.transformer.step import Problem, TransformerLayers


def forward_loss(problem: Problem, params: dict, tokens: Tensor, targets: Tensor, w: Tensor, schedule=None) -> Tensor:
    """Loss[] of one microbatch, the same on every rank. Over Z one stage computes at a time."""
    config, mesh, terms, (at,) = problem.config, problem.mesh, problem.terms, problem.contexts
    schedule, z = placed(schedule, mesh), mesh.coord.get("Z", 0)
    stages = layers_of(config, schedule)
    owners = [0] if schedule is None else [*schedule.placement]
    mine = [s for s, owner in enumerate(owners) if owner == z]
    own = {s: tree.map(lambda W, c=c: W.unflatten(0, (len(mine), -1))[c], params["layers"]) for c, s in enumerate(mine)}
    ends = stage_ends(params, problem, homes_of(config, mesh, schedule))
    if "embed" in ends:
        x = embed(ends["embed"], tokens, mesh)
    else:  # it comes from another stage
        x = params["embed"].new_empty(len(tokens), tokens.shape[1] // mesh.sizes.get("Y", 1), config.D)
    extra = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
    for s, layers in enumerate(stages):
        if s in mine:
            x, more, _ = TransformerLayers(problem, own[s], layers=layers).run(x, at)
            extra = extra + more
        if s + 1 < len(stages) and owners[s] != owners[s + 1]:
            x = ppermute(str(present(ROWS, mesh)), x, mesh, "Z", [(owners[s], owners[s + 1])])
    loss = head(ends, x, targets, w, terms, config.eps, mesh) if z == owners[-1] else torch.zeros_like(extra)
    return all_reduce("Loss[] {U_ZPXECY} -> Loss[]", loss + extra, mesh)
