"""A small layer's weights in one AllGather over X, and their gradients in one ReduceScatter: a message has a price.

    W [G_X, S] -> W [G, S]             G blocks, one a rank along X, of all the layer's shards one after the other
    dW[G, S] {U_X} -> dW[G_X, S]

The same bytes as leaf by leaf; what it costs is a copy of each weight, which a large layer would rather not make.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scaling import tree
from scaling.collectives import all_gather, reduce_scatter, wait
from scaling.spec import parse

SMALL = 2 << 20  # bytes of a layer's shards on a rank


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


def sent_over_x(W: Mapping, stored: Mapping) -> dict[int, int]:
    """{place of a leaf: the dim that X splits}, of a layer's shards W that are better sent together; else {}."""
    if torch.compiler.is_compiling():
        return {}
    leaves, specs = tree.leaves(W), [parse(text) for text in tree.leaves(stored)]
    sent = {i: spec.index(dim) for i, spec in enumerate(specs) for dim, axes in spec.dims if axes == ("X",)}
    alike = len({leaves[i].dtype for i in sent}) == 1 and sum(leaves[i].nbytes for i in sent) <= SMALL
    return sent if alike else {}


def gather(W: Mapping, mesh, sent: dict[int, int]) -> Together:
    """All leaves of a layer, whole along X: under way."""
    leaves = tree.leaves(W)
    flat = torch.cat([leaves[i].flatten() for i in sent])[None]
    pending = all_gather("W[G_X, S] -> W[G, S]", flat, mesh, async_op=True)
    return Together(pending, W, [(i, leaves[i].shape, dim) for i, dim in sent.items()])


def scatter(dW: Mapping, mesh, sent: dict[int, int]) -> Together:
    """The gradients of a layer, {U_X}, to this rank's shards along X: under way."""
    leaves, X = tree.leaves(dW), mesh.sizes["X"]
    blocks = {i: leaves[i].unflatten(dim, (X, -1)).movedim(dim, 0) for i, dim in sent.items()}
    flat = torch.cat([block.flatten(1) for block in blocks.values()], 1)
    pending = reduce_scatter("dW[G, S] {U_X} -> dW[G_X, S]", flat, mesh, async_op=True)
    return Together(pending, dW, [(i, blocks[i].shape[1:], dim) for i, dim in sent.items()])
