"""How weights come to a rank and gradients go back: the lines of each leaf, and small leaves in one message (Part 5).

A leaf has a type as it is stored, and one as it is used, gathered over X (of the ends also over Z). By the law of
cotangents its gradient is unreduced over every axis that splits the tokens and not the leaf: it is reduced over X
inside a pod first, then over the rest. Those lines are made once a mesh. The leaves of a small layer travel together,
in one AllGather and one ReduceScatter over X: a message has a price, and a large layer would rather not be copied.

    W [G_X, S] -> W [G, S]             G blocks, one a rank along X, of all the layer's shards one after the other
    dW[G, S] {U_X} -> dW[G_X, S]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.collectives import all_gather, all_reduce, reduce_scatter, wait
from scaling.models.leaves import STACKS, without
from scaling.spec import Spec, parse, present

TOKENS = ("P", "X", "E", "C", "Y")  # the axes that split the tokens: those over which the loss is unreduced
ENDS = (*TOKENS, "Z")  # and for what is outside the layers, which not every stage uses
SIZE = attrgetter("shape", "dtype")
SMALL = 2 << 20  # bytes of a layer's shards on a rank


class Moves(NamedTuple):
    """The lines of one leaf, "" where nothing is to be done: its weight's from stored to used, its gradient's back in
    two steps. `dim`: the one that X alone splits, -1 if there is none."""

    gather: str
    scatter: str
    total: str
    dim: int


def moves_of(stored: Sequence[str], mesh, axes: tuple[str, ...] = TOKENS, stack: bool = False) -> list[Moves]:
    """Of leaves stored as these types, whose gradients are unreduced over those of `axes` that do not split them. Of
    `stack`s over L all lines but `total` are those of one layer."""
    return [Moves(*each) for each in mesh.constant(_moves, tuple(stored), axes, stack)]


def _moves(mesh, stored: tuple[str, ...], axes: tuple[str, ...], stack: bool) -> list[tuple[str, str, str, int]]:
    return [_move(mesh, text, axes, stack) for text in stored]


def _move(mesh, stored: str, axes: tuple[str, ...], stack: bool) -> tuple[str, str, str, int]:
    after = present(stored, mesh)
    used = parse(without(str(after), ("X", "Z")))
    over = [axis for axis in axes if mesh.sizes.get(axis, 1) > 1 and axis not in used.axes]
    partial = used.with_unreduced(over)
    scattered = after.with_unreduced([axis for axis in over if axis not in after.axes])
    total = f"{scattered} -> {after}" if scattered.unreduced else ""
    if stack:
        after, used, partial, scattered = (
            Spec(t.name, t.dims[1:], t.unreduced) for t in (after, used, partial, scattered)
        )
    gather = "" if after.same_sharding(used) else f"{after} -> {used}"
    scatter = "" if partial.same_sharding(scattered) else f"{partial} -> {scattered}"
    dims = [i for i, (_, axes) in enumerate(after.dims) if axes == ("X",)]
    return gather, scatter, total, dims[0] if dims else -1


def gathered_leaves(W: Sequence[Tensor], mesh, moves: Sequence[Moves]) -> list:
    """Leaves as they are used: under way."""
    some = zip(W, moves, strict=True)
    return [all_gather(to.gather, x, mesh, async_op=True) if to.gather else x for x, to in some]


def scattered_leaves(dW: Sequence[Tensor], mesh, moves: Sequence[Moves]) -> list:
    """Their gradients after the first step back: under way."""
    some = zip(dW, moves, strict=True)
    return [reduce_scatter(to.scatter, g, mesh, async_op=True) if to.scatter else g for g, to in some]


def totalled(begun: Sequence, moves: Sequence[Moves], mesh) -> list[Tensor]:
    """And after the second: there."""
    some = zip(begun, moves, strict=True)
    return [*map(wait, [all_reduce(to.total, wait(g), mesh, async_op=True) if to.total else g for g, to in some])]


def gathered_ends(params: Mapping, stored: Mapping, mesh) -> dict[str, Tensor]:
    """The params outside the layers, gathered."""
    ends = {name: W for name, W in params.items() if name not in STACKS}
    moves = moves_of([stored[name] for name in ends], mesh, ENDS)
    return dict(zip(ends, map(wait, gathered_leaves([*ends.values()], mesh, moves)), strict=True))


def reduced_ends(dW: Mapping, stored: Mapping, mesh, axes: tuple[str, ...] = ENDS) -> dict[str, Tensor]:
    """Gradients of params outside the layers, by name, as these are stored."""
    moves = moves_of([stored[name] for name in dW], mesh, axes)
    return dict(zip(dW, totalled(scattered_leaves([*dW.values()], mesh, moves), moves, mesh), strict=True))


def add_by_name(sums_of: dict, dW: dict, dtype: torch.dtype) -> None:
    """Add gradients by name, in this dtype."""
    for name, g in dW.items():
        sums_of[name] = sums_of[name].add_(g) if name in sums_of else g.to(dtype)


@dataclass(frozen=True)
class Packed:
    """The leaves of a layer, of which those that X splits are in flight in one message.

    `sent`: the index of each leaf in the message, its shard's shape and the dim that X splits.
    """

    message: Any
    leaves: Sequence
    sent: list[tuple[int, torch.Size, int]]

    def wait(self) -> list:
        """Return the leaves, with those of the message in their places."""
        leaves, found, start = list(self.leaves), wait(self.message), 0
        for i, shape, dim in self.sent:
            blocks = found[:, start : start + shape.numel()].unflatten(1, shape)
            leaves[i], start = blocks.movedim(0, dim).flatten(dim, dim + 1), start + shape.numel()
        return leaves


def packed_leaves(W: Sequence[Tensor], moves: Sequence[Moves], mesh) -> dict[int, int]:
    """Return {index of a leaf: the dim that X splits} of a layer's shards W that are better sent in one message, or {}.

    These are small ones whose gradients are unreduced over the same axes. Computed once per mesh.
    """
    if torch.compiler.is_compiling():
        return {}
    key = ("packed leaves", *moves, *map(SIZE, W))
    if key not in mesh.lines:
        sent = {i: to.dim for i, to in enumerate(moves) if to.dim >= 0}
        unreduced = {parse(moves[i].scatter.split(" -> ")[0]).unreduced for i in sent}
        mesh.lines[key] = sent if len(unreduced) == 1 and sum(W[i].nbytes for i in sent) <= SMALL else {}
    return mesh.lines[key]


def gather_packed(W: Sequence[Tensor], mesh, dims: dict[int, int]) -> Packed:
    """Start to gather a layer's leaves along X in one message."""
    flat = torch.cat([W[i].flatten() for i in dims])[None]
    message = all_gather("W[G_X, S] -> W[G, S]", flat, mesh, async_op=True)
    return Packed(message, W, [(i, W[i].shape, dim) for i, dim in dims.items()])


