"""The layers of a Transformer forward and backward, all of them or those of a stage (Part 5).

Forward: a layer's weights are gathered over X, the next layer's meanwhile, and thrown away after use. Backward: the
same from the last layer to the first. A weight's gradient is unreduced over every axis that splits the
tokens and not the weight, by the law of cotangents; it is summed over microbatches, then reduced to the stored type.
"""

from collections.abc import Callable, Mapping, Sequence
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
from scaling.strategies.layers import Layers
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


class TransformerLayers(Layers):
    """The engine on the layers of stacked params, those of the model from `first` on.

    `remat`: what a layer keeps for its backward, a policy of `layer.REMAT`; None: nothing is run back. `out`: as of
    `Layers`.
    """

    def __init__(
        self,
        problem: Problem,
        params: Mapping,
        remat: str | None = None,
        layers: range | None = None,
        keep_weights: bool = False,
        out: Sequence[Tensor] | None = None,
        late: bool = False,
    ):
        config, mesh = problem.config, problem.mesh
        self.remat, self.gone = remat, dropped(remat or "block", config)
        self.origin, count = (0, None) if layers is None else (layers.start, len(layers))
        own = unstacked(params)[:count]
        self.types = problem.stored["layers"], problem.used["layers"]
        stored, used = map(layer_types, self.types)
        if sent := flat.sent_over_x(own[0], stored):
            gather, reduce = partial(flat.gather, sent=sent), partial(flat.scatter, sent=sent)
        else:
            gather, reduce = _apart(stored, used)
        on_tape = config.moe and remat == "none"  # experts' backward holds their weights
        names = tree.leaves({name: tree.map(lambda _, name=name: name, W) for name, W in own[0].items()})
        super().__init__(
            own,
            mesh,
            gather,
            reduce,
            names=names,
            keep_weights=keep_weights or on_tape,
            dtype=problem.sums,
            out=out,
            late=late,
        )

    def run(self, x: Tensor, at: Context) -> tuple[Tensor, Tensor, list]:
        """(x, the sum of the layers' extra terms, what `run_back` needs: each layer's `saved`)."""
        terms = []

        def run(l: int, W: dict, x: Tensor):
            x, extra, saved = layer(W, x, at.of_layer(self.origin + l), self.gone)
            terms.extend([] if extra is None else [extra])
            return x, saved if self.remat else None

        x, kept = self.forward(x, run)
        return x, sum(terms, x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))), kept

    def run_back(self, dx: Tensor, kept: list, at: Context, scale: float = 1.0, last: bool = False) -> Tensor:
        """dx of the last layer's result -> dx of the first one's input; `kept` is used up.

        `scale`: the cotangent of the extra terms. `last`: no microbatch follows.
        """

        def run(l: int, W: dict, dx: Tensor, saved):
            return layer_backward(W, dx, saved, at.of_layer(self.origin + l), partial(self.into, l, W), scale)

        self.summed = self.summed or not last
        return self.backward(dx, kept, run, last=last)

    def into(self, l: int, W: Mapping, name: str) -> dict[str, Any]:
        """The arguments of the product that makes the gradient of this matrix: where it is written, or added."""
        if self.compiling or W[name].dtype != self.dtype:
            return {}
        return {"out": self.slot(l, self.names.index(name), W[name].shape), "add": l in self.written}

    def result(self) -> dict:
        """The gradients of all layers, stacked and typed as the stored params."""
        return _finished(super().result(), *self.types, self.mesh)


def _apart(stored: Mapping, used: Mapping) -> tuple[Callable, Callable]:
    """The engine's `gather` and `reduce` of weights that travel leaf by leaf."""

    def reduce(dW, mesh):
        return tree.map(lambda g, s, u: _begun(g, s, u, mesh), dW, stored, used)

    return lambda W, mesh: gathered_weights(W, stored, used, mesh), reduce


def end_weights(params: Mapping, stored: Mapping, used: Mapping, mesh) -> dict:
    """The params outside the layers, gathered."""
    names = [name for name in params if name != "layers"]
    return {name: wait(gathered_weights(params[name], stored[name], used[name], mesh)) for name in names}
