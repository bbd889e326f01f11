"""Derivatives by autograd's own tape: as `torch.func.vjp`, at less cost for each collective, and without the import of
the compiler by its first call, for which every rank that torchrun starts would wait."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.common.torch_private import tape_gradients


def vjp(f: Callable, *primals, has_aux: bool = False) -> tuple[Any, ...]:
    """(f(*primals), pull), as torch.func.vjp, over trees of tensors: pull(cotangents) -> a cotangent of each primal.

    With `has_aux`, f returns (result, aux), and this (result, pull, aux). A tensor on which the result does not depend,
    or that holds whole numbers, has zeros as its cotangent. A compiler is given torch.func.vjp.
    """
    if torch.compiler.is_compiling():
        return torch.func.vjp(f, *primals, has_aux=has_aux)
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in tree.leaves(primals)]
    with torch.enable_grad():
        out, *aux = f(*tree.unflatten(primals, inputs)) if has_aux else (f(*tree.unflatten(primals, inputs)),)
    results, wanted = tree.leaves(out), [x for x in inputs if x.requires_grad]

    def pull(cotangents) -> tuple:
        found = iter(tape_gradients(results, wanted, tree.leaves(cotangents)))
        grads = [next(found) if x.requires_grad else None for x in inputs]
        return tree.unflatten(
            primals, [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]
        )

    return tree.map(Tensor.detach, out), pull, *aux
