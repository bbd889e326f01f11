"""Matmuls of shards, typed: `einsum("In[B_X, D] * W_in[D, F_Y] -> Tmp[B_X, F_Y]", In, W_in)` (Part 3, cases 1 to 4).

Each rank multiplies its own shards: nothing is sent. That gives the shards of the product, or its partial sums, only
under the rules, checked once a line, of `scaling.algebra.contraction`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from scaling import trace
from scaling.algebra.contraction import check_product, refuse_product
from scaling.collectives.calls import wait
from scaling.collectives.deferred import Deferred
from scaling.collectives.mkl import matmul, matmul_into
from scaling.collectives.torch_private import constant
from scaling.spec import Line, Spec


def einsum(line: str, a, b=None, out: torch.Tensor | None = None, add: bool = False, defer: bool = False):
    """The product (or, of one operand, the sum and transpose) that the line says, of this rank's shards.

    Dims are matched by name, as letters are in torch.einsum: those absent from the result are summed over. `out`: a
    buffer that is given away, to which the product is written, or with `add=True` added. The dims that the first
    operand brings are the outer ones in memory, wherever they stand in the result's type. An operand that is still
    under way is waited for. `defer`: check the line and the shapes now, and return a `Deferred` product, computed when
    it is waited for. Raises ShardingError if the line breaks a rule of Part 3, or if the operands' shapes do not fit.
    """
    a, b = wait(a), wait(b)
    if torch.compiler.is_compiling():
        if defer:
            return Deferred(einsum, line, a, b)
        result = torch.einsum(_constant_equation(line), *((a,) if b is None else (a, b)))
        return result if out is None else out.add_(result) if add else out.copy_(result)
    product = _products.get(line)
    if product is None:
        product = _products[line] = compile_product(line)
    if (a.dim(), None if b is None else b.dim()) != product.ranks:
        _refuse_shapes(product, a, b, None)
    for i, j, dim in product.shared:
        if a.shape[i] != b.shape[j]:
            _refuse_shapes(product, a, b, dim)
    if defer:
        return Deferred(einsum, line, a, b)
    if not trace.active():
        return product.multiply(a, b) if out is None else product.write(a, b, out, add)
    event = trace.Event("Einsum", (), product.line.operands, product.line.result, flops=product.flops(a, b))
    trace.record(event).start = trace.now()
    result = product.multiply(a, b) if out is None else product.write(a, b, out, add)
    event.end = trace.now()
    return result


@dataclass(frozen=True)
class Kernel:
    """A line made ready to run: `shared` holds (position in a, position in b, dim) of the dims that both have."""

    line: Line
    shared: tuple[tuple[int, int, str], ...]
    ranks: tuple[int, int | None]  # the operands' numbers of dims
    multiply: Callable
    into: Callable | None = None  # (a, b, out, add), where there is a kernel for it

    def write(self, a, b, out: torch.Tensor, add: bool) -> torch.Tensor:
        if self.into is not None:
            return self.into(a, b, out, add)
        return out.add_(self.multiply(a, b)) if add else out.copy_(self.multiply(a, b))

    def flops(self, a: torch.Tensor, b: torch.Tensor | None) -> int:
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
    if len(line.operands) == 1:
        equation = _equation(line)
        return Kernel(line, (), (len(line.operands[0].dims), None), lambda a, _: torch.einsum(equation, a))
    a, b = line.operands
    shared = tuple((a.index(dim), b.index(dim), dim) for dim in a.dim_names if dim in b.dim_names)
    return Kernel(line, shared, (len(a.dims), len(b.dims)), *(_matmul(a, b, line.result) or (_general(line),)))


def _refuse_shapes(product: Kernel, a, b, dim: str | None) -> None:
    shapes = [tuple(x.shape) for x in (a, b) if x is not None]
    what = (
        "the operands do not have the dims of their types" if dim is None else f"they differ in the size of dim {dim}"
    )
    refuse_product(product.line, f"shards of shapes {shapes}: {what}", "shards of one dim, split alike, have one size")


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

    def multiply(x, y):
        free_x, free_y = (x.shape[:-k] if plain_a else x.shape[k:]), (y.shape[k:] if plain_b else y.shape[:-k])
        m, n, inner = prod(free_x), prod(free_y), prod(x.shape[-k:] if plain_a else x.shape[:k])
        x = x.reshape(m, inner) if plain_a else x.reshape(inner, m).t()
        y = y.reshape(inner, n) if plain_b else y.reshape(n, inner).t()
        product = (x @ y).view((*free_x, *free_y))
        return product if ahead else product.permute(*range(len(left), product.dim()), *range(len(left)))

    return (multiply,)


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
    return lambda a, b: torch.einsum(equation, a, b)


@constant
def _constant_equation(line: str) -> str:
    """The line checked, and as the equation that a compiler is given to find the best kernel for."""
    return _equation(compile_product(line).line)


def _equation(line: Line) -> str:
    """The line in torch.einsum's letters: `A[I, J] * B[J, K] -> C[I, K]` -> "ab,bc->ac"."""
    letters: dict[str, str] = {}

    def write(dims: Sequence[str]) -> str:
        return "".join(letters.setdefault(dim, chr(ord("a") + len(letters))) for dim in dims)

    return ",".join(write(spec.dim_names) for spec in line.operands) + "->" + write(line.result.dim_names)
