"""Multiply shards by a typed line: `einsum("In[B_X, D] * W_in[D, F_Y] -> Tmp[B_X, F_Y]", In, W_in)` (Part 3).

Each rank multiplies its own shards, and nothing is sent (cases 1 to 4). That gives the shards of the product, or its
partial sums, only under the rules of `scaling.algebra.law`, which are checked once for each line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, strided

from scaling import trace
from scaling.algebra.law import check_product, refuse_product
from scaling.collectives.linear import wait, watcher, who_watches
from scaling.collectives.operands import (
    NEED_SCALES,
    check_out,
    refuse_add,
    refuse_in_graph,
    refuse_kind,
    refuse_operands,
    refuse_unscaled,
)
from scaling.common.torch_private import constant, lazy_clone
from scaling.spec import Spec, parse_line


class LocalProduct(NamedTuple):
    """A prepared line, as constants that a compiler can keep in its graph.

    A line may be a product of two matrices whose rows, columns and summed dims are groups of adjacent dims. The fields
    from `rows` on describe it. In any other line `summed` is 0, and torch.einsum computes `equation`.

    Attributes:
        line: The line.
        equation: The line as an equation of torch.einsum.
        dims: The number of dims of a and of b; -1 if there is no b.
        shared: (position in a, position in b) of each dim that both have.
        numbers: (operand, position, size, whether it is split) of each dim whose name is a number.
        result: (operand, position) of each dim of the result.
        is_view: Whether torch.einsum would return a view of the operand.
        rows: The number of dims of a that are rows of the result.
        summed: The number of dims that are summed over.
        plain_a: Whether a is [rows, summed], not its transpose.
        plain_b: Whether b is [summed, columns], not its transpose.
        ahead: Whether the result is [rows, columns], not its transpose.
        two: Whether both operands have two dims.
    """

    line: str
    equation: str
    dims: tuple[int, int]
    shared: tuple[tuple[int, int], ...]
    numbers: tuple[tuple[int, int, int, bool], ...]
    result: tuple[tuple[int, int], ...]
    is_view: bool
    rows: int = 0
    summed: int = 0
    plain_a: bool = True
    plain_b: bool = True
    ahead: bool = True
    two: bool = False

    def __str__(self) -> str:
        return f"einsum: {self.line}"

    def fits(self, a: Sequence[int], b: Any) -> bool:
        """Return whether operands of these shapes have the dims of their types, with equal sizes for shared dims.

        A dim that is a number has that size; if it is split, a size that divides it.
        """
        of_a, of_b = self.dims
        other: Any = b
        if len(a) != of_a or (-1 if b is None else len(b)) != of_b:
            return False
        for i, j in self.shared:
            if a[i] != other[j]:
                return False
        for operand, i, size, is_split in self.numbers:
            local = (other if operand else a)[i]
            if local != size and not (is_split and local and size % local == 0):
                return False
        return True

    def shape(self, a: Tensor, b: Tensor | None) -> torch.Size:
        """Return the shape of the result."""
        sizes: list[int] = []
        for operand, i in self.result:
            sizes.append(cast(Tensor, b if operand else a).shape[i])
        return torch.Size(sizes)

    def flops(self, a: Tensor, b: Tensor | None) -> int:
        """Return 2 x the product of all sizes if a dim is contracted, else 1 x (Part 4); 0 for one operand."""
        if b is None:
            return 0
        twice = prod([a.shape[i] for i, _ in self.shared])  # the shared sizes, which both operands count
        contracts = sum(self.dims) - len(self.shared) > len(self.result)
        return (2 if contracts else 1) * a.numel() * b.numel() // max(1, twice)

    def multiply(self, a: Tensor, b: Any) -> Tensor:
        """Return the product. A product of two matrices is computed as a b, and then transposed if that is wanted."""
        if self.two:
            product = (a if self.plain_a else a.t()) @ (b if self.plain_b else b.t())
            return product if self.ahead else product.t()
        if self.summed:
            a, b, shape = self.matrices(a, b)
            product = (a @ b).view(shape)
            return product if self.ahead else product.permute(*range(self.rows, len(shape)), *range(self.rows))
        result = self.by_equation(a, b)
        return lazy_clone(result) if self.is_view else result

    def into(self, a: Tensor, b: Any, out: Tensor, add: bool) -> Tensor:
        """Write the product to `out`, or with `add` add it to `out`."""
        if self.two:
            a, b = (a if self.plain_a else a.t()), (b if self.plain_b else b.t())
        elif self.summed and out.is_contiguous():
            a, b, _ = self.matrices(a, b)
        else:
            result = self.multiply(a, b)
            return out.add_(result) if add else out.copy_(result)
        if not self.ahead:
            a, b = b.t(), a.t()
        whole = out if self.two else out.view(len(a), b.shape[1])
        torch.addmm(whole, a, b, out=whole) if add else torch.mm(a, b, out=whole)
        return out

    def matrices(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Return (a[M, K], b[K, N], the sizes of the result's dims, a's first).

        Operands are copied if dims are not adjacent in memory.
        """
        k = self.summed
        rows, inner = (a.shape[:-k], a.shape[-k:]) if self.plain_a else (a.shape[k:], a.shape[:k])
        columns = b.shape[k:] if self.plain_b else b.shape[:-k]
        m, n, inner = prod(rows), prod(columns), prod(inner)
        a = a.reshape(m, inner) if self.plain_a else a.reshape(inner, m).t()
        return a, b.reshape(inner, n) if self.plain_b else b.reshape(n, inner).t(), (*rows, *columns)

    def by_equation(self, a: Tensor, b: Tensor | None) -> Tensor:
        """Run torch.einsum, on integers as int64: it would widen only an operand that it sums, and then fail."""
        operands = (a,) if b is None else (a, b)
        if a.is_floating_point() or operands[-1].is_floating_point() or a.is_complex():
            return torch.einsum(self.equation, *operands)
        dtype = torch.promote_types(a.dtype, operands[-1].dtype)
        return torch.einsum(self.equation, *(x.long() for x in operands)).to(dtype)


