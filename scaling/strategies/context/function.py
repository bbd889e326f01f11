"""Explicit passes as one differentiable function: `Attention.apply(form, at, Q, K, V, segments)`.

A form has `forward`, `backward` and `jvp`, written out with their communication. Autograd and torch.func run these, on
plain tensors, and see neither collectives nor tiles. Second derivatives are not defined.
"""

import torch


class Attention(torch.autograd.Function):
    """(O, lse) of `form.forward(Q, K, V, segments, at)`; lse has no derivative."""

    @staticmethod
    def forward(form, at, Q, K, V, segments):
        return form.forward(Q, K, V, segments, at)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.form, ctx.at, *operands = inputs
        ctx.save_for_backward(*output, *operands)
        ctx.save_for_forward(*output, *operands)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, dO, _):
        return None, None, *Once.apply(ctx.form.backward, ctx.at, dO, *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx, _form, _at, tQ, tK, tV, _segments):
        return Once.apply(ctx.form.jvp, ctx.at, tQ, tK, tV, *ctx.saved_tensors), None

    @staticmethod
    def vmap(info, in_dims, form, at, *operands):
        return _batched(Attention, info, in_dims, form, at, *operands)


class Once(torch.autograd.Function):
    """`fn(*operands, at)`, all of them typed B first, which autograd does not look into."""

    @staticmethod
    def forward(fn, at, *operands):
        return fn(*operands, at)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "the second derivative of context-parallel attention is not defined\n"
            "  fix: differentiate once; on one rank models.attention.dot_product_attention has all derivatives"
        )

    @staticmethod
    def vmap(info, in_dims, fn, at, *operands):
        return _batched(Once, info, in_dims, fn, at, *operands)


def _batched(function, info, in_dims, fn, at, *operands):
    """The mapped dim as part of B."""
    n = info.batch_size

    def folded(x, dim):
        if x is None:
            return None
        return (x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    results = function.apply(fn, at, *(folded(x, dim) for x, dim in zip(operands, in_dims[2:], strict=True)))
    if isinstance(results, torch.Tensor):
        return results.unflatten(0, (n, -1)), 0
    return tuple(x.unflatten(0, (n, -1)) for x in results), (0,) * len(results)
