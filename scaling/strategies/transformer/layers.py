"""A Transformer's layers forward and backward: how weights come to a rank, and gradients go back (Part 5).

The lines are in `TrainStep.lines`. The leaves of a small layer travel together, in one AllGather and one
ReduceScatter over X, because each message has a fixed cost. The leaves of a large layer travel one by one, which saves
copies.

    W [G_X, S] -> W [G, S]             G blocks, one a rank along X, with all the layer's shards in sequence
    dW[G, S] {U_X} -> dW[G_X, S]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_gather, all_reduce, reduce_scatter, wait
from scaling.collectives.linear import who_watches
from scaling.models.layer import Context
from scaling.models.leaves import STACKS, matrices_of
from scaling.models.lora import adapted_leaves
from scaling.scaled import UNSCALED, gather_matrix
from scaling.spec import parse, parse_line
from scaling.strategies.layers import Layers
from scaling.strategies.transformer.ends import embed, embed_backward, head
from scaling.strategies.transformer.layer import layer, layer_backward, recomputed
from scaling.strategies.transformer.lora import adapted
from scaling.strategies.transformer.step import LeafLines, TrainStep

SIZE = attrgetter("shape", "dtype")


class LocalBatch(NamedTuple):
    """This rank's batch, in the order that attention needs.

    Attributes:
        tokens: tokens[B_PXE, T_C].
        targets: targets[B_PXE, T_C].
        weights: weights[B_PXE, T_C].
        contexts: A context for each microbatch.
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    contexts: list[Context]


def start_leaves(collective: Callable, which: str, leaves: Sequence, mesh, lines: Sequence[LeafLines]) -> list:
    """Start the collective of each leaf whose `LeafLines` has a line in the field `which`; return all leaves.

    A leaf with a line is returned pending. A leaf whose line is "" is returned as it came.
    """
    found = [*leaves]
    for i, line in enumerate(map(attrgetter(which), lines)):
        if line:
            found[i] = collective(line, wait(found[i]), mesh, async_op=True)
    return found


gather_leaves = partial(start_leaves, all_gather, "gather")
scatter_leaves = partial(start_leaves, reduce_scatter, "scatter")  # the first half of the reduction of gradients


def gather_scaled(W: Sequence[Tensor], mesh, lines: Sequence[LeafLines], step: TrainStep, stack: str, back=False):
    """Start to gather leaves, the matrices quantized for one pass; return them, pending."""
    types, inputs = (tree.leaves(each[stack]) for each in (step.stored, matrices_of(step.config)))
    found = []
    for text, dims, x, leaf in zip(types, inputs, W, lines, strict=True):
        whole = parse(text)
        stored = replace(whole, dims=whole.dims[1:])  # of one layer
        if dims and whole.name not in UNSCALED:
            used, summed = parse_line(leaf.gather).result if leaf.gather else stored, dims.split(" -> ")[0]
            found.append(gather_matrix(step.options.precision, x, stored, used, summed, mesh, back))
        else:
            found += gather_leaves([x], mesh, [leaf])
    return found


def gather_forms(W: Sequence[Tensor], mesh, back: bool = True, **given: Any) -> list:
    """Start to gather leaves in the form of the backward pass, then in that of the forward, which is computed again."""
    return [*gather_scaled(W, mesh, back=back, **given), *gather_scaled(W, mesh, **given)]


def total_leaves(dW: Sequence, mesh, lines: Sequence[LeafLines]) -> list[Tensor]:
    """Finish the reduction of gradients, in place, and wait for it. The first half may still be pending."""

    def reduced_in_place(line: str, x: Tensor, mesh, async_op: bool):
        return all_reduce(line, x, mesh, async_op=async_op, donate=x.is_contiguous())

    return [*map(wait, start_leaves(reduced_in_place, "total", dW, mesh, lines))]


