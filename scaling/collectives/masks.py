"""Make partial sums with a mask: `masked("x[B, T, D] {U_Y}", x, local, mesh)`, for a table that is split over Y.

Each device looks its own rows up, and puts zeros where the row belongs to another. The sum over Y then equals the
lookup on one device (Part 5, an embedding whose vocabulary is split). No product or collective gives this type, so
there is a line for it.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from scaling.collectives.checked import agree
from scaling.collectives.linear import who_watches
from scaling.collectives.lines import numbers
from scaling.common.torch_private import modes
from scaling.spec import ShardingError, parse, refuse

RULE = "{U_X} is a sum with one term for each element: along X one device has it, the others have zeros"


def masked(line: str, x: Tensor, mask: Tensor, mesh) -> Tensor:
    """`A[I, J] {U_X}`: keep x where `mask` is true and put zeros elsewhere; nothing is sent.

    The mask is bool and has x's first dims. At most one device along X holds each element. Cotangent: dA[I, J], which
    is replicated, masked alike.

    Raises:
        ShardingError: the line is not a type with a {U}, the operands do not fit it, or, on a checked mesh of CPU
            devices, several devices hold an element. (On a GPU each device would have to wait for that check.)
    """
    if not mesh.member:
        return x
    line = mesh.resolve(line)
    if mesh.drops and "{U_" not in line:
        return zeroed(x, mask)
    if (watch := who_watches()) is not None:
        return watch.masked(line, x, mask)
    dims, sizes, axes = mesh.constant(_dims, line)
    if not isinstance(x, Tensor) or not isinstance(mask, Tensor) or x.layout is not torch.strided:
        what = f"the operand is a {type(x).__name__}, the mask a {type(mask).__name__}"
        refuse(f"masked: {line}", what, "both are dense tensors", "torch.as_tensor(...), or .to_dense()")
    if x.dim() != dims or any(x.shape[i] != size for i, size in sizes):
        what, rule = (
            f"the operand has shape {tuple(x.shape)}",
            f"its type has {dims} dims, and says those that are numbers",
        )
        refuse(f"masked: {line}", what, rule, "give the type of what is masked")
    if mask.dtype != torch.bool or mask.shape != x.shape[: mask.dim()] or mask.device != x.device:
        what = (
            f"the mask is {mask.dtype} {list(mask.shape)} on {mask.device}, the operand {list(x.shape)} on {x.device}"
        )
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
        raise ShardingError(
            f"masked: {line}\n  rule: a mask makes partial sums\n  fix: give their type, A[I, J] {{U_X}}"
        )
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
        refuse(f"masked: {line}", what, RULE, fix)
