"""The collectives, typed by an arrow: `all_gather("W[D_X, F] -> W[D, F]", W, mesh)` (Part 3).

Every function takes the type first, then the operand (this rank's shard), then the mesh. It returns a new tensor that
shares no memory with the operand, and changes nothing. Options are given by name. The type is parsed once for each
mesh; a line that breaks a rule raises a ShardingError before anything is sent. All functions are differentiable by the
law of cotangents (notation.md), under torch.func, autograd and torch.compile. With `async_op=True` they return a
`Pending` at once, whose `.wait()` returns the result. On one device each is the identity; on an AbstractMesh they map
meta tensors to meta tensors.

Reductions take `op`: "sum", "mean", "max" or "min" of the parts that `{U_X}` denotes. The cotangent of a mean is that
of the sum divided by the size. The cotangent of a maximum or minimum is shared equally among the elements that attain
it, as torch.amax does, and takes one more AllReduce.
"""

from collections.abc import Sequence
from operator import index
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from scaling.algebra.rules import collective_steps
from scaling.collectives.linear import Pending, differentiable, made_ready, observed, watcher, who_watches
from scaling.collectives.lines import (
    CallKey,
    check_in_graph,
    check_result,
    constants,
    numbers,
    ops_of,
    ready_line,
    shapes_of,
)
from scaling.collectives.op import Op
from scaling.collectives.operands import Operand, refuse_in_graph
from scaling.common.arguments import whole_numbers
from scaling.common.torch_private import modes
from scaling.mesh.meeting import agree
from scaling.spec import ShardingError, parse, refuse

ONE_HOLDER = "{U_X} is a sum with one term for each element: along X one device has it, the others have zeros"
RESHARDS = ("AllGather", "ReduceScatter", "AllReduce", "AllToAll", "Slice")  # the identity if the type stays the same


A = TypeVar("A", bound=Operand)


class CallOptions(TypedDict, total=False):
    """The options of the collectives; each function says which ones it has."""

    op: str
    out: Tensor | None
    donate: bool
    root: int


