"""One layer of a strategy, run on an abstract mesh: what it moves over each axis and how much it computes.

The strategy's own forward and backward run on meta tensors under `scaling.trace`, so a plan's bytes and FLOPs are those
of the code that will run. One layer is the book's block of two matrices; `scaling.plan.search` scales it to a model.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from scaling.mesh import AbstractMesh
from scaling.spec import parse
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel
from scaling.trace import trace


@dataclass(frozen=True)
class LayerCollective:
    """One collective of a layer: `nbytes` is V, the book's measure (`scaling.trace.Event`)."""

    op: str
    axis: str
    nbytes: float
    backward: bool


@dataclass(frozen=True)
class TracedLayer:
    """FLOPs on one chip, forward and backward, and the collectives; `weights`: bytes of the chip's own shard."""

    flops: float
    moves: tuple[LayerCollective, ...]
    weights: float


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def strategy(X: int, Y: int):
    """The strategy's module for these sizes of the FSDP and the tensor axis."""
    if X > 1 and Y > 1:
        return fsdp_tp
    return fsdp if X > 1 else tensor_parallel if Y > 1 else data_parallel


def up(size: int, parts: int) -> int:
    """The next multiple of `parts`."""
    return -(-size // parts) * parts


@lru_cache(maxsize=4096)
def layer_plan(B: int, D: int, F: int, X: int = 1, Y: int = 1, dtype: str = "bf16") -> TracedLayer:
    """One layer on B tokens over the mesh X (FSDP) by Y (tensor), per chip.

    Sizes that do not divide are padded to run, and the bytes and FLOPs scaled back in proportion, as if shards were cut
    flat: B by X, F by Y, D by both.
    """
    module, mesh = strategy(X, Y), AbstractMesh({"X": X, "Y": Y})
    sizes = {"B": up(B, X), "D": up(D, math.lcm(X, Y)), "F": up(F, Y)}

    def local(name: str, stacked: bool = False) -> torch.Tensor:
        spec = parse(module.SPECS[name])
        shape = spec.local_shape({dim: sizes[dim] for dim in spec.dim_names}, mesh)
        return torch.empty((1, *shape) if stacked else shape, dtype=DTYPES[dtype], device="meta")

    params = {name: local(name, stacked=True) for name in ("W_in", "W_out")}
    with trace() as forward:
        Out, saved = module.forward(params, local("In"), mesh, activation="none")
    with trace() as backward:
        module.backward(torch.empty_like(Out), saved, params, mesh)
    weights = D / sizes["D"] * F / sizes["F"]
    tokens = B / sizes["B"]
    moves = []
    for log in (forward, backward):
        for event in log.collectives():
            if mesh.size(event.axes) > 1:
                (axis,) = event.axes
                scale = weights if axis == "X" else tokens * D / sizes["D"]
                moves.append(LayerCollective(event.op, axis, event.nbytes * scale, log is backward))
    shard = sum(p.numel() * p.element_size() for p in params.values())
    return TracedLayer((forward.flops + backward.flops) * weights * tokens, tuple(moves), shard * weights)
