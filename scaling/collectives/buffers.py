"""Preallocated outputs, `out=` and `donate=True`: what they may be, so that nothing else is written over."""

from typing import Any

import torch
from torch import Tensor

from scaling.common.torch_private import constant
from scaling.spec import refuse


def check_out(line, out: Tensor, shape: torch.Size, dtype, device, *operands: Tensor | None, own=None) -> None:
    """ShardingError unless `out` can hold a result of this shape, dtype and device, and shares no memory with the
    operands; `own`: (dim, number) of the block of it that the first operand may be."""
    if not isinstance(out, Tensor):
        rule = "out is a preallocated tensor, overwritten and returned"
        refuse(line, f"out is a {type(out).__name__}", rule, "give a tensor, or leave out= away")
    if out.shape != shape:
        rule = "out has the shape of the result: what is written beyond it would be another tensor's"
        what = f"the result has shape {tuple(shape)}, out {tuple(out.shape)}"
        refuse(line, what, rule, "give a buffer of that shape, or leave out= away")
    if out.dtype != dtype or out.device != device:
        what = f"the result is {dtype} on {device}, out {out.dtype} on {out.device}"
        refuse(line, what, "out has the dtype and the device of the result: nothing is converted", "leave out= away")
    if out.requires_grad or not out.is_contiguous() or out.is_neg() or out.is_conj():
        check_writable(line, out, "out")
    if overlap(out, *operands) and not (own and is_block(operands[0], out, *own)):
        rule = "what is read is not written over"
        refuse(line, "out shares memory with an operand", rule, "give a buffer of its own, or leave out= away")


def is_block(x: Any, out: Tensor, dim: int, number: int) -> bool:
    """Whether x is this block of a buffer that it is gathered into."""
    block = out.narrow(dim, number * x.shape[dim], x.shape[dim])
    return block.data_ptr() == x.data_ptr() and block.stride() == x.stride()


@constant
def refuse_in_graph(line: str, shape, dtype, given, found) -> None:
    """While compiling: a buffer that does not fit."""
    what, rule = f"the result is {dtype}{list(shape)}, out {found}{list(given)}", "out has the result's shape and dtype"
    refuse(line, what, rule, "give such a buffer, or leave out= away")


def check_writable(line, x: Tensor, what: str) -> None:
    """ShardingError unless each element of x has a place in memory of its own, and holds what is written there."""
    if x.is_conj() or x.is_neg():
        rule = "a buffer holds its values as they are"
        refuse(line, f"{what} is a view that conjugates or negates", rule, "give it as .resolve_conj().resolve_neg()")
    if x.requires_grad and (x.is_leaf or what == "out") and torch.is_grad_enabled():
        rule = "what is written to a buffer is not differentiated"
        refuse(line, f"{what} requires a gradient", rule, "give another buffer, or call under torch.no_grad()")
    if not x.is_contiguous() and overlaps_itself(x):
        what = f"{what} has shape {tuple(x.shape)} and strides {x.stride()}: elements share their memory"
        refuse(line, what, "each element of a buffer is written once", "give it as .contiguous()")


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements may lie in one place. Exact for what slices, transposes and expands make of a tensor."""
    if not x.numel():
        return False
    room = 0  # elements from the first to the last, of the dims that vary faster
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride <= room:
            return True
        room += stride * (size - 1)
    return False


def overlap(out: Tensor, *operands: Tensor | None) -> bool:
    """Whether `out` shares memory with an operand: an element, where both lie in memory at all."""
    try:
        start, end = out.data_ptr(), out.data_ptr() + extent(out)
        for x in operands:
            if x is not None and x.data_ptr() < end and x.data_ptr() + extent(x) > start and _meet(out, x):
                return True
    except RuntimeError:  # a tracer's
        pass
    return False


def _meet(a: Tensor, b: Tensor) -> bool:
    if a.is_meta or b.is_meta or a.device != b.device or not (a.numel() and b.numel()):
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    import numpy  # rarely needed: for views that lie between each other, such as two columns of one matrix

    return numpy.shares_memory(_as_numpy(a), _as_numpy(b))


def extent(x: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if x.is_contiguous():
        return x.nbytes
    last = 0
    for stride, size in zip(x.stride(), x.shape, strict=True):
        last += stride * (size - 1)
    return (last + 1) * x.element_size()


def _as_numpy(x: Tensor):
    """An array that lies where x lies; its elements are never read."""
    import numpy

    size = x.element_size()
    where = {"version": 3, "typestr": f"|V{size}", "data": (x.data_ptr(), False)}
    where |= {"shape": tuple(x.shape), "strides": tuple(stride * size for stride in x.stride())}

    class Where:
        __array_interface__ = where

    return numpy.asarray(Where())
