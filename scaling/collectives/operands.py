"""Check the operands of products, and the preallocated outputs `out=` and `donate=True`."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from scaling.algebra.law import refuse_product
from scaling.collectives.linear import differentiated
from scaling.common.torch_private import constant
from scaling.spec import ShardingError, parse_line, refuse

Operand = Any  # a Tensor, or a scaling.scaled.Scaled


def check_out(line, out: Tensor, shape: torch.Size, dtype, device, *operands: Tensor | None, own=None) -> None:
    """Raise a ShardingError unless `out` can take a result of this shape, dtype and device.

    It must share no memory with the operands. Only the first operand may be a part of it: the block `own`, which is
    given as (dim, number).
    """
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
    """Return whether x is this block of a buffer that it is gathered into."""
    block = out.narrow(dim, number * x.shape[dim], x.shape[dim])
    return block.data_ptr() == x.data_ptr() and block.stride() == x.stride()


@constant
def refuse_in_graph(line: str, shape, dtype, given, found) -> None:
    """Raise the error of a buffer that does not fit, while compiling."""
    what, rule = f"the result is {dtype}{list(shape)}, out {found}{list(given)}", "out has the result's shape and dtype"
    refuse(line, what, rule, "give such a buffer, or leave out= away")


def check_writable(line, x: Tensor, what: str) -> None:
    """Raise a ShardingError unless each element of x has its own memory and holds exactly the values written there."""
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
    """Return whether two elements may share memory; exact for slices, transposes and expands of a tensor."""
    if not x.numel():
        return False
    room = 0  # distance from the first element to the last over the faster dims
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride <= room:
            return True
        room += stride * (size - 1)
    return False


def overlap(out: Tensor, *operands: Tensor | None) -> bool:
    """Return whether `out` shares memory with an operand: an element, if both have memory at all."""
    try:
        start, end = out.data_ptr(), out.data_ptr() + extent(out)
        for x in operands:
            if x is not None and x.data_ptr() < end and x.data_ptr() + extent(x) > start and _meet(out, x):
                return True
    except RuntimeError:  # a tracer's tensor has no memory
        pass
    return False


def _meet(a: Tensor, b: Tensor) -> bool:
    if a.is_meta or b.is_meta or a.device != b.device or not (a.numel() and b.numel()):
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    import numpy  # rarely needed: for interleaved views, such as two columns of one matrix

    return numpy.shares_memory(_as_numpy(a), _as_numpy(b))


def extent(x: Tensor) -> int:
    """Return the bytes from the first element to the end of the last."""
    if x.is_contiguous():
        return x.nbytes
    last = 0
    for stride, size in zip(x.stride(), x.shape, strict=True):
        last += stride * (size - 1)
    return (last + 1) * x.element_size()


def _as_numpy(x: Tensor):
    """Return an array at the same memory as x; its elements are never read."""
    import numpy

    size = x.element_size()
    where = {"version": 3, "typestr": f"|V{size}", "data": (x.data_ptr(), False)}
    where |= {"shape": tuple(x.shape), "strides": tuple(stride * size for stride in x.stride())}

    class Where:
        __array_interface__ = where

    return numpy.asarray(Where())


# The operands of a product

_every = (dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))
NEED_SCALES = {dtype for dtype in _every if dtype.is_floating_point and dtype.itemsize == 1}  # float8 and float4


@constant
def refuse_unscaled(line: str, dtype: torch.dtype) -> NoReturn:
    """Refuse a product of values that have scales."""
    what = f"an operand is {dtype}, without its scales"
    rule = "values of 8 bits or fewer are multiplied and added in a wider dtype, with their scales"
    refuse_product(line, what, rule, "multiply them by their scales first, e.g. x.to(torch.float32) * scale")


@constant
def refuse_add(line: str) -> NoReturn:
    """Refuse add=True without a buffer."""
    refuse_product(line, "add=True without out", "a product is added to a buffer", "give out=")


@constant
def refuse_operands(line: str, *shapes: tuple[int, ...], why: Sequence[str] = ()) -> NoReturn:
    """Refuse operands whose shapes do not fit the line, and say why."""
    types = parse_line(line).operands
    sizes: dict[str, int] = {}
    why = [*why]
    for shape, spec in zip(shapes, types, strict=False) if [*map(len, shapes)] == [len(t.dims) for t in types] else ():
        for (dim, axes), size in zip(spec.dims, shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                why.append(f"they differ in the size of dim {dim}")
            if dim.isdigit() and size != int(dim) and not (axes and size and int(dim) % size == 0):
                why.append(f"dim {dim} says its own size")
    what = f"shards of shapes {[*shapes]}: {'; '.join(why) or 'the operands do not have the dims of their types'}"
    refuse_product(line, what, "shards of one dim, split alike, have one size", "give shards as their types say")


def refuse_kind(line: str, a: Tensor, b: Tensor | None, out: Tensor | None, error: RuntimeError) -> None:
    """Turn the error of a product into a ShardingError if the operands' kinds, not their values, caused it."""
    rule = fix = ""
    if b is not None and (a.dtype != b.dtype or a.device != b.device):
        rule = f"the operands, {a.dtype} on {a.device} and {b.dtype} on {b.device}, have one dtype and one device"
        fix = "convert or move one of them, .to(...)"
    elif out is not None and any(x is not None and differentiated(x) for x in (a, b, out)):
        rule, fix = "what is written to a buffer is not differentiated", "leave out= away"
    elif isinstance(error, NotImplementedError):
        rule, fix = f"torch has a kernel for it; of {a.dtype} it has none", "convert the operands, .float() or .long()"
    if rule:
        raise ShardingError(f"einsum: {line}\n  {error}\n  rule: {rule}\n  fix: {fix}") from error
