"""Gradient checkpointing as pure functions that say which activations are saved (Part 4, "Gradient checkpointing").

`checkpoint_block(f)` saves a layer's inputs only and recomputes the rest. `checkpoint_matmuls(f)` also saves the
outputs of its matmuls: replayed, a matmul returns the saved output and still has its gradient, so that only the
operations between the matmuls are recomputed. Both work under torch.autograd and under torch.func (which refuses
torch.utils.checkpoint's saved-tensor hooks).
"""

import math
from collections.abc import Callable
from typing import Any, cast

import optree
import torch


def matmul_weight(x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """Multiply x[..., D] by W[D, ...], contracting the last dim of x with the first of W."""
    return (x @ W.flatten(1)).unflatten(-1, W.shape[1:]) if W.ndim > 2 else x @ W


class _Replay(torch.autograd.Function):
    """The matmul x[..., D] W[D, F] with a known output: it is differentiated but not computed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, W, saved):
        return saved.view_as(saved)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, dy):
        x, W = ctx.saved_tensors
        return dy @ W.mT, x.flatten(0, -2).mT @ dy.flatten(0, -2), None


class _Again(torch.autograd.Function):
    """Compute first(*leaves) -> (results, kept), two tuples of tensors, and recompute the results in backward.

    The leaves and `kept` are saved, and the backward pass differentiates again(kept, *leaves) -> results. `number`
    returns the list that the number of results is added to; it is a function, because torch.func would copy a list.
    """

    @staticmethod
    def forward(first, again, number, *leaves):
        results, kept = first(*leaves)
        number().append(len(results))
        return *results, *kept

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        _, ctx.again, number, *leaves = inputs
        ctx.count, ctx.leaves = number()[0], len(leaves)
        kept = outputs[ctx.count :]
        ctx.save_for_backward(*leaves, *kept)
        ctx.mark_non_differentiable(*kept)

    @staticmethod
    def backward(ctx, *cotangents):
        leaves, kept = ctx.saved_tensors[: ctx.leaves], ctx.saved_tensors[ctx.leaves :]
        _, vjp, *_ = torch.func.vjp(lambda *leaves: ctx.again(kept, *leaves), *leaves)
        return None, None, None, *vjp(tuple(cotangents[: ctx.count]))


def computed_again(first: Callable, again: Callable, *trees: Any) -> tuple[torch.Tensor, ...]:
    """Return the results of first(*trees) -> (results, kept), saving only the trees and `kept` for the backward pass.

    The backward pass differentiates again(kept, *trees) -> results.
    """
    leaves, structure = optree.tree_flatten(cast(Any, trees))
    counts: list[int] = []

    def once_more(kept, *leaves):
        return again(kept, *cast(tuple, optree.tree_unflatten(structure, leaves)))

    def once(*leaves):
        return first(*cast(tuple, optree.tree_unflatten(structure, leaves)))

    outs = _Again.apply(once, once_more, lambda: counts, *leaves)
    return outs[: counts[0]]


def checkpoint_block(f: Callable) -> Callable:
    """Return f(layer, x) -> x as a function that saves only `layer` and `x` for the backward pass."""
    return lambda *both: computed_again(lambda *both: ((f(*both),), ()), lambda _, *both: (f(*both),), *both)[0]


def checkpoint_matmuls(f: Callable) -> Callable:
    """Return f(layer, x, matmul) -> x as a function that saves `layer`, `x` and the output of each matmul but the last.

    The last matmul's output may only be added to the result (as in a residual block), so that no gradient reads it;
    otherwise gradients come out NaN.
    """

    def first(layer, x):
        outputs = []

        def recording(x, W):
            outputs.append(x @ W.flatten(1))
            return outputs[-1].unflatten(-1, W.shape[1:])

        result = f(layer, x, recording)
        return (result,), outputs[:-1]

    def again(kept, layer, x):
        unread = x.new_full((), math.nan)  # replaces the last matmul's output, and would show if it were read
        outputs = iter(kept)

        def replaying(x, W):
            if (known := next(outputs, None)) is None:
                known = unread.expand(*x.shape[:-1], W[0].numel())
            return _Replay.apply(x, W.flatten(1), known).unflatten(-1, W.shape[1:])

        return (f(layer, x, replaying),)

    return lambda *both: computed_again(first, again, *both)[0]
