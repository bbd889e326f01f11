"""The computation of one pipeline stage: forward, and backward in two halves, where others wait only for the first.

A `Stage` is a bundle of functions on one chunk, which is the loop (`scaling.strategies.layers`) over its l layers,
{"W_in": W_in[l, D, F], ...}. `of_strategy` makes a stage of any strategy's listing: its weights are gathered once per
step, and its gradients are summed over all microbatches before they are reduced.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from scaling.collectives import join_products
from scaling.spec import parse
from scaling.strategies import one_device
from scaling.strategies.layers import Layers
from scaling.strategies.stack import Block, Strategy


class Stage(NamedTuple):
    """The functions that the executor (`scaling.strategies.pipeline`) calls; all of one chunk's layers.

    forward(chunk, In, mesh, m) -> (Out, saved)                 of microbatch m
    backward_input(chunk, dOut, saved, mesh) -> (dIn, rest)     saved is emptied; dIn is None from a first stage
                                                   that makes its input itself, as an embedding
    backward_weight(chunk, rests, mesh) -> None    adds the gradients from the rests of one or several microbatches
                                                   to the chunk's
    prepare(params, mesh, s, out) -> chunk         once a step, before the first microbatch: the layers of virtual stage
                                                   s, with what must be gathered; gradients are written to `out`
    finish(chunk) -> None                          once a step, when the last reduction has begun

    `specs` are the types of In, Out and the params, whose L is split over the pipeline axis.
    """

    specs: Mapping[str, str]
    forward: Callable
    backward_input: Callable
    backward_weight: Callable
    prepare: Callable
    finish: Callable


def of_strategy(
    strategy: Strategy, activation: str = "gelu", residual: bool = False, norm: bool = False, axis: str = "Z"
) -> Stage:
    """Return a stage of a strategy: for `fsdp_tp.STRATEGY`, In[B_X, D_Y] -> Out[B_X, D_Y] by W_in[L_Z, D_X, F_Y].

    Per microbatch only the activations' collectives remain. During the step a stage keeps its weights whole along D,
    which takes Z times less memory than without the pipeline.
    """
    block = Block(activation, norm).validated()
    stacked = {name: parse(strategy.SPECS[name]).stacked("L").with_axes("L", (axis,)) for name in strategy.weights}

    def prepare(params, mesh, s, out):
        out = [out[name] for name in strategy.weights]
        given = {"names": strategy.weights, "out": out, "keep_weights": True, "reduce_when": "end"}
        return strategy.layers(params, mesh, **given).gather_all()

    def forward(chunk, In, mesh, m):
        return chunk.forward(In, partial(strategy.one_forward, mesh, block, residual))

    def backward_input(chunk, dOut, saved, mesh):
        rest: list = [None] * len(saved)
        layer = partial(strategy.one_backward, mesh, block, residual)
        return chunk.backward(dOut, saved, layer, rest.__setitem__), rest

    def backward_weight(chunk, rests, mesh):
        for l in reversed(range(len(chunk.layers))):
            products = [rest.pop() for rest in rests]  # each is freed after its use
            for grad, *several in zip(chunk.grads, *products, strict=True):  # it copies: one weight at a time
                grad.accumulate(l, join_products(several))

    specs = {name: strategy.SPECS[name] for name in ("In", "Out")} | {name: str(t) for name, t in stacked.items()}
    return Stage(specs, forward, backward_input, backward_weight, prepare, Layers.result)


def mlp(activation: str = "gelu", residual: bool = False, norm: bool = False) -> Stage:
    """Return the book's stack, In[B, D] * W_in[L_Z, D, F] * W_out[L_Z, F, D] -> Out[B, D], without sends in a stage."""
    return of_strategy(one_device.STRATEGY, activation, residual, norm)


SPECS = mlp().specs
