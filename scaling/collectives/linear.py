"""Run an `Op` directly, or through an autograd Function that torch.func, torch.compile and their nestings accept.

A sum of shards is linear, so one Function serves every `Op`: its backward applies the transposed Op (the law of
cotangents: notation.md). A maximum or minimum differs: its cotangent is shared equally among the elements that attain
it, as torch.amax does.
"""

import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial
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
    """Return the judge of types (`scaling.check`) if it follows typed calls before they run.

    While a compiler traces, which cannot follow a context variable, nobody watches.
    """
    return None if torch.compiler.is_compiling() else watcher.get()


def differentiated(x: Tensor) -> bool:
    """Return whether a compiler, autograd, a transform of torch.func, a tracer or a tensor mode sees x.

    The judge's mode does not count because it runs every op exactly as it runs without the mode.
    """
    if torch.compiler.is_compiling():
        return True
    return followed(x) or (modes() > 0 and who_watches() is None)


def observed(x: Tensor) -> bool:
    """Return whether autograd, a transform, a tracer or any tensor mode, the judge's included, sees x.

    Nothing may be being compiled.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return in_transform() is not None or type(x) not in PLAIN or (any_modes() > 0 and modes() > 0)


def followed(x: Tensor) -> bool:
    """Return whether autograd, a transform of torch.func or a tracer follows x."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return in_transform() is not None or type(x) not in PLAIN


class Pending:
    """A collective in flight. `wait()` returns its result; until then its operand must not be changed.

    A Pending that is dropped without `wait()` causes a warning, which names its `call`.
    """

    __slots__ = ("call", "event", "finish", "result", "works")

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any], event=None, call: Any = None):
        """Keep the `works` to wait for; afterwards `finish()` makes the result."""
        self.works, self.finish, self.event, self.call, self.result = works, finish, event, call, None
        if event is not None:
            trace.call_returned(event)

    def __del__(self):
        if not hasattr(self, "finish"):  # a compiler creates objects without __init__
            return
        if self.finish is not None and self.call is not None and self.works:
            _dropped.append((self.works, self.finish))
            what = f"{self.call}\n  its Pending was dropped without wait(), so that nobody has the result"
            warnings.warn(f"{what}\n  fix: call .wait(), or leave async_op=True out", RuntimeWarning, stacklevel=2)

    def wait(self) -> Any:
        """Wait for the other ranks and return the result.

        Raises:
            TimeoutError: a rank does not answer; the error names the line and the ranks (`raise_lost`).
            RankEnded: a rank has ended.
        """
        if self.finish is not None:
            if self.event is not None:
                trace.waited(self.event)
            began = monotonic() if self.works else 0.0  # a compiler, which cannot call monotonic, leaves no works
            try:
                for work in self.works:
                    work.wait()
            except RuntimeError as error:
                raise_lost(error, self.call, getattr(self.call, "group", ""), began)
            self.result, self.finish, self.works = self.finish(), None, ()
            if self.event is not None:
                trace.done(self.event)
        return self.result


_dropped: list = []  # other ranks wait for these collectives, so their buffers must not be freed


def wait(x) -> Any:
    """Return the tensor, or the result of a `Pending` collective or a `Deferred` product."""
    if x is None or isinstance(x, Tensor):
        return x
    if not hasattr(x, "wait"):
        raise ShardingError(
            f"a {type(x).__module__}.{type(x).__name__} is not a torch.Tensor\n  fix: torch.as_tensor(x) makes one"
        )
    return x.wait()


def mover(op: Op, dtype: torch.dtype) -> StartMove:
    """Return the function that starts an op on operands of this dtype.

    Raises:
        ShardingError: the op cannot combine elements of this dtype. For a backward, whose op is the transpose, this is
            the only check.
    """
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
    sent = None if op.kind == "AllReduce" else x  # kept alive until the wait, as transports do; that one sums a copy
    return (), lambda sent=sent: result


