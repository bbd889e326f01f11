"""How a product of shards runs: its line checked once, and made into the matrix product or the einsum that it is."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.algebra.law import check_product
from scaling.common.torch_private import lazy_clone
from scaling.spec import Line, Spec


class Shapes(NamedTuple):
    """What a line says of its operands' shapes: the numbers of dims, `shared` (position in a, position in b) of those
    that both have, and `numbers` (operand, position, size, whether it is split) of the dims that are numbers."""

    a: int
    b: int | None
    shared: tuple[tuple[int, int], ...]
    numbers: tuple[tuple[int, int, int, bool], ...]


class Kernel(NamedTuple):
    """A line made ready to run: `multiply(a, b)`, and `into(a, b, out, add)` where there is a kernel for it: where
    it is a product of two matrices in some `order`. `result` holds (operand, position) of the result's dims."""

    line: Line
    shapes: Shapes
    result: tuple[tuple[int, int], ...]
    multiply: Callable
    into: Callable | None = None
    order: "Order | None" = None

    def __str__(self) -> str:
        return f"einsum: {self.line}"

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
    if order := order_of(*line.operands, line.result):
        return Kernel(line, shapes, result, *(_matrices if order.of_two(len(result)) else _matmul)(order), order)
    return Kernel(line, shapes, result, _general(line))


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


class Order(NamedTuple):
    """How a product is one of two matrices, each a group of dims side by side: so many dims of a are `rows` of the
    result, and so many of both are `summed` over. a[rows, summed], or transposed unless `plain_a`; b[summed, columns],
    or transposed unless `plain_b`; the result is [rows, columns] if `ahead`, or else transposed."""

    rows: int
    summed: int
    plain_a: bool
    plain_b: bool
    ahead: bool

    def of_two(self, dims: int) -> bool:
        """Whether the operands are matrices themselves: `dims` of the result, of which each brings one."""
        return self.rows == self.summed == dims - 1 == 1

    def matrices(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """(a[M, K], b[K, N], the sizes of the result's dims, a's first), a copy where dims do not lie together."""
        k = self.summed
        rows, inner = (a.shape[:-k], a.shape[-k:]) if self.plain_a else (a.shape[k:], a.shape[:k])
        columns = b.shape[k:] if self.plain_b else b.shape[:-k]
        m, n, inner = prod(rows), prod(columns), prod(inner)
        a = a.reshape(m, inner) if self.plain_a else a.reshape(inner, m).t()
        return a, b.reshape(inner, n) if self.plain_b else b.reshape(n, inner).t(), (*rows, *columns)

    def turned(self, product: Tensor) -> Tensor:
        """The product, whose dims stand as a's and then b's, with b's in front."""
        return product.permute(*range(self.rows, product.dim()), *range(self.rows))


def order_of(*types: Spec) -> Order | None:
    """Of a product a, b -> result: how it is one of matrices, or None if its dims do not stand so."""
    if len(types) != 3:
        return None
    a, b, result = ([*spec.dim_names] for spec in types)
    summed = [dim for dim in a if dim in b and dim not in result]
    left, right = [dim for dim in a if dim not in summed], [dim for dim in b if dim not in summed]
    plain_a, plain_b, ahead = a == left + summed, b == summed + right, result == left + right
    fits = (plain_a or a == summed + left) and (plain_b or b == right + summed) and (ahead or result == right + left)
    if not summed or set(left) & set(right) or not fits:
        return None
    return Order(len(left), len(summed), plain_a, plain_b, ahead)


def _matmul(order: Order) -> tuple[Callable, Callable]:
    """(multiply, into) of a product of matrices of several dims."""

    def multiply(a, b):
        a, b, shape = order.matrices(a, b)
        product = (a @ b).view(shape)
        return product if order.ahead else order.turned(product)

    def into(a, b, out, add):
        if not out.is_contiguous():
            return out.add_(multiply(a, b)) if add else out.copy_(multiply(a, b))
        a, b, _ = order.matrices(a, b)
        if not order.ahead:
            a, b = b.t(), a.t()
        matmul_into(a, b, out.view(len(a), b.shape[1]), add)
        return out

    return multiply, into


def _matrices(order: Order) -> tuple[Callable, Callable]:
    """(multiply, into) of two matrices. The product a b is computed even where its transpose is wanted."""
    _, _, plain_a, plain_b, ahead = order

    def multiply(a, b):
        product = (a if plain_a else a.t()) @ (b if plain_b else b.t())
        return product if ahead else product.t()

    def into(a, b, out, add):
        a, b = (a if plain_a else a.t()), (b if plain_b else b.t())
        if not ahead:
            a, b = b.t(), a.t()
        return matmul_into(a, b, out, add)

    return multiply, into


def matmul_into(a: Tensor, b: Tensor, out: Tensor, add: bool) -> Tensor:
    """out = a b, or with `add` out += a b, in place."""
    return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)


def compiled_matmul(order: Order, a: Tensor, b: Tensor) -> Tensor | None:
    """The product in a compiler's graph, or None where torch.einsum's is as good."""
    if not order.of_two(len(a.shape) + len(b.shape) - 2 * order.summed):
        return None
    x, y, shape = order.matrices(a, b)  # torch.einsum's is a product of batches of one, not written to its place
    product = torch.mm(x, y).view(shape)
    return product if order.ahead else order.turned(product)


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


def equation_of(line: Line) -> str:
    """The line in torch.einsum's letters: `A[I, J] * B[J, K] -> C[I, K]` -> "ab,bc->ac"."""
    letters: dict[str, str] = {}

    def write(dims: Sequence[str]) -> str:
        return "".join(letters.setdefault(dim, chr(ord("a") + len(letters))) for dim in dims)

    return ",".join(write(spec.dim_names) for spec in line.operands) + "->" + write(line.result.dim_names)
