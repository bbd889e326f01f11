"""A product that is written down where the book has it, and computed when it suits: `einsum(..., defer=True)`.

The gradient of a weight is needed by the optimizer alone. So a layer's backward states it, in its place in the listing,
and whoever runs the layer decides when it is computed, and where the result goes: at once into a buffer, on top of what
earlier microbatches left there, or much later, when a pipeline would otherwise be idle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from scaling.spec import Spec, parse_line


@dataclass(frozen=True)
class Deferred:
    """`line` of operands a and b, checked but not computed. It keeps its operands alive."""

    einsum: Callable
    line: str
    a: torch.Tensor
    b: Any

    def wait(self, out: torch.Tensor | None = None, add: bool = False) -> torch.Tensor:
        """The product; written to `out`, or with `add` added to it, where a buffer is given."""
        return self.einsum(self.line, self.a, self.b, out=out, add=add)

    @property
    def type(self) -> Spec:
        """The type of the result."""
        return parse_line(self.line).result

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape of the result."""
        both = (*self.a.shape, *self.b.shape)
        return tuple([both[i] for i in _places(self.line)])


@lru_cache(maxsize=4096)
def _places(line: str) -> list[int]:
    """Of each dim of the result its place among those of the operands."""
    a, b = parse_line(line).operands
    dims = (*a.dim_names, *b.dim_names)
    return [dims.index(dim) for dim in parse_line(line).result.dim_names]


def join_products(products: Sequence[Deferred]) -> Deferred:
    """The sum of products of one line, such as those of several microbatches, as one product.

    Their operands are joined along the first dim that is summed over: a sum of few long rows is one matmul.
    """
    first = products[0]
    if len(products) == 1:
        return first
    if any(product.line != first.line for product in products):
        raise ValueError(
            f"only products of one line are joined, not {first.line} and others"
            "\n  fix: join products of one line at a time"
        )
    (a, b), result = parse_line(first.line).operands, parse_line(first.line).result
    dim = next(dim for dim in a.dim_names if dim in b.dim_names and dim not in result.dim_names)
    return Deferred(
        first.einsum,
        first.line,
        torch.cat([product.a for product in products], a.index(dim)),
        torch.cat([product.b for product in products], b.index(dim)),
    )
