"""The collectives, typed by an arrow: `all_gather("W[D_X, F] -> W[D, F]", W, mesh)` (Part 3).

Every function takes the type first, then the operand (this rank's shard), then the mesh, and returns a new tensor; it
changes nothing. The type is parsed once per mesh; a line that breaks a rule raises a ShardingError before anything is
sent. All are differentiable by the law of cotangents (notation.md), under torch.func, autograd and torch.compile.
With `async_op=True` they return a `Pending` at once, whose `.wait()` gives the result.
On one device each is the identity; on an AbstractMesh they map meta tensors to meta tensors.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from scaling import trace
from scaling.algebra.rules import CollectiveStep, collective_steps
from scaling.collectives.checked import agree_on
from scaling.collectives.eager import start
from scaling.collectives.op import Op
from scaling.collectives.traced import differentiated, linear, register
from scaling.mesh import Group
from scaling.spec import ShardingError, Spec, parse, parse_line

__all__ = ["Pending", "all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "ppermute", "recv", "reduce"]
__all__ += ["reduce_scatter", "scatter", "send", "shard", "unshard", "wait"]


class Pending:
    """A collective under way. `wait()` returns its result; until then its operand must not be changed."""

    __slots__ = ("event", "finish", "result", "work")

    def __init__(self, work, finish, event=None):
        self.work, self.finish, self.event, self.result = work, finish, event, None

    def wait(self) -> torch.Tensor:
        if self.finish is not None:
            if self.work is not None:
                self.work.wait()
            self.result, self.finish, self.work = self.finish(), None, None
            if self.event is not None:
                self.event.end = trace.now()
        return self.result


def wait(x):
    """The tensor, or the result of what is still under way: a `Pending` collective, a `Deferred` product."""
    return x if x is None or isinstance(x, torch.Tensor) else x.wait()


def all_gather(line: str, x: torch.Tensor, mesh, async_op: bool = False, out: torch.Tensor | None = None):
    """`A[I_X, J] -> A[I, J]`: every rank gets the whole dim. The axes removed must be the minor ones of their dim
    (`I_XY -> I_X`): otherwise the blocks would arrive interleaved. Cotangent: ReduceScatter. `out`: a buffer that is
    given away for the result."""
    return _call("AllGather", line, x, mesh, async_op, out=out)


def reduce_scatter(line: str, x: torch.Tensor, mesh, async_op: bool = False, out: torch.Tensor | None = None):
    """`A[I, J] {U_X} -> A[I_X, J]`: the sum over X, of which each rank gets its block. The axes become the minor ones
    of their dim. Cotangent: AllGather. `out`: a buffer that is given away for the result."""
    return _call("ReduceScatter", line, x, mesh, async_op, out=out)


def all_reduce(line: str, x: torch.Tensor, mesh, async_op: bool = False, donate: bool = False):
    """`A[I, J] {U_X} -> A[I, J]`: every rank gets the sum over X. Cotangent: AllReduce. `donate`: x is given away, and
    the sum is written over it."""
    return _call("AllReduce", line, x, mesh, async_op, out=x if donate else None)


def all_to_all(line: str, x: torch.Tensor, mesh, async_op: bool = False):
    """`A[I_X, J] -> A[I, J_X]`: moves axes from one dim to another, the minor ones of both. Cotangent: the way back."""
    return _call("AllToAll", line, x, mesh, async_op)


def shard(line: str, x: torch.Tensor, mesh) -> torch.Tensor:
    """`A[I, J] -> A[I_X, J]`: this rank's block of what every rank holds; nothing is sent. A single type, `A[I_X, J]`,
    means from the whole array. Cotangent: the block in its place among zeros, which is unreduced `{U_X}`."""
    if "->" not in line:
        line = f"{Spec('', tuple((dim, ()) for dim in parse(line).dim_names))} -> {parse(line)}"
    if parse_line(line).operands[0].same_sharding(parse_line(line).result):
        return x
    return _call("Slice", line, x, mesh, False)


def broadcast(line: str, x: torch.Tensor, mesh, root: int = 0, async_op: bool = False):
    """`A[I] {U_X} -> A[I]`: as an AllReduce in which only the root's part counts. Cotangent: Reduce."""
    return _call("Broadcast", line, x, mesh, async_op, root)


