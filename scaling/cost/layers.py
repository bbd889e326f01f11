"""A layer under each strategy: its bytes, its time of computing and of communicating (Parts 5 and 12).

A layer is the book's block In[B, D] *_D W_in[D, F] *_F W_out[F, D]: two matrices of D x F, as a `LayerShape`;
`Links` are the rates of the chips that it runs on. X and Y are the sizes of the data (or FSDP) and the tensor axis.
Volumes are the book's: an AllReduce counts twice, and (X - 1)/X is taken as 1.
"""

from dataclasses import dataclass

from scaling.common.arguments import not_negative, one_of, positive, whole
from scaling.spec import dtype_bytes

STRATEGIES = ("dp", "fsdp", "tp", "fsdp_tp")
DIRECTIONS = ("forward", "backward", "both")
OVERLAPS = ("max", "sum")


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer: B tokens of the *global* batch through `matrices` matrices of D x F.

    A gated layer has 3 `matrices`; attention adds 2D(N+K)H / DF of them. `blocks` counts the pairs of AllGather and
    ReduceScatter over Y in a forward pass, 2 with attention.
    """

    B: float
    D: float
    F: float
    matrices: float = 2
    blocks: float = 1
    dtype: str = "bf16"

    def __post_init__(self):
        positive(B=self.B, D=self.D, F=self.F, matrices=self.matrices)
        not_negative(blocks=self.blocks)

    @property
    def params(self) -> float:
        """Elements of the layer's matrices."""
        return self.matrices * self.D * self.F


@dataclass(frozen=True)
class Links:
    """C FLOPs/s of a chip, and the bytes/s at which its collectives over each mesh axis run.

    X and Y are `chip.bandwidth("ici", axes=M_X)` on a TPU, "node" or "scale-out" on a GPU. Z is for a hop between
    pipeline stages, and P for a chip's share of the network between pods.
    """

    C: float
    X: float | None = None
    Y: float | None = None
    Z: float | None = None
    P: float | None = None

    def __post_init__(self):
        positive(C=self.C, **{f"W_{axis}": rate for axis, rate in self.rates().items() if rate is not None})

    def rates(self) -> dict[str, float | None]:
        """Return the bytes/s over each axis, or None."""
        return {"X": self.X, "Y": self.Y, "Z": self.Z, "P": self.P}

    def rate(self, axis: str, user: str) -> float:
        """Return the bytes/s over an axis. Raise a ValueError if they were not given."""
        if (rate := self.rates()[axis]) is None:
            raise ValueError(f"{user} moves bytes over {axis}\n  fix: give Links({axis}=...), in bytes/s")
        return rate


@dataclass(frozen=True)
class Cost:
    """Seconds of computing and of communicating by mesh axis, per chip.

    `overlap` combines the collectives of different axes: with "max" they run at once (the book of 2026), with "sum" in
    turn (of 2025). `lower` and `upper` bound the overlap of computing and communicating. `a + b` is b after a, as
    backward after forward: work overlaps only within each of its `parts`.
    """

    math: float
    axes: tuple[tuple[str, float], ...]
    overlap: str = "max"
    parts: tuple["Cost", ...] = ()

    @property
    def comms(self) -> float:
        """Seconds of communicating, over all parts."""
        if self.parts:
            return sum(part.comms for part in self.parts)
        times = [time for _, time in self.axes]
        return max(times, default=0.0) if self.overlap == "max" else sum(times)

    @property
    def lower(self) -> float:
        """Seconds when communication hides behind computing: max(math, comms), of each part."""
        return sum(part.lower for part in self.parts) if self.parts else max(self.math, self.comms)

    @property
    def upper(self) -> float:
        """Seconds when nothing overlaps: the sum of all."""
        return self.math + sum(time for _, time in self.axes)

    @property
    def bound(self) -> str:
        """The bottleneck: "compute" or a mesh axis, in the part whose communication exceeds its computing most."""
        if self.parts:
            return max(self.parts, key=lambda part: part.comms - part.math).bound
        return "compute" if self.math >= self.comms else max(self.axes, key=lambda axis: axis[1])[0]

    def __add__(self, other: "Cost") -> "Cost":
        axes = dict(self.axes)
        for axis, time in other.axes:
            axes[axis] = axes.get(axis, 0.0) + time
        parts = (self.parts or (self,)) + (other.parts or (other,))
        return Cost(self.math + other.math, tuple(axes.items()), self.overlap, parts)


