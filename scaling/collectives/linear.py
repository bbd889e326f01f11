"""The collectives under differentiation: autograd Functions that torch.func, torch.compile and their nestings accept.

A sum of shards is linear, so one Function serves every `Op`: its backward applies the transposed Op (the law of
cotangents: notation.md). A maximum or minimum has another: its cotangent is shared equally among the elements that
attain it, as torch.amax shares it.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from scaling.collectives.checked import agree_on
from scaling.collectives.kinds import traceable
from scaling.collectives.op import Op, dual, event
from scaling.common.torch_private import any_modes, in_transform, modes
from scaling.trace import done, open_logs, reached, record

watcher: ContextVar[Callable[..., Any] | None] = ContextVar("watcher", default=None)  # called as (call, *arguments)
PLAIN = (Tensor, torch.nn.Parameter)  # other classes are a tracer's


def who_watches() -> Callable[..., Any] | None:
    """The judge of types (`scaling.check`), if it sees typed calls before they run; nobody while a compiler traces,
    which cannot follow a context variable."""
    return None if torch.compiler.is_compiling() else watcher.get()


def differentiated(x: Tensor) -> bool:
    """Whether x is seen by a compiler, by autograd, by a transform of torch.func, by a tracer or by a tensor mode other
    than the judge's, which runs what runs without it."""
    if torch.compiler.is_compiling():
        return True
    return followed(x) or (modes() > 0 and who_watches() is None)


def observed(x: Tensor) -> bool:
    """The same where it is known that nothing is compiled, the judge's mode included."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return in_transform() is not None or type(x) not in PLAIN or (any_modes() > 0 and modes() > 0)


def followed(x: Tensor) -> bool:
    """Whether autograd, a transform of torch.func or a tracer follows x."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return in_transform() is not None or type(x) not in PLAIN


def apply(x: Tensor, op: Op) -> Tensor:
    """The op on x, so that it can be differentiated."""
    result = differentiable(x, *op)
    return result / op.size if op.mean else result


def differentiable(x: Tensor, *op) -> Tensor:
    return AnyOp.apply(x, *op)


@lru_cache(maxsize=1)
def register() -> None:
    """Tell torch.compile to keep this in its graph: it would refuse to look into a Function that has a jvp.

    Called while compiling, since it imports the compiler, which takes as long as torch itself.
    """
    torch.compiler.allow_in_graph(differentiable)


def run_op(x: Tensor, op: Op) -> Tensor:
    if type(x) not in PLAIN:
        return traceable(x, op)  # a tracer's: nothing runs
    if (watch := who_watches()) is not None:
        return watch(run_op, x, op)
    seen = reached(event(op, x)) if open_logs else None
    agree_on(op, x, traced=True)
    if seen is not None:
        record(seen)
    result = traceable(x, op)
    if seen is not None:
        done(seen)
    return result


class AnyOp(torch.autograd.Function):
    """Any Op. One that adds is linear: its backward applies the transposed Op, its jvp the Op itself. A maximum or
    minimum does so with the share that each element has in it."""

    @staticmethod
    def forward(x, *op):
        return run_op(x, Op(*op))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.op = Op(*inputs[1:])
        if ctx.op.by != "sum":
            ctx.save_for_backward(inputs[0], output)
            ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx, cotangent):
        gradient = differentiable(cotangent, *dual(ctx.op))
        gradient = gradient if ctx.op.by == "sum" else _share(ctx) * gradient
        return gradient, *(None,) * len(ctx.op)

    @staticmethod
    def jvp(ctx, tangent, *_):
        tangent = tangent if ctx.op.by == "sum" else _share(ctx) * tangent
        return differentiable(tangent, *ctx.op._replace(by="sum"))

    @staticmethod
    def vmap(info, in_dims, x, *op):
        return differentiable(x.movedim(in_dims[0], 0), *Op(*op).batched()), 0


def _share(ctx) -> Tensor:
    """By which part each element of the operand decides the result: 1 / (how many attain it), or 0."""
    (x, result), op = ctx.saved_tensors, ctx.op

    def where_x_is(y: Tensor) -> Tensor:
        return y if op.kind == "AllReduce" else differentiable(y, *dual(op))

    attains = (x == where_x_is(result)).to(x.dtype)
    return attains / where_x_is(differentiable(attains, *op._replace(by="sum")))
