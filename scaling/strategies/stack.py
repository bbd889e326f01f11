"""Any strategy over L layers (Part 5): its one-layer listing, run with as few waits as possible.

`scaling.strategies.layers` gathers weights a layer ahead, and reduces gradients while the layers below run. A chapter's
own listing runs here as the library's do:

    Strategy(SPECS, forward, backward)      a listing with all of its lines in the two passes
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.collectives import wait
from scaling.collectives.checked import alike
from scaling.models.pointwise import act, act_vjp, check_activation, rms_norm, rms_norm_vjp
from scaling.spec import Spec, parse
from scaling.strategies.layers import Layers, layers_a_bucket


class Block(NamedTuple):
    """The norm and activation of a layer Out = act(norm(In) W_in) W_out, which each rank applies to its own rows.

    The book's layer has neither: `Block("none")`.

    Attributes:
        activation: none, relu or gelu.
        normed: Whether In is RMS-normed first, which takes whole rows of D.
        keep: Whether a gathered In[B, D] is kept for the backward, or gathered there again (a step of the book).
    """

    activation: str = "none"
    normed: bool = False
    keep: bool = True

    def validated(self) -> "Block":
        """Return this block. Raise a ValueError for an unknown activation."""
        check_activation(self.activation)
        return self

    def norm(self, In: Tensor) -> Tensor:
        """Return In, normed if the block has a norm."""
        return rms_norm(In) if self.normed else In

    def norm_vjp(self, In: Tensor, dHid: Tensor) -> Tensor:
        """Return the cotangent of In from that of norm(In). It is linear in dHid, so it also holds for partial sums."""
        return rms_norm_vjp(In, dHid) if self.normed else dHid

    def act(self, Tmp: Tensor) -> Tensor:
        """Return the activation of Tmp."""
        return act(Tmp, self.activation)

    def act_vjp(self, Tmp: Tensor, dAct: Tensor) -> Tensor:
        """Return the cotangent of Tmp from that of act(Tmp)."""
        return act_vjp(Tmp, dAct, self.activation)


class Saved(NamedTuple):
    """The arrays that each layer's listing saved for `backward`, and how the layers are joined."""

    layers: list
    block: Block
    residual: bool


