"""Where the gradients of weights go: into one stack over the layers, summed over microbatches, reduced in buckets.

A layer's backward states its weight gradients as deferred products, mostly partial sums `{U_X}`. Here they are
computed: straight into the stack of gradients where a reduction only adds (an AllReduce, or none at all); else into a
buffer for a bucket of layers, from which a ReduceScatter leaves each rank its shards, and which is then freed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scaling.collectives import Deferred, join_products, wait
from scaling.spec import parse


class Gradients:
    """The gradients of L layers as they come in, from the last layer down.

    `sums`: partial sums of earlier microbatches, stacked over L, which are added to. With `reduce` each bucket of
    layers, as many as fit in `bucket_bytes` and at least one, is reduced as soon as its last gradient is there;
    otherwise `sums` of all layers are kept, until `reduce_all`. `out`: preallocated results, typed as params.
    """

    def __init__(
        self, strategy, params: Mapping[str, Tensor], mesh, sums=None, *, reduce: bool, bucket_bytes: int = 0, out=None
    ):
        self.strategy, self.params, self.mesh, self.reduce = strategy, params, mesh, reduce
        self.L = len(next(iter(params.values())))
        self.bucket = min(self.L, layers_a_bucket(bucket_bytes, params))
        self.compiling = torch.compiler.is_compiling()  # a compiler would copy a stack at each write to it: use lists
        if sums is not None and self.compiling:
            sums = {name: list(stack.unbind()) for name, stack in sums.items()}
        self.sums: dict[str, Any] | None = sums
        self.written = set() if sums is None else set(range(self.L))
        self.first = 0  # `buffers`: of the layers now being written, from `first` on
        self.buffers: Any = self.sums
        self.results: dict[str, Tensor] | None = out
        self.pieces: list[dict[str, Tensor]] = []  # of `results`, while compiling
        self.late: list[tuple[int, int, Sequence]] = []  # (first, last, what `reduce` returned)
        self.later: list[tuple[int, int, Sequence]] = []  # the same over the slow axis

    def write(self, l: int, products: Sequence) -> None:
        """Compute the gradients of layer l: of each weight a `Deferred` product or a tensor, or a list of these to sum.

        Layers may be written several times unless they are reduced as soon as they are written.
        """
        last = self.L - (self.L - 1 - l) // self.bucket * self.bucket
        first = max(0, last - self.bucket)
        if self.buffers is None:
            self.allocate([some[0] if isinstance(some, list) else some for some in products], first, last)
        buffers: Any = self.buffers
        for name, some in zip(self.strategy.weights, products, strict=True):
            product = join_products(some) if isinstance(some, list) else some
            self.put(name, product, buffers[name], l - self.first, add=l in self.written)
            del product  # of several microbatches a copy: one weight's at a time
        self.written.add(l)
        if self.reduce and l == first:
            self.start(first, last)

    def put(self, name: str, product, buffer, at: int, add: bool) -> None:
        if isinstance(buffer, list):
            buffer[at] = buffer[at] + wait(product) if add else wait(product)
        elif isinstance(product, Deferred):
            product.wait(out=buffer[at], add=add)
        else:
            product = fitting(name, wait(product), buffer[at])
            (buffer[at].add_ if add else buffer[at].copy_)(product)

    def allocate(self, products: Sequence, first: int, last: int) -> None:
        """Buffers for the gradients of some layers, or of all."""
        named = dict(zip(self.strategy.weights, products, strict=True))
        splits = {} if self.compiling else {name: self.split_dim(name, product) for name, product in named.items()}
        in_place = not self.compiling and not any(splits.values())
        self.first, count = (0, self.L) if in_place or not self.reduce else (first, last - first)
        if self.compiling:
            self.buffers = {name: [None] * count for name in named}
        elif in_place:
            self.results = self.results or {name: torch.empty_like(self.params[name]) for name in named}
            self.buffers = self.results
        else:
            together = self.reduce and count > 1
            self.buffers = {
                name: _room(self.params[name], (count, *product.shape), splits[name], together)
                for name, product in named.items()
            }
        if in_place or not self.reduce:
            self.sums = self.buffers

    def split_dim(self, name: str, product) -> int:
        """The dim, counted with L in front, that a gradient's reduction splits; 0 if it splits none."""
        if not isinstance(product, Deferred):
            return 0
        wanted = parse((self.strategy.GRADS or self.strategy.SPECS)[name])
        dims = zip(product.type.dims, wanted.dims, strict=True)
        return next((i for i, (now, then) in enumerate(dims, 1) if now != then), 0)

    def start(self, first: int, last: int) -> None:
        """Start to reduce the gradients of these layers."""
        at, to = first - self.first, last - self.first
        some = [self.buffers[name][at:to] for name in self.strategy.weights]
        if last - first == 1:  # the listing's own lines
            some, mesh = [gradients[0] for gradients in some], self.mesh
        else:
            some, mesh = [torch.stack(g) if isinstance(g, list) else g for g in some], self.mesh.stacked("L")
        if self.sums is None:
            self.settle()  # one bucket is reduced while the next one is filled: more would hold more whole gradients
            self.buffers = None
        if self.strategy.reduce:
            some = returned("reduce", self.strategy.reduce(*some, mesh), self.strategy.weights)
        self.late.append((first, last, some))

    def settle(self) -> None:
        """Wait for the reductions under way, and put their results in their places."""
        while self.late:
            first, last, pending = self.late.pop(0)
            done = [wait(x) for x in pending]
            if self.strategy.reduce_slow is None:
                self.place(first, last, done)
            else:
                mesh = self.mesh if last - first == 1 else self.mesh.stacked("L")
                slow = returned("reduce_slow", self.strategy.reduce_slow(*done, mesh), self.strategy.weights)
                self.later.append((first, last, slow))

    def place(self, first: int, last: int, done: Sequence[Tensor]) -> None:
        if self.compiling:  # matrices below each other, which a compiler writes straight to their places
            rows = done if last - first == 1 else [x.flatten(0, 1) for x in done]
            self.pieces.insert(0, dict(zip(self.strategy.weights, rows, strict=True)))
            return
        done = [x[None] for x in done] if last - first == 1 else done
        named = dict(zip(self.strategy.weights, done, strict=True))
        results = self.results
        if results is None:
            whole = self.sums is not None and all(x.shape[1:] == self.sums[name].shape[1:] for name, x in named.items())
            new = {name: self.params[name].new_empty((self.L, *x.shape[1:])) for name, x in named.items() if not whole}
            self.results = results = self.sums if self.sums is not None and whole else new
        for name, x in named.items():
            into = results[name][first:last]
            if x.is_meta or into.data_ptr() != x.data_ptr():
                into.copy_(x)

    def reduce_all(self) -> None:
        """Start to reduce the sums of all layers, layer by layer from the last."""
        for l in reversed(range(self.L)):
            self.start(l, l + 1)

    def result(self) -> dict[str, Tensor]:
        """The gradients typed as params, when all reductions are through; without `reduce` the partial sums."""
        if not self.reduce and not self.late:
            sums = self.sums or {name: torch.empty_like(W) for name, W in self.params.items()}
            return {name: torch.stack(g) if isinstance(g, list) else g for name, g in sums.items()}
        self.settle()
        for first, last, pending in self.later:
            self.place(first, last, [wait(x) for x in pending])
        if self.pieces:
            rows = {name: torch.cat([piece[name] for piece in self.pieces]) for name in self.params}
            return {name: x.unflatten(0, (self.L, len(x) // self.L)) for name, x in rows.items()}
        results = self.results or {name: torch.empty_like(W) for name, W in self.params.items()}
        return {name: results[name] for name in self.params}


def layers_a_bucket(bucket_bytes: int, params: Mapping[str, Tensor]) -> int:
    """How many layers of params, stacked over L, fit into a bucket: at least one."""
    L = max(1, len(next(iter(params.values()))))
    one_layer = sum(W.numel() * W.element_size() for W in params.values()) // L
    return max(1, bucket_bytes // max(1, one_layer))


def _room(like: Tensor, shape: Sequence[int], dim: int, together: bool) -> Tensor:
    """An empty tensor [L, ...] in which the dim that will be scattered is the outermost in memory: of all layers
    `together`, or of each layer. Its blocks then need no copy."""
    if dim == 0:
        return like.new_empty(shape)
    rest = [i for i in range(len(shape)) if i not in (0, dim)]
    order = [dim, 0, *rest] if together else [0, dim, *rest]
    return like.new_empty([shape[i] for i in order]).permute(*(order.index(i) for i in range(len(shape))))


def fitting(name: str, grad: Tensor, place: Tensor) -> Tensor:
    """A listing's gradient of one layer. ValueError unless it has the shape of its place: torch would broadcast it."""
    if grad.shape != place.shape:
        what = f"the listing's backward returned d{name} of shape {tuple(grad.shape)}, not {tuple(place.shape)}"
        order = "return the gradients in SPECS' order of the weights, each reduced to the type of its weight"
        raise ValueError(f"{what}\n  fix: {order}; python -m scaling.check FILE shows the line")
    return grad


def returned(which: str, found: Any, parts: Sequence[str]) -> Any:
    """What a listing's function returned. ValueError unless it is a tuple of these parts: an array that stands alone
    would be taken apart into its rows."""
    if not isinstance(found, (tuple, list)) or len(found) != len(parts):
        shown = f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, (tuple, list)) else "")
        what = f"the listing's {which} returned {shown}"
        raise ValueError(f"{what}\n  fix: return a tuple of {len(parts)}: {', '.join(parts)}")
    return found
