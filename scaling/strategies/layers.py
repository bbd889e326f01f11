"""The loop over layers: L layers of any listing, run with as few waits as possible (Part 5).

Each layer's weights are gathered while the layer before computes, and dropped after use, in both passes. The
computation of a layer is a function that the loop is given: the book's strategies and the Transformer both go
through here.

Each microbatch's backward gives unreduced gradients. `reduce_when` says what becomes of them, one of four:

    last     They are summed over microbatches. The last microbatch's backward (`reduces=True`) starts to reduce the
             sums, a bucket of layers at a time, while the layers below run. One bucket is in flight at a time.
    each     Every microbatch's backward reduces its gradients in the same way, and the reduced ones are summed.
    end      They are summed. `reduce_all` then starts to reduce the sums of all layers at once.
    never    They are summed, and the caller takes the unreduced sums by `Gradient.sums`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from scaling.collectives import Deferred, wait


@dataclass(eq=False)
class Gradient:
    """The gradients of one leaf, layer by layer: unreduced sums as they come in, then the stack of reduced ones.

    A backward calls `accumulate` for each layer from the last to the first, `take` to hand unreduced gradients to a
    reduction, `keep_reduced` with the reduction's result, and `reduced_stack` at the end. Unreduced gradients are
    written into one tensor [L, ...] if they fit into `out`, or if the sums are the result (`never`). Otherwise each
    layer's gradient is a separate tensor, which is freed once it has been reduced.

    Attributes:
        name: The leaf's name, for errors.
        like: One layer's weight, for its dtype and device.
        shape: The shape of one layer's reduced gradient.
        L: The number of layers.
        dtype: The dtype in which gradients are added up; None is their own.
        out: The stack [L, *shape] that receives the reduced gradients; None makes one.
        reduce_when: When gradients are reduced, as in the module's table. With `each`, a given `out` begins as zeros.
        stack: The tensor [L, ...] that unreduced gradients are written into, or None.
        reduced: The reduced gradients [n, *shape] of n layers, by the first of them, if there is no `out`.
    """

    name: str
    like: Tensor
    shape: tuple[int, ...]
    L: int
    dtype: torch.dtype | None
    out: Tensor | None
    reduce_when: str
    stack: Tensor | None = None
    reduced: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.compiling = torch.compiler.is_compiling()  # a compiler would copy tensors that are written in place
        self.unreduced: list[Any] = [None] * self.L

    def resume(self, sums: Tensor) -> None:
        """Continue from the unreduced sums [L, ...] of earlier microbatches, which are added to in place."""
        self.stack, self.unreduced = sums, [*sums.unbind()]
        if sums.shape[1:] == self.shape and not self.compiling:
            self.out = sums

    def accumulate(self, l: int, g: Any) -> None:
        """Add a microbatch's gradient of layer l, a tensor or a deferred product, to the sum of those before it."""
        sums, deferred = self.unreduced[l], isinstance(g, Deferred) and not self.compiling
        g = g if deferred or isinstance(g, Tensor) else wait(g)
        if sums is None and l == self.L - 1 and not self.compiling and self.reduce_when != "each":
            if self.out is not None and g.shape == self.shape:  # reducing changes only the values
                self.stack = self.out
            elif self.reduce_when == "never":
                self.stack = self.like.new_empty((self.L, *g.shape), dtype=self.dtype)
        if sums is None and self.stack is None:
            g = g.wait() if deferred else g
            self.unreduced[l] = g.to(self.dtype or g.dtype)
        elif sums is None:
            slot = self.unreduced[l] = cast(Tensor, self.stack)[l]
            g.wait(out=slot) if deferred else slot.copy_(g)
        elif self.compiling:
            self.unreduced[l] = sums + g
        else:
            g.wait(out=sums, add=True) if deferred else sums.add_(g)

    def take(self, first: int, end: int) -> Tensor:
        """Pop the unreduced gradients of layers first..end-1: one layer's alone, several stacked."""
        taken, self.unreduced[first:end] = self.unreduced[first:end], [None] * (end - first)
        if end - first == 1:
            return taken[0]
        return torch.stack(taken) if self.stack is None else self.stack[first:end]

    def keep_reduced(self, first: int, end: int, x: Tensor) -> None:
        """Keep the reduced gradients of layers first..end-1, one layer's alone or several stacked.

        The gradients of a later microbatch are added to the sum of the earlier ones.

        Raises:
            ValueError: they have another shape than the leaf's. torch would broadcast them.
        """
        x = x[None] if end - first == 1 else x
        if x.shape[1:] != self.shape:
            what = f"the listing's backward returned d{self.name} of shape {tuple(x.shape[1:])}, not {self.shape}"
            order = "return the gradients in SPECS' order of the weights, each reduced to the type of its weight"
            raise ValueError(f"{what}\n  fix: {order}; python -m scaling.check FILE shows the line")
        if self.out is None or self.compiling:
            earlier = self.reduced.get(first)
            self.reduced[first] = x if earlier is None else earlier + x if self.compiling else earlier.add_(x)
        elif self.reduce_when == "each":
            self.out[first:end].add_(x)
        elif x.is_meta or self.out[first:end].data_ptr() != x.data_ptr():
            self.out[first:end].copy_(x)

    def reduced_stack(self) -> Tensor:
        """Return the stack of all layers' reduced gradients."""
        if self.out is None:
            self.out, self.reduced = torch.cat([*map(self.reduced.__getitem__, sorted(self.reduced))]), {}
        return self.out

    def sums(self) -> Tensor:
        """Return the stack of all layers' unreduced sums."""
        return torch.stack(self.unreduced) if self.stack is None else self.stack