@lru_cache(maxsize=4096)
def product_of(text: str) -> LocalProduct:
    """Parse a line, check it by the rules, and return its product."""
    line = check_product(text)
    if scaled := next((spec for spec in line.operands if spec.scaled), None):
        rule = "an array with scales is its values and its scales"
        refuse_product(line, f"{scaled} is a plain tensor", rule, "quantize it first, or leave {Q} out")
    a, *others = [[*spec.dim_names] for spec in line.operands]
    b, result = others[0] if others else [], [*line.result.dim_names]
    letters = {dim: chr(ord("a") + i) for i, dim in enumerate(dict.fromkeys(a + b))}
    sides = [",".join("".join(letters[dim] for dim in dims) for dims in side) for side in ([a, *others], [result])]
    shared = tuple((a.index(dim), b.index(dim)) for dim in a if dim in b)
    each = [(operand, i, *dim) for operand, spec in enumerate(line.operands) for i, dim in enumerate(spec.dims)]
    numbers = tuple((operand, i, int(dim), bool(axes)) for operand, i, dim, axes in each if dim.isdigit())
    places = tuple((0, a.index(dim)) if dim in a else (1, b.index(dim)) for dim in result)
    dims = len(a), len(b) if others else -1
    is_view = dims == (len(result), -1)  # a line's result must not share memory with its operand
    product = LocalProduct(str(line), "->".join(sides), dims, shared, numbers, places, is_view)
    summed = [dim for dim in a if dim in b and dim not in result]
    left, right = [dim for dim in a if dim not in summed], [dim for dim in b if dim not in summed]
    plain_a, plain_b, ahead = a == left + summed, b == summed + right, result == left + right
    fits = (plain_a or a == summed + left) and (plain_b or b == right + summed) and (ahead or result == right + left)
    if not summed or set(left) & set(right) or not fits:
        return product
    rows, terms, two = len(left), len(summed), len(left) == len(right) == len(summed) == 1
    return product._replace(rows=rows, summed=terms, plain_a=plain_a, plain_b=plain_b, ahead=ahead, two=two)


@dataclass(frozen=True)
class Deferred:
    """A checked product that is computed when it is waited for. It keeps its operands alive."""

    line: str
    a: Tensor
    b: Any

    def wait(self, out: Tensor | None = None, add: bool = False) -> Tensor:
        """Return the product; it is written to a buffer `out` if one is given, or with `add` added to it."""
        given, watch = (self.line, self.a, self.b), who_watches()
        return einsum(*given, out=out, add=add) if watch is None else watch.product(*given, out, add, self)

    @property
    def type(self) -> Spec:
        """The type of the result."""
        return parse_line(self.line).result

    @property
    def shape(self) -> torch.Size:
        """The local shape of the result."""
        return LocalProduct(*_constants(self.line)).shape(self.a, self.b)


def join_products(products: Sequence[Deferred]) -> Deferred:
    """Return the sum of products of one line, such as several microbatches' gradients, as one product.

    The operands are joined along the first dim that is summed over, since a sum over a few long rows is one matmul.
    """
    first = products[0]
    if len(products) == 1:
        return first
    if any(product.line != first.line for product in products):
        what, fix = f"only products of one line are joined, not {first.line} and others", "join products of one line"
        raise ValueError(f"{what}\n  fix: {fix} at a time")
    (a, b), result = parse_line(first.line).operands, parse_line(first.line).result
    dim = next(dim for dim in a.dim_names if dim in b.dim_names and dim not in result.dim_names)
    As = torch.cat([product.a for product in products], a.index(dim))
    Bs = torch.cat([product.b for product in products], b.index(dim))
    joined, watch = Deferred(first.line, As, Bs), who_watches()
    return joined if watch is None else watch.join(products, joined)