def reduce(line: str, x: torch.Tensor, mesh, root: int = 0, async_op: bool = False):
    """`A[I] {U_X} -> A[I] {U_X}`: the root gets the sum, the others zeros. Cotangent: Broadcast."""
    return _call("Reduce", line, x, mesh, async_op, root)


def scatter(line: str, x: torch.Tensor, mesh, root: int = 0, async_op: bool = False):
    """`A[I] {U_X} -> A[I_X]`: each rank gets its block of the root's array. Cotangent: Gather."""
    return _call("Scatter", line, x, mesh, async_op, root)


def gather(line: str, x: torch.Tensor, mesh, root: int = 0, async_op: bool = False):
    """`A[I_X] -> A[I] {U_X}`: the root gets the whole array, the others zeros. Cotangent: Scatter."""
    return _call("Gather", line, x, mesh, async_op, root)


def ppermute(line: str, x: torch.Tensor, mesh, axis: str | Sequence[str], perm, async_op: bool = False):
    """Send along an axis: the rank at `source` to the one at `target`, for each (source, target) of `perm`.

    A rank that no pair names as target gets zeros, as in JAX. `line` is the type, which stays: `A[I_X]`, or what the
    permutation makes of it: `A[I_XY] -> A[I_YX]`. Cotangent: the pairs turned round.
    """
    typed = parse_line(line if "->" in line else f"{line} -> {line}")
    (spec,), after, perm = typed.operands, typed.result, tuple((int(s), int(t)) for s, t in perm)
    spec.check_axes(mesh)
    group = mesh.group((axis,) if axis in mesh.sizes else tuple(axis))
    for ends in zip(*perm, strict=True):
        if len(set(ends)) < len(ends) or not all(0 <= i < group.size for i in ends):
            raise ShardingError(
                f"{spec}: ppermute over {axis} (size {group.size}) by {perm}\n"
                f"  rule: sources are distinct, targets are distinct, and all lie in 0..{group.size - 1}"
            )
    op = Op.over(group, "CollectivePermute", f"{spec} -> {after}", moves=perm)
    return _run(op, group, CollectiveStep(spec, after, group.axes), x, mesh, async_op)


def send(line: str, x: torch.Tensor, mesh, axis: str, to: int, async_op: bool = False):
    """Send x to the rank at `to` along the axis, which calls `recv`. Not differentiable by itself: `ppermute` is."""
    return _point_to_point("Send", line, x, mesh, axis, to, async_op)


def recv(line: str, like: torch.Tensor, mesh, axis: str, source: int, async_op: bool = False):
    """Receive a tensor shaped and typed as `like` from the rank at `source` along the axis, which calls `send`."""
    return _point_to_point("Recv", line, like, mesh, axis, source, async_op)


def unshard(line: str, x: torch.Tensor, mesh) -> torch.Tensor:
    """The whole array on every rank: `A[I_X, J] {U_Y}` is reduced over Y and gathered over X. `line` is x's type."""
    spec = parse(line)
    if spec.unreduced:
        x = all_reduce(f"{spec} -> {spec.with_unreduced(())}", x, mesh)
        spec = spec.with_unreduced(())
    if spec.axes:
        x = all_gather(f"{spec} -> {Spec(spec.name, tuple((dim, ()) for dim in spec.dim_names))}", x, mesh)
    return x


def _call(kind: str, line: str, x: torch.Tensor, mesh, async_op: bool, root: int | None = None, out=None):
    if torch.compiler.is_compiling():
        return _compiled(kind, line, x, mesh, async_op, root, out)
    resolved = mesh.lines.get((kind, line, root))
    if resolved is None:
        resolved = mesh.lines[kind, line, root] = _resolve(kind, line, mesh, root)
    for op, group, step in resolved[:-1]:
        x = _run(op, group, step, x, mesh, False)
    return _run(*resolved[-1], x, mesh, async_op, out)


def _compiled(kind: str, line: str, x: torch.Tensor, mesh, async_op: bool, root: int | None, out):
    for op in mesh.constant(_constants, kind, line, root):
        x = linear(x, *op)
    if out is not None:
        x = out.copy_(x)
    return Pending(None, lambda: x) if async_op else x


