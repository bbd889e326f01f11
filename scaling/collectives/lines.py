"""Resolve a typed line on a mesh into its ops.

A line is prepared at the first call with operands of one shape, dtype and device, which checks and decides everything
that can be; later calls only run it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.algebra.rules import CollectiveStep, collective_steps
from scaling.collectives.linear import ReadyOp, made_ready, register
from scaling.collectives.op import Op, output_shape
from scaling.collectives.operands import check_out, check_writable
from scaling.spec import Line, ShardingError, Spec, mesh_sizes, parse_line, refuse

REDUCTIONS = ("sum", "mean", "max", "min")
# The key of a call, (kind, line, where, how): where is the root, or the axes of a CollectivePermute; how is the
# reduction, or a CollectivePermute's pairs (source, target). It is a plain tuple because each call makes one.
CallKey = tuple[str, str, Any, Any]


def ops_of(mesh, key: CallKey) -> Sequence[Op]:
    """Return the ops of a line on this mesh, computed once; there are several if several dims are gathered or split."""
    if key not in mesh.lines:
        kind, line, where, how = key
        steps, root, by, pairs = _steps(kind, line, where, how)
        mesh.lines[key] = [
            _op(mesh, kind, step.stacked(mesh.stack) if mesh.stack else step, root, by, pairs) for step in steps
        ]
    return mesh.lines[key]


def _steps(kind: str, line: str, where: Any, how: Any) -> tuple:
    if kind == "CollectivePermute":
        typed = parse_line(line if "->" in line else f"{line} -> {line}")
        return [CollectiveStep(typed.operands[0], typed.result, where)], None, "sum", how
    if how not in REDUCTIONS:
        refuse(line, f"op={how!r}", f"parts are put together by one of {', '.join(REDUCTIONS)}", "choose one of these")
    (before, *_), after = parse_line(line).operands, parse_line(line).result
    if kind == "Slice" and before.same_sharding(after):  # a Slice over no axes
        return [CollectiveStep(before, after, ())], where, how, ()
    return collective_steps(kind, line), where, how, ()


def _op(mesh, kind: str, step: CollectiveStep, root: int | None, by: str, pairs: tuple) -> Op:
    line = f"{step.before} -> {step.after}"
    step.before.check_axes(mesh)
    step.after.check_axes(mesh)
    group = mesh.group(step.axes)
    if root is not None and not 0 <= root < group.size:
        raise ShardingError(
            f"{line}\n  root {root} is not in 0..{group.size - 1}, the ranks along {step.axes}"
            "\n  fix: give the place of a rank along the axes"
        )
    for ends in zip(*pairs, strict=True):
        if len(set(ends)) < len(ends) or not all(0 <= i < group.size for i in ends):
            rule = f"sources are distinct, targets are distinct, and all lie in 0..{group.size - 1}"
            refuse(line, f"ppermute over {step.axes[0]} (size {group.size}) by {pairs}", rule, "give such pairs")
    operand = {"dims": len(step.before.dims), "splits": step.splits, "numbers": numbers(step.before, mesh)}
    options = {"root": root, "by": by, "pairs": pairs, "sliced": mesh.slices}
    return Op.over(group, kind, line, dim=step.dim, to=step.to, **options, **operand)


def check_operand(kind: str, line: Line, group, x: Tensor, mesh) -> None:
    """Raise a ShardingError unless x has the dims of a line's operand and is on the mesh's device."""
    before = line.operands[0]
    Op.over(group, kind, str(line), dims=len(before.dims), numbers=numbers(before, mesh)).check(x, mesh)


def numbers(spec: Spec, mesh) -> tuple[tuple[int, int], ...]:
    """Return (position, size on each rank) of the dims that are numbers: for `A[2, 8_X]` on X=4 ((0, 2), (1, 2))."""
    sizes = mesh_sizes(mesh)
    fixed = [(i, dim, axes) for i, (dim, axes) in enumerate(spec.dims) if dim.isdigit()]
    return tuple((i, Spec("", ((dim, axes),)).local_shape((int(dim),), sizes)[0]) for i, dim, axes in fixed)


def constants(mesh, key: CallKey) -> tuple:
    """Return the ops of a line as plain tuples while compiling, since a graph holds constants."""
    register()
    return tuple(map(tuple, ops_of(mesh, key)))


def check_in_graph(mesh, key: CallKey, number: int, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> None:
    """Raise, while compiling, the error of an op for an operand of this dtype, or of this shape if one is given."""
    op = ops_of(mesh, key)[number]
    if shape is not None:
        op.refuse_shape(shape)
    op.check_dtype(dtype)


def shapes_of(ops: Sequence[Op], shape: torch.Size) -> list[torch.Size]:
    """Return the shapes of the operand before each op, and of the result. Raise a ShardingError for a misfit."""
    shapes = [shape]
    for op in ops:
        if not op.fits(shapes[-1]):
            op.refuse_shape(tuple(shapes[-1]))
        shapes.append(torch.Size(output_shape(op, shapes[-1])))
    return shapes


def check_result(ops: Sequence[Op], x: Tensor, out: Tensor, shape: torch.Size) -> None:
    """Raise a ShardingError unless `out` can take a line's result of this shape.

    `out` may be x, if it is reduced in place, or hold x as its own block of the gathered array.
    """
    first = ops[0]
    if out is not x:
        text = f"{first.kind}: {first.line.split(' -> ')[0]} -> {ops[-1].line.split(' -> ')[1]}"
        gathers = len(ops) == 1 and first.kind == "AllGather"
        check_out(text, out, shape, x.dtype, x.device, x, own=(first.dim, first.index) if gathers else None)
    elif not x.is_contiguous() or x.requires_grad or x.is_neg() or x.is_conj():
        check_writable(first, x, "the donated operand")


class ReadyLine(NamedTuple):
    """A prepared line: its ops in order, and the shape of the result."""

    ready: list[ReadyOp]
    shape: torch.Size


def ready_line(mesh, key: CallKey, x: Tensor) -> ReadyLine:
    """Prepare a line for operands like x. Raise a ShardingError if x does not fit the line."""
    ops = ops_of(mesh, key)
    ops[0].check(x, mesh)
    *shapes, result = shapes_of(ops, x.shape)
    return ReadyLine(
        [made_ready(op, shape, x.dtype, mesh.group(op.axes)) for op, shape in zip(ops, shapes, strict=True)], result
    )
