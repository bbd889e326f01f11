"""One mesh for a model and a batch: how long is a step, what binds it, what does a chip hold.

A mesh has the axes pod (data-parallel over the datacenter's network), pipe (stages of layers), data (replicas, with the
optimizer's state split over them, ZeRO-1), fsdp and tensor. A layer's bytes and FLOPs are those of the strategy's own
code (`scaling.plan.layer`), scaled from the book's block of two D x F matrices to the model's matmuls: weights and
FLOPs by the number of elements, activations by the two blocks of a layer, attention and MLP.
"""

import math
from dataclasses import dataclass

from scaling.configs import Config
from scaling.cost import Memory, training_memory
from scaling.cost import transformer as tm
from scaling.cost.layers import Cost
from scaling.cost.pipeline import bubble
from scaling.plan.layer import DTYPES, layer, up
from scaling.plan.network import AXES, Network
from scaling.spec import dtype_bytes

OVERLAPS = ("max", "sum", "none")
BLOCKS = 2  # of a layer: attention and MLP each gather their input and scatter their output over the tensor axis


@dataclass(frozen=True)
class Job:
    """What is to be trained: tokens in the global batch and in a sequence, and what is stored per parameter.

    `zero1`: replicas split the optimizer's state among them. `overlap`: everything overlaps ("max", the book of 2026);
    the axes' collectives follow each other, but hide behind computing ("sum", 2025); nothing overlaps ("none").
    """

    config: Config
    batch: int
    seq: int = 4096
    dtype: str = "bf16"
    param_bytes: float = 2
    grad_bytes: float = 2
    optimizer_bytes: float = 8
    overlap: str = "max"
    zero1: bool = True

    def __post_init__(self):
        for name in ("batch", "seq"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value!r}: must be a whole number of at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype!r}: one of {', '.join(DTYPES)}")
        if self.overlap not in OVERLAPS:
            raise ValueError(f"overlap = {self.overlap!r}: one of {', '.join(OVERLAPS)}")
        if self.seq > self.batch:
            raise ValueError(f"a sequence of {self.seq:,} tokens is longer than the batch of {self.batch:,}")

    @property
    def weights(self) -> tuple[int, int]:
        """Elements of all matrices (stored, and used by a token): layers and unembedding, without the embedding."""
        unembed = self.config.D * self.config.V
        both = (tm.params(self.config, active) for active in (False, True))
        return tuple(p["mlp"] + p["attention"] + p["router"] + unembed for p in both)

    def flops(self, remat: str = "none") -> float:
        """FLOPs of a step that attention kernels need: six per weight and token, and the causal dot products."""
        one, sequences = self.config, self.batch / self.seq
        dots = tm.forward_flops(one, 1, self.seq, causal=True)["attention"] * sequences
        again = {"none": 0, "matmuls": dots, "block": 2 * self.weights[1] * self.batch + dots}[remat]
        return 6 * self.weights[1] * self.batch + 3 * dots + again


@dataclass(frozen=True)
class Plan:
    """One mesh. Seconds are of a step, memory is of a chip; `bytes` by axis are V, an AllReduce counted twice."""

    mesh: tuple[tuple[str, int], ...]
    remat: str
    microbatches: int
    torus: tuple[tuple[str, int], ...]
    cost: Cost
    bubble: float
    memory: Memory
    working: float
    bytes: tuple[tuple[str, float], ...]
    useful: float
    overlap: str = "max"
    padded: tuple[str, ...] = ()

    def size(self, axis: str) -> int:
        return dict(self.mesh).get(axis, 1)

    @property
    def chips(self) -> int:
        return math.prod(size for _, size in self.mesh)

    @property
    def seconds(self) -> float:
        """Seconds of a step under the job's model of overlap."""
        return self.worst if self.overlap == "none" else self.cost.lower / (1 - self.bubble)

    @property
    def worst(self) -> float:
        """Seconds if no communication overlapped with anything."""
        return self.cost.upper / (1 - self.bubble)

    @property
    def mfu(self) -> float:
        """Useful FLOPs over the peak during `seconds`: an upper bound, what the roofline leaves."""
        return self.useful / self.seconds

    @property
    def held(self) -> float:
        return self.memory.total + self.working

    @property
    def name(self) -> str:
        words = {"pod": "pods", "pipe": "pipeline", "data": "data", "fsdp": "FSDP", "tensor": "TP"}
        return " x ".join(f"{words[axis]} {size:,}" for axis, size in self.mesh if size > 1) or "one chip"