def _constants(mesh, kind: str, line: str, root: int | None) -> tuple:
    """The ops of a line as plain tuples, worked out while compiling: a graph holds constants."""
    register()
    return tuple(tuple(op) for op, _, _ in _resolve(kind, line, mesh, root))


def _resolve(kind: str, line: str, mesh, root: int | None) -> list[tuple[Op, Group, CollectiveStep]]:
    """What a line does on this mesh: mostly one op; one a dim where several dims are gathered or split."""
    resolved = []
    for step in collective_steps(kind, line):
        step = step.stacked(mesh.stack) if mesh.stack else step
        step.before.check_axes(mesh)
        step.after.check_axes(mesh)
        group = mesh.group(step.axes)
        if root is not None and not 0 <= root < group.size:
            raise ShardingError(f"{line}\n  root {root} is not in 0..{group.size - 1}, the ranks along {step.axes}")
        moves = () if root is None else ((root, root),)
        op = Op.over(group, kind, f"{step.before} -> {step.after}", step.dim, step.to, moves)
        resolved.append((op, group, step))
    return resolved


def _run(
    op: Op, group: Group, step: CollectiveStep, x: torch.Tensor, mesh, async_op: bool, out: torch.Tensor | None = None
):
    if x.dim() != len(step.before.dims) or (step.splits is not None and x.shape[step.splits] % op.size):
        _refuse_shape(op, step, x)
    if op.backend == "abstract" and type(x) is torch.Tensor and not x.is_meta:
        raise ShardingError(
            f"{op.line}\n  an AbstractMesh moves no data: give it tensors on the meta device, not {x.device}"
        )
    if differentiated(x):
        result = linear(x, *op)
        if out is not None:
            result = out.copy_(result)
        return Pending(None, lambda: result) if async_op else result
    agree_on(op, x)
    event = trace.record(op.event(x, async_op)) if trace.active() else None
    work, finish = start(x, op, group, out)
    if out is not None:
        make = finish
        finish = lambda: _into(out, make())  # noqa: E731
    pending = Pending(work, finish, event)
    return pending if async_op else pending.wait()


def _into(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The result in the buffer given for it: copied there unless it was made there."""
    return out if out.data_ptr() == result.data_ptr() else out.copy_(result)


def _refuse_shape(op: Op, step: CollectiveStep, x: torch.Tensor) -> None:
    shape = tuple(x.shape)
    if x.dim() != len(step.before.dims):
        raise ShardingError(
            f"{op.line}\n  the operand has shape {shape}, but its type has {len(step.before.dims)} dims"
        )
    dim = step.before.dim_names[step.splits]
    raise ShardingError(
        f"{op.line}\n  dim {dim} of this shard has size {shape[step.splits]}, "
        f"which does not divide into {op.size} blocks over {', '.join(step.axes)}\n"
        f"  fix: make {dim} a multiple of {op.size} on each rank"
    )


def _point_to_point(kind: str, line: str, x: torch.Tensor, mesh, axis: str, other: int, async_op: bool):
    spec, group = parse(line), mesh.group((axis,))
    spec.check_axes(mesh)
    if x.dim() != len(spec.dims):
        raise ShardingError(
            f"{kind} {spec}: the shard has shape {tuple(x.shape)}, but its type has {len(spec.dims)} dims"
        )
    if differentiated(x):
        raise ShardingError(
            f"{kind} {spec}: not differentiable, since its transpose lies on another rank: use ppermute"
        )
    if not 0 <= other < group.size or other == group.index:
        raise ShardingError(f"{kind} {spec}: rank {other} along {axis} must be another one of 0..{group.size - 1}")
    event, nbytes = None, x.numel() * x.element_size()
    if trace.active():
        sent = nbytes if kind == "Send" else 0
        event = trace.Event(kind, group.axes, spec, spec, nbytes, sent, start=trace.now(), async_op=async_op)
        trace.record(event)
    if group.backend == "abstract":
        work, buffer = None, torch.empty_like(x)
    elif kind == "Send":
        buffer = x.contiguous()
        work = dist.isend(buffer, group.ranks[group.member_of(other)], group=group.pg)
    else:
        buffer = torch.empty(x.shape, dtype=x.dtype, device=mesh.device)
        work = dist.irecv(buffer, group.ranks[group.member_of(other)], group=group.pg)
    pending = Pending(work, lambda: buffer, event)
    return pending if async_op else pending.wait()
