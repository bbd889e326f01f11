"""The layers of a Transformer forward and backward, all of them or those of a stage (Part 5).

Forward: a layer's weights are gathered over X, the next layer's meanwhile, and thrown away after use. Backward: the
same from the last layer to the first. A weight's gradient is unreduced over every axis that splits the
tokens and not the weight, by the law of cotangents; it is summed over microbatches, then reduced to the stored type.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import wait
from scaling.configs import Config
from scaling.models.transformer import unstacked
from scaling.spec import Spec, parse
from scaling.strategies.axes import all_gather, all_reduce, reduce_scatter
from scaling.strategies.transformer import flat
from scaling.strategies.transformer.ends import Terms
from scaling.strategies.transformer.layer import Context, dropped, layer, layer_backward

TOKENS = ("P", "X", "E", "C", "Y")  # the axes that split the tokens: those over which the loss is unreduced
ENDS = (*TOKENS, "Z")  # and for what is outside the layers, which not every stage uses


class Problem(NamedTuple):
    """What is given beside params and batch: the types of the params as stored and as used, a context a microbatch.

    `sums`: the dtype in which gradients are added up over microbatches and ranks, and are returned. `scale`: of the
    loss, as it is differentiated.
    """

    config: Config
    mesh: Any
    stored: dict
    used: dict
    contexts: list[Context]
    terms: Terms
    sums: torch.dtype
    scale: float = 1.0


def gathered_weights(W: Mapping, stored: Mapping, used: Mapping, mesh, async_op: bool = True):
    """A tree of weights, each gathered from its stored to its used type: under way."""

    def one(x: Tensor, before: str, after: str):
        line = f"{before} -> {after}"
        return all_gather(line, x, mesh, async_op=async_op) if before != after else x

    return tree.map(one, W, stored, used)


def add_by_name(sums_of: dict, dW: dict, dtype: torch.dtype) -> None:
    """Add gradients by name, in this dtype."""
    for name, g in dW.items():
        sums_of[name] = sums_of[name].add_(g) if name in sums_of else g.to(dtype)


def reduce_gradients(
    dW: Mapping, stored: Mapping, used: Mapping, mesh, axes: tuple[str, ...] = TOKENS
) -> dict[str, Any]:
    """Gradients by name from partial sums {U} to their stored types: over X inside a pod first, then over the rest.

    dW is typed as used, unreduced over those of `axes` that do not split it: of a layer's weight those that split the
    tokens; of the ends, which some stages do not use, also Z. The types may be of more leaves than there are.
    """
    stored, used = ({name: types[name] for name in dW} for types in (stored, used))
    begun = tree.map(lambda g, s, u: _begun(g, s, u, mesh, axes), dW, stored, used)
    return _finished(begun, stored, used, mesh, axes)


def _begun(dW: Tensor, stored: str, used: str, mesh, axes: tuple[str, ...] = TOKENS):
    """The first half, the ReduceScatter: under way."""
    return reduce_scatter(mesh.constant(_reduction, stored, used, axes)[0], dW, mesh, async_op=True)


def _finished(begun, stored, used, mesh, axes: tuple[str, ...] = TOKENS):
    """The second half, over the axes that split neither: of all leaves at once."""

    def one(pending, s: str, u: str):
        return all_reduce(mesh.constant(_reduction, s, u, axes)[1], wait(pending), mesh, async_op=True)

    return tree.map(wait, tree.map(one, begun, stored, used))


def _reduction(mesh, stored: str, used: str, axes: tuple[str, ...]) -> tuple[str, str]:
    return _lines(stored, used, tuple(axis for axis in axes if mesh.sizes.get(axis, 1) > 1))


@lru_cache(maxsize=4096)
def _lines(stored: str, used: str, axes: tuple[str, ...]) -> tuple[str, str]:
    """The two lines by which a gradient that is unreduced over `axes` gets its stored type."""
    before, after = parse(used), parse(stored)
    over = [axis for axis in axes if axis not in before.axes]
    shard = after.with_unreduced([axis for axis in over if axis not in after.axes])
    return f"{before.with_unreduced(over)} -> {shard}", f"{shard} -> {after}"


def layer_types(types: Mapping) -> Mapping:
    """The types of one layer's params: without the L in front."""

    return tree.map(_layer_type, types)


@lru_cache(maxsize=4096)
def _layer_type(text: str) -> str:
    spec = parse(text)
    return str(Spec(spec.name, spec.dims[1:], spec.unreduced))


