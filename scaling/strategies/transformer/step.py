"""The layers of a Transformer forward and backward, all of them or those of a stage (Part 5).

Forward: a layer's weights are gathered over X, the next layer's meanwhile, and thrown away after use. Backward: the
same from the last layer to the first. Gradients are summed over microbatches, then reduced to the stored types.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from scaling import tree
from scaling.configs import Config
from scaling.models.transformer import unstacked
from scaling.strategies.axes import all_reduce
from scaling.strategies.layers import Layers
from scaling.strategies.transformer.ends import Terms, embed, embed_backward, head
from scaling.strategies.transformer.layer import Context, dropped, layer, layer_backward
from scaling.strategies.transformer.moves import (
    ENDS,
    TOKENS,
    Moves,
    add_by_name,
    gathered_ends,
    gathered_leaves,
    gathered_together,
    moves_of,
    reduced_ends,
    scattered_leaves,
    scattered_together,
    sent_together,
    totalled,
)


class Problem(NamedTuple):
    """What is given beside params and batch: the types of the params as they are stored, a context a microbatch.

    `sums`: the dtype in which gradients are added up over microbatches and ranks, and are returned. `scale`: of the
    loss, as it is differentiated. `remat`: what a layer keeps for its backward, a policy of `layer.REMAT`; None:
    nothing is run back. `keep_weights`: they stay gathered to the end of the step. `schedule`: of the stages.
    """

    config: Config
    mesh: Any
    stored: dict
    contexts: list[Context]
    terms: Terms
    sums: torch.dtype
    scale: float = 1.0
    remat: str | None = None
    keep_weights: bool = False
    schedule: Any = None


class TransformerLayers(Layers):
    """The engine on one `stack` of params, "dense" or "layers" of the model's tree, or on those `layers` of it that a
    stage has. Dense layers are the first stage's: their gradients are unreduced over Z, too.

    `out`, `late`: as of `Layers`.
    """

    def __init__(
        self,
        problem: Problem,
        params: Mapping,
        layers: range | None = None,
        out: Sequence[Tensor] | None = None,
        late: bool = False,
        stack: str = "layers",
    ):
        config, mesh, remat = problem.config, problem.mesh, problem.remat
        self.remat, self.gone = remat, dropped(remat or "block", config)
        first, count = (0, None) if layers is None else (layers.start, len(layers))
        own, self.origin = unstacked(params)[:count], first + (config.dense_layers if stack == "layers" else 0)
        axes = TOKENS if stack == "layers" else ENDS
        self.moves = moves_of(tree.leaves(problem.stored[stack]), mesh, axes, stack=True)
        if sent := sent_together(tree.leaves(own[0]), self.moves, mesh):
            gather, reduce = partial(gathered_together, sent=sent), partial(scattered_together, sent=sent)
        else:
            gather, reduce = (partial(_apart, move, self.moves) for move in (gathered_leaves, scattered_leaves))
        on_tape = "router" in params and remat == "none"  # experts' backward holds their weights
        super().__init__(
            own,
            mesh,
            gather,
            reduce,
            names=[path[0] for path in optree.tree_paths(own[0])],
            keep_weights=problem.keep_weights or on_tape,
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
        found = super().result()
        return tree.unflatten(found, totalled(tree.leaves(found), self.moves, self.mesh))


class Stacks:
    """The engines on a model's stacks, or a stage's, by name and in their order, as one."""

    def __init__(self, engines: dict[str, TransformerLayers]):
        self.engines = engines

    def run(self, x: Tensor, at: Context) -> tuple[Tensor, Tensor, list]:
        """As of one stack."""
        extras, kept = [], []
        for engine in self.engines.values():
            x, extra, saved = engine.run(x, at)
            extras.append(extra)
            kept.append(saved)
        return x, sum(extras[1:], extras[0]), kept

    def run_back(self, dx: Tensor, kept: list, at: Context, scale: float = 1.0, last: bool = False) -> Tensor:
        """As of one stack; `kept` is used up."""
        for engine in reversed(self.engines.values()):
            dx = engine.run_back(dx, kept.pop(), at, scale, last=last)
        return dx

    def reduce_all(self) -> None:
        for engine in reversed(self.engines.values()):
            engine.reduce_all()


def stacks_of(
    problem: Problem,
    params: Mapping,
    layers: range | None = None,
    first: bool = True,
    out: Sequence[Tensor] | None = None,
    late: bool = False,
) -> Stacks:
    """The engine on each stack, in the order of the layers: dense ones, where the model has them and this is the
    `first` stage, and the others, or those of them that `layers` says, counted in their stack."""
    engines = {}
    if problem.config.dense_layers and first:
        dense = params["dense"]
        engines["dense"] = TransformerLayers(problem, dense, late=late, stack="dense")
    engines["layers"] = TransformerLayers(problem, params["layers"], layers, out, late)
    return Stacks(engines)


def unstaged(problem: Problem, params: dict, tokens: Tensor, targets: Tensor, w: Tensor) -> tuple[Tensor, dict]:
    """(loss, grads) where every rank has all layers."""
    config, mesh, stored, contexts, terms, sums, scale, *_ = problem
    ends = gathered_ends(params, stored, mesh)
    stacks = stacks_of(problem, params)
    losses, dends, grads, M, size = [], {}, {}, len(contexts), len(ends["embed"])
    batches = zip(contexts, *(x.chunk(M) for x in (tokens, targets, w)), strict=True)
    for m, (at, some, wanted, share) in enumerate(batches):
        x, last = embed(ends["embed"], some, mesh), m == M - 1
        if last and not config.tied:
            del ends["embed"]  # a table of the vocabulary is not held longer than it is used
        x, extra, kept = stacks.run(x, at)
        losses.append(extra * scale / M)
        loss, dx, dW = head(ends, x, wanted, share, terms, config.eps, mesh)
        add_by_name(dends, dW, sums)
        del x, dW
        if last:
            ends.clear()
            tables = {name: dends.pop(name) for name in [*dends] if name != "embed"}
            grads = reduced_ends(tables, stored, mesh)
            del tables
        dx = stacks.run_back(dx, kept, at, scale / M, last=last)
        add_by_name(dends, {"embed": embed_backward(dx, some, size, mesh)}, sums)
        losses.append(loss)
    grads |= reduced_ends(dends, stored, mesh)
    loss = all_reduce("Loss[] {U_PXECY} -> Loss[]", torch.stack(losses).sum(), mesh)
    return loss, grads | {name: layers.result() for name, layers in stacks.engines.items()}


def _apart(move: Callable, moves: Sequence[Moves], W: Mapping, mesh) -> Any:
    """A layer's weights or gradients that travel leaf by leaf."""
    return tree.unflatten(W, move(tree.leaves(W), moves, mesh))
