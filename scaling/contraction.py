"""Matmuls of shards, typed: `einsum("In[B_X, D] * W_in[D, F_Y] -> Tmp[B_X, F_Y]", In, W_in)` (Part 3, cases 1 to 4).

Each rank multiplies its own shards: nothing is sent. That gives the shards of the product, or its partial sums, only
under the rules that are checked here, once a line:
1. a contracted dim is split alike in both operands; where it is split over X, the result is unreduced `{U_X}`;
2. a dim of the result is split as it is in the operand that brings it, and no two of them over the same axis;
3. an operand may be unreduced over X if the other one is replicated over X; then so is the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from scaling import trace
from scaling.matmul import matmul, matmul_into
from scaling.spec import Line, ShardingError, Spec, format_axes, parse_line
from scaling.traceable import constant


def einsum(line: str, a: torch.Tensor, b: torch.Tensor | None = None, out=None, add: bool = False) -> torch.Tensor:
    """The product (or, of one operand, the sum and transpose) that the line says, of this rank's shards.

    Dims are matched by name, as letters are in torch.einsum: those absent from the result are summed over. `out`: a
    buffer that is given away, to which the product is written, or with `add=True` added. The dims that the first
    operand brings are the outer ones in memory, wherever they stand in the result's type. Raises ShardingError if the
    line breaks a rule of Part 3, or if the operands' shapes do not fit their types.
    """
    if torch.compiler.is_compiling():
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
    if not trace.active():
        return product.multiply(a, b) if out is None else product.write(a, b, out, add)
    event = trace.Event("Einsum", (), product.line.operands, product.line.result, flops=product.flops(a, b))
    trace.record(event).start = trace.now()
    result = product.multiply(a, b) if out is None else product.write(a, b, out, add)
    event.end = trace.now()
    return result


@dataclass(frozen=True)
class Product:
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


_products: dict[str, Product] = {}


def compile_product(text: str) -> Product:
    """Check a line by the rules and choose how to run it: one matrix product where that needs no copy of an operand."""
    line = parse_line(text)
    if len(line.operands) > 2:
        raise ShardingError(f"{line}\n  einsum multiplies two operands at a time: write one line for each product")
    _check(line)
    if len(line.operands) == 1:
        equation = _equation(line)
        return Product(line, (), (len(line.operands[0].dims), None), lambda a, _: torch.einsum(equation, a))
    a, b = line.operands
    shared = tuple((a.index(dim), b.index(dim), dim) for dim in a.dim_names if dim in b.dim_names)
    return Product(line, shared, (len(a.dims), len(b.dims)), *(_matmul(a, b, line.result) or (_general(line),)))


def result_type(line: str | Line) -> Spec:
    """The type that the operands' product has, with the dims of the result; ShardingError if there is none."""
    line = parse_line(line)
    operands, result = line.operands, line.result
    axes_of, unreduced = {}, []
    for spec in operands:
        unreduced += spec.unreduced
        for dim, axes in spec.dims:
            if axes_of.setdefault(dim, axes) != axes:
                a, b = (f"over {format_axes(x)}" if x else "not at all" for x in (axes_of[dim], axes))
                _refuse(
                    line,
                    f"dim {dim} is split {a} in one operand and {b} in the other",
                    "case 2: both operands of a product are split alike along a dim that they share",
                    f"all_gather one of them over {format_axes(axes_of[dim] or axes)}, or shard the other",
                )
    if len(set(unreduced)) < len(unreduced):
        _refuse(line, "both operands are unreduced over one axis", "a product of sums is not the sum of the products",
                "all_reduce or reduce_scatter one of them first")  # fmt: skip
    summed = [axis for dim, axes in axes_of.items() if dim not in result.dim_names for axis in axes]
    for axis in unreduced:
        if any(axis in spec.axes for spec in operands):
            _refuse(line, f"one operand is unreduced over {axis}, over which the other is split",
                    f"a partial sum over {axis} may only meet what is replicated over {axis}",
                    f"all_reduce or reduce_scatter it over {axis} first")  # fmt: skip
    for dim in result.dim_names:
        if dim not in axes_of:
            _refuse(line, f"dim {dim} is in no operand", "every dim of the result comes from an operand")
    dims = tuple((dim, axes_of[dim]) for dim in result.dim_names)
    used = [axis for _, axes in dims for axis in axes] + summed
    for axis in used:
        if used.count(axis) > 1:
            _refuse(line, f"two dims of the operands are split over {axis}, and not the same one",
                    f"case 4: each device along {axis} would hold only the diagonal blocks of the product",
                    f"all_gather one operand over {axis} first")  # fmt: skip
    return Spec(result.name, dims, tuple(sorted({*unreduced, *summed})))


def _check(line: Line) -> None:
    dims = [set(spec.dim_names) for spec in line.operands]
    for dim in line.contract:
        if not all(dim in names for names in dims) or dim in line.result.dim_names:
            _refuse(line, f"*_{dim} says that {dim} is contracted", "both operands have it and the result does not")
    natural = result_type(line)
    if natural.same_sharding(line.result):
        return
    if missing := [axis for axis in natural.unreduced if axis not in line.result.unreduced]:
        over = format_axes(missing)
        carried = [axis for spec in line.operands for axis in spec.unreduced]
        rule = f"case 3: contracting a dim that is split over {over} leaves the result unreduced"
        _refuse(line, f"each device along {over} holds only a partial sum of the result",
                "a product with a partial sum is a partial sum" if set(missing) & set(carried) else rule,
                f"write {natural}, then reduce_scatter or all_reduce it")  # fmt: skip
    rule = "a product is split as its operands are: einsum sends nothing"
    _refuse(line, f"the product of these operands is {natural}", rule, "reshard the operands or the result")


def _refuse(line, what: str, rule: str, mend: str = "") -> None:
    raise ShardingError(f"einsum: {line}\n  {what}\n  rule: {rule}" + (f"\n  mend: {mend}" if mend else ""))


def _refuse_shapes(product: Product, a, b, dim: str | None) -> None:
    shapes = [tuple(x.shape) for x in (a, b) if x is not None]
    what = (
        "the operands do not have the dims of their types" if dim is None else f"they differ in the size of dim {dim}"
    )
    _refuse(product.line, f"shards of shapes {shapes}: {what}", "shards of one dim, split alike, have one size")


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