class Layers:
    """The layers of stacked params, those of the model from `first` on: gathered ahead of use, run, run back.

    `remat`: what a layer keeps for its backward, a policy of `layer.REMAT`; None: nothing is run back. Gathered weights
    are thrown away after use and gathered again for the backward; with `keep_weights` they are gathered once and kept.
    """

    def __init__(
        self,
        problem: Problem,
        params: Mapping,
        remat: str | None = None,
        layers: range | None = None,
        keep_weights: bool = False,
    ):
        self.run, self.run_back = layer, layer_backward
        config, self.mesh, self.sums = problem.config, problem.mesh, problem.sums
        self.remat, self.gone = remat, dropped(remat or "block", config)
        self.first, count = (0, None) if layers is None else (layers.start, len(layers))
        self.layers = unstacked(params)[:count]
        self.types = problem.stored["layers"], problem.used["layers"]
        self.stored, self.used = map(layer_types, self.types)
        self.together = flat.sent_over_x(self.layers[0], self.stored)
        on_tape = config.moe and remat == "none"  # experts' backward holds their weights
        self.held: dict[int, Any] | None = {} if keep_weights or on_tape else None
        self.grads: list[Any] = [None] * len(self.layers)
        self.begun: set[int] = set()
        self.stacks = {  # of gradients that need no reduction: written where they stay
            name: torch.empty_like(W[: len(self.layers)])
            for name, W in params.items()
            if remat and isinstance(W, Tensor) and W.dim() > 2 and W.dtype == self.sums and self.stays(name)
        }
        self.slots = [{name: stack[l] for name, stack in self.stacks.items()} for l in range(len(self.layers))]

    def stays(self, name: str) -> bool:
        """Whether the gradient of this matrix needs no reduction."""
        lines = self.mesh.constant(_reduction, self.stored[name], self.used[name], TOKENS)
        return not torch.compiler.is_compiling() and all(len(set(line.split(" -> "))) == 1 for line in lines)

    def weights(self, l: int):
        """The used weights of layer l, under way; None if there is no such layer."""
        if self.held is not None and l in self.held:
            return self.held[l]
        if not 0 <= l < len(self.layers):
            return None
        if self.together:
            return flat.gather(self.layers[l], self.together, self.mesh)
        return gathered_weights(self.layers[l], self.stored, self.used, self.mesh)

    def waited(self, l: int, pending):
        """The same, there."""
        W = tree.map(wait, pending)
        if self.held is not None:
            self.held[l] = W
        return W

    def forward(self, x: Tensor, at: Context) -> tuple[Tensor, Tensor, list]:
        """(x, the sum of the layers' extra terms, what `backward` needs: each layer's `saved`)."""
        kept, extra = [], x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        coming = self.weights(0)
        for l in range(len(self.layers)):
            W = self.waited(l, coming)
            coming = self.weights(l + 1)
            x, more, saved = self.run(W, x, at.of_layer(self.first + l), self.gone)
            extra = extra if more is None else extra + more
            if self.remat:
                kept.append(saved)
        return x, extra, kept

    def backward(self, dx: Tensor, kept: list, at: Context, scale: float = 1.0, last: bool = False) -> Tensor:
        """dx of the last layer's result -> dx of the first one's input; `kept` is used up.

        `scale`: the cotangent of the extra terms. `last`: no microbatch follows, so that each layer's gradients are
        reduced as soon as they are there.
        """
        coming = self.weights(len(kept) - 1)
        for l in reversed(range(len(kept))):
            W = self.waited(l, coming)
            coming = self.weights(l - 1)
            before, of_layer = self.grads[l], at.of_layer(self.first + l)
            places = self.slots[l] if before is None else before if dx.dtype == self.sums else {}
            into = partial(_place, places, before is not None)
            dx, dW = self.run_back(W, dx, kept.pop(), of_layer, into, scale)
            dW = tree.map(lambda g: g.to(self.sums), dW)
            self.grads[l] = dW if before is None else tree.map(lambda a, b: a if a is b else a.add_(b), before, dW)
            if last:
                self.begin(l)
        return dx

    def begin(self, l: int) -> None:
        """Start to reduce the gradients of layer l, from partial sums to their stored types; those of the one above,
        which were under way meanwhile, are waited for, so that no more than two layers' whole gradients are there."""
        if l + 1 in self.begun:
            self.grads[l + 1] = tree.map(wait, self.grads[l + 1])
        if self.together:
            self.grads[l] = flat.scatter(self.grads[l], self.together, self.mesh)
        else:
            self.grads[l] = tree.map(lambda g, s, u: _begun(g, s, u, self.mesh), self.grads[l], self.stored, self.used)
        self.begun.add(l)

    def reduce_all(self) -> None:
        """Start to reduce the gradients of all layers."""
        for l in reversed(range(len(self.layers))):
            if l not in self.begun:
                self.begin(l)

    def reduce(self) -> dict:
        """The gradients of all layers, stacked and typed as the stored params."""
        self.reduce_all()
        self.grads = [tree.map(wait, grads) for grads in self.grads]
        return _finished(self.stacked(), *self.types, self.mesh)

    def stacked(self) -> dict:
        """The layers' gradients in their stacks; those that were written there are there."""
        if not self.stacks:
            return tree.map(lambda *leaves: torch.stack(leaves), *self.grads)
        placed = {id(slot): self.stacks[name] for name, slot in self.slots[0].items()}
        return tree.map(
            lambda *leaves: placed[id(leaves[0])] if id(leaves[0]) in placed else torch.stack(leaves), *self.grads
        )


def _place(places: Mapping[str, Tensor], add: bool, name: str) -> dict[str, Any]:
    """The arguments of the product that makes the gradient of this matrix."""
    return {"out": places[name], "add": add} if name in places else {}


def end_weights(params: Mapping, stored: Mapping, used: Mapping, mesh) -> dict:
    """The params outside the layers, gathered."""
    names = [name for name in params if name != "layers"]
    return {name: wait(gathered_weights(params[name], stored[name], used[name], mesh)) for name in names}
