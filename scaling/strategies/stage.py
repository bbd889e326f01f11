"""What one pipeline stage computes: forward, and backward in two halves, of which only the first is waited for.

A `Stage` is a bundle of pure functions over the params of one chunk, {"W_in": W_in[l, D, F], ...}, stacked over its l
layers. Any strategy's listing makes one (`of_strategy`): its weights are gathered once a step, its gradients summed
over all microbatches before they are reduced.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from scaling.collectives import wait
from scaling.spec import parse
from scaling.strategies import one_device
from scaling.strategies.block import Block
from scaling.strategies.grads import Gradients
from scaling.strategies.stack import Strategy


class Stage(NamedTuple):
    """The functions that the executor (`scaling.strategies.pipeline`) calls; all of one chunk's layers.

    forward(weights, In, mesh, m) -> (Out, saved)                   of microbatch m
    backward_input(weights, dOut, saved, mesh) -> (dIn, rest)       saved is used up
    backward_weight(weights, rests, grads, mesh) -> None            adds to grads what the rests of one or several
                                                                    microbatches give
    prepare(params, mesh, s) -> weights           once a step, before the first microbatch: what must be gathered, of
                                                  the virtual stage s
    gradients(params, mesh, out) -> grads         sums of dW, with `reduce_all()`, once a step, and `result()`, which
                                                  is written to `out`, typed as params
    `specs`: the types of In, Out and the params, whose L is split over the pipeline axis.
    """

    specs: Mapping[str, str]
    forward: Callable
    backward_input: Callable
    backward_weight: Callable
    prepare: Callable
    gradients: Callable


def of_strategy(
    strategy: Strategy, activation: str = "gelu", residual: bool = False, norm: bool = False, axis: str = "Z"
) -> Stage:
    """A stage of a strategy's layers: of `fsdp_tp.STRATEGY`, In[B_X, D_Y] -> Out[B_X, D_Y] by W_in[L_Z, D_X, F_Y].

    Per microbatch only the activations' collectives remain; the weights of one stage are held whole along D during the
    step, which pipelining made Z times smaller.
    """
    block = Block(activation, norm).validated()
    stacked = {name: parse(strategy.SPECS[name]).stacked("L").with_axes("L", (axis,)) for name in strategy.weights}

    def prepare(params, mesh, s):
        layers = [strategy.layer(params, l, mesh) for l in range(strategy.depth(params))]
        return [tuple(wait(W) for W in layer) for layer in layers]

    def forward(weights, In, mesh, m):
        saved = []
        for W in weights:
            Out, kept = strategy.layer_forward(*W, In, mesh, block)
            saved.append(kept)
            In = In + Out if residual else Out
        return In, saved

    def backward_input(weights, dOut, saved, mesh):
        rest = []
        for W in reversed(weights):
            dIn, *products = strategy.layer_backward(*W, dOut, saved.pop(), mesh, block)
            rest.insert(0, products)
            dOut = dOut + wait(dIn) if residual else wait(dIn)
        return dOut, rest

    def backward_weight(weights, rests, grads, mesh):
        for l in range(len(weights)):
            layer = [rest.pop(0) for rest in rests]  # freed as they are used
            grads.write(l, [list(products) for products in zip(*layer, strict=True)])

    def gradients(params, mesh, out):
        return Gradients(strategy, params, mesh, reduce=False, out=out)

    specs = {name: strategy.SPECS[name] for name in ("In", "Out")} | {name: str(t) for name, t in stacked.items()}
    return Stage(specs, forward, backward_input, backward_weight, prepare, gradients)


def mlp(activation: str = "gelu", residual: bool = False, norm: bool = False) -> Stage:
    """The book's stack: In[B, D] * W_in[L_Z, D, F] * W_out[L_Z, F, D] -> Out[B, D]; inside a stage nothing is sent."""
    return of_strategy(one_device.STRATEGY, activation, residual, norm)


SPECS = mlp().specs
