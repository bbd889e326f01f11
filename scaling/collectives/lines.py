"""A typed line made ready to run on a mesh: its steps, and what the operand and the buffers given for it must be."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.algebra.rules import CollectiveStep, collective_steps
from scaling.collectives.buffers import check_out, check_writable, overlap, refuse_overlap
from scaling.collectives.kinds import CARRIED, check_dtype, output_shape
from scaling.collectives.linear import PLAIN, register
from scaling.collectives.op import Op
from scaling.spec import Line, ShardingError, Spec, mesh_sizes, parse_line, refuse

REDUCTIONS = ("sum", "mean", "max", "min")


class LineStep(NamedTuple):
    """A step of a line on a mesh: mostly there is one; several where several dims are gathered or split.

    Of the operand: the number of `dims`, the dim that must divide (`splits`), and (position, size) of the dims that are
    `numbers`.
    """

    op: Op
    group: Any  # a Group; None while compiling
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
    return LineStep(op, group, len(before.dims), None, numbers(before, mesh), on(mesh))


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
    return LineStep(op, group, len(step.before.dims), step.splits, numbers(step.before, mesh), on(mesh))


def check_operand(kind: str, line: Line, group, x: Tensor, mesh) -> None:
    """ShardingError unless x has the dims of a line's operand, and lies on the mesh's device."""
    before = line.operands[0]
    step = LineStep(Op.over(group, kind, str(line)), group, len(before.dims), None, numbers(before, mesh), on=on(mesh))
    step.check(x, mesh)


def on(mesh) -> str:
    return f"is_{mesh.device.type}"


def numbers(spec: Spec, mesh) -> tuple[tuple[int, int], ...]:
    """(position, size on each rank) of the dims that are numbers: of `A[2, 8_X]` on X=4 ((0, 2), (1, 2))."""
    sizes = mesh_sizes(mesh)
    fixed = [(i, dim, axes) for i, (dim, axes) in enumerate(spec.dims) if dim.isdigit()]
    return tuple((i, Spec("", ((dim, axes),)).local_shape((int(dim),), sizes)[0]) for i, dim, axes in fixed)


def constants(mesh, kind: str, line: str, root: int | None, by: str) -> tuple:
    """The steps of a line as plain tuples, worked out while compiling: a graph holds constants."""
    register()
    steps = resolve(mesh, kind, line, root, by)
    return tuple((tuple(step.op), step.dims, step.splits, step.numbers) for step in steps)


def check_result(steps: Sequence[LineStep], x: Tensor, out: Tensor) -> None:
    """ShardingError unless `out` can take the result of a line's steps on x; it may be x, reduced in place."""
    if out is x:
        if not x.is_contiguous() or x.requires_grad or x.is_neg() or x.is_conj():
            check_writable(steps[0], x, "the donated operand")
        return
    shape = x.shape
    for step in steps:
        if not step.fits(shape):
            step.refuse_shape(tuple(shape))
        shape = output_shape(step.op, shape)
    if not isinstance(out, Tensor) or [*out.shape] != shape or out.dtype is not x.dtype or out.device != x.device:
        check_out(_whole(steps), out, tuple(shape), x.dtype, x.device)
    if not out.is_contiguous() or out.requires_grad or out.is_neg() or out.is_conj():
        check_writable(_whole(steps), out, "out")
    if overlap(out, x) and not (len(steps) == 1 and steps[0].op.kind == "AllGather" and is_own_block(x, out, step.op)):
        refuse_overlap(_whole(steps))


def _whole(steps: Sequence[LineStep]) -> str:
    """The line that these steps do together."""
    return f"{steps[0].op.kind}: {steps[0].op.line.split(' -> ')[0]} -> {steps[-1].op.line.split(' -> ')[1]}"


def is_own_block(x: Tensor, out: Tensor, op: Op) -> bool:
    """Whether x is its block of the buffer that it is gathered into."""
    block = out.narrow(op.dim, op.index * x.shape[op.dim], x.shape[op.dim])
    return block.data_ptr() == x.data_ptr() and block.stride() == x.stride()


def refuse_shape(mesh, kind: str, line: str, root: int | None, by: str, shape: tuple[int, ...]) -> None:
    """While compiling: the error of the first step that x, of this shape, does not fit."""
    x = torch.empty(shape, device="meta")
    for step in resolve(mesh, kind, line, root, by):
        if not step.fits(x.shape):
            step.refuse_shape(tuple(x.shape))
        x = x.new_empty(output_shape(step.op, x.shape))


def refuse_buffer(mesh, line: str, shape, given, dtype, found) -> None:
    """While compiling: a buffer that does not fit."""
    what, rule = f"the result is {dtype}{list(shape)}, out {found}{list(given)}", "out has the result's shape and dtype"
    refuse(line, what, rule, "give such a buffer, or leave out= away")


def _a(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"
