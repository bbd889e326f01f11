"""Buffers that a caller gives away, `out=` and `donate=True`: what they are, so that nothing else is written over."""

from math import prod

from torch import Tensor

from scaling.collectives.torch_private import in_transform
from scaling.spec import ShardingError


def check_out(line, out: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """ShardingError unless `out` can hold a result of this shape, with the dtype and device of `like`."""
    if not isinstance(out, Tensor):
        refuse(line, f"out is a {type(out).__name__}", "out is a tensor that is given away for the result")
    if out.shape != shape:
        rule = "out has the shape of the result: what is written beyond it would be another tensor's"
        refuse(line, f"the result has shape {tuple(shape)}, out {tuple(out.shape)}", rule)
    if out.dtype != like.dtype or out.device != like.device:
        what = f"the result is {like.dtype} on {like.device}, out {out.dtype} on {out.device}"
        refuse(line, what, "out has the dtype and the device of the result: nothing is converted", "leave out= away")
    check_writable(line, out, "out")


def refuse_overlap(line) -> None:
    rule = "what is read is not written over"
    refuse(line, "out shares memory with an operand", rule, "give a buffer of its own, or leave out= away")


def check_writable(line, x: Tensor, what: str) -> None:
    """ShardingError unless each element of x has a place in memory of its own, and holds what is written there."""
    if x.is_conj() or x.is_neg():
        rule = "a buffer holds its values as they are"
        refuse(line, f"{what} is a view that conjugates or negates", rule, "give it as .resolve_conj().resolve_neg()")
    if not x.is_contiguous() and overlaps_itself(x):
        what = f"{what} has shape {tuple(x.shape)} and strides {x.stride()}: elements share their memory"
        refuse(line, what, "each element of a buffer is written once", "give it as .contiguous()")


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements may lie in one place. Exact for what slices, transposes and expands make of a tensor."""
    if not x.numel():
        return False
    room = 0  # elements from the first to the last, of the dims that vary faster
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if size and stride <= room:
            return True
        room += stride * (size - 1)
    return False


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether a and b have an element in one place of memory. Tensors that are not in memory have none."""
    if a.is_meta or b.is_meta or a.device != b.device or in_transform() is not None:
        return False
    (a_start, a_end), (b_start, b_end) = span(a), span(b)
    if a_end <= b_start or b_end <= a_start:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    import numpy  # rarely needed: for views that lie between each other, such as two columns of one matrix

    return numpy.shares_memory(_as_numpy(a), _as_numpy(b))


def span(x: Tensor) -> tuple[int, int]:
    """The bytes of memory from x's first element to the end of its last: (start, end), empty for no elements."""
    start, last = x.data_ptr(), 0
    if not x.numel():
        return start, start
    if x.is_contiguous():
        last = prod(x.shape) - 1
    else:
        last = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    return start, start + (last + 1) * x.element_size()


def _as_numpy(x: Tensor):
    """An array that lies where x lies; its elements are never read."""
    import numpy

    size = x.element_size()
    where = {"version": 3, "typestr": f"|V{size}", "data": (x.data_ptr(), False)}
    where |= {"shape": tuple(x.shape), "strides": tuple(stride * size for stride in x.stride())}

    class Where:
        __array_interface__ = where

    return numpy.asarray(Where())


def refuse(line, what: str, rule: str, fix: str = "") -> None:
    raise ShardingError(f"{line}\n  {what}\n  rule: {rule}" + (f"\n  fix: {fix}" if fix else ""))
