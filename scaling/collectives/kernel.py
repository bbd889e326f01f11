"""How a product of shards runs: its line checked once, and made into the matrix product or the einsum that it is."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling._torch import lazy_clone
from scaling.algebra.contraction import check_product
from scaling.collectives.matrices import matmul, matmul_into
from scaling.spec import Line, Spec


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
        shape, shared = a.shape, self.shapes.shared
        twice = prod([shape[i] for i, _ in shared])  # the sizes that both have, counted in each
        contracts = len(shape) + len(b.shape) - len(shared) > len(self.result)
        return (2 if contracts else 1) * a.numel() * b.numel() // max(1, twice)


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


def shapes_fit(wanted: Shapes, a: Sequence[int], b: Any) -> bool:
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


def _matmul(a: Spec, b: Spec, result: Spec) -> tuple[Callable, ...] | None:
    """The product as one matrix product of the operands or their transposes, if their dims stand so; else None."""
    if orders := orders_of(a, b, result):
        return _matrices(*orders)
    summed = [dim for dim in a.dim_names if dim in b.dim_names and dim not in result.dim_names]
    left = [dim for dim in a.dim_names if dim not in summed]
    right = [dim for dim in b.dim_names if dim not in summed]
    plain_a, turned_a = [*a.dim_names] == left + summed, [*a.dim_names] == summed + left
    plain_b, turned_b = [*b.dim_names] == summed + right, [*b.dim_names] == right + summed
    ahead, behind = [*result.dim_names] == left + right, [*result.dim_names] == right + left
    fits = (plain_a or turned_a) and (plain_b or turned_b) and (ahead or behind)
    if not summed or set(left) & set(right) or not fits:
        return None
    k = len(summed)

    def flat(x, y):
        free_x, free_y = (x.shape[:-k] if plain_a else x.shape[k:]), (y.shape[k:] if plain_b else y.shape[:-k])
        m, n, inner = prod(free_x), prod(free_y), prod(x.shape[-k:] if plain_a else x.shape[:k])
        x = x.reshape(m, inner) if plain_a else x.reshape(inner, m).t()
        return x, y.reshape(inner, n) if plain_b else y.reshape(n, inner).t(), (*free_x, *free_y)

    def multiply(x, y):
        x, y, shape = flat(x, y)
        product = matmul(x, y).view(shape)
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
    equation = equation_of(line)
    if len(line.operands) == 2:
        return lambda a, b: einsum_kernel(equation, a, b)
    if is_view(line):
        return lambda a, _: lazy_clone(torch.einsum(equation, a))
    return lambda a, _: einsum_kernel(equation, a)


def einsum_kernel(equation: str, *operands: Tensor) -> Tensor:
    """torch.einsum, also of small whole numbers: torch makes some of their sums int64, and then refuses the product."""
    if operands[0].is_floating_point() or operands[-1].is_floating_point() or operands[0].is_complex():
        return torch.einsum(equation, *operands)
    dtype = torch.promote_types(operands[0].dtype, operands[-1].dtype)
    return torch.einsum(equation, *(x.long() for x in operands)).to(dtype)


def is_view(line: Line) -> bool:
    """Whether torch.einsum gives a view of the operand: the result of a line shares no memory with it."""
    return len(line.operands) == 1 and set(line.result.dim_names) == set(line.operands[0].dim_names)


def orders_of(*types: Spec) -> tuple[bool, bool, bool] | None:
    """Of the product of two matrices a, b -> result: whether these are [I, J], [J, K] and [I, K], or else transposed.
    None of any other product."""
    if len(types) != 3 or any(len(spec.dims) != 2 for spec in types):
        return None
    a, b, result = ([*spec.dim_names] for spec in types)
    summed = {*a} & {*b} - {*result}
    if len(summed) != 1 or len({*a, *b}) != 3:
        return None
    return a[1] in summed, b[0] in summed, result[0] in a


def equation_of(line: Line) -> str:
    """The line in torch.einsum's letters: `A[I, J] * B[J, K] -> C[I, K]` -> "ab,bc->ac"."""
    letters: dict[str, str] = {}

    def write(dims: Sequence[str]) -> str:
        return "".join(letters.setdefault(dim, chr(ord("a") + len(letters))) for dim in dims)

    return ",".join(write(spec.dim_names) for spec in line.operands) + "->" + write(line.result.dim_names)
