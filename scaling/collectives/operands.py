"""Refuse operands that a product cannot multiply, with the rule and the fix."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from scaling.algebra.law import refuse_product
from scaling.collectives.linear import differentiated
from scaling.common.torch_private import constant
from scaling.spec import ShardingError, parse_line

_every = (dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))
NEED_SCALES = {dtype for dtype in _every if dtype.is_floating_point and dtype.itemsize == 1}  # float8 and float4


@constant
def refuse_unscaled(line: str, dtype: torch.dtype) -> NoReturn:
    what = f"an operand is {dtype}, without its scales"
    rule = "values of 8 bits or fewer are multiplied and added in a wider dtype, with their scales"
    refuse_product(line, what, rule, "multiply them by their scales first, e.g. x.to(torch.float32) * scale")


@constant
def refuse_operands(line: str, *shapes: tuple[int, ...], why: Sequence[str] = ()) -> NoReturn:
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
    """Raise the error of a product as a ShardingError, if it comes of the operands' kinds and not of their number."""
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
