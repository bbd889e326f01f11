"""The engine: L layers of any listing, run so that nothing waits that need not (Part 5).

Weights, a tree a layer, are gathered while the layer before computes and thrown away after use, in both passes.
Gradients are summed over microbatches and reduced in buckets of layers while the layers below run: in place where a
reduction only adds (an AllReduce, or none); else from a buffer, of which a ReduceScatter leaves each rank its shards.
What a layer computes is a function that the engine is given: the book's strategies and the Transformer both go here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import ne
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import Deferred, wait


class Gradient:
    """The gradient of one leaf, `like` a layer's weight: each layer's whole one as it comes in, from the last layer
    down, and the stack [L, ...] of all when they are reduced, one layer's then of this `shape`.

    One that has that shape from the beginning lies in its place in the stack; others lie in a buffer for the layers
    that are reduced together, `buckets` [(first, end)] of each layer, in which the dim that will be scattered is the
    outermost in memory. A compiler would copy a stack at each write to it: compiled, nothing is written in place.
    """

    def __init__(
        self, name: str, like: Tensor, shape: Sequence[int], buckets: list[tuple[int, int]], dtype: torch.dtype | None
    ):
        self.name, self.like, self.shape, self.buckets, self.dtype = name, like, tuple(shape), buckets, dtype
        self.compiling = torch.compiler.is_compiling()
        self.whole: list[Any] = [None] * len(buckets)
        self.room: Any = None  # (first layer, the stack in which its gradient and the next layers' lie)
        self.out: Any = None  # the stack of the results
        self.pieces: list[Tensor] = []  # of it, where it has no room yet

    def resume(self, sums: Tensor) -> None:
        """Go on from the sums of earlier microbatches."""
        self.whole, self.room = [*sums.unbind()], (0, sums)
        if sums.shape[1:] == self.shape and not self.compiling:
            self.out = sums

    def place(self, l: int, shape: Sequence[int], together: bool = False) -> Tensor:
        """Where layer l's lies, of this shape while it is whole. `together`: in memory as all of its bucket's."""
        if self.whole[l] is None:
            first, end = self.buckets[l]
            if tuple(shape) == self.shape:  # a reduction only adds
                first, end = 0, len(self.buckets)
                if self.out is None:
                    self.out = self.like.new_empty((end, *shape), dtype=self.dtype)
                room = self.out
            else:
                split = [*map(ne, shape, self.shape)].index(True)
                room = _room(self.like, (end - first, *shape), split + 1, together and end - first > 1, self.dtype)
            self.room, self.whole[first:end] = (first, room), room.unbind()
        return self.whole[l]

    def put(self, l: int, g: Any, more: bool, together: bool = False) -> None:
        """Layer l's, or `more` of it: a tensor, or a deferred product, which is computed where it stays."""
        there = self.whole[l]
        if isinstance(g, Deferred) and not self.compiling:
            g.wait(out=self.place(l, g.shape, together), add=more)
        elif (g := wait(g)) is there:  # it was written there
            pass
        elif more:
            self.whole[l] = there + g if self.compiling else there.add_(g)
        elif self.compiling or g.shape != self.shape:
            self.whole[l] = g.to(self.dtype or g.dtype)
        else:
            self.place(l, g.shape).copy_(g)

    def take(self, first: int, end: int) -> Tensor:
        """Those of these layers, whole: one layer's, or several stacked. They are not kept here."""
        some, room = self.whole[first:end], self.room
        self.whole[first:end] = [None] * (end - first)
        if room is not None and room[0] >= first and room[1] is not self.out:
            self.room = None
        if end - first == 1:
            return some[0]
        return torch.stack(some) if room is None else room[1][first - room[0] : end - room[0]]

    def settle(self, first: int, end: int, x: Tensor) -> None:
        """Put the reduced ones of these layers where they stay. ValueError for another shape: torch would broadcast."""
        x = x[None] if end - first == 1 else x
        if x.shape[1:] != self.shape:
            what = f"the listing's backward returned d{self.name} of shape {tuple(x.shape[1:])}, not {self.shape}"
            order = "return the gradients in SPECS' order of the weights, each reduced to the type of its weight"
            raise ValueError(f"{what}\n  fix: {order}; python -m scaling.check FILE shows the line")
        if self.out is None:  # joined at the end: matrices below each other, which a compiler writes in place
            self.pieces.insert(0, x.flatten(0, 1))
        elif x.is_meta or self.out[first:end].data_ptr() != x.data_ptr():
            self.out[first:end].copy_(x)

    def result(self) -> Tensor:
        """The stack, once all are reduced."""
        if self.pieces:
            self.out, self.pieces = torch.cat(self.pieces).unflatten(0, (len(self.buckets), -1)), []
        return self.out

    def sums(self) -> Tensor:
        """The stack of those that are whole."""
        room = None if self.room is None else self.room[1]
        return torch.stack(self.whole) if room is None or len(room) < len(self.buckets) else room


