"""What is not there yet: a collective or a message under way, and a product that is computed when it suits.

A product is written down where the book has it: `einsum(..., defer=True)`. The gradient of a weight is needed by the
optimizer alone. So a layer's backward states it, in its place in the listing, and whoever runs the layer decides when
it is computed, and where the result goes: at once into a buffer, on top of what earlier microbatches left there, or
much later, when a pipeline would otherwise be idle.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from scaling import trace
from scaling.spec import ShardingError, Spec, parse_line


class Pending:
    """A collective under way. `wait()` returns its result; until then its operand must not be changed.

    One that is dropped without `wait()` is named in a warning; `call` is what it is called by.
    """

    __slots__ = ("call", "event", "finish", "result", "works")

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any], event=None, call: Any = None):
        """`works`: what is waited for; `finish()` then makes the result."""
        self.works, self.finish, self.event, self.call, self.result = works, finish, event, call, None
        if event is not None:
            trace.call_returned(event)

    def __del__(self):
        if not hasattr(self, "finish"):  # a compiler makes objects without __init__
            return
        if self.finish is not None and self.call is not None and self.works:
            _dropped.append((self.works, self.finish))
            what = f"{self.call}\n  its Pending was dropped without wait(), so that nobody has the result"
            warnings.warn(f"{what}\n  fix: call .wait(), or leave async_op=True out", RuntimeWarning, stacklevel=2)

    def wait(self) -> Any:
        if self.finish is not None:
            if self.event is not None:
                trace.waited(self.event)
            for work in self.works:
                work.wait()
            self.result, self.finish, self.works = self.finish(), None, ()
            if self.event is not None:
                trace.done(self.event)
        return self.result


_dropped: list = []  # the other ranks wait for what is under way: its buffers must not be freed


def wait(x) -> Any:
    """The tensor, or the result of what is still under way: a `Pending` collective, a `Deferred` product."""
    if x is None or isinstance(x, Tensor):
        return x
    if not hasattr(x, "wait"):
        raise ShardingError(
            f"a {type(x).__module__}.{type(x).__name__} is not a torch.Tensor\n  fix: torch.as_tensor(x) makes one"
        )
    return x.wait()


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
