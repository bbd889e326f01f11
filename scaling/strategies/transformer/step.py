"""The layers of a Transformer forward and backward: how weights come to a rank, and gradients go back (Part 5).

A leaf has a type as it is stored, and one as it is used, gathered over X (of the ends also over Z). By the law of
cotangents its gradient is unreduced over every axis that splits the tokens and not the leaf: it is reduced over X
inside a pod first, then over the rest. Those lines are made once a mesh. The leaves of a small layer travel together,
in one AllGather and one ReduceScatter over X: a message has a price, and a large layer would rather not be copied.

    W [G_X, S] -> W [G, S]             G blocks, one a rank along X, of all the layer's shards one after the other
    dW[G, S] {U_X} -> dW[G_X, S]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_gather, all_reduce, reduce_scatter, wait
from scaling.configs import Config
from scaling.models.layer import Context
from scaling.models.leaves import STACKS, without
from scaling.spec import Spec, parse, present
from scaling.strategies.layers import Layers
from scaling.strategies.transformer.ends import Terms, embed, embed_backward, head
from scaling.strategies.transformer.layer import dropped, layer, layer_backward
from scaling.strategies.transformer.types import reduced_shapes

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


class AskedStep(NamedTuple):
    """What is asked for beside params and batch: the arguments of `loss_and_grads`. `seeded`: whether there is a seed
    for dropout. `backward`: else the loss alone is wanted, and nothing is kept to run back."""

    config: Config
    remat: str = "none"
    zero: int = 3
    schedule: Any = None
    microbatches: int = 1
    keep_weights: bool = False
    context: str = "zigzag"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    sums: Any = None
    scale: float = 1.0
    seeded: bool = False
    backward: bool = True


class Problem(NamedTuple):
    """What follows from it on a mesh: the types of the stored params and of the gradients, what a token's loss is made
    of, the dtype in which gradients are added up over microbatches and ranks, and a context a microbatch."""

    asked: AskedStep
    mesh: Any
    stored: dict
    reduced: dict
    terms: Terms
    sums: torch.dtype
    contexts: list[Context]

    def grad_shapes(self, stack: str, params: Any) -> list[list[int]]:
        """Return the local shapes of the gradients of a stack's leaves: with ZeRO-1 and 2 params are whole over X."""
        types = tree.leaves(self.stored[stack]), tree.leaves(self.reduced[stack])
        return reduced_shapes([W.shape for W in tree.leaves(params)], *types, self.mesh)


