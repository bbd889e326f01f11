"""The book's stack of layers by a strategy: a training step of it, run or traced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

from scaling.mesh import AbstractMesh
from scaling.spec import parse
from scaling.trace import Log, trace
from scaling.train.settings import DTYPES


@dataclass(frozen=True)
class Size:
    """L layers of W_in[D, F] and W_out[F, D], and B tokens in the global batch."""

    L: int
    B: int
    D: int
    F: int

    def __str__(self) -> str:
        return f"L={self.L} B={self.B} D={self.D} F={self.F}"


def make_shards(module: ModuleType, size: Size, mesh, make: Callable) -> tuple[dict, torch.Tensor]:
    """This rank's params, stacked over layers, and its In: `make(shape)` is called for each."""
    dims = {"B": size.B, "D": size.D, "F": size.F}

    def local(name: str) -> tuple[int, ...]:
        spec = parse(module.SPECS[name])
        return spec.local_shape({dim: dims[dim] for dim in spec.dim_names}, mesh)

    return {name: make((size.L, *local(name))) for name in ("W_in", "W_out")}, make(local("In"))


def sgd_step(module: ModuleType, params: dict, In: torch.Tensor, mesh, rate: float = 1e-4) -> torch.Tensor:
    """One training step, SGD on half the mean square of Out, the params updated in place; returns Out."""
    Out, saved = module.forward(params, In, mesh)
    _, grads = module.backward(Out / In.shape[0], saved, params, mesh)
    for name, W in params.items():
        W.sub_(grads[name], alpha=rate)
    return Out


def traced(module: ModuleType, size: Size, sizes: Mapping[str, int], dtype: str = "fp32") -> Log:
    """The lines of the step on each device of a mesh of these sizes: they have bytes and FLOPs, but took no time."""
    mesh = AbstractMesh(sizes)
    params, In = make_shards(module, size, mesh, lambda shape: torch.empty(shape, dtype=DTYPES[dtype], device="meta"))
    with trace() as log:
        sgd_step(module, params, In, mesh)
    return log