def move_ends(move: Callable, params: Mapping[str, Any], mesh, lines: Mapping[str, LeafLines]) -> dict[str, Any]:
    """Start a `move` of leaves, one of those above, of the params outside the layers, or of gradients of some."""
    ends = dict(params)
    for stack in STACKS:
        ends.pop(stack, None)
    return dict(zip(ends, move([*ends.values()], mesh, [*map(lines.__getitem__, ends)]), strict=True))


def pop_inputs(ends: dict) -> dict[str, Any]:
    """Pop the leaves that make the first layer's input, or their gradients."""
    found = {}
    for name in ("embed", "positions"):
        if name in ends:
            found[name] = ends.pop(name)
    return found


def add_by_name(sums: dict, dW: dict, dtype: torch.dtype) -> None:
    """Add gradients by name, in this dtype, after they have arrived; `dW` is emptied, so that each is freed."""
    for name in [*dW]:
        g = wait(dW.pop(name))
        sums[name] = sums[name].add_(g) if name in sums else g.to(dtype)


@dataclass(frozen=True)
class Packed:
    """The leaves of a layer, some of them in flight in one message.

    Attributes:
        message: The pending message, with the leaves that X splits.
        leaves: All leaves.
        sent: For each leaf in the message its index, its shard's shape, the dim that X splits, and its own line.
        mesh: The mesh.
    """

    message: Any
    leaves: Sequence
    sent: list[tuple[int, torch.Size, int, str]]
    mesh: Any

    def wait(self) -> list:
        """Return the leaves, after the message's have arrived."""
        leaves, found, start, watch = list(self.leaves), wait(self.message), 0, who_watches()
        for i, shape, dim, line in self.sent:
            blocks = found[:, start : start + shape.numel()].unflatten(1, shape)
            leaves[i], start = blocks.movedim(0, dim).flatten(dim, dim + 1), start + shape.numel()
            if watch is not None:  # the message has one type, and its memory too; the judge needs each leaf's
                watch.check_declared(self.leaves[i], parse_line(line).operands[0], line, "")
                leaves[i] = watch.typed(leaves[i].clone(), parse_line(line).result, "", self.mesh)
        return leaves


def packed_leaves(W: Sequence[Tensor], lines: Sequence[LeafLines], mesh, small: int) -> dict[int, int]:
    """Return {index: the dim that X splits} of a layer's leaves that are better sent in one message, or {}.

    The shards W of the layer must have at most `small` bytes, and their gradients must be unreduced over the same axes.
    Computed once per mesh.
    """
    if torch.compiler.is_compiling():
        return {}
    key = ("packed leaves", small, *lines, *map(SIZE, W))
    if key not in mesh.lines:
        dims = {i: leaf.dim for i, leaf in enumerate(lines) if leaf.dim >= 0}
        unreduced = {parse(lines[i].scatter.split(" -> ")[0]).unreduced for i in dims}
        mesh.lines[key] = dims if len(unreduced) == 1 and sum(W[i].nbytes for i in dims) <= small else {}
    return mesh.lines[key]


def gather_packed(W: Sequence[Tensor], mesh, dims: dict[int, int], lines: Sequence[LeafLines]) -> "Packed | list":
    """Start to gather a layer's leaves along X in one message, or one by one if `dims` is empty."""
    if not dims:
        return gather_leaves(W, mesh, lines)
    rows, sent = [], []
    for i, dim in dims.items():
        rows.append(W[i].flatten())
        sent.append((i, W[i].shape, dim, lines[i].gather))
    return Packed(all_gather("W[G_X, S] -> W[G, S]", torch.cat(rows)[None], mesh, async_op=True), W, sent, mesh)


