"""A whole training step: layers under a strategy, stages of a pipeline, slices joined by the datacenter's network."""

from dataclasses import dataclass

from scaling.cost.checks import positive, whole
from scaling.cost.layers import Cost, layer, layer_bytes
from scaling.spec import dtype_bytes


@dataclass(frozen=True)
class Step:
    """Seconds of a step per chip: `cost` without the pipeline's bubble, which is the share `bubble` of the time."""

    cost: Cost
    bubble: float
    tokens: float

    @property
    def lower(self) -> float:
        return self.cost.lower / (1 - self.bubble)

    @property
    def upper(self) -> float:
        return self.cost.upper / (1 - self.bubble)

    @property
    def bound(self) -> str:
        return self.cost.bound

    @property
    def mfu(self) -> float:
        """Share of the peak FLOPs/s at `lower`, counting the FLOPs of `cost` as useful."""
        return self.cost.math / self.lower


def bubble(stages: int, microbatches: int) -> float:
    """Idle share of a pipeline's time, forward and backward alike: (Z - 1) / (M + Z - 1) for GPipe and 1F1B."""
    whole(stages=stages, microbatches=microbatches)
    return (stages - 1) / (microbatches + stages - 1)


def pipeline_comms(B: float, D: float, W: float, stages: int, microbatches: int, dtype="bf16") -> float:
    """Seconds of sending activations in one pass: 2BD / (W M) a hop, M + Z - 2 hops (Part 12, "Pipeline Parallelism").

    B: tokens of one replica whose activations go over links of W bytes/s in all.
    """
    positive(B=B, D=D, W=W)
    whole(stages=stages, microbatches=microbatches)
    if stages == 1:
        return 0.0
    return dtype_bytes(dtype) * B * D / (W * microbatches) * (microbatches + stages - 2)


def pod_bytes(D: float, F: float, L: int, chips: int, matrices: float = 2, dtype="bf16") -> float:
    """Bytes of a chip's share of the gradients' AllReduce across slices of `chips` chips: 8DF/M a layer (Part 5)."""
    positive(D=D, F=F, matrices=matrices)
    whole(L=L, chips=chips)
    return 2 * dtype_bytes(dtype) * matrices * D * F * L / chips


def step(
    strategy, L, B, D, F, C, W_X=None, W_Y=None, W_Z=None, W_pod=None, X=1, Y=1, Z=1, microbatches=1, pods=1,
    dtype="bf16", matrices=2, blocks=1, regather=False, overlap="max",
) -> Step:  # fmt: skip
    """Forward and backward of L layers on pods * X * Y * Z chips; B tokens in the global batch.

    Z stages of L/Z layers; FSDP gathers its weights again for each microbatch, and reduces gradients once. Pods are
    data-parallel: each takes B/pods, and every chip AllReduces its share of the gradients at W_pod.
    """
    whole(L=L, Z=Z, pods=pods, microbatches=microbatches)
    positive(B=B)
    if L % Z:
        raise ValueError(f"{L} layers do not divide into {Z} stages")
    tokens = B / pods
    passes = []
    for direction in ("forward", "backward"):
        cost = layer(strategy, tokens, D, F, C, W_X, W_Y, X, Y, direction, dtype, matrices, blocks, regather, overlap)
        cost = cost.scaled(L / Z)
        times = dict(cost.axes)
        if strategy in ("fsdp", "fsdp_tp") and X > 1:
            gathered = L / Z * layer_bytes(strategy, tokens, D, F, X, Y, "forward", dtype, matrices)["X"] / W_X
            times["X"] = gathered * (microbatches + (direction == "backward"))
        if Z > 1:
            positive(W_Z=W_Z)
            times["Z"] = pipeline_comms(tokens / (X * Y), D, W_Z, Z, microbatches, dtype)
        if pods > 1 and direction == "backward":
            positive(W_pod=W_pod)
            times["pod"] = pod_bytes(D, F, L, X * Y * Z, matrices, dtype) / W_pod
        passes.append(Cost(cost.math, tuple(times.items()), overlap))
    return Step(passes[0] + passes[1], bubble(Z, microbatches), B)