class Layers:
    """L layers of one listing: their weights on the way in, their gradients on the way out.

    A layer's weights, and its gradients, are a list of leaves. If leaves may be pending, an object whose `wait` returns
    the list will do as well.

    Args:
        layers: The leaves of each layer.
        mesh: The mesh that the functions below are called with.
        gather: `gather(W, mesh) -> W` starts to gather a layer's weights. Its results may be pending.
        reduce: `reduce(dW, mesh) -> dW` starts to reduce the gradients of one layer to their stored types, or of a
            bucket of several layers on `mesh.stacked("L")`. Its results may be pending.
        reduce_slow: Takes the results of `reduce`, once they have arrived, and starts to reduce them over a slow axis.
        names: The names of the leaves that have gradients, in their order; none if there is no backward.
        bucket: The number of layers that are reduced together.
        keep_weights: Whether to gather each layer once and keep its weights.
        reduce_when: When gradients are reduced: `last`, `each`, `end` or `never`, as in the module's table.
        dtype: The dtype in which gradients are added up; None is their own.
        sums: For each leaf, the stack [L, ...] of earlier microbatches' sums, which are added to.
        out: For each leaf, the stack that receives the result.
        shapes: For each leaf, the shape of one layer's reduced gradient; by default the weight's.
        trained: The indices of the leaves that have gradients, which are the leaves of the lists above; by default all.
        gather_back: Gathers weights for the backward pass, if it needs another form of them.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Tensor]],
        mesh,
        gather: Callable | None = None,
        reduce: Callable | None = None,
        reduce_slow: Callable | None = None,
        *,
        names: Sequence[str] = (),
        bucket: int = 1,
        keep_weights: bool = False,
        reduce_when: str = "last",
        dtype: torch.dtype | None = None,
        sums: Sequence[Tensor] | None = None,
        out: Sequence[Tensor] | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
        trained: Sequence[int] | None = None,
        gather_back: Callable | None = None,
    ):
        self.layers, self.mesh, self.gather, self.reduce_when = layers, mesh, gather, reduce_when
        self.reduce, self.reduce_slow, self.bucket, self.gather_back = reduce, reduce_slow, bucket, gather_back
        self.held: dict[int, Any] = {}  # the weights of some layers, gathered or in flight
        self.keep_weights = keep_weights
        self.grads: list[Gradient] = []
        for i, name in enumerate(names):
            W, stack = layers[0][i if trained is None else trained[i]], None if out is None else out[i]
            shape = tuple(W.shape if shapes is None else shapes[i])
            self.grads.append(Gradient(name, W, shape, len(layers), dtype, stack, reduce_when))
        for grad, stack in zip(self.grads, sums or (), strict=sums is not None):
            grad.resume(stack)
        self.in_flight: list[tuple[int, int, Any, Any]] = []  # (first, end, their mesh, the result of `reduce`)
        self.in_flight_slow: list[tuple[int, int, Any, Any]] = []  # (first, end, mesh, the result of `reduce_slow`)

    def gather_all(self) -> "Layers":
        """Gather the weights of all layers, which stay held with `keep_weights`; return self."""
        for step in (self.start_gather, self.finish_gather):
            for l in range(len(self.layers)):
                step(l)
        return self

    def start_gather(self, l: int, back: bool = False) -> None:
        """Start to gather the weights of layer l, unless they are held."""
        if l not in self.held:
            gather = self.gather_back if back and self.gather_back else self.gather
            self.held[l] = self.layers[l] if gather is None else gather(self.layers[l], self.mesh)

    def finish_gather(self, l: int, keep: bool = False) -> Any:
        """Wait for layer l's gathered weights and return them; they stay held if `keep`, or with `keep_weights`."""
        W = self.held.pop(l)
        W = W if self.gather is None else wait_leaves(W)
        if self.keep_weights or (keep and self.gather_back is None):
            self.held[l] = W
        return W

    def forward(self, x, layer: Callable, above: Callable | None = None, keep_last: bool = False) -> tuple[Any, list]:
        """Run x through all layers by `layer(l, W, x) -> (x, saved)`; return x and the arrays that each layer saved.

        Args:
            x: The first layer's input.
            layer: One layer's forward.
            above: Starts to gather what is used after the last layer; called while that layer's weights arrive.
            keep_last: Whether the last layer's weights stay gathered, because its backward follows at once.
        """
        kept, last = [], len(self.layers) - 1
        self.start_gather(0)
        for l in range(last + 1):
            if l < last:
                self.start_gather(l + 1)  # the next gather starts before this one is waited for
            elif above is not None:
                above()
            x, saved = layer(l, self.finish_gather(l, keep_last and l == last), x)
            kept.append(saved)
        return x, kept

    def backward(
        self, dx, kept: list, layer: Callable, add: Callable | None = None, *, reduces=True, donate=True,
        below: Callable | None = None,
    ):  # fmt: skip
        """Run dx through all layers, from the last to the first, by `layer(l, W, dx, saved) -> (dx, dW)`; return dx.

        Args:
            dx: The cotangent of the last layer's result.
            kept: The second result of `forward`; with `donate` each layer's part is freed once it has been used.
            layer: One layer's backward; its dx and dW may be pending.
            add: `add(l, dW)` takes a layer's gradients; by default the method `add`.
            reduces: Whether this backward starts to reduce the sums: in the last microbatch, or in each.
            donate: Whether `kept` may be emptied.
            below: Starts to gather what is used after the first layer's backward.
        """
        add = add or partial(self.add, reduces=reduces)
        self.start_gather(len(self.layers) - 1, back=True)
        for l in reversed(range(len(self.layers))):
            if l:
                self.start_gather(l - 1, back=True)
            elif below is not None:
                below()
            W = self.finish_gather(l)
            saved = kept.pop() if donate else kept[l]
            dx, dW = layer(l, W, dx, saved)
            del W, saved
            add(l, dW)
            del dW
            dx = wait(dx)
        if self.reduce_when == "each":
            self.settle()  # else whole gradients would be held while the next microbatch runs forward
        return dx

    def add(self, l: int, dW: list, reduces: bool) -> None:
        """Add layer l's gradients, tensors or deferred products, to its sums; start to reduce them if `reduces`.

        Buckets are counted from the last layer down, so a bucket is full with the first of its layers. `dW` is emptied:
        else all of a layer's gradients would be held in two dtypes.
        """
        for grad in self.grads:
            grad.accumulate(l, dW.pop(0))
        end = len(self.layers) - (len(self.layers) - 1 - l) // self.bucket * self.bucket
        if reduces and l == max(0, end - self.bucket):
            self.start(l, end)

    def start(self, first: int, end: int) -> None:
        """Start to reduce the gradients of layers first..end-1.

        Wait for the bucket before, unless all are reduced at the end: a bucket in flight holds its whole gradients.
        """
        dW = []
        for grad in self.grads:
            dW.append(grad.take(first, end))
        if self.reduce_when != "end":
            self.settle()
        mesh = self.mesh if end - first == 1 else self.mesh.stacked("L")
        self.in_flight.append((first, end, mesh, dW if self.reduce is None else self.reduce(dW, mesh)))

    def reduce_all(self) -> None:
        """Start to reduce the sums of all layers, one by one from the last; with `end`, none waits for another."""
        for l in reversed(range(len(self.layers))):
            self.start(l, l + 1)

    def settle(self) -> None:
        """Wait for the reductions in flight; keep their results, or start to reduce them over the slow axis."""
        while self.in_flight:
            first, end, mesh, pending = self.in_flight.pop(0)
            dW = wait_leaves(pending)
            if self.reduce_slow is not None:
                self.in_flight_slow.append((first, end, mesh, self.reduce_slow(dW, mesh)))
                continue
            for grad, x in zip(self.grads, dW, strict=True):
                grad.keep_reduced(first, end, x)

    def result(self) -> list[Tensor]:
        """Wait for all reductions; return the gradients of all layers, a stack [L, ...] for each leaf."""
        self.settle()
        self.in_flight, self.reduce_slow = self.in_flight_slow, None
        self.settle()
        return [*map(Gradient.reduced_stack, self.grads)]


def wait_leaves(pending: Any) -> list[Tensor]:
    """Wait for the leaves of a layer, in separate messages or in one, and return them."""
    return [*map(wait, pending)] if isinstance(pending, (list, tuple)) else pending.wait()


def layers_a_bucket(bucket_bytes: int, params: Mapping[str, Tensor]) -> int:
    """Return how many layers of params, stacked over L, fit into a bucket: at least one."""
    L = max(1, len(next(iter(params.values()))))
    one_layer = sum([W.nbytes for W in params.values()]) // L
    return max(1, bucket_bytes // max(1, one_layer))
