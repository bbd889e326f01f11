"""Matmuls of shards, typed: `einsum("In[B_X, D] * W_in[D, F_Y] -> Tmp[B_X, F_Y]", In, W_in)` (Part 3, cases 1 to 4).

Each rank multiplies its own shards: nothing is sent. That gives the shards of the product, or its partial sums, only
under the rules, checked once a line, of `scaling.algebra.law`.
"""

from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from scaling import trace
from scaling.algebra.law import check_product, refuse_product
from scaling.collectives.buffers import check_out, refuse_in_graph
from scaling.collectives.kernel import (
    Kernel,
    Order,
    Shapes,
    compile_product,
    compiled_matmul,
    einsum_kernel,
    equation_of,
    is_view,
    shapes_fit,
)
from scaling.collectives.linear import differentiated, watcher
from scaling.collectives.pending import Deferred, wait
from scaling.common.torch_private import constant
from scaling.spec import Line, ShardingError

DENSE = torch.strided
_products: dict[str, Kernel] = {}  # by line


@overload
def einsum(
    line: str, a, b=None, *, out: Tensor | None = ..., add: bool = ..., defer: Literal[False] = ...
) -> Tensor: ...
@overload
def einsum(line: str, a, b=None, *, out: Tensor | None = ..., add: bool = ..., defer: Literal[True]) -> Deferred: ...
def einsum(line: str, a: Any, b: Any = None, *, out: Tensor | None = None, add: bool = False, defer: bool = False):
    """The product (or, of one operand, the sum and transpose) that the line says, of this rank's shards.

    Dims are matched by name, as letters are in torch.einsum: those absent from the result are summed over. `out`: a
    preallocated output, overwritten and returned, or with `add=True` added to; it shares no memory with the
    operands, as the result does not. The dims that the first operand brings are the outer ones in memory, wherever they
    stand in the result's type. Under torch.autocast the product has the dtype that torch's has; in `out`, out's.
    An operand that is still under way is waited for. `defer`: check the line and the shapes now, and return a
    `Deferred` product, computed when it is waited for. Raises ShardingError if the line breaks a rule of Part 3, or if
    the operands' shapes or the buffer do not fit.
    """
    if not (isinstance(a, Tensor) and (b is None or isinstance(b, Tensor))):
        a, b = wait(a), wait(b)
    if torch.compiler.is_compiling():
        return Deferred(einsum, line, a, b) if defer else _compiled(line, a, b, out, add)
    if not defer and (watch := watcher.get()) is not None:
        return watch(einsum, line, a, b, out=out, add=add)
    product = _products.get(line)
    if product is None:
        product = _products[line] = compile_product(line)
    if a is None or (b is not None and a.is_meta is not b.is_meta):
        _refuse_operands(product.line, a, b)
    if not shapes_fit(product.shapes, a.shape, b if b is None else b.shape):
        _refuse_operands(product.line, a, b)
    if a.layout is not DENSE or (b is not None and b.layout is not DENSE):
        what = "an operand is sparse, of which torch gives some products wrong"
        refuse_product(product.line, what, "shards are dense tensors", "give them as .to_dense()")
    if defer:
        return Deferred(einsum, line, a, b)
    if out is not None:
        sizes: Any = a.shape, b if b is None else b.shape
        shape = torch.Size([sizes[operand][i] for operand, i in product.result])
        dtype = a.dtype if b is None else torch.promote_types(a.dtype, b.dtype)
        check_out(product, out, shape, dtype, a.device, a, b)
    elif add:
        refuse_product(product.line, "add=True without out", "a product is added to a buffer", "give out=")
    event = None
    if trace.open_logs:
        event = trace.Event("Einsum", (), product.line.operands, product.line.result, flops=product.flops(a, b))
        trace.record(event)
    try:
        if out is None:
            result = product.multiply(a, b)
        elif product.into is not None:
            result = product.into(a, b, out, add)
        else:
            result = out.add_(product.multiply(a, b)) if add else out.copy_(product.multiply(a, b))
    except RuntimeError as error:
        _refuse_kind(product.line, a, b, out, error)
        raise
    if event is not None:
        trace.done(event)
        event.memory, event.dtype = a.nbytes + (0 if b is None else b.nbytes) + result.nbytes, a.dtype
    return result


def _compiled(line: str, a: Tensor, b: Tensor | None, out: Tensor | None, add: bool) -> Tensor:
    """The same in a compiler's graph: by the equation, for which it finds the best kernel."""
    equation, order, copies, shapes = _constants(line)
    operands = (a,) if b is None else (a, b)
    if not shapes_fit(Shapes(*shapes), a.shape, None if b is None else b.shape):
        _refuse_shapes(line, *(tuple(x.shape) for x in operands))
    result = None if order is None or b is None else compiled_matmul(Order(*order), a, b)
    if result is None:
        result = einsum_kernel(equation, *operands)
    if out is None:
        return result.clone() if copies else result
    if out.shape != result.shape or out.dtype != result.dtype:
        refuse_in_graph(f"einsum: {line}", tuple(result.shape), result.dtype, tuple(out.shape), out.dtype)
    return out.add_(result) if add else out.copy_(result)


@constant
def _constants(line: str) -> tuple:
    """(equation, order, whether its result would be a view of the operand, shapes), the line checked."""
    product = compile_product(line)
    found, order = product.line, product.order
    return equation_of(found), order and tuple(order), is_view(found), tuple(product.shapes)


@constant
def _refuse_shapes(line: str, *shapes: tuple[int, ...]) -> None:
    _refuse_operands(check_product(line), *(torch.empty(shape, device="meta") for shape in shapes))


def _refuse_operands(line: Line, *operands: Tensor | None) -> NoReturn:
    given = [x for x in operands if x is not None]
    ranks, wanted = [x.dim() for x in given], [len(spec.dims) for spec in line.operands]
    sizes: dict[str, int] = {}
    why = []
    for x, spec in zip(given, line.operands, strict=False) if ranks == wanted else ():
        for (dim, axes), size in zip(spec.dims, x.shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                why.append(f"they differ in the size of dim {dim}")
            if dim.isdigit() and size != int(dim) and not (axes and size and int(dim) % size == 0):
                why.append(f"dim {dim} says its own size")
    if len({x.is_meta for x in given}) > 1:
        why.append("one of them is on the meta device, which holds shapes alone")
    what = "; ".join(why) or "the operands do not have the dims of their types"
    what = f"shards of shapes {[tuple(x.shape) for x in given]}: {what}"
    rule = "shards of one dim, split alike, have one size"
    refuse_product(line, what, rule, "give shards as their types say")


def _refuse_kind(line: Line, a: Tensor, b: Tensor | None, out: Tensor | None, error: RuntimeError) -> None:
    """The error of a product as a ShardingError, if it comes of the operands' kinds and not of their number."""
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