def layer_bytes(
    strategy: str, shape: LayerShape, X: int = 1, Y: int = 1, direction: str = "both", regather: bool = False
) -> dict[str, float]:
    """Return {"X": bytes, "Y": bytes} of a layer's collectives; an AllReduce counts twice (Part 5, "Takeaways").

    With `regather`, TP gathers its input again in the backward pass instead of keeping the forward's copy.
    The book's table has 8BD/X for the backward of FSDP+TP; its algorithm moves 4BD/X (6BD/X with regather).
    """
    one_of("strategy", strategy, STRATEGIES)
    one_of("direction", direction, DIRECTIONS)
    whole(X=X, Y=Y)
    if (strategy in ("dp", "fsdp") and Y > 1) or (strategy == "tp" and X > 1):
        raise ValueError(
            f"{strategy} has no axis {'X' if strategy == 'tp' else 'Y'}\n  fix: use fsdp_tp for X={X}, Y={Y}"
        )
    size = dtype_bytes(shape.dtype)
    weights = size * shape.params / Y if X > 1 else 0  # gathered over X, each chip's share of F
    activations = size * shape.B * shape.D / X if Y > 1 else 0  # gathered over Y, each chip's share of B
    forward = {"X": 0 if strategy == "dp" else weights, "Y": 2 * shape.blocks * activations}
    backward = {"X": 2 * weights, "Y": (2 + regather) * shape.blocks * activations}
    use = {"forward": (forward,), "backward": (backward,), "both": (forward, backward)}[direction]
    return {axis: sum(part[axis] for part in use) for axis in ("X", "Y")}


def layer_flops(shape: LayerShape, chips: int = 1, direction: str = "both") -> float:
    """Return the FLOPs of one layer on each of `chips` chips: 2BDF for each matrix forward, twice that backward."""
    whole(chips=chips)
    one_of("direction", direction, DIRECTIONS)
    return {"forward": 2, "backward": 4, "both": 6}[direction] * shape.B * shape.params / chips


def layer(
    strategy: str, shape: LayerShape, links: Links, X: int = 1, Y: int = 1, direction: str = "both",
    regather: bool = False, overlap: str = "max",
) -> Cost:  # fmt: skip
    """Return the Cost of one layer on each chip: T_math = 4BDF/(XY C), T_comms = bytes / W forward.

    Both directions are forward + backward, so the communication of one cannot hide behind the computing of the other.
    """
    one_of("direction", direction, DIRECTIONS)
    if direction == "both":
        one, two = (layer(strategy, shape, links, X, Y, way, regather, overlap) for way in ("forward", "backward"))
        return one + two
    one_of("overlap", overlap, OVERLAPS)
    moved = layer_bytes(strategy, shape, X, Y, direction, regather)
    times = tuple((axis, nbytes / links.rate(axis, strategy)) for axis, nbytes in moved.items() if nbytes)
    return Cost(layer_flops(shape, X * Y, direction) / links.C, times, overlap)


def pipeline_comms(B: float, D: float, W: float, stages: int, microbatches: int) -> float:
    """Return the seconds that a pass takes for M + Z - 2 hops of 2BD / (W M) each (Part 12, "Pipeline Parallelism").

    B counts the tokens of one replica, whose activations go over links of W bytes/s in all.
    """
    positive(B=B, D=D, W=W)
    whole(stages=stages, microbatches=microbatches)
    if stages == 1:
        return 0.0
    return 2 * B * D / (W * microbatches) * (microbatches + stages - 2)


# Thresholds: the time of computing equals the time of communicating


def data_threshold(C: float, W: float) -> float:
    """Return the tokens per chip above which DP and FSDP are compute-bound: B/X > C/W (Parts 5 and 12)."""
    positive(C=C, W=W)
    return C / W


def tensor_limit(F: float, C: float, W: float) -> float:
    """Return the largest Y for which TP is compute-bound: Y < F W/C for any batch (W = M_Y W_ici on a TPU)."""
    positive(F=F, C=C, W=W)
    return F * W / C


def mixed_threshold(F: float, C: float, W_X: float, W_Y: float, overlap: str = "max", matrices: float = 2) -> float:
    """Return the tokens per chip above which FSDP+TP at its best X is compute-bound: c C^2 / (W_X W_Y F).

    This is for two matrices; a gated layer has a third, and needs 2/3 as many tokens. c = 1 if the collectives of X and
    Y overlap, 4 if they follow each other: at X_opt both take the same time t, so the maximum is t, the sum is 2t, and
    t^2 is proportional to N/B.
    """
    positive(F=F, C=C, W_X=W_X, W_Y=W_Y, matrices=matrices)
    one_of("overlap", overlap, OVERLAPS)
    return (1 if overlap == "max" else 4) * 2 / matrices * C**2 / (W_X * W_Y * F)


def mixed_optimum(B: float, F: float, N: float, m_x: float = 1, m_y: float = 1, matrices: float = 2) -> float:
    """Return X_opt of FSDP+TP on N chips, sqrt(B N M_X / (F M_Y)): both axes' collectives take equal time.

    It follows from matrices DF/(Y M_X) = 2BD/(X M_Y) with XY = N; a gated layer has more weights and so a smaller Y.
    """
    positive(B=B, F=F, N=N, m_x=m_x, m_y=m_y, matrices=matrices)
    return (2 * B * N * m_x / (matrices * F * m_y)) ** 0.5


def pod_threshold(C: float, W_dcn: float) -> float:
    """Return the tokens per *slice* above which DP across slices is compute-bound: C / (W_dcn per chip) (Part 5)."""
    return data_threshold(C, W_dcn)


def expert_inflation(experts: int, active: int) -> float:
    """Return the factor E/k by which an MoE raises the data threshold: E times weights, k times FLOPs (Part 12)."""
    whole(experts=experts, active=active)
    if active > experts:
        raise ValueError(f"active = {active} of {experts} experts\n  fix: choose from 1 to all of them")
    return experts / active
