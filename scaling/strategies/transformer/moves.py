"""How a Transformer's weights come to a rank, and how their gradients go back to where they are stored.

A leaf has a type as it is stored, and one as it is used, gathered over X (of the ends also over Z). By the law of
cotangents its gradient is unreduced over every axis that splits the tokens and not the leaf: it is reduced over X
inside a pod first, then over the rest. Those lines are made once a mesh. The leaves of a small layer travel together,
in one AllGather and one ReduceScatter over X: a message has a price, and a large layer would rather not be copied.

    W [G_X, S] -> W [G, S]             G blocks, one a rank along X, of all the layer's shards one after the other
    dW[G, S] {U_X} -> dW[G_X, S]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_gather, all_reduce, reduce_scatter, wait
from scaling.models.leaves import STACKS, without
from scaling.spec import Spec, parse
from scaling.strategies.axes import present

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
    if torch.compiler.is_compiling():
        return [Moves(*mesh.constant(_moves, text, axes, stack)) for text in stored]
    key = ("moves", *stored, axes, stack)
    if key not in mesh.lines:
        mesh.lines[key] = [Moves(*_moves(mesh, text, axes, stack)) for text in stored]
    return mesh.lines[key]


def _moves(mesh, stored: str, axes: tuple[str, ...], stack: bool) -> tuple[str, str, str, int]:
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


def gathered_leaves(W: Sequence[Tensor], moves: Sequence[Moves], mesh) -> list:
    """Leaves as they are used: under way."""
    some = zip(W, moves, strict=True)
    return [all_gather(to.gather, x, mesh, async_op=True) if to.gather else x for x, to in some]


def scattered_leaves(dW: Sequence[Tensor], moves: Sequence[Moves], mesh) -> list:
    """Their gradients after the first step back: under way."""
    some = zip(dW, moves, strict=True)
    return [reduce_scatter(to.scatter, g, mesh, async_op=True) if to.scatter else g for g, to in some]


def totalled(begun: Sequence, moves: Sequence[Moves], mesh) -> list[Tensor]:
    """And after the second: there."""
    some = zip(begun, moves, strict=True)
    going = [all_reduce(to.total, wait(g), mesh, async_op=True) if to.total else g for g, to in some]
    return [wait(g) for g in going]


def gathered_ends(params: Mapping, stored: Mapping, mesh) -> dict[str, Tensor]:
    """The params outside the layers, gathered."""
    names = [name for name in params if name not in STACKS]
    moves = moves_of([stored[name] for name in names], mesh, ENDS)
    pending = gathered_leaves([params[name] for name in names], moves, mesh)
    return {name: wait(W) for name, W in zip(names, pending, strict=True)}


def reduced_ends(dW: Mapping, stored: Mapping, mesh, axes: tuple[str, ...] = ENDS) -> dict[str, Tensor]:
    """Gradients of params outside the layers, by name, as these are stored."""
    moves = moves_of([stored[name] for name in dW], mesh, axes)
    return dict(zip(dW, totalled(scattered_leaves([*dW.values()], moves, mesh), moves, mesh), strict=True))


def add_by_name(sums_of: dict, dW: dict, dtype: torch.dtype) -> None:
    """Add gradients by name, in this dtype."""
    for name, g in dW.items():
        sums_of[name] = sums_of[name].add_(g) if name in sums_of else g.to(dtype)


@dataclass(frozen=True)
class Together:
    """Leaves of a tree that are under way together. `sent`: the place of each, its shard's shape and X's dim."""

    pending: Any
    tree: Mapping
    sent: list[tuple[int, torch.Size, int]]

    def wait(self) -> Any:
        """The tree, with what was sent in its places."""
        leaves, found, start = tree.leaves(self.tree), wait(self.pending), 0
        for i, shape, dim in self.sent:
            blocks = found[:, start : start + shape.numel()].unflatten(1, shape)
            leaves[i], start = blocks.movedim(0, dim).flatten(dim, dim + 1), start + shape.numel()
        return tree.unflatten(self.tree, leaves)


def sent_together(W: Sequence[Tensor], moves: Sequence[Moves], mesh) -> dict[int, int]:
    """{place of a leaf: the dim that X splits}, of a layer's shards W that are better sent together; else {}: so are
    small ones of one dtype, whose gradients are unreduced over the same axes. Found out once a mesh."""
    if torch.compiler.is_compiling():
        return {}
    key = ("sent together", *moves, *map(SIZE, W))
    if key not in mesh.lines:
        mesh.lines[key] = _together(W, moves)
    return mesh.lines[key]


def _together(W: Sequence[Tensor], moves: Sequence[Moves]) -> dict[int, int]:
    sent = {i: to.dim for i, to in enumerate(moves) if to.dim >= 0}
    if len({parse(moves[i].scatter.split(" -> ")[0]).unreduced for i in sent}) > 1:
        return {}
    small = sum(W[i].nbytes for i in sent) <= SMALL
    return sent if small and len({W[i].dtype for i in sent}) == 1 else {}


def gathered_together(W: Mapping, mesh, sent: dict[int, int]) -> Together:
    """All leaves of a layer, whole along X: under way."""
    leaves = tree.leaves(W)
    flat = torch.cat([leaves[i].flatten() for i in sent])[None]
    pending = all_gather("W[G_X, S] -> W[G, S]", flat, mesh, async_op=True)
    return Together(pending, W, [(i, leaves[i].shape, dim) for i, dim in sent.items()])


def scattered_together(dW: Mapping, mesh, sent: dict[int, int]) -> Together:
    """The gradients of a layer, {U_X}, to this rank's shards along X: under way."""
    leaves, X = tree.leaves(dW), mesh.sizes["X"]
    blocks = {i: leaves[i].unflatten(dim, (X, -1)).movedim(dim, 0) for i, dim in sent.items()}
    flat = torch.cat([block.flatten(1) for block in blocks.values()], 1)
    pending = reduce_scatter("dW[G, S] {U_X} -> dW[G_X, S]", flat, mesh, async_op=True)
    return Together(pending, dW, [(i, blocks[i].shape[1:], dim) for i, dim in sent.items()])
