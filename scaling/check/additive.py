"""Find out whether an op that no table has is additive, by trying it with numbers: f(a) + f(b) = f(a + b)."""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

LARGEST = 1 << 20  # elements in all operands of an op that is tried
TRIES = 3


def adds_up(call: Callable[[list[Tensor]], list[Tensor]], operands: Sequence[Tensor], partial: Sequence[bool]) -> bool:
    """Return whether `call` is linear in the operands that are `partial`, taken together.

    Args:
        call: runs the op on tensors in place of the operands, and returns its results.
        operands: tensors without numbers, which have the shapes and dtypes.
        partial: which operands are partial sums.

    Raises:
        NotTried: the operands are too large, or the op does not take drawn numbers.
    """
    if sum(prod(x.shape) for x in operands) > LARGEST:
        raise NotTried
    generator = torch.Generator().manual_seed(0)
    try:
        for _ in range(TRIES):
            fixed = [_drawn(x, generator) for x in operands]
            a, b = ([_drawn(x, generator) if own else y for x, y, own in zip(operands, fixed, partial, strict=True)]
                    for _ in range(2))  # fmt: skip
            both = [x + y if own else x for x, y, own in zip(a, b, partial, strict=True)]
            for x, y, z in zip(call(a), call(b), call(both), strict=True):
                if x.dtype is torch.bool or not torch.allclose(x + y, z):
                    return False
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        raise NotTried from None
    return True


class NotTried(Exception):
    """The op was not run."""


def _drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return numbers of both signs and of many magnitudes; for integer dtypes small ones, which may be indices."""
    if not x.dtype.is_floating_point:
        return torch.randint(0, 4, x.shape, generator=generator).to(x.dtype)
    normal, scale = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return normal * 10 ** (2 * scale)
