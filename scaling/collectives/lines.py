"""A typed line made ready to run on a mesh: its steps, and what the operand and the buffers given for it must be.

A `LineStep` is what the line says alone. A `ReadyLine` is that for operands of one shape, dtype and device: it is made
at their first call, when all that can be is checked and decided; later calls run it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling import trace
from scaling.algebra.rules import CollectiveStep, collective_steps
from scaling.collectives.buffers import check_out, check_writable
from scaling.collectives.checked import call_of, compared
from scaling.collectives.kinds import starter
from scaling.collectives.linear import PLAIN, register
from scaling.collectives.op import CARRIED, Op, check_dtype, event, output_shape
from scaling.collectives.pending import Pending
from scaling.mesh.meeting import meeting
from scaling.spec import Line, ShardingError, Spec, mesh_sizes, parse_line, refuse

REDUCTIONS = ("sum", "mean", "max", "min")


class LineStep(NamedTuple):
    """A step of a line on a mesh: mostly there is one; several where several dims are gathered or split.

    Of the operand: the number of `dims`, the dim that must divide (`splits`), and (position, size) of the dims that are
    `numbers`.
    """

    op: Op
    dims: int
    splits: int | None = None
    numbers: tuple[tuple[int, int], ...] = ()
    on: str = "is_cpu"  # the attribute that a tensor on the mesh's device has

    def __str__(self) -> str:
        return f"{self.op.kind}: {self.op.line}"

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether an operand of this shape has the dims of its type."""
        if len(shape) != self.dims or (self.splits is not None and shape[self.splits] % self.op.size):
            return False
        return not self.numbers or all(shape[i] == size for i, size in self.numbers)

    def check(self, x: Tensor, mesh) -> None:
        """ShardingError unless x is a tensor that has the dims of its type, on the mesh's device."""
        if not isinstance(x, Tensor):
            refuse(self, f"the operand is a {_a(type(x))}", "arrays are torch.Tensors", "torch.as_tensor(...)")
        if not self.fits(x.shape):
            self.refuse_shape(tuple(x.shape))
        if not getattr(x, self.on) and type(x) in PLAIN:
            self.refuse_device(x, mesh)
        if x.layout is not torch.strided:
            refuse(self, f"the operand is {x.layout}", "shards are dense tensors", "give it as .to_dense()")
        if x.dtype not in CARRIED or self.op.reduction != "sum":
            check_dtype(self.op, x.dtype)

    def refuse_device(self, x: Tensor, mesh) -> None:
        if self.op.backend == "abstract" or mesh.device.type == "meta":
            what = f"an AbstractMesh moves no data, and the operand is on {x.device}"
            raise ShardingError(f"{self}\n  {what}\n  fix: give it tensors on the meta device")
        rule = f"a mesh moves what is on its own device, {mesh.device}"
        fix = "plan with shapes alone on an AbstractMesh" if x.is_meta else f".to({str(mesh.device)!r}) first"
        refuse(self, f"the operand is on {x.device}", rule, fix)

    def refuse_shape(self, shape: tuple[int, ...]) -> None:
        op, before = self.op, parse_line(self.op.line).operands[0]
        if len(shape) != self.dims:
            what = f"the operand has shape {shape}, but its type has {self.dims} dims"
            raise ShardingError(f"{self}\n  {what}\n  fix: name each dim of it")
        for i, size in self.numbers:
            if shape[i] != size:
                what = f"dim {before.dim_names[i]} of this shard has size {shape[i]}, not {size}"
                refuse(self, what, "a dim that is a number says its own size", "give a dim of any size a name")
        split = self.splits or 0
        dim = before.dim_names[split]
        raise ShardingError(
            f"{self}\n  dim {dim} of this shard has size {shape[split]}, "
            f"which does not divide into {op.size} blocks over {', '.join(op.axes)}\n"
            f"  fix: make {dim} a multiple of {op.size} on each rank"
        )


def resolve(mesh, kind: str, line: str, root: int | None, by: str) -> list[LineStep]:
    """What a line does on this mesh."""
    if by not in REDUCTIONS:
        refuse(line, f"op={by!r}", f"parts are put together by one of {', '.join(REDUCTIONS)}", "choose one of these")
    same = kind == "Slice" and unsplit(line)
    steps = [same] if same else collective_steps(kind, line)
    return [_step(mesh, kind, step.stacked(mesh.stack) if mesh.stack else step, root, by) for step in steps]


def steps_of(mesh, what: tuple) -> Sequence[LineStep]:
    """What a line does on this mesh, worked out once; `what`: (kind, line, root, by), or of a CollectivePermute (kind,
    line, axes, pairs)."""
    if what not in mesh.lines:
        mesh.lines[what] = [_permute(mesh, *what[1:])] if what[0] == "CollectivePermute" else resolve(mesh, *what)
    return mesh.lines[what]


def _permute(mesh, line: str, axes: tuple[str, ...], pairs: tuple[tuple[int, int], ...]) -> LineStep:
    typed = parse_line(line if "->" in line else f"{line} -> {line}")
    (before,), after = typed.operands, typed.result
    before.check_axes(mesh)
    after.check_axes(mesh)
    group = mesh.group(axes)
    for ends in zip(*pairs, strict=True):
        if len(set(ends)) < len(ends) or not all(0 <= i < group.size for i in ends):
            rule = f"sources are distinct, targets are distinct, and all lie in 0..{group.size - 1}"
            refuse(line, f"ppermute over {axes[0]} (size {group.size}) by {pairs}", rule, "give such pairs")
    op = Op.over(group, "CollectivePermute", f"{before} -> {after}", pairs=pairs)
    return LineStep(op, len(before.dims), None, numbers(before, mesh), on(mesh))


