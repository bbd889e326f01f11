"""What one pipeline stage computes: forward, and backward in two halves, of which only the first is waited for.

A `Stage` is a bundle of pure functions over the params of one chunk, {"W_in": W_in[l, D, F], ...}, stacked over its l
layers. `mlp` is the book's stack of blocks written out; `from_function` makes a stage of any function by its vjp.
The stage with FSDP and tensor parallelism inside is `scaling.strategies.stage_fsdp_tp`.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from scaling import tree
from scaling.collectives import einsum
from scaling.strategies.block import Layer, act, act_vjp, normed, normed_vjp


class Stage(NamedTuple):
    """The functions that the executor (`scaling.strategies.pipeline`) calls; all of one chunk's layers.

    forward(weights, In, mesh) -> (Out, saved)
    backward_input(weights, dOut, saved, mesh, wanted) -> (dIn, rest)   dIn may be None where it is not wanted;
                                                                        saved is given away
    backward_weight(weights, rests, sums, mesh, add) -> None            of the rests of one or several microbatches:
                                                                        writes dW to sums, or adds it (they are ours)
    prepare(params, mesh) -> weights              once a step, before the first microbatch: what must be gathered
    make_sums(params, grads, mesh) -> sums        buffers for dW; may be `grads` itself
    reduce(sums, grads, mesh) -> pendings         once a step: from sums to grads, which are typed as params
    `specs`: the types of In, Out and the params, whose L is split over the pipeline axis.
    """

    specs: dict
    forward: Callable
    backward_input: Callable
    backward_weight: Callable
    prepare: Callable = lambda params, mesh: params
    make_sums: Callable = lambda params, grads, mesh: grads
    reduce: Callable = lambda sums, grads, mesh: []


SPECS = {"In": "In[B, D]", "W_in": "W_in[L_Z, D, F]", "W_out": "W_out[L_Z, F, D]", "Out": "Out[B, D]"}


class Rest(NamedTuple):
    """What the weight half of one layer's backward needs, for one microbatch."""

    Hid: torch.Tensor
    dTmp: torch.Tensor
    Act: torch.Tensor
    dOut: torch.Tensor


def mlp(activation: str = "gelu", residual: bool = False, norm: bool = False) -> Stage:
    """The book's stack: In[B, D] * W_in[l, D, F] * W_out[l, F, D] -> Out[B, D], l layers; nothing is sent."""

    def forward(weights, In, mesh):
        layers = []
        for W_in, W_out in zip(weights["W_in"].unbind(), weights["W_out"].unbind(), strict=True):
            Tmp = einsum("Hid[B, D] * W_in[D, F] -> Tmp[B, F]", normed(In, norm), W_in)
            Act = act(Tmp, activation)
            Out = einsum("Act[B, F] * W_out[F, D] -> Out[B, D]", Act, W_out)
            layers.append(Layer(In, Tmp, Act))
            In = In + Out if residual else Out
        return In, layers

    def backward_input(weights, dOut, saved, mesh, wanted=True):
        rest: list[Rest] = [None] * len(saved)
        for l in reversed(range(len(saved))):
            In, Tmp, Act = saved.pop()
            dAct = times_transposed("dOut[B, D] * W_out[F, D] -> dAct[B, F]", dOut, weights["W_out"][l])
            dTmp = act_vjp(Tmp, dAct, activation)
            rest[l] = Rest(normed(In, norm), dTmp, Act, dOut)
            if l > 0 or wanted:
                dHid = times_transposed("dTmp[B, F] * W_in[D, F] -> dHid[B, D]", dTmp, weights["W_in"][l])
                dIn = normed_vjp(In, dHid, norm)
                dOut = dOut + dIn if residual else dIn
        return dOut if wanted else None, rest

    def backward_weight(weights, rests, sums, mesh, add):
        for l, (Hid, dTmp, Act, dOut) in enumerate(joined(rests)):
            einsum("Act[B, F] * dOut[B, D] -> dW_out[F, D]", Act, dOut, out=sums["W_out"][l], add=add)
            einsum("Hid[B, D] * dTmp[B, F] -> dW_in[D, F]", Hid, dTmp, out=sums["W_in"][l], add=add)

    return Stage(SPECS, forward, backward_input, backward_weight)


def joined(rests: list[list[Rest]]) -> Iterator[Rest]:
    """For each layer in turn, the rows of all the microbatches together; valid until the next one is asked for."""
    scratch: list = [None] * len(Rest._fields)
    for layer in zip(*rests, strict=True):
        if len(layer) == 1:
            yield layer[0]
        else:
            scratch = [
                torch.cat(rows, out=buffer) for rows, buffer in zip(zip(*layer, strict=True), scratch, strict=True)
            ]
            yield Rest(*scratch)


def times_transposed(line: str, d: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """einsum(line, d, W) where W's inner dim is contracted. With the few rows of a microbatch, a CPU multiplies a third
    faster with the weights first, and rows that are contiguous again are what is sent and multiplied next."""
    if not d.is_cpu:
        return einsum(line, d, W)
    operands, result = line.split(" -> ")
    return einsum(" * ".join(reversed(operands.split(" * "))) + " -> " + result, W, d).contiguous()


def from_function(f: Callable, specs: dict = SPECS) -> Stage:
    """A stage of any pure function f(params, In) -> Out, differentiated by torch.func.vjp.

    Collectives of `scaling.collectives` may stand in it. The two halves are two vjps: that for the params runs when the
    weight half is due, and computes the forward again.
    """

    def forward(weights, In, mesh):
        Out, vjp = torch.func.vjp(lambda x: f(weights, x), In)
        return Out.detach(), (In, vjp)

    def backward_input(weights, dOut, saved, mesh, wanted=True):
        In, vjp = saved
        return vjp(dOut)[0] if wanted else None, (In, dOut)

    def backward_weight(weights, rests, sums, mesh, add):
        for In, dOut in rests:
            _, vjp = torch.func.vjp(lambda w, In=In: f(w, In), weights)
            tree.map(lambda total, dW, add=add: total.add_(dW) if add else total.copy_(dW), sums, vjp(dOut)[0])
            add = True

    return Stage(specs, forward, backward_input, backward_weight)
