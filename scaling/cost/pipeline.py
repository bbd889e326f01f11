"""A whole training step: layers under a strategy, stages of a pipeline, slices joined by the datacenter's network."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scaling.arguments import one_of, positive, whole
from scaling.cost.layers import Cost, LayerShape, Links, layer, layer_bytes
from scaling.spec import dtype_bytes


@dataclass(frozen=True)
class StepCost:
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


def pod_bytes(shape: LayerShape, L: int, chips: int) -> float:
    """Bytes of a chip's share of the gradients' AllReduce across slices of `chips` chips: 8DF/M a layer (Part 5)."""
    whole(L=L, chips=chips)
    return 2 * dtype_bytes(shape.dtype) * shape.params * L / chips


def step(
    strategy: str, L: int, shape: LayerShape, links: Links, sizes: Mapping[str, int], microbatches: int = 1,
    regather: bool = False, overlap: str = "max",
) -> StepCost:  # fmt: skip
    """Forward and backward of L layers on a mesh of `sizes` of X, Y, Z (stages) and P (pods); axes left out are 1.

    Z stages of L/Z layers; FSDP gathers its weights again for each microbatch, and reduces gradients once. Pods are
    data-parallel: each takes B/P tokens, and every chip AllReduces its share of the gradients.
    """
    for axis in sizes:
        one_of("axis", axis, ("P", "Z", "X", "Y"))
    pods, Z, X, Y = (sizes.get(axis, 1) for axis in "PZXY")
    whole(L=L, Z=Z, pods=pods, microbatches=microbatches)
    if L % Z:
        raise ValueError(
            f"{L} layers do not divide into {Z} stages\n  fix: choose a number of stages that divides the layers"
        )
    one = replace(shape, B=shape.B / pods)
    passes = []
    for direction in ("forward", "backward"):
        cost = layer(strategy, one, links, X, Y, direction, regather, overlap).scaled(L / Z)
        times = dict(cost.axes)
        if strategy in ("fsdp", "fsdp_tp") and X > 1:
            gathered = L / Z * layer_bytes(strategy, one, X, Y, "forward")["X"] / links.rate("X", strategy)
            times["X"] = gathered * (microbatches + (direction == "backward"))
        if Z > 1:
            times["Z"] = pipeline_comms(
                one.B / (X * Y), one.D, links.rate("Z", "a pipeline"), Z, microbatches, one.dtype
            )  # fmt: skip
        if pods > 1 and direction == "backward":
            times["P"] = pod_bytes(one, L, X * Y * Z) / links.rate("P", "data parallelism over pods")
        passes.append(Cost(cost.math, tuple(times.items()), overlap))
    return StepCost(passes[0] + passes[1], bubble(Z, microbatches), shape.B)
