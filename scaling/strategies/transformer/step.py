"""The layers of a Transformer forward and backward, and the whole step where every rank has all layers (Part 5)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_reduce
from scaling.configs import Config
from scaling.models.layer import Context
from scaling.models.lora import Lora
from scaling.strategies.layers import Layers
from scaling.strategies.transformer.ends import Terms, embed, embed_backward, head, token_logprobs
from scaling.strategies.transformer.layer import dropped, layer, layer_backward
from scaling.strategies.transformer.lora import adapted
from scaling.strategies.transformer.moves import (
    ENDS,
    TOKENS,
    add_by_name,
    gathered_ends,
    gathering,
    moves_of,
    reduced_ends,
    reducing,
    totalled,
)
from scaling.strategies.transformer.types import reduced_shapes


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
    lora: Lora | None = None
    mean: bool = True


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
        held, reduced = params[stack], problem.reduced[stack]
        if asked.lora:
            held, reduced = held | {"lora": params["lora"]}, reduced | {"lora": problem.reduced["lora"]}
        self.structure, self.origin = tree.structure(held), first
        own = [*zip(*map(Tensor.unbind, tree.leaves(held)), strict=True)][:count]
        self.before = None
        if stack == "layers" and config.dense_layers:
            self.origin += config.dense_layers
            self.before = TransformerLayers(problem, params, late=late, stack="dense") if first == 0 else None
        moves = moves_of(tree.leaves(reduced), mesh, TOKENS if stack == "layers" else ENDS, True)
        paths = optree.tree_paths(held)
        trained = [i for i, path in enumerate(paths) if not asked.lora or path[0] == "lora"]
        self.moves, self.trained = [moves[i] for i in trained], tree.structure(held["lora"] if asked.lora else held)
        gather = gathering(own[0], moves, mesh) if asked.zero == 3 else None  # else X has whole layers on every rank
        if gather and asked.lora:
            gather = adapted(gather, self.structure, asked.lora, config, reduced)
        reduce = reducing([own[0][i] for i in trained], self.moves, mesh)
        names = [paths[i][-2 if asked.lora else 0] for i in trained]
        kept = asked.keep_weights or (asked.backward and asked.remat == "none" and "router" in held)  # on their tape
        shapes = [shape[1:] for shape in problem.grad_shapes(stack, params[stack])] if asked.zero in (1, 2) else None
        options = {"keep_weights": kept, "late": late, "dtype": problem.sums, "out": out, "shapes": shapes}
        options |= {"trained": trained}
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
        return self.trained.unflatten(totalled(super().result(), self.moves, self.mesh))


def forward_logprobs(problem: Problem, params: dict, tokens: Tensor, targets: Tensor) -> Tensor:
    """tokens[B_PXE, T_C], targets[B_PXE, T_C] -> logprobs[B_PXE, T_C], where every rank has all layers."""
    mesh, (at,), config = problem.mesh, problem.contexts, problem.asked.config
    ends = gathered_ends(params, problem.stored, mesh)
    x, _, _ = TransformerLayers(problem, params).run(embed(ends["embed"], tokens, mesh), at)
    return token_logprobs(ends, x, targets, config.V, config.eps, mesh)


def unstaged(problem: Problem, params: dict, tokens: Tensor, targets: Tensor, w: Tensor) -> tuple[Tensor, dict]:
    """(loss, grads) where every rank has all layers. Gradients are summed over microbatches, then reduced."""
    asked, mesh, stored, reduced, terms, sums, contexts = problem
    config, M, late = asked.config, asked.microbatches, asked.zero == 1
    ends, layers = gathered_ends(params, stored, mesh), TransformerLayers(problem, params)
    losses, dends, grads, size = [], {}, {}, len(ends["embed"])
    batches = zip(contexts, *(x.chunk(M) for x in (tokens, targets, w)), strict=True)
    for m, (at, some, wanted, share) in enumerate(batches):
        x, last = embed(ends["embed"], some, mesh, config.embed_scale), m == M - 1
        if last and not config.tied:
            del ends["embed"]  # a table of the vocabulary is not held longer than it is used
        x, extra, kept = layers.run(x, at)
        loss, dx, dW = head(ends, x, wanted, share, terms, config.eps, mesh, frozen=asked.lora is not None)
        losses.append(loss + extra * (asked.scale / M))
        add_by_name(dends, dW, sums)
        del x, dW
        if last:
            ends.clear()
            tables = {name: dends.pop(name) for name in [*dends] if name != "embed"}
            grads = reduced_ends(tables, reduced, mesh)
            del tables
        dx = layers.run_back(dx, kept, at, asked.scale / M, last=last and not late)
        if not asked.lora:
            add_by_name(dends, {"embed": embed_backward(dx, some, size, mesh, config.embed_scale)}, sums)
    if late:
        layers.reduce_all()
    grads |= reduced_ends(dends, reduced, mesh) | {"lora" if asked.lora else "layers": layers.result()}
    grads |= {"dense": layers.before.result()} if layers.before else {}
    return all_reduce("Loss[] {U_PXECY} -> Loss[]", torch.stack(losses).sum(), mesh), grads
