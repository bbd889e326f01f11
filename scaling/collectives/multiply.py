"""Matmuls of shards, typed: `einsum("In[B_X, D] * W_in[D, F_Y] -> Tmp[B_X, F_Y]", In, W_in)` (Part 3, cases 1 to 4).

Each rank multiplies its own shards: nothing is sent. That gives the shards of the product, or its partial sums, only
under the rules, checked once a line, of `scaling.algebra.contraction`.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from scaling import trace
from scaling.algebra.contraction import check_product, refuse_product
from scaling.collectives.buffers import check_out, overlap, refuse_overlap
from scaling.collectives.calls import wait
from scaling.collectives.deferred import Deferred
from scaling.collectives.linear import differentiated
from scaling.collectives.mkl import matmul, matmul_into
from scaling.collectives.torch_private import constant, lazy_clone
from scaling.spec import Line, ShardingError, Spec


@overload
def einsum(
    line: str, a, b=None, *, out: Tensor | None = ..., add: bool = ..., defer: Literal[False] = ...
) -> Tensor: ...
@overload
def einsum(line: str, a, b=None, *, out: Tensor | None = ..., add: bool = ..., defer: Literal[True]) -> Deferred: ...
def einsum(line: str, a, b=None, *, out: Tensor | None = None, add: bool = False, defer: bool = False):
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
    product = _products.get(line)
    if product is None:
        product = _products[line] = compile_product(line)
    one_is_meta = a is None or (b is not None and a.is_meta is not b.is_meta)
    if one_is_meta or not _fits(product.shapes, a.shape, b if b is None else b.shape):
        _refuse_operands(product.line, a, b)
    if defer:
        return Deferred(einsum, line, a, b)
    if out is not None or add:
        _check_out(product, a, b, out)
    if not trace.active():
        return _run(product, a, b, out, add)
    event = trace.Event("Einsum", (), product.line.operands, product.line.result, flops=product.flops(a, b))
    trace.record(event).start = trace.now()
    result = _run(product, a, b, out, add)
    event.end = trace.now()
    return result


def _run(product: "Kernel", a: Tensor, b: Tensor | None, out: Tensor | None, add: bool) -> Tensor:
    try:
        if out is None:
            return product.multiply(a, b)
        if product.into is not None:
            return product.into(a, b, out, add)
        return out.add_(product.multiply(a, b)) if add else out.copy_(product.multiply(a, b))
    except RuntimeError as error:
        _refuse_kind(product.line, a, b, out, error)
        raise


def _compiled(line: str, a: Tensor, b: Tensor | None, out: Tensor | None, add: bool) -> Tensor:
    """The same in a compiler's graph: by the equation, for which it finds the best kernel."""
    equation, copies, shapes = _constants(line)
    operands = (a,) if b is None else (a, b)
    if not _fits(Shapes(*shapes), a.shape, None if b is None else b.shape):
        _refuse_shapes(line, *(tuple(x.shape) for x in operands))
    result = _evaluate(equation, *operands)
    if out is None:
        return result.clone() if copies else result
    if out.shape != result.shape or out.dtype != result.dtype:
        _refuse_buffer(line, tuple(result.shape), result.dtype, tuple(out.shape), out.dtype)
    return out.add_(result) if add else out.copy_(result)


@constant
def _constants(line: str) -> tuple:
    """(equation, whether its result would be a view of the operand, shapes), the line checked."""
    product = compile_product(line)
    return _equation(product.line), _is_view(product.line), tuple(product.shapes)


@constant
def _refuse_shapes(line: str, *shapes: tuple[int, ...]) -> None:
    _refuse_operands(check_product(line), *(torch.empty(shape, device="meta") for shape in shapes))


@constant
def _refuse_buffer(line: str, shape, dtype, given, found) -> None:
    what, rule = f"the result is {dtype}{list(shape)}, out {found}{list(given)}", "out has the result's shape and dtype"
    refuse_product(check_product(line), what, rule)


class Shapes(NamedTuple):
    """What a line says of its operands' shapes: the numbers of dims, `shared` (position in a, position in b) of those
    that both have, and `numbers` (operand, position, size, whether it is split) of the dims that are numbers."""

    a: int
    b: int | None
    shared: tuple[tuple[int, int], ...]
    numbers: tuple[tuple[int, int, int, bool], ...]


