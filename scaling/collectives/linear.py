"""Running an `Op`: as it is, or under differentiation, by an autograd Function that torch.func, torch.compile and their
nestings accept.

A sum of shards is linear, so one Function serves every `Op`: its backward applies the transposed Op (the law of
cotangents: notation.md). A maximum or minimum has another: its cotangent is shared equally among the elements that
attain it, as torch.amax shares it.
"""

import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from scaling import trace
from scaling.collectives.checked import call_of, compare_counts, compared
from scaling.collectives.moves import IN_GRAPH, MOVES, TO_NOBODY, InGraph, OnGroup, Started, StartMove
from scaling.collectives.op import CARRIED, LOCAL, PLAIN, RUN_BY, Op, as_carried, dual, event, output_shape
from scaling.common.torch_private import any_modes, in_transform, lazy_clone, mode_names, modes, process_group
from scaling.mesh import Group
from scaling.mesh.lost import raise_lost
from scaling.mesh.meeting import meeting
from scaling.spec import ShardingError

watcher: ContextVar[Any] = ContextVar("watcher", default=None)  # scaling.check.typed.TypedLines, or None


def who_watches() -> Any:
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


class Pending:
    """A collective under way. `wait()` returns its result; until then its operand must not be changed.

    One that is dropped without `wait()` is named in a warning; `call` is what it is called by.
    """

    __slots__ = ("call", "event", "finish", "result", "works")

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any], event=None, call: Any = None):
        """`works`: what is waited for; `finish()` then makes the result."""
        self.works, self.finish, self.event, self.call, self.result = works, finish, event, call, None
        if event is not None:
            trace.call_returned(event)

    def __del__(self):
        if not hasattr(self, "finish"):  # a compiler makes objects without __init__
            return
        if self.finish is not None and self.call is not None and self.works:
            _dropped.append((self.works, self.finish))
            what = f"{self.call}\n  its Pending was dropped without wait(), so that nobody has the result"
            warnings.warn(f"{what}\n  fix: call .wait(), or leave async_op=True out", RuntimeWarning, stacklevel=2)

    def wait(self) -> Any:
        """Wait for the other ranks and return the result.

        TimeoutError or RankEnded that name the line and the ranks, if one of those does not answer (`raise_lost`).
        """
        if self.finish is not None:
            if self.event is not None:
                trace.waited(self.event)
            began = monotonic() if self.works else 0.0  # a compiler, which cannot call it, leaves none
            try:
                for work in self.works:
                    work.wait()
            except RuntimeError as error:
                raise_lost(error, self.call, getattr(self.call, "group", ""), began)
            self.result, self.finish, self.works = self.finish(), None, ()
            if self.event is not None:
                trace.done(self.event)
        return self.result


_dropped: list = []  # the other ranks wait for what is under way: its buffers must not be freed


def wait(x) -> Any:
    """The tensor, or the result of what is still under way: a `Pending` collective, a `Deferred` product."""
    if x is None or isinstance(x, Tensor):
        return x
    if not hasattr(x, "wait"):
        raise ShardingError(
            f"a {type(x).__module__}.{type(x).__name__} is not a torch.Tensor\n  fix: torch.as_tensor(x) makes one"
        )
    return x.wait()


def mover(op: Op, dtype: torch.dtype) -> StartMove:
    """Return what starts an op on operands of this dtype. ShardingError if the op cannot put them together; a backward,
    whose op is the transpose, is checked here alone."""
    op.check_dtype(dtype)
    if op.size == 1 and op.kind != "CollectivePermute":
        return _alone
    if op.by == "mean":
        return _mean
    if op.kind in LOCAL:
        return MOVES[op.kind]
    if op.backend == "abstract":
        return _shaped
    return MOVES[op.kind] if dtype in CARRIED else _carried