class CollectiveCall(Protocol):
    """The type of a collective: it returns an array like x, or with `async_op=True` a Pending of one."""

    @overload
    def __call__(
        self,
        line: str,
        x: A,
        mesh,
        *along: Any,
        async_op: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> A: ...
    @overload
    def __call__(
        self, line: str, x: Operand, mesh, *along: Any, async_op: Literal[True], **options: Unpack[CallOptions]
    ) -> Pending: ...


def as_call(f: Any) -> CollectiveCall:
    """Return the function, typed as a `CollectiveCall`."""
    return f


@as_call
def all_gather(line: str, x: Operand, mesh, *, async_op: bool = False, out: Tensor | None = None) -> Any:
    """`A[I_X, J] -> A[I, J]`: give every rank the whole dim. Cotangent: ReduceScatter.

    The axes removed must be the minor ones of their dim (`I_XY -> I_X`), since the blocks would otherwise be
    interleaved. `out` is a preallocated output, which is overwritten and returned; x may be its own block of it.
    """
    return _call(("AllGather", line, None, "sum"), x, mesh, async_op, out)


@as_call
def reduce_scatter(
    line: str, x: Tensor, mesh, *, op: str = "sum", async_op: bool = False, out: Tensor | None = None
) -> Any:
    """`A[I, J] {U_X} -> A[I_X, J]`: sum over X and give each rank its block. Cotangent: AllGather.

    The axes become the minor ones of their dim. `out` is a preallocated output, which is overwritten and returned.
    """
    return _call(("ReduceScatter", line, None, op), x, mesh, async_op, out)


@as_call
def all_reduce(line: str, x: Tensor, mesh, *, op: str = "sum", async_op: bool = False, donate: bool = False) -> Any:
    """`A[I, J] {U_X} -> A[I, J]`: give every rank the sum over X. Cotangent: AllReduce.

    `donate` reduces in place: x must not be used afterwards.
    """
    return _call(("AllReduce", line, None, op), x, mesh, async_op, x if donate else None)


@as_call
def all_to_all(line: str, x: Operand, mesh, *, async_op: bool = False) -> Any:
    """`A[I_X, J] -> A[I, J_X]`: move axes that are minor in both dims from one to the other. Cotangent: the reverse."""
    return _call(("AllToAll", line, None, "sum"), x, mesh, async_op)


def shard(line: str, x: Operand, mesh) -> Operand:
    """`A[I, J] -> A[I_X, J]`: take this rank's block of an array that every rank holds; nothing is sent.

    A single type, `A[I_X, J]`, means from the whole array. Cotangent: the block at its place among zeros, which is
    unreduced `{U_X}`.
    """
    if "->" not in line:
        line = f"{parse(line).whole().with_name('')} -> {parse(line)}"
    return _call(("Slice", line, None, "sum"), x, mesh)


@as_call
def broadcast(line: str, x: Tensor, mesh, *, root: int = 0, async_op: bool = False) -> Any:
    """`A[I] {U_X} -> A[I]`: give every rank the root's part. Cotangent: Reduce."""
    return _call(("Broadcast", line, root, "sum"), x, mesh, async_op)


@as_call
def reduce(line: str, x: Tensor, mesh, *, root: int = 0, op: str = "sum", async_op: bool = False) -> Any:
    """`A[I] {U_X} -> A[I] {U_X}`: give the root the sum, and the others zeros. Cotangent: Broadcast."""
    return _call(("Reduce", line, root, op), x, mesh, async_op)


@as_call
def scatter(line: str, x: Tensor, mesh, *, root: int = 0, async_op: bool = False) -> Any:
    """`A[I] {U_X} -> A[I_X]`: give each rank its block of the root's array. Cotangent: Gather."""
    return _call(("Scatter", line, root, "sum"), x, mesh, async_op)


@as_call
def gather(line: str, x: Tensor, mesh, *, root: int = 0, async_op: bool = False) -> Any:
    """`A[I_X] -> A[I] {U_X}`: give the root the whole array, and the others zeros. Cotangent: Scatter."""
    return _call(("Gather", line, root, "sum"), x, mesh, async_op)


@as_call
def ppermute(line: str, x: Operand, mesh, axis: str | Sequence[str], perm, *, async_op: bool = False) -> Any:
    """Send along an axis, from the rank at `source` to the one at `target` for each (source, target) of `perm`.

    A rank that no pair names as target gets zeros, as in JAX. `line` is the type, which stays the same, `A[I_X]`, or
    the change that the permutation makes: `A[I_XY] -> A[I_YX]`. Cotangent: the reversed pairs.
    """
    axes = (axis,) if axis in mesh.sizes else tuple(axis)
    return _call(("CollectivePermute", line, axes, pairs_of(line, perm)), x, mesh, async_op)


def pairs_of(line: str, perm: Any) -> tuple[tuple[int, int], ...]:
    """Return a permutation's pairs (source, target) as ints. Raise a ShardingError for anything else."""
    try:
        return tuple((index(source), index(target)) for source, target in perm)
    except (TypeError, ValueError):
        what, rule = f"ppermute by {perm!r:.60}", "a permutation is pairs of whole numbers"
        raise ShardingError(f"{line}\n  {what}\n  rule: {rule}\n  fix: give (source, target), ...") from None


def unshard(line: str, x: Any, mesh) -> Any:
    """Return the whole array on every rank: `A[I_X, J] {U_Y}` is reduced over Y and gathered over X.

    `line` is the type of x.
    """
    spec, whole = parse(line), parse(line).whole()
    if not spec.named_axes:
        return shard(f"{spec} -> {spec}", x, mesh)
    if spec.unreduced:
        x = all_reduce(f"{spec} -> {spec.with_unreduced(())}", x, mesh)
        spec = spec.with_unreduced(())
    return all_gather(f"{spec} -> {whole}", x, mesh) if spec.axes else x


def masked(line: str, x: Tensor, mask: Tensor, mesh) -> Tensor:
    """`A[I, J] {U_X}`: keep x where `mask` is true and put zeros elsewhere; nothing is sent.

    With it a table that is split over X is looked up: each device looks its own rows up, and the sum over X is the
    lookup on one device (Part 5, an embedding whose vocabulary is split). The mask is bool and has x's first dims. At
    most one device along X holds each element. Cotangent: dA[I, J], which is replicated, masked alike.

    Raises:
        ShardingError: the line is not a type with a {U}, the operands do not fit it, or, on a checked mesh of CPU
            devices, several devices hold an element. (On a GPU each device would have to wait for that check.)
    """
    if not mesh.member:
        return x
    line, watch = mesh.resolve(line), who_watches()
    if mesh.drops and "{U_" not in line:
        return zeroed(x if watch is None else watch.dropped(line, x, mesh), mask)
    dims, sizes, axes = mesh.constant(_dims, line)
    if watch is not None:
        return watch.masked(line, x, mask, mesh)
    if not isinstance(x, Tensor) or not isinstance(mask, Tensor) or x.layout is not torch.strided:
        what = f"the operand is a {type(x).__name__}, the mask a {type(mask).__name__}"
        refuse(f"masked: {line}", what, "both are dense tensors", "torch.as_tensor(...), or .to_dense()")
    if x.dim() != dims or (sizes and any(x.shape[i] != size for i, size in sizes)):
        rule = f"its type has {dims} dims, and says those that are numbers"
        what = f"the operand has shape {tuple(x.shape)}"
        refuse(f"masked: {line}", what, rule, "give the type of what is masked")
    if mask.dtype != torch.bool or mask.shape != x.shape[: mask.dim()] or mask.device != x.device:
        what = f"the mask is {mask.dtype} {list(mask.shape)} on {mask.device}"
        what += f", the operand {list(x.shape)} on {x.device}"
        rule = "a mask is bool, and has the operand's first dims and its device"
        refuse(f"masked: {line}", what, rule, "make it of the ids that the operand was looked up by")
    if x.dtype == torch.bool:
        refuse(f"masked: {line}", "the operand is of bools", "partial sums are of numbers", "x.int()")
    if mesh.checked and not torch.compiler.is_compiling() and type(mask) is Tensor and not modes():
        _held_once(line, axes, mask, mesh)
    return zeroed(x, mask)


def zeroed(x: Tensor, mask: Tensor) -> Tensor:
    """x[I, J], mask[I] -> x where the mask is true, zeros elsewhere, even in place of NaN."""
    return torch.where(mask[(..., *[None] * (x.dim() - mask.dim()))], x, 0)


def _dims(mesh, line: str) -> tuple[int, tuple[tuple[int, int], ...], tuple[str, ...]]:
    """Return (number of dims, (position, size) of the dims that are numbers, the axes summed over) of a masked type."""
    spec = None if "->" in str(line) else parse(line)
    if spec is None or not spec.unreduced:
        refuse(f"masked: {line}", "it is no partial sum", "a mask makes partial sums", "give its type, A[I, J] {U_X}")
    spec.check_axes(mesh)
    stacked = bool(mesh.stack)
    sizes = tuple((i + stacked, size) for i, size in numbers(spec, mesh))
    return len(spec.dims) + stacked, sizes, spec.unreduced


def _held_once(line: str, axes: tuple[str, ...], mask: Tensor, mesh) -> None:
    """Raise a ShardingError on every rank of the group if two of them hold an element."""
    group = mesh.group(axes)
    if group.pg is None or mask.device.type != mesh.device.type or mask.is_cuda:
        return
    agree(group, f"masked {line}", mask)
    count = mask.to(torch.int32)
    dist.all_reduce(count, group=group.pg)
    if most := int((count > 1).sum()):
        what = f"{most} of {count.numel()} elements are held by several devices along {', '.join(axes)}"
        fix = "let the masks of the devices exclude each other: local = ids - mesh.coord['X'] * len(table)"
        refuse(f"masked: {line}", what, ONE_HOLDER, fix)


def ragged_all_to_all(
    line: str, x: Tensor, sends: Sequence[int], receives: Sequence[int], mesh, *, async_op: bool = False
) -> Any:
    """x[rows, ...] -> [rows received, ...]: send `sends[i]` rows to rank i along the axes, and receive `receives[i]`.

    The line, `Row[G_X, E, R, D] -> Row[G, E_X, R, D]`, moves X from one dim to another as `all_to_all` does, in an
    array with a ragged dim: R, the number of rows, differs by block (g, e). In memory the dims up to and including R
    are one, with the blocks' rows in sequence, so that this rank's shard is [rows, D]. A rank sends the rows of E's
    first block to the first rank along X, and so on, and gets rows in the order of the ranks that sent them, G. The
    ranks first tell each other the numbers of rows by the same line without the ragged dim, `n[G_X, E] -> n[G, E_X]`.

    Ranks are numbered in the order of the axes in the line. Cotangent: the reverse, with `sends` and `receives`
    exchanged. The trace counts the rows that are really sent: `wire_bytes` are the bytes that leave this rank. `nbytes`
    (V) is the bytes of x on this rank times the number of ranks. The mean of V over the ranks is the whole array's
    bytes.

    Raises:
        ShardingError: the line is not an AllToAll, or the counts do not fit x or, on a checked mesh, each other.
    """
    if (watch := who_watches()) is not None:
        return _given(watch.ragged(line, x), async_op)
    (step,) = collective_steps("AllToAll", line)
    step.before.check_axes(mesh)
    step.after.check_axes(mesh)
    group = mesh.group(step.axes)
    sends, receives = (tuple(whole_numbers(name, n)) for name, n in (("sends", sends), ("receives", receives)))
    dims = len(step.before.dims) - 1 - max(step.dim, step.to)  # R, and what comes after it
    if not isinstance(x, Tensor) or x.dim() != dims:
        found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShardingError(
            f"{line}\n  the rows are {found}\n  rule: dims up to R are one: {dims} in all\n  fix: flatten"
        )
    wrong = len(sends) != group.size or len(receives) != group.size or sum(sends) != len(x)
    if wrong or min(sends + receives) < 0 or sends[group.index] != receives[group.index]:
        raise ShardingError(
            f"{line}\n  {len(x)} rows cannot be sent as {sends} and received as {receives}\n"
            f"  rule: a count for each of the {group.size} ranks along {', '.join(step.axes)}; x has the rows "
            "sent, and what a rank keeps it receives\n  fix: exchange the counts by an AllToAll first"
        )
    line = f"{step.before} -> {step.after}"
    op = Op.over(group, "Ragged", line, sends=sends, receives=receives)
    if torch.compiler.is_compiling() or observed(x):
        return _given(differentiable(x, *op), async_op)
    return made_ready(op, x.shape, x.dtype, group).run(x, async_op)


def _call(call: CallKey, x: Any, mesh, async_op: bool = False, out: Tensor | None = None, seen: bool = False) -> Any:
    """Run the line of a call on this mesh.

    The line was prepared at the first call with such operands. While x is differentiated or compiled, another path runs
    it. On an optional mesh, the axes that the mesh lacks drop out first.
    """
    kind, line, where, how = call
    if mesh.drops and kind in RESHARDS:
        if not (local := mesh.resolve(line)):
            x = x if (watch := who_watches()) is None else watch.dropped(line, x, mesh)
            return x if out is None or out is x else out.copy_(x)
        call = kind, local, where, how
    if not isinstance(x, Tensor) and hasattr(x, "moved"):  # scaling.scaled.Scaled: each of its parts is moved
        return x.moved(_call, call, mesh, async_op)
    if torch.compiler.is_compiling():
        return _compiled(call, x, mesh, async_op, out)
    if not seen and (watch := watcher.get()) is not None:
        return watch.call(_call, call, x, mesh, async_op, out, True)
    if not mesh.member:
        return None
    if not isinstance(x, Tensor) or observed(x):
        return _differentiated(call, x, mesh, async_op, out)
    key = call, x.shape, x.dtype, x.device, x.layout
    prepared = mesh.lines.get(key)
    if prepared is None:
        prepared = mesh.lines[key] = ready_line(mesh, call, x)
    if out is not None:
        check_result(ops_of(mesh, call), x, out, prepared.shape)
    for ready in prepared.ready[:-1]:
        x = ready.run(x)
    return prepared.ready[-1].run(x, async_op, out)


def _differentiated(call: CallKey, x: Any, mesh, async_op: bool, out: Tensor | None) -> Any:
    ops = ops_of(mesh, call)
    if out is not None:
        ops[0].check(x, mesh)
        check_result(ops, x, out, shapes_of(ops, x.shape)[-1])
    for op in ops:
        op.check(x, mesh)
        x = differentiable(x, *op)
    return _given(x, async_op, out)


def _compiled(call: CallKey, x: Tensor, mesh, async_op: bool, out: Tensor | None) -> Any:
    for number, op in enumerate(mesh.constant(constants, call)):
        misfit = () if Op(*op).fits(x.shape) else (tuple(x.shape),)
        mesh.constant(check_in_graph, call, number, x.dtype, *misfit)
        x = differentiable(x, *op)
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
        _, line, _, _ = call
        refuse_in_graph(line, tuple(x.shape), x.dtype, tuple(out.shape), out.dtype)
    return _given(x, async_op, out)


def _given(x: Tensor, async_op: bool, out: Tensor | None = None) -> Any:
    x = x if out is None else out.copy_(x)
    return Pending((), lambda: x) if async_op else x