class Kernel(NamedTuple):
    """A line made ready to run: `multiply(a, b)`, and `into(a, b, out, add)` where there is a kernel for it. `result`
    holds (operand, position) of the result's dims."""

    line: Line
    shapes: Shapes
    result: tuple[tuple[int, int], ...]
    multiply: Callable
    into: Callable | None = None

    def flops(self, a: Tensor, b: Tensor | None) -> int:
        """2 x the product of all sizes if a dim is contracted, else 1 x (Part 4, Counting Dots), 0 for one operand."""
        if b is None:
            return 0
        sizes = dict(zip(self.line.operands[0].dim_names, a.shape, strict=True))
        sizes |= dict(zip(self.line.operands[1].dim_names, b.shape, strict=True))
        return prod(sizes.values()) * (2 if set(sizes) - set(self.line.result.dim_names) else 1)


_products: dict[str, Kernel] = {}


def compile_product(text: str) -> Kernel:
    """Check a line by the rules and choose how to run it: one matrix product where that needs no copy of an operand."""
    line = check_product(text)
    a = line.operands[0]
    b: Any = line.operands[1] if len(line.operands) == 2 else None
    shared = tuple((a.index(dim), b.index(dim)) for dim in a.dim_names if b and dim in b.dim_names)
    numbers = tuple(
        (operand, i, int(dim), bool(axes))
        for operand, spec in enumerate(line.operands)
        for i, (dim, axes) in enumerate(spec.dims)
        if dim.isdigit()
    )
    result = tuple((0, a.index(d)) if d in a.dim_names else (1, b.index(d)) for d in line.result.dim_names)
    shapes = Shapes(len(a.dims), None if b is None else len(b.dims), shared, numbers)
    return Kernel(line, shapes, result, *((b and _matmul(a, b, line.result)) or (_general(line),)))


def _fits(wanted: Shapes, a: Sequence[int], b: Any) -> bool:
    """Whether operands of these shapes have the dims of their types, and sizes that meet. A dim that is a number has
    that size, or where it is split, one that divides it."""
    if len(a) != wanted.a or (wanted.b is not None if b is None else len(b) != wanted.b):
        return False
    other: Sequence[int] = () if b is None else b
    for i, j in wanted.shared:
        if a[i] != other[j]:
            return False
    for operand, i, size, is_split in wanted.numbers:
        own = (other if operand else a)[i]
        if own != size and not (is_split and own and size % own == 0):
            return False
    return True


def _refuse_operands(line: Line, *operands: Tensor | None) -> None:
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
    rule = "shards of one dim, split alike, have one size"
    refuse_product(line, f"shards of shapes {[tuple(x.shape) for x in given]}: {what}", rule)


def _check_out(product: Kernel, a: Tensor, b: Tensor | None, out: Tensor | None) -> None:
    """ShardingError unless `out` can hold the product, and shares no memory with the operands."""
    if out is None:
        refuse_product(product.line, "add=True without out", "a product is added to a buffer", "give out=")
    sizes: Any = a.shape, b if b is None else b.shape
    shape = tuple([sizes[operand][i] for operand, i in product.result])
    fits = isinstance(out, Tensor) and out.shape == shape and out.dtype is a.dtype
    if not fits or out.requires_grad or not out.is_contiguous() or out.device != a.device:
        dtype = a.dtype if b is None else torch.promote_types(a.dtype, b.dtype)
        check_out(f"einsum: {product.line}", out, shape, dtype, a.device)
    if overlap(out, a, b):
        refuse_overlap(f"einsum: {product.line}")


def _refuse_kind(line: Line, a: Tensor, b: Tensor | None, out: Tensor | None, error: RuntimeError) -> None:
    """The error of a product as a ShardingError, if it comes of the operands' kinds and not of their number."""
    rule = fix = ""
    if b is not None and (a.dtype != b.dtype or a.device != b.device):
        rule = f"the operands, {a.dtype} on {a.device} and {b.dtype} on {b.device}, have one dtype and one device"
    elif any(x is not None and x.layout != torch.strided for x in (a, b)):
        rule, fix = "shards are dense tensors", "give them as .to_dense()"
    elif out is not None and any(x is not None and differentiated(x) for x in (a, b, out)):
        rule, fix = "what is written to a buffer is not differentiated", "leave out= away"
    if rule:
        raise ShardingError(
            f"einsum: {line}\n  {error}\n  rule: {rule}" + (f"\n  fix: {fix}" if fix else "")
        ) from error


