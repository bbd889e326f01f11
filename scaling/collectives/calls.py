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

from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Any, Literal, overload

import torch
from torch import Tensor

from scaling import trace
from scaling.collectives.checked import call_of, compared, meet
from scaling.collectives.kinds import event, output_shape, starter
from scaling.collectives.linear import apply, observed
from scaling.collectives.lines import LineStep, check_result, constants, refuse_buffer, refuse_shape, steps_of
from scaling.collectives.op import Op
from scaling.collectives.pending import Pending
from scaling.collectives.watch import watcher
from scaling.mesh.meeting import meeting
from scaling.spec import ShardingError, Spec, parse


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
    axes = (axis,) if axis in mesh.sizes else tuple(axis)
    return _run(mesh, ("CollectivePermute", line, axes, pairs_of(line, perm)), x, async_op)


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
    if not seen and (watch := watcher.get()) is not None:
        return watch(_call, kind, line, x, mesh, async_op, out, root, by, True)
    if not mesh.member:
        return None
    return _run(mesh, (kind, line, root, by), x, async_op, out)


def _run(mesh, what: tuple, x: Any, async_op: bool, out: Tensor | None = None) -> Any:
    """A line on this mesh, `what` as `steps_of` takes it: as made ready for such operands at its first call, or so that
    it can be differentiated."""
    if not isinstance(x, Tensor) or observed(x):
        return _differentiated(steps_of(mesh, what), x, mesh, async_op, out)
    key = what, x.shape, x.dtype, x.device, x.layout
    if key not in mesh.lines:
        mesh.lines[key] = made_ready(steps_of(mesh, what), x, mesh)
    steps = mesh.lines[key]
    if out is not None:
        check_result([step.step for step in steps], x, out)
    for step in steps[:-1]:
        x = step.run(x)
    return steps[-1].run(x, async_op, out)


class Ready:
    """One step of a line on operands of one shape, dtype and device, made at its first call. What is decided: that the
    operand fits, how the op starts, and what the ranks compare."""

    __slots__ = ("call", "compares", "group", "meeting", "op", "start", "step")

    def __init__(self, step: LineStep, shape: torch.Size, dtype: torch.dtype):
        self.step, self.op, self.group = step, step.op, step.group
        self.start = starter(step.op, step.group, dtype)
        self.compares, self.call = compared(step.op), call_of(step.op, shape, dtype, "")
        self.meeting = meeting(step.op.checked)

    def run(self, x: Tensor, async_op: bool = False, out: Tensor | None = None) -> Any:
        """The result, or with `async_op` a Pending; in the buffer `out`, if one is given."""
        seen = trace.reached(event(self.op, x, async_op)) if trace.open_logs else None
        if self.compares:
            self.meeting.meet(self.call) if self.meeting is not None else meet(self.op, self.call)
        if seen is not None:
            trace.record(seen)
        works, make = self.start(x, self.op, self.group, out)
        finish = make if out is None and not self.op.mean else lambda: self._finished(make(), out)
        if async_op:
            return Pending(works, finish, seen, self.step)
        if seen is not None:
            seen.left = seen.waited = trace.now()
        for work in works:
            work.wait()
        result = finish()
        if seen is not None:
            trace.done(seen)
        return result

    def _finished(self, result: Tensor, out: Tensor | None) -> Tensor:
        """The result divided by the size, of a mean; and in the buffer given for it, if it was not made there."""
        if self.op.mean and self.op.size > 1:
            result.div_(self.op.size)
        return result if out is None or result is out else out.copy_(result)


def made_ready(steps: Sequence[LineStep], x: Tensor, mesh) -> list[Ready]:
    """The steps of a line for operands as x. ShardingError if x is not what the line says."""
    steps[0].check(x, mesh)
    shape, made = x.shape, [Ready(steps[0], x.shape, x.dtype)]
    for before, step in pairwise(steps):
        shape = torch.Size(output_shape(before.op, shape))
        if not step.fits(shape):
            step.refuse_shape(tuple(shape))
        made.append(Ready(step, shape, x.dtype))
    return made


def _differentiated(steps: Sequence[LineStep], x: Any, mesh, async_op: bool, out: Tensor | None) -> Any:
    steps[0].check(x, mesh)
    if out is not None:
        check_result(steps, x, out)
    for step in steps:
        step.check(x, mesh)
        x = apply(x, step.op)
        x = x / step.op.size if step.op.mean else x
    x = x if out is None else out.copy_(x)
    return Pending((), lambda: x) if async_op else x


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
    return Pending((), lambda: x) if async_op else x
