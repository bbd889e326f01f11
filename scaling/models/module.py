"""A pure function of a pytree of params as a stateless `nn.Module`: for `torch.func.functional_call`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ParamModule(nn.Module):
    """Nested dicts of params as nested modules, on the meta device."""

    def __init__(self, params: dict):
        super().__init__()
        for name, leaf in params.items():
            if isinstance(leaf, dict):
                self.add_module(name, ParamModule(leaf))
            else:
                self.register_parameter(name, nn.Parameter(torch.empty_like(leaf, device="meta")))

    def params(self) -> dict:
        """The params as nested dicts again: those that `functional_call` put here."""
        inner: dict[str, Any] = dict(self._modules)  # each a Tree
        return dict(self._parameters) | {name: module.params() for name, module in inner.items()}


class Stateless(ParamModule):
    """`f(params, *args)` as a module whose parameters only have shapes: functional_call(module, flat(params), args)."""

    def __init__(self, f: Callable, params: dict):
        super().__init__(params)
        self.f = f

    def forward(self, *args, **options):
        return self.f(self.params(), *args, **options)


def flat(params: dict, prefix: str = "") -> dict[str, Tensor]:
    """{"layers.W_Q": leaf}: params by the dotted names that a module's parameters have."""
    found = {}
    for name, leaf in params.items():
        found |= flat(leaf, f"{prefix}{name}.") if isinstance(leaf, dict) else {prefix + name: leaf}
    return found