class TransformerLayers(Layers):
    """The engine on one `stack` of params, "dense" or "layers" of the model's tree, or on those `layers` of it that a
    stage has. Dense layers are the first stage's, `before` its others: their gradients are unreduced over Z, too.
    `out`, `late`: as of `Layers`.
    """

    def __init__(
        self, problem: Problem, params: Mapping, layers: range | None = None, out: Sequence[Tensor] | None = None,
        late: bool = False, stack: str = "layers",
    ):  # fmt: skip
        asked, mesh, config = problem.asked, problem.mesh, problem.asked.config
        self.asked, self.gone = asked, dropped(asked.remat, config)
        first, count = (0, None) if layers is None else (layers.start, len(layers))
        leaves, self.structure, self.origin = tree.leaves(params[stack]), tree.structure(params[stack]), first
        own = [*zip(*map(Tensor.unbind, leaves), strict=True)][:count]
        self.before = None
        if stack == "layers" and config.dense_layers:
            self.origin += config.dense_layers
            self.before = TransformerLayers(problem, params, late=late, stack="dense") if first == 0 else None
        self.moves = moves_of(tree.leaves(problem.reduced[stack]), mesh, TOKENS if stack == "layers" else ENDS, True)
        if dims := packed_leaves(own[0], self.moves, mesh):
            gather, reduce = partial(gather_packed, dims=dims), partial(scatter_packed, dims=dims)
        else:
            gather, reduce = (partial(move, moves=self.moves) for move in (gathered_leaves, scattered_leaves))
        gather = gather if asked.zero == 3 else None  # else every rank along X has whole layers
        names = [path[0] for path in optree.tree_paths(params[stack])]
        held = asked.keep_weights or (asked.backward and asked.remat == "none" and "router" in names)  # on their tape
        shapes = [shape[1:] for shape in problem.grad_shapes(stack, params[stack])] if asked.zero in (1, 2) else None
        options = {"keep_weights": held, "late": late, "dtype": problem.sums, "out": out, "shapes": shapes}
        super().__init__(own, mesh, gather, reduce, names=names, **options)

    def run(self, x: Tensor, at: Context) -> tuple[Tensor, Any, list]:
        """(x, the sum of the layers' extra terms, what `run_back` needs: each layer's `saved`)."""
        x, extra, before = self.before.run(x, at) if self.before else (x, 0.0, [])
        terms = []

        def one(l: int, W: list, x: Tensor):
            x, more, saved = layer(self.structure.unflatten(W), x, at.of_layer(self.origin + l), self.gone)
            terms.extend([] if more is None else [more])
            return x, saved if self.asked.backward else None

        x, kept = self.forward(x, one)
        return x, sum(terms, extra), before + kept

    def run_back(self, dx: Tensor, kept: list, at: Context, scale: float = 1.0, last: bool = False) -> Tensor:
        """dx of the last layer's result -> dx of the first one's input; `kept` is used up.

        `scale`: the cotangent of the extra terms. `last`: no microbatch follows.
        """

        def one(l: int, W: list, dx: Tensor, saved):
            dx, dW = layer_backward(self.structure.unflatten(W), dx, saved, at.of_layer(self.origin + l), scale)
            return dx, tree.leaves(dW)

        dx = self.backward(dx, kept, one, last=last)
        return self.before.run_back(dx, kept, at, scale, last) if self.before else dx

    def reduce_all(self) -> None:
        super().reduce_all()
        if self.before:
            self.before.reduce_all()

    def result(self) -> dict:
        """The gradients of the stack, typed as the stored params."""
        return self.structure.unflatten(totalled(super().result(), self.moves, self.mesh))


def unstaged(problem: Problem, params: dict, tokens: Tensor, targets: Tensor, w: Tensor) -> tuple[Tensor, dict]:
    """(loss, grads) where every rank has all layers. Gradients are summed over microbatches, then reduced."""
    asked, mesh, stored, reduced, terms, sums, contexts = problem
    config, M, late = asked.config, asked.microbatches, asked.zero == 1
    ends, layers = gathered_ends(params, stored, mesh), TransformerLayers(problem, params)
    losses, dends, grads, size = [], {}, {}, len(ends["embed"])
    batches = zip(contexts, *(x.chunk(M) for x in (tokens, targets, w)), strict=True)
    for m, (at, some, wanted, share) in enumerate(batches):
        x, last = embed(ends["embed"], some, mesh), m == M - 1
        if last and not config.tied:
            del ends["embed"]  # a table of the vocabulary is not held longer than it is used
        x, extra, kept = layers.run(x, at)
        loss, dx, dW = head(ends, x, wanted, share, terms, config.eps, mesh)
        losses.append(loss + extra * (asked.scale / M))
        add_by_name(dends, dW, sums)
        del x, dW
        if last:
            ends.clear()
            tables = {name: dends.pop(name) for name in [*dends] if name != "embed"}
            grads = reduced_ends(tables, reduced, mesh)
            del tables
        dx = layers.run_back(dx, kept, at, asked.scale / M, last=last and not late)
        add_by_name(dends, {"embed": embed_backward(dx, some, size, mesh)}, sums)
    if late:
        layers.reduce_all()
    grads |= reduced_ends(dends, reduced, mesh) | {"layers": layers.result()}
    grads |= {"dense": layers.before.result()} if layers.before else {}
    return all_reduce("Loss[] {U_PXECY} -> Loss[]", torch.stack(losses).sum(), mesh), grads
