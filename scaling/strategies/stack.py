"""Any strategy over L layers (Part 5): its one-layer listing, run so that nothing waits that need not.

Weights are gathered a layer ahead, gradients are reduced while the layers below run (`scaling.strategies.grads`), and
activations can be freed as they are used. A chapter's own listing runs here as the library's do:

    Strategy(SPECS, forward, backward)      a listing whose lines all stand in the two passes
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from scaling.collectives import wait
from scaling.collectives.alike import alike
from scaling.strategies.block import Block
from scaling.strategies.grads import Gradients, returned


class Saved(NamedTuple):
    """What `forward` keeps for `backward`: for each layer what its listing saved, and how the layers are joined."""

    layers: list
    block: Block
    residual: bool


@dataclass(frozen=True)
class Strategy:
    """One layer's listing, by its functions. `SPECS` has the types of In, of the weights in their order, and of Out.

    layer_forward(*weights, In, mesh, block) -> (Out, saved)
    layer_backward(*weights, dOut, saved, mesh, block) -> (dIn, *gradients)    dIn and the gradients may be pending
    gather(*weights, mesh) -> weights              what can be done ahead of time; the layer gets its results, pending
    reduce(*gradients, mesh) -> gradients          what can be done late: from partial sums, stacked over L, to `GRADS`
    reduce_slow(*gradients, mesh) -> gradients     the same over a slow axis, once `reduce` is through
    `GRADS`: the types of the gradients, if they are not those of the weights.
    """

    SPECS: Mapping[str, str]
    layer_forward: Callable
    layer_backward: Callable
    gather: Callable | None = None
    reduce: Callable | None = None
    reduce_slow: Callable | None = None
    GRADS: Mapping[str, str] | None = None

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights: those of SPECS that are neither In nor Out."""
        return tuple(name for name in self.SPECS if name not in ("In", "Out"))

    def layer(self, params: Mapping[str, Tensor], l: int, mesh) -> tuple:
        """The weights of layer l as its listing takes them: gathered, pending, if it gathers ahead of time."""
        W = tuple(params[name][l] for name in self.weights)
        return tuple(returned("gather", self.gather(*W, mesh), self.weights)) if self.gather else W

    def depth(self, params: Mapping[str, Tensor]) -> int:
        """L. ValueError if the params are not the strategy's weights, or not stacked alike."""
        if set(params) != set(self.weights):
            raise ValueError(
                f"params has the leaves {sorted(params)}, but SPECS has the weights {sorted(self.weights)}\n"
                "  fix: give SPECS a type, and params a leaf stacked over the layers, for each weight"
            )
        depths = {len(params[name]) for name in self.weights}
        if len(depths) > 1:
            raise ValueError(
                f"the params are stacked over different numbers of layers: {sorted(depths)}"
                "\n  fix: stack all of them over the same layers"
            )
        return depths.pop()

    def forward(
        self, params: Mapping[str, Tensor], In: Tensor, mesh, activation="gelu", residual=False, norm=False, keep=True
    ) -> tuple[Tensor, Saved]:
        """In -> (Out, saved), typed as in SPECS, through L layers of params stacked over L: `W_in[L, D_X, F]`.

        `activation`: none, relu or gelu; `residual`: In is added to each layer's Out; `norm`: each layer's input is
        RMS-normed (the book's layer has none of these). `keep`: see `Block`.
        """
        block, layers, L = Block(activation, norm, keep).validated(), [], self.depth(params)
        alike(mesh, f"a forward of {L} layers", activation=activation, residual=residual, norm=norm, keep=keep)
        prefetched = self.layer(params, 0, mesh) if L else ()
        for l in range(L):
            W = prefetched
            prefetched = self.layer(params, l + 1, mesh) if l + 1 < L else ()
            Out, saved = returned("forward", self.layer_forward(*W, In, mesh, block), ("Out", "saved"))
            layers.append(saved)
            In = In + Out if residual else Out
        return In, Saved(layers, block, residual)

    def backward(
        self,
        dOut: Tensor,
        saved: Saved,
        params: Mapping[str, Tensor],
        mesh,
        partial: dict | None = None,
        reduce: bool = True,
        donate: bool = False,
        bucket_bytes: int = 0,
    ) -> tuple[Tensor, dict[str, Any]]:
        """dOut, typed as Out -> (dIn, typed as In; grads typed as params).

        For microbatches: with `reduce=False` the gradients are left as partial sums and returned as the `partial` of
        the next microbatch, which is added to (and overwritten); the last one reduces them. `donate`: saved is used up,
        and each layer's activations are freed once they have been used. `bucket_bytes`: gradients of as many layers as
        fit are reduced together; at 0 each layer's by itself. ValueError if `saved` is not of these layers.
        """
        if not isinstance(saved, Saved):
            raise ValueError(
                f"saved is a {type(saved).__name__}, not what forward returned\n"
                "  fix: Out, saved = forward(params, In, mesh), then backward(dOut, saved, params, mesh)"
            )
        L = self.depth(params)
        if len(saved.layers) != L:
            raise ValueError(
                f"saved has {len(saved.layers)} layers, the params have {L}: a backward with donate=True empties it\n"
                "  fix: run forward again"
            )
        grads = Gradients(self, params, mesh, partial, reduce=reduce, bucket_bytes=bucket_bytes)
        prefetched = self.layer(params, L - 1, mesh) if L else ()
        for l in reversed(range(L)):
            kept = saved.layers.pop() if donate else saved.layers[l]
            W = prefetched
            prefetched = self.layer(params, l - 1, mesh) if l else ()
            found = self.layer_backward(*W, dOut, kept, mesh, saved.block)
            dIn, *dW = returned("backward", found, ("dIn", *(f"d{name}" for name in self.weights)))
            grads.write(l, dW)  # while dIn may still be under way
            del W, kept, dW, found
            dOut = dOut + wait(dIn) if saved.residual else wait(dIn)
        return dOut, grads.result()
