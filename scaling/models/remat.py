"""Gradient checkpointing as pure functions (Part 4, "Gradient checkpointing"): which activations are saved is explicit.

`checkpoint_block(f)` saves a layer's inputs only and computes the rest again. `checkpoint_matmuls(f)` also saves the
outputs of its matmuls: replayed, a matmul hands out the saved output and still has its gradient, so that only what
lies between the matmuls is computed again. Both work under torch.autograd and under torch.func (which refuses
torch.utils.checkpoint's saved-tensor hooks).
"""

import math
from typing import Any

import optree
import torch


def matmul_weight(x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """x[..., D] times W[D, ...]: contracts x's last dim with W's first."""
    return (x @ W.flatten(1)).unflatten(-1, W.shape[1:]) if W.ndim > 2 else x @ W


class _Replay(torch.autograd.Function):
    """The matmul x[..., D] W[D, F] whose output is known already: not computed, but differentiated."""

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


class _Checkpoint(torch.autograd.Function):
    """f(layer, x) of which the inputs, and with `keep` the outputs of its matmuls, are saved."""

    @staticmethod
    def forward(f, keep, treedef, *leaves):
        saved = []

        def recording(x, W):
            saved.append(x @ W.flatten(1))
            return saved[-1].unflatten(-1, W.shape[1:])

        layer, x = optree.tree_unflatten(treedef, leaves)
        out = f(layer, x, recording) if keep else f(layer, x)
        return out, *saved[:-1]

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.f, ctx.keep, ctx.treedef, *leaves = inputs
        ctx.leaves = len(leaves)
        ctx.save_for_backward(*leaves, *outputs[1:])
        ctx.mark_non_differentiable(*outputs[1:])

    @staticmethod
    def backward(ctx, dout, *_):
        leaves, saved = ctx.saved_tensors[: ctx.leaves], ctx.saved_tensors[ctx.leaves :]

        def again(*leaves):
            both: Any = optree.tree_unflatten(ctx.treedef, leaves)
            layer, x = both
            if not ctx.keep:
                return ctx.f(layer, x)
            unread = x.new_full((), math.nan)  # in place of the last matmul's output: were it read, it would show
            outputs = iter(saved)

            def replaying(x, W):
                if (known := next(outputs, None)) is None:
                    known = unread.expand(*x.shape[:-1], W[0].numel())
                return _Replay.apply(x, W.flatten(1), known).unflatten(-1, W.shape[1:])

            return ctx.f(layer, x, replaying)

        _, vjp, *_ = torch.func.vjp(again, *leaves)
        return None, None, None, *vjp(dout)


def _wrap(f, keep: bool):
    def step(layer, x):
        both: Any = (layer, x)
        leaves, treedef = optree.tree_flatten(both)
        return _Checkpoint.apply(f, keep, treedef, *leaves)[0]

    return step


def checkpoint_block(f):
    """f(layer, x) -> x, of which only `layer` and `x` are saved for the backward pass."""
    return _wrap(f, keep=False)


def checkpoint_matmuls(f):
    """f(layer, x, matmul) -> x, of which `layer`, `x` and the output of each matmul but the last are saved.

    The last matmul's output may only be added to the result (as in a residual block), so that no gradient reads it;
    otherwise gradients come out NaN.
    """
    return _wrap(f, keep=True)
