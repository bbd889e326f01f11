"""Derivatives by autograd's own tape: as `torch.func.vjp`, at less cost for each collective, and without the import of
the compiler by its first call, for which every rank that torchrun starts would wait."""

from collections.abc import Callable

import torch
from torch import Tensor

from scaling._torch import gradients


def taped(f: Callable, *xs: Tensor) -> tuple[Tensor, Callable]:
    """(f(*xs), pull): pull(dy) -> a cotangent of each x. A compiler is given torch.func.vjp."""
    if torch.compiler.is_compiling():
        y, pull, *_ = torch.func.vjp(f, *xs)
        return y, pull
    leaves = [x.detach().requires_grad_() for x in xs]
    with torch.enable_grad():
        y = f(*leaves)
    return y.detach(), lambda dy: gradients([y], leaves, [dy])
