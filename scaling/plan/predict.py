"""The time of a strategy's training step on a chip, from a trace of its own code on an abstract mesh.

Each einsum is priced at the chip's FLOPs/s, each collective by its network or as measured, and what lies between them,
the activation and the optimizer, as measured (a chip file's rows "Activation" and "Update") or else by the bytes that
pass through memory. Seconds, per chip.
"""

from dataclasses import dataclass
from types import ModuleType

import torch

from scaling import cost
from scaling.hardware import Chip
from scaling.mesh import AbstractMesh
from scaling.plan.layer import DTYPES
from scaling.spec import dtype_bytes, parse
from scaling.trace import Log, trace


@dataclass(frozen=True)
class Size:
    """L layers of W_in[D, F] and W_out[F, D], and B tokens in the global batch."""

    L: int
    B: int
    D: int
    F: int

    def __str__(self) -> str:
        return f"L={self.L} B={self.B} D={self.D} F={self.F}"


@dataclass(frozen=True)
class Prediction:
    """Seconds of the matmuls, of the work between them, and of the collectives by mesh axis."""

    math: float
    between: float
    comms: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        """Nothing overlaps: as on CPUs, where the core that computes also moves the bytes."""
        return self.math + self.between + sum(seconds for _, seconds in self.comms)

    @property
    def overlapped(self) -> float:
        """Communication hides behind the rest."""
        return max(self.math + self.between, sum(seconds for _, seconds in self.comms))


def shards(module: ModuleType, size: Size, mesh, make) -> tuple[dict, torch.Tensor]:
    """This rank's params, stacked over layers, and its In: `make(shape)` is called for each."""
    dims = {"B": size.B, "D": size.D, "F": size.F}

    def local(name: str) -> tuple[int, ...]:
        spec = parse(module.SPECS[name])
        return spec.local_shape({dim: dims[dim] for dim in spec.dim_names}, mesh)

    return {name: make((size.L, *local(name))) for name in ("W_in", "W_out")}, make(local("In"))


def step(module: ModuleType, params: dict, In: torch.Tensor, mesh, rate: float = 1e-4) -> torch.Tensor:
    """One training step, SGD on half the mean square of Out, the params updated in place; returns Out."""
    Out, saved = module.forward(params, In, mesh)
    _, grads = module.backward(Out / In.shape[0], saved, params, mesh)
    for name, W in params.items():
        W.sub_(grads[name], alpha=rate)
    return Out


def traced(module: ModuleType, size: Size, sizes: dict[str, int], dtype: str = "fp32") -> Log:
    """The step on an abstract mesh: its events have bytes and FLOPs, but took no time."""
    mesh = AbstractMesh(sizes)
    params, In = shards(module, size, mesh, lambda shape: torch.empty(shape, dtype=DTYPES[dtype], device="meta"))
    with trace() as log:
        step(module, params, In, mesh)
    return log


def predict(module: ModuleType, size: Size, sizes: dict[str, int], chip: Chip, dtype: str = "fp32") -> Prediction:
    """Price a step of L layers. `sizes`: the mesh; the chip needs FLOPs/s in `dtype`, hbm_bw, and a network or
    measured collectives."""
    log, comms = traced(module, size, sizes, dtype), {}
    for event in log.collectives():
        ranks = AbstractMesh(sizes).size(event.axes)
        if ranks > 1:
            axis = "".join(event.axes)
            comms[axis] = comms.get(axis, 0.0) + cost.seconds(event.op, event.nbytes, chip, ranks)
    return Prediction(log.flops / chip.flops(dtype), between(module, size, sizes, chip, dtype), tuple(comms.items()))


def between(module: ModuleType, size: Size, sizes: dict[str, int], chip: Chip, dtype: str) -> float:
    """Seconds outside the matmuls: each layer's activation and its derivative on Tmp, and SGD on the params.

    Passes through memory, where nothing was measured: 2 and 3 over Tmp, 3 over the params.
    """
    held, _ = shards(module, size, sizes, torch.Size)
    tmp = dtype_bytes(dtype) * size.B * size.F / AbstractMesh(sizes).size()
    params = [dtype_bytes(dtype) * shape.numel() for shape in held.values()]
    rows = {row.op: row for row in chip.measured}
    if {"Activation", "Update"} <= rows.keys():
        act, update = rows["Activation"], rows["Update"]
        each = sum(update.latency + nbytes / update.bandwidth for nbytes in params)
        return size.L * (act.latency + tmp / act.bandwidth) + each
    return (5 * size.L * tmp + 3 * sum(params)) / chip.need("hbm_bw")