def _alone(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    return (), lambda: lazy_clone(x) if out is None else x


def _shaped(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    result = x.new_empty(output_shape(op, x.shape)) if out is None else out
    return (), lambda: result


def _carried(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    """Of a dtype that transports do not carry as it is."""
    carried, back = as_carried(x)
    works, make = MOVES[op.kind](carried, op, via, None)
    return works, lambda: back(make())


def _mean(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    added = op._replace(by="sum")
    works, make = mover(added, x.dtype)(x, added, via, out)
    return works, lambda: make().div_(op.size)


class ReadyOp:
    """An op made ready to run on operands of one shape and dtype: what starts it, and what the ranks compare."""

    __slots__ = ("call", "meeting", "move", "op", "via")

    def __init__(self, op: Op, shape: torch.Size, dtype: torch.dtype, via: InGraph, how: str = ""):
        self.op, self.via, self.move = op, via, mover(op, dtype)
        self.meeting = self.call = None
        if compared(op):
            self.meeting, self.call = meeting(process_group(op.group)), call_of(op, shape, dtype, how)

    def run(self, x: Tensor, async_op: bool = False, out: Tensor | None = None) -> Any:
        """The result, or with `async_op` a Pending; in the buffer `out`, if one is given."""
        seen = trace.reached(event(self.op, x, async_op)) if trace.open_logs else None
        if self.meeting is not None:
            self.meeting.meet(self.call)
            if self.op.kind == "Ragged" and not modes():  # a tracer records the call, it makes none
                compare_counts(self.op, x.device)
        if seen is not None:
            trace.record(seen)
        began = monotonic()
        try:
            works, make = self.move(x, self.op, self.via, out)
            finish = make if out is None else lambda: _in_buffer(make(), out)
            if async_op:
                return Pending(works, finish, seen, self.op)
            if seen is not None:
                seen.left = seen.waited = trace.now()
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise_lost(error, self.op, self.op.group, began)
        result = finish()
        if seen is not None:
            trace.done(seen)
        return result


def _in_buffer(result: Tensor, out: Tensor) -> Tensor:
    return result if result is out else out.copy_(result)


def made_ready(op: Op, shape: torch.Size, dtype: torch.dtype, group: Group) -> ReadyOp:
    """For operands that nothing differentiates."""
    at_once = not op.linear or (group.pg is None and op.backend != "gloo")
    return ReadyOp(op, shape, dtype, _in_graph(op) if at_once else OnGroup(group))


def _in_graph(op: Op) -> InGraph:
    return IN_GRAPH if op.group else TO_NOBODY


def run_op(x: Tensor, op: Op) -> Tensor:
    """The op as torch.func, autograd and tensor modes see through it, which can send other messages than the op does
    alone: so all ranks run it in one of these ways."""
    if type(x) not in PLAIN:  # a tracer's: nothing runs
        return mover(op, x.dtype)(x, op, _in_graph(op), None)[1]()
    if (watch := who_watches()) is not None:
        return watch.collective(x, op)
    how = f"under {', '.join(mode_names())}" if modes() else "differentiated"
    return ReadyOp(op, x.shape, x.dtype, _in_graph(op), how).run(x)


def differentiable(x: Tensor, *op) -> Tensor:
    """The op on x, so that it can be differentiated."""
    return AnyOp.apply(x, *op[:RUN_BY])


@lru_cache(maxsize=1)
def register() -> None:
    """Tell torch.compile to keep this in its graph: it would refuse to look into a Function that has a jvp.

    Called while compiling, since it imports the compiler, which takes as long as torch itself.
    """
    torch.compiler.allow_in_graph(differentiable)


class AnyOp(torch.autograd.Function):
    """Any Op. One that adds is linear: its backward applies the transposed Op, its jvp the Op itself. A maximum or
    minimum does so with the share that each element has in it."""

    @staticmethod
    def forward(x, *op):
        return run_op(x, Op(*op))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.op = Op(*inputs[1:])
        if not ctx.op.linear:
            ctx.save_for_backward(inputs[0], output)
            ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx, cotangent):
        cotangent = cotangent / ctx.op.size if ctx.op.by == "mean" else cotangent
        gradient = differentiable(cotangent, *dual(ctx.op))
        gradient = gradient if ctx.op.linear else _share(ctx) * gradient
        return gradient, *(None,) * RUN_BY

    @staticmethod
    def jvp(ctx, tangent, *_):
        if ctx.op.linear:
            return differentiable(tangent, *ctx.op)
        return differentiable(_share(ctx) * tangent, *ctx.op._replace(by="sum"))

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