def einsum(
    line: str, a: Any, b: Any = None, *, out: Tensor | None = None, add: bool = False, defer: bool = False
) -> Any:
    """Return the line's product of this rank's shards; with one operand, its sum and transpose.

    Dims are matched by name, as letters are in torch.einsum; dims that the result lacks are summed over. The dims of
    the first operand are the outer ones in memory, wherever they are in the result's type. Under torch.autocast the
    product has the dtype of torch's product; in `out`, out's. An operand that is still in flight is waited for.

    Args:
        line: the typed line.
        a: this rank's shard of the first operand.
        b: this rank's shard of the second operand, if there is one.
        out: a preallocated output, overwritten and returned; it shares no memory with the operands.
        add: whether the product is added to `out`.
        defer: whether only the line and the shapes are checked now, and a `Deferred` product is returned.

    Raises:
        ShardingError: the line breaks a rule of Part 3, or the operands' shapes or the buffer do not fit.
    """
    if not (isinstance(a, Tensor) and (b is None or isinstance(b, Tensor))):
        a, b = wait(a), wait(b)
        for scaled in (x for x in (a, b) if hasattr(x, "multiplied")):  # scaling.scaled.Scaled
            return scaled.multiplied(line, a, b, out, add, defer)
    if torch.compiler.is_compiling():
        return Deferred(line, a, b) if defer else _compiled(line, a, b, out, add)
    if (watch := watcher.get()) is not None and not defer:
        return watch.product(line, a, b, out, add)
    product = product_of(line)
    if a is None or not product.fits(a.shape, b if b is None else b.shape):
        refuse_operands(product.line, *(tuple(x.shape) for x in (a, b) if x is not None))
    if b is not None and a.is_meta is not b.is_meta:
        why = ["one of them is on the meta device, which holds shapes alone"]
        refuse_operands(product.line, tuple(a.shape), tuple(b.shape), why=why)
    if a.layout is not strided or (b is not None and b.layout is not strided):
        what = "an operand is sparse, of which torch gives some products wrong"
        refuse_product(product.line, what, "shards are dense tensors", "give them as .to_dense()")
    if a.dtype in NEED_SCALES and not product.is_view:  # and b, or torch refuses them
        refuse_unscaled(product.line, a.dtype)
    if defer:
        return Deferred(line, a, b) if watch is None else watch.defer(Deferred(line, a, b))
    if out is not None:
        dtype = a.dtype if b is None else torch.promote_types(a.dtype, b.dtype)
        check_out(product, out, product.shape(a, b), dtype, a.device, a, b)
    elif add:
        refuse_add(line)
    event = None
    if trace.open_logs:
        typed = parse_line(line)
        event = trace.record(trace.Event("Einsum", (), typed.operands, typed.result, flops=product.flops(a, b)))
    try:
        result = product.multiply(a, b) if out is None else product.into(a, b, out, add)
    except RuntimeError as error:
        refuse_kind(product.line, a, b, out, error)
        raise
    if event is not None:
        trace.done(event)
        event.memory = a.nbytes, *(() if b is None else (b.nbytes,)), result.nbytes
        event.dtype = a.dtype
    return result


def _compiled(line: str, a: Tensor, b: Tensor | None, out: Tensor | None, add: bool) -> Tensor:
    """Return the product in a compiler's graph.

    A compiler finds the best kernel for an equation. A product of two matrices is the exception: its equation would
    become a batched product with a batch of one, which is not written directly to its place.
    """
    product = LocalProduct(*_constants(line))
    if not product.fits(a.shape, None if b is None else b.shape):
        refuse_operands(product.line, *(tuple(x.shape) for x in (a, b) if x is not None))
    if a.dtype in NEED_SCALES and not product.is_view:  # and b, or torch refuses them
        refuse_unscaled(product.line, a.dtype)
    result = product.multiply(a, b) if product.two else product.by_equation(a, b)
    if out is None:
        refuse_add(line) if add else None
        return result.clone() if product.is_view else result
    if out.shape != result.shape or out.dtype != result.dtype:
        refuse_in_graph(f"einsum: {line}", tuple(result.shape), result.dtype, tuple(out.shape), out.dtype)
    return out.add_(result) if add else out.copy_(result)


@constant
def _constants(line: str) -> tuple:
    return tuple(product_of(line))
