"""The collectives, typed by an arrow: `all_gather("W[D_X, F] -> W[D, F]", W, mesh)` (Part 3).

Every function takes the type first, then the operand (this rank's shard), then the mesh, and returns a new tensor that
shares no memory with the operand; it changes nothing. Options are given by name. The type is parsed once per mesh; a
line that breaks a rule raises a ShardingError before anything is sent. All are differentiable by the law of cotangents
(notation.md), under torch.func, autograd and torch.compile.
With `async_op=True` they return a `Pending` at once, whose `.wait()` gives the result.
On one device each is the identity; on an AbstractMesh they map meta tensors to meta tensors.

What reduces takes `op`: "sum", "mean", "max" or "min" of the parts that `{U_X}` stands for. The cotangent of a mean is
that of the sum over the size; of a maximum or minimum it is shared equally among the elements that attain it, as
torch.amax shares it, and takes one more AllReduce.
"""

import warnings
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Literal, overload

import torch
from torch import Tensor

from scaling import trace
from scaling.collectives.checked import agree_on
from scaling.collectives.kinds import event, start_op
from scaling.collectives.linear import apply, observed
from scaling.collectives.lines import (
    LineStep,
    check_result,
    constants,
    numbers,
    on,
    refuse_buffer,
    refuse_shape,
    resolve,
)
from scaling.collectives.op import Op
from scaling.collectives.watch import who_watches
from scaling.spec import ShardingError, Spec, parse, parse_line, refuse


class Pending:
    """A collective under way. `wait()` returns its result; until then its operand must not be changed.

    One that is dropped without `wait()` is named in a warning; `call` is what it is called by.
    """

    __slots__ = ("call", "event", "finish", "result", "work")

    def __init__(self, work, finish, event=None, call=None):
        self.work, self.finish, self.event, self.call, self.result = work, finish, event, call, None
        if event is not None:
            event.left = trace.now()

    def __del__(self):
        if not hasattr(self, "finish"):  # a compiler makes objects without __init__
            return
        if self.finish is not None and self.call is not None and self.work is not None:
            _dropped.append((self.work, self.finish))
            what = f"{self.call}\n  its Pending was dropped without wait(), so that nobody has the result"
            warnings.warn(f"{what}\n  fix: call .wait(), or leave async_op=True out", RuntimeWarning, stacklevel=2)

    def wait(self) -> Any:
        if self.finish is not None:
            if self.event is not None:
                self.event.waited = trace.now()
            if self.work is not None:
                self.work.wait()
            self.result, self.finish, self.work = self.finish(), None, None
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


@overload
def all_gather(line: str, x: Tensor, mesh, *, async_op: Literal[False] = ..., out: Tensor | None = ...) -> Tensor: ...
@overload
def all_gather(line: str, x: Tensor, mesh, *, async_op: Literal[True], out: Tensor | None = ...) -> Pending: ...
def all_gather(line: str, x: Tensor, mesh, *, async_op: bool = False, out: Tensor | None = None):
    """`A[I_X, J] -> A[I, J]`: every rank gets the whole dim. The axes removed must be the minor ones of their dim
    (`I_XY -> I_X`): otherwise the blocks would arrive interleaved. Cotangent: ReduceScatter. `out`: a preallocated
    output, overwritten and returned; x may be its own block of it."""
    return _call("AllGather", line, x, mesh, async_op, out)


@overload
def reduce_scatter(
    line: str, x: Tensor, mesh, *, op: str = ..., async_op: Literal[False] = ..., out: Tensor | None = ...
) -> Tensor: ...
@overload
def reduce_scatter(
    line: str, x: Tensor, mesh, *, op: str = ..., async_op: Literal[True], out: Tensor | None = ...
) -> Pending: ...
def reduce_scatter(line: str, x: Tensor, mesh, *, op: str = "sum", async_op: bool = False, out: Tensor | None = None):
    """`A[I, J] {U_X} -> A[I_X, J]`: the sum over X, of which each rank gets its block. The axes become the minor ones
    of their dim. Cotangent: AllGather. `out`: a preallocated output, overwritten."""
    return _call("ReduceScatter", line, x, mesh, async_op, out, by=op)


@overload
def all_reduce(
    line: str, x: Tensor, mesh, *, op: str = ..., async_op: Literal[False] = ..., donate: bool = ...
) -> Tensor: ...
@overload
def all_reduce(
    line: str, x: Tensor, mesh, *, op: str = ..., async_op: Literal[True], donate: bool = ...
) -> Pending: ...
def all_reduce(line: str, x: Tensor, mesh, *, op: str = "sum", async_op: bool = False, donate: bool = False):
    """`A[I, J] {U_X} -> A[I, J]`: every rank gets the sum over X. Cotangent: AllReduce. `donate`: reduces in
    place: do not use x afterwards."""
    return _call("AllReduce", line, x, mesh, async_op, x if donate else None, by=op)