class Layers:
    """L layers by their weights, and their gradients as they come in, from the last layer down.

    gather(W, mesh) -> W            the weights as the layer uses them, under way
    reduce(dW, mesh) -> dW          gradients to their stored types, under way: of one layer, or, on
                                    `mesh.stacked("L")`, of a `bucket` of several
    reduce_slow(dW, mesh) -> dW     the same over a slow axis, once `reduce` is through
    `keep_weights`: gathered once and kept. `summed`: over several microbatches, of which the last one's reduces.
    `late`: all are reduced at the end, by `reduce_all`. `dtype`: in which gradients are added up, if not their own. Of
    each leaf, in the order of `tree.leaves`: `names`; `sums`, the stacks [L, ...] of earlier microbatches, which are
    added to; `out`, the stacks in which the results are wanted; `shapes`, of one layer's gradient when it is reduced,
    by default the weight's.
    """

    def __init__(
        self,
        layers: Sequence,
        mesh,
        gather: Callable | None = None,
        reduce: Callable | None = None,
        reduce_slow: Callable | None = None,
        *,
        names: Sequence[str],
        bucket: int = 1,
        keep_weights: bool = False,
        summed: bool = False,
        late: bool = False,
        dtype: torch.dtype | None = None,
        sums: Sequence[Tensor] | None = None,
        out: Sequence[Tensor] | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
    ):
        self.layers, self.mesh, self.gather, self.late, self.summed = layers, mesh, gather, late, summed
        self.reduce, self.reduce_slow = reduce, reduce_slow
        self.held: dict[int, Any] | None = {} if keep_weights else None
        L, like = len(layers), tree.leaves(layers[0])
        self.buckets = [(max(0, end - bucket), end) for end in range(L, 0, -bucket) for _ in range(min(end, bucket))]
        self.buckets.reverse()
        of_each = zip(names, like, shapes or [W.shape for W in like], strict=True)
        self.grads = [Gradient(*each, self.buckets, dtype) for each in of_each]
        self.written: set[int] = set() if sums is None else {*range(L)}
        for grad, stack in zip(self.grads, sums or (), strict=sums is not None):
            grad.resume(stack)
        for grad, stack in zip(self.grads, out or (), strict=out is not None):
            grad.out = stack
        self.under_way: list[tuple[int, int, Any]] = []  # (first, end, what `reduce` returned)
        self.later: list[tuple[int, int, Any]] = []  # the same over the slow axis

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
            W = coming  # the weights of the layer before are freed
            coming = self.weights(l + 1)  # which starts before these are waited for
            W = self.waited(l, W)
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
            W = coming
            coming = self.weights(l - 1)
            W = self.waited(l, W)
            saved = kept.pop() if donate else kept[l]
            dx, dW = run(l, W, dx, saved)
            put(l, dW)
            del W, saved, dW
            dx = wait(dx)
        return dx

    def add(self, l: int, dW, last: bool) -> None:
        """Add layer l's gradients, deferred products or tensors, to its sums; the `last` microbatch's are reduced."""
        more = l in self.written
        for grad, g in zip(self.grads, tree.leaves(dW), strict=True):
            grad.put(l, g, more, not self.summed)
        self.written.add(l)
        first, end = self.buckets[l]
        if last and l == first:
            self.start(first, end)

    def start(self, first: int, end: int) -> None:
        """Start to reduce the gradients of these layers. One bucket is reduced while the next one is filled: more would
        hold more whole gradients."""
        dW = tree.unflatten(self.layers[0], [grad.take(first, end) for grad in self.grads])
        if not self.late:
            self.settle()
        done = dW if self.reduce is None else self.reduce(dW, self.of_bucket(first, end))
        self.under_way.append((first, end, done))

    def of_bucket(self, first: int, end: int) -> Any:
        """The mesh, for the lines of one layer or of several stacked."""
        return self.mesh if end - first == 1 else self.mesh.stacked("L")

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
                self.place(first, end, done)
            else:
                self.later.append((first, end, self.reduce_slow(done, self.of_bucket(first, end))))

    def place(self, first: int, end: int, done) -> None:
        for grad, x in zip(self.grads, tree.leaves(done), strict=True):
            grad.settle(first, end, x)

    def result(self) -> Any:
        """The reduced gradients of all layers, a tree of stacks."""
        self.settle()
        while self.later:
            first, end, pending = self.later.pop(0)
            self.place(first, end, tree.map(wait, pending))
        return tree.unflatten(self.layers[0], [grad.result() for grad in self.grads])


def layers_a_bucket(bucket_bytes: int, params: Mapping[str, Tensor]) -> int:
    """How many layers of params, stacked over L, fit into a bucket: at least one."""
    L = max(1, len(next(iter(params.values()))))
    one_layer = sum([W.nbytes for W in params.values()]) // L
    return max(1, bucket_bytes // max(1, one_layer))


def _room(like: Tensor, shape: Sequence[int], dim: int, together: bool, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor [L, ...] in which the dim that will be scattered is the outermost in memory: of all layers
    `together`, or of each layer. Its blocks then need no copy."""
    outermost = 0 if together else min(1, dim)
    rest = [*shape]
    rest.insert(outermost, rest.pop(dim))
    return like.new_empty(rest, dtype=dtype).movedim(outermost, dim)