def scatter_packed(dW: Sequence[Tensor], mesh, dims: dict[int, int], lines: Sequence[LeafLines]) -> "Packed | list":
    """Start to reduce-scatter a layer's gradients along X in one message, or one by one if `dims` is empty."""
    if not dims:
        return scatter_leaves(dW, mesh, lines)
    X, blocks, sent = mesh.sizes["X"], [], []
    for i, dim in dims.items():
        block = dW[i].unflatten(dim, (X, -1)).movedim(dim, 0)
        blocks.append(block.flatten(1))
        sent.append((i, block.shape[1:], dim, lines[i].scatter))
    flat = torch.cat(blocks, 1)
    return Packed(reduce_scatter(_packed_line(sent[0][3]), flat, mesh, async_op=True), dW, sent, mesh)


@lru_cache
def _packed_line(line: str) -> str:
    """Return the line of a message of gradients that are unreduced over the same axes as the one of `line`."""
    parsed = parse_line(line)
    before = replace(parsed.operands[0], name="dW", dims=(("G", ()), ("S", ())))
    return f"{before} -> {replace(parsed.result, name='dW', dims=(('G', ('X',)), ('S', ())))}"


class LayerGroup:
    """Consecutive layers of one kind that this rank runs, and the group below them, which runs first.

    `loop`, the loop over its layers (`strategies.layers`), runs each with the context of its place in the model.

    Args:
        step: The resolved step.
        params: This rank's params.
        stack: The name in `params` of the layers' leaves, stacked over L: `layers`, `dense` or `linear`.
        first: The index in the model of the group's first layer.
        count: The number of layers in the group, or None for all after `start`.
        start: The index in the stack of the group's first layer.
        below: The group that runs before this one, in a model with layers of several kinds.
        out: As in `Layers`.
        reduce_when: As in `Layers`, unless the step reduces after each microbatch.
    """

    def __init__(
        self, step: TrainStep, params: Mapping, stack="layers", first=0, count=None, out=None, start=0,
        below: "LayerGroup | None" = None, reduce_when: str = "last",
    ):  # fmt: skip
        self.step, self.stack, lora, self.lines = step, stack, step.options.lora, step.lines[stack]
        held: Any = params[stack] | {"lora": params["lora"][stack]} if lora else params[stack]
        self.structure: Any
        leaves, self.structure = optree.tree_flatten(held)
        layers = [*zip(*map(Tensor.unbind, leaves), strict=True)][start:][:count]
        self.first, self.below = first, below
        small, options = step.limits.small, step.options
        dims = packed_leaves(layers[0], self.lines, step.mesh, small)
        gather: Any = partial(gather_packed, dims=dims, lines=self.lines)
        paths = optree.tree_paths(held)
        self.trained: Any = self.structure
        trained, names = None, next(zip(*paths, strict=False))
        if lora:
            own = adapted_leaves(step.config, lora)[stack]
            gather = adapted(gather, self.structure, lora, own, step.reduced[stack])
            trained = [i for i, path in enumerate(paths) if path[0] == "lora"]
            self.trained, names = optree.tree_structure(held["lora"]), [paths[i][-2] for i in trained]
            self.lines = [self.lines[i] for i in trained]
            dims = packed_leaves([layers[0][i] for i in trained], self.lines, step.mesh, small)
        elif not any(map(attrgetter("gather"), self.lines)):
            gather = None  # every rank along X has whole layers
        gather_back = None
        if options.precision:
            given: Any = {"lines": self.lines, "step": step, "stack": stack}
            gather = partial(gather_scaled, **given)
            gather_back = partial(gather_forms if options.remat == "block" else gather_scaled, back=True, **given)
        reduce = partial(scatter_packed, dims=dims, lines=self.lines)
        shapes = [shape[1:] for shape in step.grad_shapes(stack)] if options.zero in (1, 2) else None
        self.loop = Layers(
            layers, step.mesh, gather, reduce, names=names, keep_weights=options.keep_weights,
            dtype=step.sums, out=out, shapes=shapes, trained=trained, gather_back=gather_back,
            reduce_when="each" if step.reduce_each else reduce_when,
        )  # fmt: skip

    def run_forward(
        self, x: Tensor, at: Context, above: Callable | None = None, keep_last: bool = False
    ) -> tuple[Tensor, Any, list]:
        """Return x, the sum of the layers' extra terms, and the arrays that each layer saved.

        `above` and `keep_last` are as in `Layers.forward`.
        """
        at, kept_below, terms = at.prepared(), [], []
        if self.below:
            x, extra, kept_below = self.below.run_forward(x, at, partial(self.loop.start_gather, 0))
            terms.append(extra)

        def run_layer(l: int, W: list, x: Tensor):
            x, term, saved = layer(self.structure.unflatten(W), x, at.of_layer(self.first + l), self.step.dropped_names)
            terms.append(0.0 if term is None else term)
            return x, saved if self.step.backward else None

        x, kept = self.loop.forward(x, run_layer, above, keep_last)
        return x, sum(terms), kept_below + kept

    def run_backward(
        self, dx: Tensor, kept: list, at: Context, scale: float, reduces: bool = False, rest: list | None = None,
        then: Callable | None = None,
    ) -> Tensor:  # fmt: skip
        """Return dx of the first layer's input from that of the last one's result; `kept` is emptied.

        Args:
            dx: The cotangent of the last layer's result.
            kept: The third result of `run_forward`.
            at: The context of the microbatch.
            scale: The cotangent of the extra terms.
            reduces: Whether this backward starts to reduce gradients, while the layers below run.
            rest: A list that receives (loop, l, dW) for each layer, so that dW is not added to the loop's sums.
                Weight gradients in dW may be deferred products, which the stage's weight half computes.
            then: Called after the last layer's backward, the first that is computed.
        """
        at = at.prepared(attends="O" in self.step.dropped_names)._replace(defers=rest is not None)
        add = None if rest is None else lambda l, dW: rest.append((self.loop, l, dW))

        def run_layer_backward(l: int, W: list, dx: Tensor, saved):
            context = at.of_layer(self.first + l)
            if (n := self.structure.num_leaves) < len(W):  # the forward's forms of the weights follow the backward's
                saved = recomputed(self.structure.unflatten(W[n:]), saved, context, whole=True)
            dx, dW = layer_backward(self.structure.unflatten(W[:n]), dx, saved, context, scale)
            if then is not None and l == len(self.loop.layers) - 1:
                then()
            return dx, self.trained.flatten_up_to(dW)

        below = self.below and partial(self.below.loop.start_gather, len(self.below.loop.layers) - 1, back=True)
        dx = self.loop.backward(dx, kept, run_layer_backward, add, reduces=reduces, below=below)
        return self.below.run_backward(dx, kept, at, scale, reduces, rest) if self.below else dx

    def reduce_all(self) -> None:
        """Start to reduce the gradients of all layers, unless each microbatch's have been reduced."""
        if not self.step.reduce_each:
            self.loop.reduce_all()
            if self.below:
                self.below.reduce_all()

    def gradients(self) -> dict[str, Any]:
        """Return {stack: its tree of reduced gradients, over all its layers} of this group and those below."""
        found: dict[str, Any] = {}
        group: LayerGroup | None = self
        while group is not None:
            dW = total_leaves(group.loop.result(), group.step.mesh, group.lines)
            found.setdefault(group.stack, []).insert(0, group.trained.unflatten(dW))
            group = group.below
        for stack, groups in found.items():
            found[stack] = groups[0] if len(groups) == 1 else tree.map(lambda *dW: torch.cat(dW), *groups)
        return found