def _carried(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    """Start an op on a dtype that transports cannot send."""
    carried, back = as_carried(x)
    works, make = MOVES[op.kind](carried, op, via, None)
    return works, lambda: back(make())


def _mean(x: Tensor, op: Op, via: InGraph, out: Tensor | None) -> Started:
    added = op._replace(by="sum")
    works, make = mover(added, x.dtype)(x, added, via, out)
    return works, lambda: make().div_(op.size)


class ReadyOp:
    """An op prepared for operands of one shape and dtype: its mover, and the Intent that the ranks compare."""

    __slots__ = ("call", "meeting", "move", "op", "via")

    def __init__(self, op: Op, shape: torch.Size, dtype: torch.dtype, via: InGraph, how: str = ""):
        self.op, self.via, self.move = op, via, mover(op, dtype)
        self.meeting = self.call = None
        if compared(op):
            self.meeting, self.call = meeting(process_group(op.group)), call_of(op, shape, dtype, how)

    def run(self, x: Tensor, async_op: bool = False, out: Tensor | None = None) -> Any:
        """Return the result, or with `async_op` a Pending; the buffer `out`, if given, holds it."""
        seen = trace.reached(event(self.op, x, async_op)) if trace.open_logs else None
        if self.meeting is not None:
            self.meeting.meet(self.call)
            if self.op.kind == "Ragged" and not modes():  # a tracer records the call without making it
                compare_counts(self.op, x.device)
        if seen is not None:
            trace.record(seen)
        began = monotonic()
        try:
            works, make = self.move(x, self.op, self.via, out)
            finish = make if out is None else partial(_in_buffer, make, out)
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


def _in_buffer(make: Callable[[], Tensor], out: Tensor) -> Tensor:
    result = make()
    return result if result is out else out.copy_(result)


def made_ready(op: Op, shape: torch.Size, dtype: torch.dtype, group: Group) -> ReadyOp:
    """Prepare an op for operands that nothing differentiates."""
    return ReadyOp(op, shape, dtype, OnGroup(group))


def _in_graph(op: Op) -> InGraph:
    return IN_GRAPH if op.group else TO_NOBODY


def run_op(x: Tensor, op: Op) -> Tensor:
    """Run an op so that torch.func, autograd and tensor modes see through it.

    It can send other messages than the op does alone, so all ranks must run it in the same way.
    """
    if type(x) not in PLAIN:  # a tracer's tensor: nothing runs
        return mover(op, x.dtype)(x, op, _in_graph(op), None)[1]()
    if (watch := who_watches()) is not None:
        return watch.collective(x, op)
    how = f"under {', '.join(mode_names())}" if modes() else "differentiated"
    return ReadyOp(op, x.shape, x.dtype, _in_graph(op), how).run(x)


def differentiable(x: Tensor, *op) -> Tensor:
    """Run the op on x so that it can be differentiated."""
    return AnyOp.apply(x, *op[:RUN_BY])


@lru_cache(maxsize=1)
def register() -> None:
    """Tell torch.compile to keep `differentiable` in its graph, since it refuses a Function that has a jvp.

    Called while compiling, since it imports the compiler, which takes as long as torch itself.
    """
    torch.compiler.allow_in_graph(differentiable)


class AnyOp(torch.autograd.Function):
    """Any Op as an autograd Function.

    An op that adds is linear: its backward applies the transposed Op, its jvp the Op itself. A maximum or minimum first
    scales by each element's share.
    """

    @staticmethod
    def forward(x, *op):
        """Run the op."""
        return run_op(x, Op(*op))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the op; for a maximum or minimum also the operand and the result."""
        ctx.op = Op(*inputs[1:])
        if not ctx.op.linear:
            ctx.save_for_backward(inputs[0], output)
            ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx, cotangent):
        """Apply the transposed op to the cotangent."""
        cotangent = cotangent / ctx.op.size if ctx.op.by == "mean" else cotangent
        gradient = differentiable(cotangent, *dual(ctx.op))
        gradient = gradient if ctx.op.linear else _share(ctx) * gradient
        return gradient, *(None,) * RUN_BY

    @staticmethod
    def jvp(ctx, tangent, *_):
        """Apply the op to the tangent."""
        if ctx.op.linear:
            return differentiable(tangent, *ctx.op)
        return differentiable(_share(ctx) * tangent, *ctx.op._replace(by="sum"))

    @staticmethod
    def vmap(info, in_dims, x, *op):
        """Run the op with the batch as one more dim in front."""
        return differentiable(x.movedim(in_dims[0], 0), *Op(*op).batched()), 0


def _share(ctx) -> Tensor:
    """Return each element's share in a maximum or minimum: 1 / (how many attain it), or 0."""
    (x, result), op = ctx.saved_tensors, ctx.op

    def where_x_is(y: Tensor) -> Tensor:
        return y if op.kind == "AllReduce" else differentiable(y, *dual(op))

    attains = (x == where_x_is(result)).to(x.dtype)
    return attains / where_x_is(differentiable(attains, *op._replace(by="sum")))