@dataclass(frozen=True)
class Strategy:
    """One layer's listing, by its functions.

        layer_forward(*weights, In, mesh, block) -> (Out, saved)
        layer_backward(*weights, dOut, saved, mesh, block) -> (dIn, *gradients)    dIn and the gradients may be pending
        gather(*weights, mesh) -> weights              done ahead of time; the layer gets its results, pending
        reduce(*gradients, mesh) -> gradients          done while the layers below run: from partial sums to `GRADS`,
                                                       of one layer, or of a bucket of layers stacked over L
        reduce_slow(*gradients, mesh) -> gradients     reduces over a slow axis what `reduce` returned

    `SPECS` has the types of In, of the weights in their order, and of Out. `GRADS` has the types of the gradients, if
    they differ from the weights' types.
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
        """The names of the weights, which are all in SPECS but In and Out."""
        return tuple(name for name in self.SPECS if name not in ("In", "Out"))

    @cached_property
    def types(self) -> tuple[list[Spec], list[Spec]]:
        """The types of the weights and of their gradients, parsed once, since torch.compile warns about parsing."""
        of_grads = self.GRADS or self.SPECS
        return [parse(self.SPECS[name]) for name in self.weights], [parse(of_grads[name]) for name in self.weights]

    @cached_property
    def results(self) -> dict[str, tuple[str, ...]]:
        """The names of the parts that each of the listing's functions returns."""
        backward = ("dIn", *(f"d{name}" for name in self.weights))
        return {"forward": ("Out", "saved"), "backward": backward} | dict.fromkeys(
            ("gather", "reduce", "reduce_slow"), self.weights
        )

    @cached_property
    def of_leaves(self) -> list[Callable | None]:
        """The listing's `gather`, `reduce` and `reduce_slow`, each as a function of a list of leaves, or None."""

        def checked(which: str) -> Callable | None:
            f = getattr(self, which)
            return f and (lambda W, mesh: self.returned(which, f(*W, mesh)))

        return [checked(which) for which in ("gather", "reduce", "reduce_slow")]

    def layers(self, params: Mapping[str, Tensor], mesh, **options) -> Layers:
        """Return the `Layers` that run these params, which are stacked over L."""
        layers = list(zip(*[params[name].unbind() for name in self.weights], strict=True))
        shapes = None if self.GRADS is None else self.grads_shapes(layers[0], mesh)
        return Layers(layers, mesh, *self.of_leaves, shapes=shapes, **options)

    def grads_shapes(self, W: Sequence[Tensor], mesh) -> list[tuple[int, ...]]:
        """Return the shapes of one layer's gradients, whose types are `GRADS`."""
        types, gradient_types = self.types
        sizes = {}
        for spec, x in zip(types, W, strict=True):
            sizes |= {dim: n * mesh.size(axes) for (dim, axes), n in zip(spec.dims, x.shape, strict=True)}
        return [spec.local_shape(sizes, mesh) for spec in gradient_types]

    def depth(self, params: Mapping[str, Tensor]) -> int:
        """Return L. Raise ValueError if the params are not the strategy's weights, or are not stacked alike."""
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
        """Run In -> (Out, saved), typed as in SPECS, through L layers of params stacked over L: `W_in[L, D_X, F]`.

        The book's layer has no activation, residual or norm.

        Args:
            params: This rank's weights, stacked over L.
            In: The input.
            mesh: The mesh.
            activation: "none", "relu" or "gelu".
            residual: Whether In is added to each layer's Out.
            norm: Whether each layer's input is RMS-normed.
            keep: As in `Block`.
        """
        block, L = Block(activation, norm, keep).validated(), self.depth(params)
        alike(mesh, f"a forward of {L} layers", block=block, residual=residual)
        layer = functools.partial(self.one_forward, mesh, block, residual)
        Out, saved = self.layers(params, mesh).forward(In, layer) if L else (In, [])
        return Out, Saved(saved, block, residual)

    def one_forward(self, mesh, block: Block, residual: bool, l: int, W: Sequence, In: Tensor) -> tuple[Tensor, Any]:
        """Run layer l, of weights W, forward."""
        Out, saved = self.returned("forward", self.layer_forward(*W, In, mesh, block))
        return In + Out if residual else Out, saved

    def one_backward(
        self, mesh, block: Block, residual: bool, l: int, W: Sequence, dOut: Tensor, saved
    ) -> tuple[Any, Sequence]:
        """Run layer l backward: return dIn, which may be pending, and the gradients of its weights."""
        dIn, *dW = self.returned("backward", self.layer_backward(*W, dOut, saved, mesh, block))
        return Sum(dOut, dIn) if residual else dIn, dW

    def returned(self, which: str, found: Any) -> Any:
        """Return the result of a listing's function.

        Raises:
            ValueError: It is not a tuple of the right length. An array alone would be unpacked into its rows.
        """
        parts = self.results[which]
        if not isinstance(found, (tuple, list)) or len(found) != len(parts):
            shown = f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, (tuple, list)) else "")
            what = f"the listing's {which} returned {shown}"
            raise ValueError(f"{what}\n  fix: return a tuple of {len(parts)}: {', '.join(parts)}")
        return found

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

        Args:
            dOut: The cotangent of Out.
            saved: The second result of `forward`.
            params: This rank's weights, stacked over L.
            mesh: The mesh.
            partial: The unreduced sums of earlier microbatches, which are added to and overwritten.
            reduce: Whether to reduce the gradients. If not, the unreduced sums are returned, as the `partial` of the
                next microbatch. The last microbatch reduces them.
            donate: Whether `saved` may be emptied: each layer's activations are freed once they have been used.
            bucket_bytes: Gradients of as many layers as fit into a bucket are reduced together; at 0, each layer's
                alone.

        Raises:
            ValueError: `saved` does not belong to these layers.
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
        if not L:
            return dOut, {name: torch.empty_like(W) for name, W in params.items()}
        sums = None if partial is None else [partial[name] for name in self.weights]
        bucket = min(L, layers_a_bucket(bucket_bytes, params)) if reduce else L
        reduce_when = "last" if reduce else "never"
        in_place = self.GRADS is None and reduce and partial is None and not torch.compiler.is_compiling()
        out = [torch.empty_like(params[name]) for name in self.weights] if in_place else None
        layers = self.layers(
            params, mesh, names=self.weights, sums=sums, out=out, bucket=bucket, reduce_when=reduce_when
        )
        layer = functools.partial(self.one_backward, mesh, saved.block, saved.residual)
        dIn = layers.backward(dOut, saved.layers, layer, reduces=reduce, donate=donate)
        found = layers.result() if reduce else [grad.sums() for grad in layers.grads]
        grads = dict(zip(self.weights, found, strict=True))
        return dIn, {name: grads[name] for name in params}


class Sum(NamedTuple):
    """The residual stream x, and a layer's output to be added to it, which may be in flight."""

    x: Tensor
    pending: Any

    def wait(self) -> Tensor:
        """Wait for the output, and return the sum."""
        return self.x + wait(self.pending)
