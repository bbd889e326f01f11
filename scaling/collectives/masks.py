"""Partial sums that come of a mask: `masked("x[B, T, D] {U_Y}", x, here, mesh)`, for a table that is split over Y.

Each device looks its own rows up, and puts zeros where the row is another's: the sum over Y is what one device would
look up (Part 5, an embedding whose vocabulary is split). No product tells so, and no collective: this line does.
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
    """`A[I, J] {U_X}`: x where `mask` is true, and zeros elsewhere; nothing is sent. The mask is bool, of x's first
    dims: an element is held by one device along X at most. Cotangent: dA[I, J], which is replicated, masked alike.

    ShardingError if the line is no type with a {U}, or the operands do not fit it; and on a checked mesh of CPU devices
    if several of them have an element (on a GPU each device would have to wait for that to be known).
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
    """x[I, J], mask[I] -> x where the mask is true, zeros elsewhere, whatever stands there."""
    return torch.where(mask[(..., *[None] * (x.dim() - mask.dim()))], x, 0)


def _dims(mesh, line: str) -> tuple[int, tuple[tuple[int, int], ...], tuple[str, ...]]:
    """(how many dims the operand has, (position, size) of those that are numbers, the axes that it is summed over)."""
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
    """ShardingError on every rank of the group if two of them have an element."""
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
