"""Where a rank's tokens lie in the batch and in the sequence, and what follows: rotation, masks and dropout."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_gather
from scaling.models.attention import fused
from scaling.models.dropout import dropout
from scaling.models.layer import Context, all_kept
from scaling.models.rope import layer_tables, restarted
from scaling.spec import present
from scaling.strategies import context as ring
from scaling.strategies.transformer.step import AskedStep


def in_form(x: Tensor, asked: AskedStep, mesh) -> Tensor:
    """Of tokens in plain order, in the order that the form of attention wants."""
    zigzag = asked.context == "zigzag" and mesh.sizes.get("C", 1) > 1
    return ring.to_zigzag(x, 1, mesh, "C") if zigzag else x


def contexts_of(
    asked: AskedStep, mesh, shape: Sequence[int], segments: Tensor | None, dtype: torch.dtype, seed: int | None
) -> list[Context]:
    """A `Context` for each microbatch: where this rank's tokens [B_PXE, T_C], of this shape, lie in the batch, and in
    the sequence by the form of attention over C; what rotates, hides and drops them follows from that. `seed`: of
    dropout; None: nothing is dropped."""
    config, M, (rows, t) = asked.config, asked.microbatches, shape
    split, c = mesh.sizes.get("C", 1) > 1, mesh.coord.get("C", 0)
    places = ring.positions(asked.context, t, mesh, "C") if split else torch.arange(t, device=mesh.device)
    rope = partial(layer_tables, config, dtype=dtype)
    ropes, parts, drops = [], [None] * M, [all_kept] * M
    if segments is None:
        ropes = [rope(places)] * M
    else:
        restart = restarted(all_gather("s[B, T_C] -> s[B, T]", segments, mesh))[:, c * t : (c + 1) * t]
        ropes = [rope(some) for some in in_form(restart.contiguous(), asked, mesh).chunk(M)]
        parts = in_form(segments, asked, mesh).chunk(M)
    if config.dropout and seed is not None:
        samples = torch.arange(rows * mesh.size([axis for axis in "PXE" if axis in mesh.sizes]), device=mesh.device)
        samples = tree.shard(samples, present("s[B_PXE]", mesh), mesh)
        given = {"rate": config.dropout, "seed": seed, "positions": tree.shard(places, present("p[T_Y]", mesh), mesh)}
        drops = [partial(dropout, samples=some, **given) for some in samples.chunk(M)]
    attend = partial(ring.attention, mesh=mesh, axis="C", form=asked.context) if split else fused
    stage, of_each = mesh.without("Z"), zip(ropes, parts, drops, strict=True)  # a layer does not see the stages
    return [Context(config, stage, rope, partial(attend, segments=part), drop) for rope, part, drop in of_each]
