"""The engine: L layers of any listing, run so that nothing waits that need not (Part 5).

Weights, a tree a layer, are gathered while the layer before computes and thrown away after use, in both passes.
Gradients are summed over microbatches and reduced in buckets of layers while the layers below run: in place where a
reduction only adds (an AllReduce, or none); else from a buffer, of which a ReduceScatter leaves each rank its shards.
What a layer computes is a function that the engine is given: the book's strategies and the Transformer both go here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import Deferred, wait


class Layers:
    """L layers by their weights, and their gradients as they come in, from the last layer down.

    gather(W, mesh) -> W            the weights as the layer uses them, under way
    reduce(dW, mesh) -> dW          gradients to their stored types, under way: of one layer, or, on
                                    `mesh.stacked("L")`, of a `bucket` of several
    reduce_slow(dW, mesh) -> dW     the same over a slow axis, once `reduce` is through
    `keep_weights`: gathered once and kept. `dtype`: in which gradients are added up, if not their own. `late`: all are
    reduced at the end, by `reduce_all`. Of each leaf, in the order of `tree.leaves`: `sums`, the stacks [L, ...] of
    earlier microbatches, which are added to; `out`, the stacks in which the results are wanted; `shapes`, of one
    layer's gradient when it is reduced, by default the weight's; `names`.
    """

    def __init__(
        self,
        layers: Sequence,
        mesh,
        gather: Callable | None = None,
        reduce: Callable | None = None,
        reduce_slow: Callable | None = None,
        *,
        bucket: int = 1,
        keep_weights: bool = False,
        dtype: torch.dtype | None = None,
        sums: Sequence[Tensor] | None = None,
        out: Sequence[Tensor] | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
        names: Sequence[str] | None = None,
        late: bool = False,
    ):
        self.layers, self.mesh, self.gather, self.bucket, self.dtype = layers, mesh, gather, bucket, dtype
        self.reduce, self.reduce_slow = reduce, reduce_slow
        self.held: dict[int, Any] | None = {} if keep_weights else None
        self.like = tree.leaves(layers[0])
        self.names = names or ["W"] * len(self.like)
        self.shapes = [tuple(shape) for shape in shapes or [W.shape for W in self.like]]
        self.compiling = torch.compiler.is_compiling()  # a compiler would copy a stack at each write to it
        self.out: list[Any] = [None] * len(self.like) if out is None else [*out]
        self.rooms: list[Any] = [None] * len(self.like)  # (first layer, the stack of some layers' gradients)
        self.slots: list[list] = [[None] * len(layers) for _ in self.like]  # each layer's gradients, whole
        self.written: set[int] = set()
        self.under_way: list[tuple[int, int, Any]] = []  # (first, last, what `reduce` returned)
        self.later: list[tuple[int, int, Any]] = []  # the same over the slow axis
        self.pieces: list[list[Tensor]] = [[] for _ in self.like]  # of the results that have no place yet
        self.late, self.summed, self.reduced = late, late, False  # are sums kept of all layers; are some being reduced
        if sums is not None:
            self.resume(sums)

    def weights(self, l: int) -> Any:
        """The weights of layer l as it uses them, under way; None if there is no such layer."""
        if not 0 <= l < len(self.layers):
            return None
        if self.held is not None and l in self.held:
            return self.held[l]
        return self.layers[l] if self.gather is None else self.gather(self.layers[l], self.mesh)

    def waited(self, l: int, pending) -> Any:
        """The same, there."""
        W = pending if self.gather is None else tree.map(wait, pending)
        if self.held is not None:
            self.held[l] = W
        return W

    def gathered(self) -> "Layers":
        """These layers with all weights gathered, which are then kept."""
        for l, pending in enumerate([self.weights(l) for l in range(len(self.layers))]):
            self.waited(l, pending)
        return self

    def forward(self, x, run: Callable) -> tuple[Any, list]:
        """x through all layers, by run(l, W, x) -> (x, saved): (x, what each layer has saved)."""
        kept, coming = [], self.weights(0)
        for l in range(len(self.layers)):
            W = self.waited(l, coming)
            coming = self.weights(l + 1)
            x, saved = run(l, W, x)
            kept.append(saved)
        return x, kept

    def backward(self, dx, kept: list, run: Callable, put: Callable | None = None, *, last=True, donate=True):
        """dx through all layers, from the last one down, by run(l, W, dx, saved) -> (dx, dW).

        dx and dW may be under way. put(l, dW): who takes a layer's gradients, by default `add`. `last`: no microbatch
        follows, so that they are reduced as soon as they are there. `donate`: `kept` is used up, and each layer's
        activations are freed once they have been used.
        """
        put, coming = put or partial(self.add, last=last), self.weights(len(self.layers) - 1)
        for l in reversed(range(len(self.layers))):
            W = self.waited(l, coming)
            coming = self.weights(l - 1)
            saved = kept.pop() if donate else kept[l]
            dx, dW = run(l, W, dx, saved)
            put(l, dW)
            del W, saved, dW
            dx = wait(dx)
        return dx

    def add(self, l: int, dW, last: bool) -> None:
        """Add layer l's gradients, deferred products or tensors, to its sums; the `last` microbatch's are reduced."""
        self.summed = self.summed or not last
        for i, g in enumerate(tree.leaves(dW)):
            self.put(l, i, g)
        self.written.add(l)
        first, end = self.bucket_of(l)
        if last and l == first:
            self.start(first, end)

    def bucket_of(self, l: int) -> tuple[int, int]:
        """(first, end) of the layers that are reduced with layer l."""
        end = len(self.layers) - (len(self.layers) - 1 - l) // self.bucket * self.bucket
        return max(0, end - self.bucket), end

    def put(self, l: int, i: int, g: Any) -> None:
        """Leaf i of layer l's gradient: a deferred product is computed where it stays."""
        there, more = self.slots[i][l], l in self.written
        if self.compiling:
            self.slots[i][l] = there + wait(g) if more else self.cast(wait(g))
        elif isinstance(g, Deferred):
            g.wait(out=self.slot(l, i, g.shape), add=more)
        elif (g := wait(g)) is there:  # it was written there
            pass
        elif more:
            there.add_(g)
        elif tuple(g.shape) == self.shapes[i]:
            self.slot(l, i, g.shape).copy_(g)
        else:
            self.slots[i][l] = self.cast(g)

    def cast(self, g: Tensor) -> Tensor:
        return g if self.dtype is None else g.to(self.dtype)

    def slot(self, l: int, i: int, shape: Sequence[int]) -> Tensor:
        """The place of leaf i of layer l's gradient, of this shape before it is reduced."""
        if self.slots[i][l] is None:
            first, end = self.bucket_of(l)
            if tuple(shape) == self.shapes[i]:  # a reduction only adds: the results' place is theirs too
                first, end = 0, len(self.layers)
                if self.out[i] is None:
                    self.out[i] = self.like[i].new_empty((end, *shape), dtype=self.dtype)
                room = self.out[i]
            else:
                split = next(d for d, n in enumerate(shape) if n != self.shapes[i][d])
                together = end - first > 1 and not self.summed
                room = _room(self.like[i], (end - first, *shape), split + 1, together, self.dtype)
            self.rooms[i] = first, room
            self.slots[i][first:end] = room.unbind()
        return self.slots[i][l]

    def resume(self, sums: Sequence[Tensor]) -> None:
        """Go on from the sums of earlier microbatches."""
        self.summed, self.written = True, set(range(len(self.layers)))
        for i, stack in enumerate(sums):
            self.slots[i], self.rooms[i] = [*stack.unbind()], (0, stack)
            if stack.shape[1:] == self.shapes[i] and not self.compiling:
                self.out[i] = stack

    def whole(self, i: int, first: int, end: int) -> Tensor:
        """Leaf i of the gradients of these layers: one layer's, or several stacked."""
        if end - first == 1:
            return self.slots[i][first]
        if self.rooms[i] is None:
            return torch.stack(self.slots[i][first:end])
        start, room = self.rooms[i]
        return room[first - start : end - start]

    def start(self, first: int, end: int) -> None:
        """Start to reduce the gradients of these layers. One bucket is reduced while the next one is filled: more would
        hold more whole gradients."""
        self.reduced = True
        dW = tree.unflatten(self.layers[0], [self.whole(i, first, end) for i in range(len(self.like))])
        if not self.late:
            self.settle()
        for i, slots in enumerate(self.slots):
            slots[first:end] = [None] * (end - first)
            if self.rooms[i] is not None and self.rooms[i][0] >= first and self.rooms[i][1] is not self.out[i]:
                self.rooms[i] = None
        mesh = self.mesh if end - first == 1 else self.mesh.stacked("L")
        self.under_way.append((first, end, dW if self.reduce is None else self.reduce(dW, mesh)))

    def reduce_all(self) -> None:
        """Start to reduce the sums of all layers, layer by layer from the last."""
        for l in reversed(range(len(self.layers))):
            self.start(l, l + 1)

    def settle(self) -> None:
        """Wait for the reductions under way, and put their results in their places."""
        while self.under_way:
            first, end, pending = self.under_way.pop(0)
            done = tree.map(wait, pending)
            if self.reduce_slow is None:
                self.place(first, end, tree.leaves(done))
            else:
                mesh = self.mesh if end - first == 1 else self.mesh.stacked("L")
                self.later.append((first, end, self.reduce_slow(done, mesh)))

    def place(self, first: int, end: int, done: list[Tensor]) -> None:
        """Put the reduced gradients of these layers where they stay."""
        done = [x[None] for x in done] if end - first == 1 else done
        for i, x in enumerate(done):
            if x.shape[1:] != self.shapes[i]:
                refuse_gradient(self.names[i], x, self.shapes[i])
            if self.out[i] is None:  # joined at the end: matrices below each other, which a compiler writes in place
                self.pieces[i].insert(0, x.flatten(0, 1))
                continue
            into = self.out[i][first:end]
            if x.is_meta or into.data_ptr() != x.data_ptr():
                into.copy_(x)

    def result(self) -> Any:
        """The gradients of all layers, a tree of stacks: reduced, or if nothing was, the sums."""
        return tree.unflatten(self.layers[0], self.stacks() if self.reduced else self.sums())

    def sums(self) -> list[Tensor]:
        whole = [room[1] if room and len(room[1]) == len(self.layers) else None for room in self.rooms]
        return [torch.stack(self.slots[i]) if stack is None else stack for i, stack in enumerate(whole)]

    def stacks(self) -> list[Tensor]:
        """Of each leaf the reduced gradients, once all are there."""
        self.settle()
        while self.later:
            first, end, pending = self.later.pop(0)
            self.place(first, end, tree.leaves(tree.map(wait, pending)))
        for i, pieces in enumerate(self.pieces):
            if pieces:
                self.out[i] = torch.cat(pieces).unflatten(0, (len(self.layers), -1))
                pieces.clear()
        return self.out