def unsplit(line: str) -> CollectiveStep | None:
    """The step of a shard over no axes."""
    (before, *_), after = parse_line(line).operands, parse_line(line).result
    return CollectiveStep(before, after, ()) if before.same_sharding(after) else None


def _step(mesh, kind: str, step: CollectiveStep, root: int | None, by: str) -> LineStep:
    step.before.check_axes(mesh)
    step.after.check_axes(mesh)
    group = mesh.group(step.axes)
    if root is not None and not 0 <= root < group.size:
        raise ShardingError(
            f"{step.before} -> {step.after}\n  root {root} is not in 0..{group.size - 1}, the ranks along {step.axes}"
            "\n  fix: give the place of a rank along the axes"
        )
    line, mean = f"{step.before} -> {step.after}", by == "mean"
    op = Op.over(group, kind, line, dim=step.dim, to=step.to, root=root, by="sum" if mean else by, mean=mean)
    return LineStep(op, len(step.before.dims), step.splits, numbers(step.before, mesh), on(mesh))


def check_operand(kind: str, line: Line, group, x: Tensor, mesh) -> None:
    """ShardingError unless x has the dims of a line's operand, and lies on the mesh's device."""
    before = line.operands[0]
    LineStep(Op.over(group, kind, str(line)), len(before.dims), None, numbers(before, mesh), on(mesh)).check(x, mesh)


def on(mesh) -> str:
    return f"is_{mesh.device.type}"


def numbers(spec: Spec, mesh) -> tuple[tuple[int, int], ...]:
    """(position, size on each rank) of the dims that are numbers: of `A[2, 8_X]` on X=4 ((0, 2), (1, 2))."""
    sizes = mesh_sizes(mesh)
    fixed = [(i, dim, axes) for i, (dim, axes) in enumerate(spec.dims) if dim.isdigit()]
    return tuple((i, Spec("", ((dim, axes),)).local_shape((int(dim),), sizes)[0]) for i, dim, axes in fixed)


def constants(mesh, what: tuple) -> tuple:
    """The steps of a line as plain tuples, worked out while compiling: a graph holds constants."""
    register()
    return tuple((tuple(step.op), *step[1:]) for step in steps_of(mesh, what))


def refuse_shape(mesh, what: tuple, number: int, shape: tuple[int, ...]) -> None:
    """While compiling: the error of a step that an operand of this shape does not fit."""
    steps_of(mesh, what)[number].refuse_shape(shape)


def shapes_of(steps: Sequence[LineStep], shape: Sequence[int]) -> list[Sequence[int]]:
    """The shapes of the operand, before each step, and of the result. ShardingError if one does not fit its step."""
    shapes = [shape]
    for step in steps:
        if not step.fits(shapes[-1]):
            step.refuse_shape(tuple(shapes[-1]))
        shapes.append(output_shape(step.op, shapes[-1]))
    return shapes


def text_of(steps: Sequence[LineStep]) -> str:
    """The line that these steps do together."""
    return f"{steps[0].op.kind}: {steps[0].op.line.split(' -> ')[0]} -> {steps[-1].op.line.split(' -> ')[1]}"


def check_result(first: LineStep, x: Tensor, out: Tensor, shape: torch.Size, text: str) -> None:
    """ShardingError unless `out` can take a line's result; it may be x, reduced in place, or hold x as its own block of
    what is gathered."""
    if out is not x:
        gathers = text == str(first) and first.op.kind == "AllGather"
        check_out(text, out, shape, x.dtype, x.device, x, own=(first.op.dim, first.op.index) if gathers else None)
    elif not x.is_contiguous() or x.requires_grad or x.is_neg() or x.is_conj():
        check_writable(first, x, "the donated operand")


class ReadyLine:
    """A line made ready for operands as x: its `steps`, its result's `shape`, and its `text` in errors. ShardingError
    if x is not what the line says."""

    __slots__ = ("shape", "steps", "text")

    def __init__(self, steps: Sequence[LineStep], x: Tensor, mesh):
        steps[0].check(x, mesh)
        *shapes, result = map(torch.Size, shapes_of(steps, x.shape))
        self.steps = [ReadyStep(step, shape, x.dtype, mesh) for step, shape in zip(steps, shapes, strict=True)]
        self.shape, self.text = result, text_of(steps)


class ReadyStep:
    """One step of it: how its op starts, and what the ranks compare."""

    __slots__ = ("call", "line", "meeting", "op", "start", "via")

    def __init__(self, step: LineStep, shape: torch.Size, dtype: torch.dtype, mesh):
        self.line, self.op, group = step, step.op, mesh.group(step.op.axes)
        self.start, self.via = starter(step.op, group, dtype)
        self.call = call_of(step.op, shape, dtype, "")
        self.meeting = meeting(group.pg) if compared(step.op) else None

    def run(self, x: Tensor, async_op: bool = False, out: Tensor | None = None) -> Any:
        """The result, or with `async_op` a Pending; in the buffer `out`, if one is given."""
        seen = trace.reached(event(self.op, x, async_op)) if trace.open_logs else None
        if self.meeting is not None:
            self.meeting.meet(self.call)
        if seen is not None:
            trace.record(seen)
        works, make = self.start(x, self.op, self.via, out)
        finish = make if out is None and not self.op.mean else lambda: self._finished(make(), out)
        if async_op:
            return Pending(works, finish, seen, self.line)
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


def _a(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"