def _matmul(a: Spec, b: Spec, result: Spec) -> tuple[Callable, ...] | None:
    """The product as one matrix product of the operands or their transposes, if their dims stand so; else None."""
    summed = [dim for dim in a.dim_names if dim in b.dim_names and dim not in result.dim_names]
    left = [dim for dim in a.dim_names if dim not in summed]
    right = [dim for dim in b.dim_names if dim not in summed]
    plain_a, turned_a = [*a.dim_names] == left + summed, [*a.dim_names] == summed + left
    plain_b, turned_b = [*b.dim_names] == summed + right, [*b.dim_names] == right + summed
    ahead, behind = [*result.dim_names] == left + right, [*result.dim_names] == right + left
    fits = (plain_a or turned_a) and (plain_b or turned_b) and (ahead or behind)
    if not summed or set(left) & set(right) or not fits:
        return None
    if len(left) == len(summed) == len(right) == 1:
        return _matrices(plain_a, plain_b, ahead)
    k = len(summed)

    def flat(x, y):
        free_x, free_y = (x.shape[:-k] if plain_a else x.shape[k:]), (y.shape[k:] if plain_b else y.shape[:-k])
        m, n, inner = prod(free_x), prod(free_y), prod(x.shape[-k:] if plain_a else x.shape[:k])
        x = x.reshape(m, inner) if plain_a else x.reshape(inner, m).t()
        return x, y.reshape(inner, n) if plain_b else y.reshape(n, inner).t(), (*free_x, *free_y)

    def multiply(x, y):
        x, y, shape = flat(x, y)
        product = (x @ y).view(shape)
        return product if ahead else product.permute(*range(len(left), product.dim()), *range(len(left)))

    def into(x, y, out, add):
        if not out.is_contiguous():
            return out.add_(multiply(x, y)) if add else out.copy_(multiply(x, y))
        x, y, _ = flat(x, y)
        if not ahead:
            x, y = y.t(), x.t()
        matmul_into(x, y, out.view(len(x), y.shape[1]), add)
        return out

    return multiply, into


def _matrices(plain_a: bool, plain_b: bool, ahead: bool) -> tuple[Callable, Callable]:
    """Two matrices: (multiply, into). The product a b is computed even where its transpose is wanted."""

    def multiply(a, b):
        product = matmul(a if plain_a else a.t(), b if plain_b else b.t())
        return product if ahead else product.t()

    def into(a, b, out, add):
        a, b = (a if plain_a else a.t()), (b if plain_b else b.t())
        if not ahead:
            a, b = b.t(), a.t()
        return matmul_into(a, b, out, add)

    return multiply, into


def _general(line: Line) -> Callable:
    equation = _equation(line)
    if len(line.operands) == 2:
        return lambda a, b: _evaluate(equation, a, b)
    if _is_view(line):
        return lambda a, _: lazy_clone(torch.einsum(equation, a))
    return lambda a, _: _evaluate(equation, a)


def _evaluate(equation: str, *operands: Tensor) -> Tensor:
    """torch.einsum, also of small whole numbers: torch makes some of their sums int64, and then refuses the product."""
    if operands[0].is_floating_point() or operands[-1].is_floating_point() or operands[0].is_complex():
        return torch.einsum(equation, *operands)
    dtype = torch.promote_types(operands[0].dtype, operands[-1].dtype)
    return torch.einsum(equation, *(x.long() for x in operands)).to(dtype)


def _is_view(line: Line) -> bool:
    """Whether torch.einsum gives a view of the operand: the result of a line shares no memory with it."""
    return len(line.operands) == 1 and set(line.result.dim_names) == set(line.operands[0].dim_names)


def _equation(line: Line) -> str:
    """The line in torch.einsum's letters: `A[I, J] * B[J, K] -> C[I, K]` -> "ab,bc->ac"."""
    letters: dict[str, str] = {}

    def write(dims: Sequence[str]) -> str:
        return "".join(letters.setdefault(dim, chr(ord("a") + len(letters))) for dim in dims)

    return ",".join(write(spec.dim_names) for spec in line.operands) + "->" + write(line.result.dim_names)