def layers_a_bucket(bucket_bytes: int, params: Mapping[str, Tensor]) -> int:
    """How many layers of params, stacked over L, fit into a bucket: at least one."""
    L = max(1, len(next(iter(params.values()))))
    one_layer = sum(W.numel() * W.element_size() for W in params.values()) // L
    return max(1, bucket_bytes // max(1, one_layer))


def _room(like: Tensor, shape: Sequence[int], dim: int, together: bool, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor [L, ...] in which the dim that will be scattered is the outermost in memory: of all layers
    `together`, or of each layer. Its blocks then need no copy."""
    outermost = 0 if together else min(1, dim)
    rest = [*shape]
    rest.insert(outermost, rest.pop(dim))
    return like.new_empty(rest, dtype=dtype).movedim(outermost, dim)


def refuse_gradient(name: str, grads: Tensor, shape: Sequence[int]) -> NoReturn:
    """ValueError: a listing's gradients[L, ...] have not their places' shape; torch would broadcast them."""
    what = f"the listing's backward returned d{name} of shape {tuple(grads.shape[1:])}, not {tuple(shape)}"
    order = "return the gradients in SPECS' order of the weights, each reduced to the type of its weight"
    raise ValueError(f"{what}\n  fix: {order}; python -m scaling.check FILE shows the line")