def group_layers(step: TrainStep, params: Mapping) -> LayerGroup:
    """Return the last of the groups of all layers: consecutive layers of one kind are a group above the one before."""
    below, first, kinds = None, 0, step.config.kinds
    for stack, same in groupby(kinds):
        given: Any = {"first": first, "count": len([*same]), "start": kinds[:first].count(stack), "below": below}
        below = LayerGroup(step, params, stack, **given)
        first += given["count"]
    return cast(LayerGroup, below)


def group_stage(step: TrainStep, params: Mapping, layers: range, out=None) -> LayerGroup:
    """Return the group of layers that a stage runs.

    `layers` are indices in the model's stack "layers". If the model begins with dense layers before those with experts,
    the first stage runs them too, as the group below.
    """
    dense = len(step.config.dense)
    below = LayerGroup(step, params, "dense", reduce_when="end") if dense and layers.start == 0 else None
    given: Any = {"first": dense + layers.start, "count": len(layers), "below": below, "out": out}
    return LayerGroup(step, params, reduce_when="end", **given)


def run_all_layers(step: TrainStep, params: dict, batch: LocalBatch) -> tuple[Tensor, dict]:
    """Return the loss and the gradients where every rank has all layers.

    Gradients are summed over microbatches, and reduced in the last one's backward, or if `reduce_each` in each one's.
    `ends` are the params outside the layers. A table of the vocabulary is freed after its last use. The steps:

        embed; the layers forward       the head's params are gathered (in the first microbatch) during the last layer
        the head, and its backward      then its part of `end_gradients` starts to be scattered
        the last layer backward         its weights have stayed gathered; `add_scattered` then waits for the head's part
        the other layers backward       each layer's gradients are reduced while the next runs; with ZeRO-1, after all
        embed's backward                the rest of `end_gradients` joins `scattered`
    """
    mesh, config, M, scale = step.mesh, step.config, step.options.microbatches, step.options.scale
    lora, chunk = step.options.lora is not None, step.limits.chunk
    scatter_ends, outputs = partial(move_ends, scatter_leaves, mesh=mesh, lines=step.lines), dict(params)
    ends = tree.map(wait, move_ends(gather_leaves, pop_inputs(outputs), mesh, step.lines))
    layers = group_layers(step, params)
    after_all = step.options.zero == 1 and not step.reduce_each  # ZeRO-1 reduces after the last backward
    losses, end_gradients, scattered, size = [], {}, {}, len(ends["embed"])
    shares = batch.tokens.chunk(M), batch.targets.chunk(M), batch.weights.chunk(M)

    def gather_head() -> None:
        ends.update(move_ends(gather_leaves, outputs, mesh, step.lines))

    for m, (at, tokens, targets, weights) in enumerate(zip(batch.contexts, *shares, strict=True)):
        x, last = embed(ends, tokens, at.learned, mesh, config), m == M - 1
        if last and not config.tied:
            del ends["embed"]
        x, extra, kept = layers.run_forward(x, at, None if m else gather_head, keep_last=True)
        ends = tree.map(wait, ends)
        loss, dx, dW = head(ends, x, targets, weights, step.terms, config, mesh, frozen=lora, chunk_bytes=chunk)
        losses.append(loss + extra * (scale / M))
        add_by_name(end_gradients, dW, step.sums)
        del x, dW
        if last:
            ends.clear()
        add_scattered = None
        if reduces := last or step.reduce_each:
            first = pop_inputs(end_gradients)  # to which the backward of the first layer's input adds
            add_scattered = partial(add_by_name, scattered, scatter_ends(end_gradients), step.sums)
            end_gradients = first  # no name holds the others' whole gradients
        dx = layers.run_backward(dx, kept, at, scale / M, reduces=reduces and not after_all, then=add_scattered)
        if not lora:
            add_by_name(end_gradients, embed_backward(dx, tokens, at.learned, size, mesh, config), step.sums)
        if reduces:
            add_by_name(scattered, scatter_ends(end_gradients), step.sums)
            end_gradients.clear()
    if after_all:
        layers.reduce_all()
    grads, found = move_ends(total_leaves, scattered, mesh, step.lines), layers.gradients()
    grads |= {"lora": found} if lora else found
    return all_reduce("Loss[] {U_PXECY} -> Loss[]", torch.stack(losses).sum(), mesh), grads