@overload
def all_to_all(line: str, x: Tensor, mesh, *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def all_to_all(line: str, x: Tensor, mesh, *, async_op: Literal[True]) -> Pending: ...
def all_to_all(line: str, x: Tensor, mesh, *, async_op: bool = False):
    """`A[I_X, J] -> A[I, J_X]`: moves axes from one dim to another, the minor ones of both. Cotangent: the way back."""
    return _call("AllToAll", line, x, mesh, async_op)


def shard(line: str, x: Tensor, mesh) -> Tensor:
    """`A[I, J] -> A[I_X, J]`: this rank's block of what every rank holds; nothing is sent. A single type, `A[I_X, J]`,
    means from the whole array. Cotangent: the block in its place among zeros, which is unreduced `{U_X}`."""
    if "->" not in line:
        line = f"{Spec('', tuple((dim, ()) for dim in parse(line).dim_names))} -> {parse(line)}"
    return _call("Slice", line, x, mesh, False)


@overload
def broadcast(line: str, x: Tensor, mesh, *, root: int = ..., async_op: Literal[False] = ...) -> Tensor: ...
@overload
def broadcast(line: str, x: Tensor, mesh, *, root: int = ..., async_op: Literal[True]) -> Pending: ...
def broadcast(line: str, x: Tensor, mesh, *, root: int = 0, async_op: bool = False):
    """`A[I] {U_X} -> A[I]`: as an AllReduce in which only the root's part counts. Cotangent: Reduce."""
    return _call("Broadcast", line, x, mesh, async_op, root=root)


@overload
def reduce(line: str, x: Tensor, mesh, *, root: int = ..., op: str = ..., async_op: Literal[False] = ...) -> Tensor: ...
@overload
def reduce(line: str, x: Tensor, mesh, *, root: int = ..., op: str = ..., async_op: Literal[True]) -> Pending: ...
def reduce(line: str, x: Tensor, mesh, *, root: int = 0, op: str = "sum", async_op: bool = False):
    """`A[I] {U_X} -> A[I] {U_X}`: the root gets the sum, the others zeros. Cotangent: Broadcast."""
    return _call("Reduce", line, x, mesh, async_op, root=root, by=op)


@overload
def scatter(line: str, x: Tensor, mesh, *, root: int = ..., async_op: Literal[False] = ...) -> Tensor: ...
@overload
def scatter(line: str, x: Tensor, mesh, *, root: int = ..., async_op: Literal[True]) -> Pending: ...
def scatter(line: str, x: Tensor, mesh, *, root: int = 0, async_op: bool = False):
    """`A[I] {U_X} -> A[I_X]`: each rank gets its block of the root's array. Cotangent: Gather."""
    return _call("Scatter", line, x, mesh, async_op, root=root)


@overload
def gather(line: str, x: Tensor, mesh, *, root: int = ..., async_op: Literal[False] = ...) -> Tensor: ...
@overload
def gather(line: str, x: Tensor, mesh, *, root: int = ..., async_op: Literal[True]) -> Pending: ...
def gather(line: str, x: Tensor, mesh, *, root: int = 0, async_op: bool = False):
    """`A[I_X] -> A[I] {U_X}`: the root gets the whole array, the others zeros. Cotangent: Scatter."""
    return _call("Gather", line, x, mesh, async_op, root=root)


@overload
def ppermute(
    line: str, x: Tensor, mesh, axis: str | Sequence[str], perm, *, async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def ppermute(line: str, x: Tensor, mesh, axis: str | Sequence[str], perm, *, async_op: Literal[True]) -> Pending: ...
def ppermute(line: str, x: Tensor, mesh, axis: str | Sequence[str], perm, *, async_op: bool = False):
    """Send along an axis: the rank at `source` to the one at `target`, for each (source, target) of `perm`.

    A rank that no pair names as target gets zeros, as in JAX. `line` is the type, which stays: `A[I_X]`, or what the
    permutation makes of it: `A[I_XY] -> A[I_YX]`. Cotangent: the pairs turned round.
    """
    typed = parse_line(line if "->" in line else f"{line} -> {line}")
    (before,), after, pairs = typed.operands, typed.result, pairs_of(line, perm)
    before.check_axes(mesh)
    after.check_axes(mesh)
    group = mesh.group((axis,) if axis in mesh.sizes else tuple(axis))
    for ends in zip(*pairs, strict=True):
        if len(set(ends)) < len(ends) or not all(0 <= i < group.size for i in ends):
            rule = f"sources are distinct, targets are distinct, and all lie in 0..{group.size - 1}"
            refuse(line, f"ppermute over {axis} (size {group.size}) by {pairs}", rule, "give such pairs")
    op = Op.over(group, "CollectivePermute", f"{before} -> {after}", pairs=pairs)
    return _run(LineStep(op, group, len(before.dims), None, numbers(before, mesh), on=on(mesh)), x, mesh, async_op)


def pairs_of(line: str, perm: Any) -> tuple[tuple[int, int], ...]:
    """The pairs (source, target) of a permutation, as ints; numpy's count. ShardingError for anything else."""
    try:
        return tuple((index(source), index(target)) for source, target in perm)
    except (TypeError, ValueError):
        what, rule = f"ppermute by {perm!r:.60}", "a permutation is pairs of whole numbers"
        raise ShardingError(f"{line}\n  {what}\n  rule: {rule}\n  fix: give (source, target), ...") from None


def unshard(line: str, x: Tensor, mesh) -> Tensor:
    """The whole array on every rank: `A[I_X, J] {U_Y}` is reduced over Y and gathered over X. `line` is x's type."""
    spec = parse(line)
    whole = Spec(spec.name, tuple((dim, ()) for dim in spec.dim_names))
    if not spec.axes + spec.unreduced:
        return shard(f"{spec} -> {spec}", x, mesh)
    if spec.unreduced:
        x = all_reduce(f"{spec} -> {spec.with_unreduced(())}", x, mesh)
        spec = spec.with_unreduced(())
    return all_gather(f"{spec} -> {whole}", x, mesh) if spec.axes else x


def _call(kind, line, x: Any, mesh, async_op, out=None, root: int | None = None, by="sum", seen=False) -> Any:
    if torch.compiler.is_compiling():
        return _compiled(kind, line, x, mesh, async_op, out, root, by)
    if not seen and (watch := who_watches()) is not None:
        return watch(_call, kind, line, x, mesh, async_op, out, root, by, True)
    if not mesh.member:
        return None
    steps = mesh.lines.get((kind, line, root, by))
    if steps is None:
        steps = mesh.lines[kind, line, root, by] = resolve(mesh, kind, line, root, by)
    if out is not None:
        steps[0].check(x, mesh)
        check_result(steps, x, out)
    for step in steps[:-1]:
        x = _run(step, x, mesh, False)
    return _run(steps[-1], x, mesh, async_op, out)


def _run(step: LineStep, x: Tensor, mesh, async_op: bool, out: Tensor | None = None) -> Any:
    step.check(x, mesh)
    op = step.op
    if observed(x):
        result = apply(x, op)
        result = result / op.size if op.mean else result
        result = result if out is None else out.copy_(result)
        return Pending(None, lambda: result) if async_op else result
    seen = trace.reached(event(op, x, async_op)) if trace.active() else None
    agree_on(op, x)
    if seen is not None:
        trace.record(seen)
    work, make = start_op(x, op, step.group, out)
    if out is not None or op.mean:
        make = _finish(make, step, out)
    pending = Pending(work, make, seen, step)
    return pending if async_op else pending.wait()


def _finish(make: Callable[[], Tensor], step: LineStep, out: Tensor | None) -> Callable[[], Tensor]:
    """The result divided by the size, of a mean; and in the buffer given for it, if it was not made there."""

    def finish() -> Tensor:
        result = make()
        if step.op.mean and step.op.size > 1:
            result.div_(step.op.size)
        return result if out is None or result is out else out.copy_(result)

    return finish


def _compiled(kind, line, x, mesh, async_op, out, root, by):
    for op, *of_operand in mesh.constant(constants, kind, line, root, by):
        step = LineStep(Op(*op), None, *of_operand)
        if not step.fits(x.shape):
            mesh.constant(refuse_shape, kind, line, root, by, tuple(x.shape))
        x = apply(x, step.op)
        x = x / step.op.size if step.op.mean else x
    if out is not None:
        if out.shape != x.shape or out.dtype != x.dtype:
            mesh.constant(refuse_buffer, line, tuple(x.shape), tuple(out.shape), x.dtype, out.dtype)
        x = out.copy_(x)
    return Pending(None, lambda: x) if async_op else x