def scatter_packed(dW: Sequence[Tensor], mesh, dims: dict[int, int]) -> Packed:
    """Start to reduce-scatter a layer's gradients {U_X} in one message."""
    X, blocks, sent = mesh.sizes["X"], [], []
    for i, dim in dims.items():
        blocks.append(dW[i].unflatten(dim, (X, -1)).movedim(dim, 0))
        sent.append((i, blocks[-1].shape[1:], dim))
    flat = torch.cat([block.flatten(1) for block in blocks], 1)
    return Packed(reduce_scatter("dW[G, S] {U_X} -> dW[G_X, S]", flat, mesh, async_op=True), dW, sent)


def gathering(W: Sequence[Tensor], moves: Sequence[Moves], mesh) -> Callable:
    """Return the `gather` of layers whose shards are such as W: in one message if they are better sent so."""
    dims = packed_leaves(W, moves, mesh)
    return partial(gather_packed, dims=dims) if dims else partial(gathered_leaves, moves=moves)


def reducing(W: Sequence[Tensor], moves: Sequence[Moves], mesh) -> Callable:
    """Return the `reduce` of the gradients of such leaves."""
    dims = packed_leaves(W, moves, mesh)
    return partial(scatter_packed, dims=dims) if dims else partial(scattered_leaves, moves=moves)