def evaluate(job: Job, network: Network, remat: str, microbatches: int) -> Plan:
    """Time and memory of one mesh."""
    config, chip, size = job.config, network.chip, network.sizes.get
    P, Z, R, X, Y = (size(axis, 1) for axis in AXES)
    chips, m = P * Z * R * X * Y, microbatches
    tokens = math.ceil(job.batch / (P * R * m))  # of a microbatch, over one fsdp x tensor group
    one = layer(tokens, config.D, config.F, X, Y, job.dtype)
    stored, used = (w / (2 * config.D * config.F * config.L) for w in job.weights)
    passes = {False: m * (2 if remat == "block" else 1), True: m}  # block remat runs the forward pass again

    times, moved = {}, {}
    for move in one.moves:
        axis = "fsdp" if move.axis == "X" else "tensor"
        # the backward pass gathers the weights anyway: what it computes again needs no gather of its own
        count = (m if axis == "fsdp" else passes[move.backward] * BLOCKS) * config.L / Z
        nbytes = move.nbytes * (stored if axis == "fsdp" else 1)
        times[axis] = times.get(axis, 0.0) + count * network.seconds(move.op, nbytes, axis)
        moved[axis] = moved.get(axis, 0.0) + count * nbytes
    shard = one.weights * stored * config.L / Z
    for axis in ("data", "pod"):
        if size(axis, 1) > 1:
            share = shard / R if axis == "pod" else shard
            times[axis] = network.seconds("AllReduce", share, axis)
            moved[axis] = 2 * share
    if Z > 1:
        hop = dtype_bytes(job.dtype) * tokens * config.D / (X * Y)
        times["pipe"] = 2 * (m + Z - 2) * network.seconds("CollectivePermute", hop, "pipe")
        moved["pipe"] = 2 * m * hop

    traced = one.flops * used * config.L / Z * m  # forward and backward of all matmuls
    rest = (job.flops(remat) - 6 * job.weights[1] * job.batch) / chips
    C = chip.flops(job.dtype)
    memory, working = held(job, remat, m, tokens, P, Z, R, X, Y)
    padded = [f"tokens {tokens:,} to {up(tokens, X):,}"] if tokens % X else []
    padded += [f"D {config.D:,} to {up(config.D, math.lcm(X, Y)):,}"] if config.D % math.lcm(X, Y) else []
    padded += [f"F {config.F:,} to {up(config.F, Y):,}"] if config.F % Y else []
    return Plan(
        mesh=tuple((axis, size(axis, 1)) for axis in AXES),
        remat=remat,
        microbatches=m,
        torus=tuple(network.torus.items()),
        cost=Cost((traced + rest) / C, tuple(sorted(times.items())), "sum" if job.overlap == "none" else job.overlap),
        bubble=bubble(Z, m),
        memory=memory,
        working=working,
        bytes=tuple(sorted(moved.items())),
        useful=job.flops() / chips / C,
        overlap=job.overlap,
        padded=tuple(padded),
    )


def held(job: Job, remat: str, m: int, tokens: int, P: int, Z: int, R: int, X: int, Y: int) -> tuple[Memory, float]:
    """Bytes on one chip: what is kept, and the largest work space (a layer's gathered weights, or the logits)."""
    config = job.config
    in_flight = min(m, Z)  # microbatches whose activations a stage holds (1F1B)
    saved = tm.saved_bytes(config, tokens * in_flight, remat, job.dtype) / (X * Y * Z)
    state = training_memory(
        tm.num_params(config), 0, X, Y, Z, zero=3,
        param_bytes=job.param_bytes, grad_bytes=job.grad_bytes, optimizer_bytes=job.optimizer_bytes,
    )  # fmt: skip
    memory = Memory(state.params, state.grads, state.optimizer / (R if job.zero1 else 1), saved)
    widest = max(config.D * config.V, job.weights[0] // config.L)
    gathered = 2 * job.param_bytes * widest / Y if X > 1 else 0  # this layer's weights and the next one's, or gradient
    logits = (dtype_bytes(job.dtype) + 4) * tokens / X * config.V / Y
    recomputed = tm.saved_bytes(config, tokens, "none", job.dtype) / config.L / (X * Y) if remat != "none" else 0
    return memory, gathered + max(logits, recomputed)
