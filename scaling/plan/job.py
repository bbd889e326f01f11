"""The planner's question and its answer: a job, the chips and the user's decisions; and a layout.

The question has a model, a batch, and the bytes that are stored per parameter. The answer has the size of each mesh
axis, and how the step runs on the mesh. The axes are, outermost first: pod (replicas joined by the datacenter's
network), pipe (stages of layers), data (replicas), fsdp, context (chunks of a sequence), expert, tensor. Tokens are
split over pod, data, fsdp, context and expert. Weights are split over tensor and pipe, weights of experts also over
expert. ZeRO splits further: stage 3 also splits weights over fsdp, context and expert, and gathers them for each use;
stage 1 splits only the optimizer's state, over data, context and expert; stage 0 splits nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from scaling.common.arguments import check_fields, one_of, whole
from scaling.configs import Config
from scaling.cost.memory import ROOM
from scaling.cost.transformer import POLICIES, REDUCES
from scaling.hardware import Chip
from scaling.plan.work import LayerWork, work_of
from scaling.spec import DTYPE_BYTES, dtype_bytes

AXES = ("pod", "pipe", "data", "fsdp", "context", "expert", "tensor")
WORDS = {
    "pod": "pods", "pipe": "PP", "data": "DP", "fsdp": "FSDP", "context": "CP", "expert": "EP", "tensor": "TP",
}  # fmt: skip
SHARDS = ("fsdp", "context", "expert")  # over which ZeRO-3 may shard weights
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "dualpipev")
CODED = {"schedule": SCHEDULES, "remat": POLICIES, "reduce": REDUCES}  # words, which are numbers in columns
ZEROS = 0, 1, 3
SAVES = {
    "none": "nothing recomputed", "attention": "attention recomputed", "matmuls": "big matmuls saved",
    "block": "block checkpointing",
}  # fmt: skip
OVERLAPS = ("max", "sum", "none")
DTYPES = ("bf16", "fp16", "fp32", "fp64", "fp8", "int8")
IN_BF16 = 2.0, 4.0, 12.0  # bytes that a run keeps of a param, its gradient, and AdamW's state with fp32 masters


def run_bytes(dtype: str) -> tuple[float, float, float]:
    """Return the bytes that a run in this dtype keeps of a param, of its gradient and of its optimizer state."""
    if (size := dtype_bytes(dtype)) < 4:
        return IN_BF16
    return size, size, 2 * size


@dataclass(frozen=True)
class Framework:
    """The memory that a training framework holds beyond the plan, which computes the loss in chunks and reserves none.

    Attributes:
        logits: Bytes of each logit, 0 for a loss in chunks. torchtitan's loss (components/loss.py) is cross entropy of
            `pred.float()`, so bf16 logits, their copy in fp32, its log-softmax and its gradient are whole;
            Megatron-LM's (core/tensor_parallel/cross_entropy.py) works in place on one copy in fp32.
        sequence: Whether norms' outputs are split over tensor and gathered again in the backward pass, as by Megatron's
            sequence parallelism (arXiv:2205.05198; its training/theoretical_memory_usage.py).
        reserved: The share by which activations and buffers are above their actual use, fitted to torchtitan's 13
            published peaks of reserved memory (benchmarks/llama3_h100_202412_torchtitan.md).
    """

    logits: float = 0.0
    sequence: bool = False
    reserved: float = 0.0


FRAMEWORKS = {
    "this": Framework(),
    "torchtitan": Framework(logits=14, reserved=0.15),
    "megatron": Framework(logits=6, sequence=True, reserved=0.15),
}


@dataclass(frozen=True)
class Job:
    """A batch of tokens in sequences of `seq`, and the bytes of a parameter, its gradient, and its optimizer state.

    The bytes are by default the book's 10 bytes a parameter and a gradient in bf16; `run_bytes` has a run's.
    `dtype` is that of the layers' matmuls. With fp8 or int8, the dot products, the unembedding and everything that is
    sent stay bf16, except tokens on their way to experts. `overlap` belongs to the bound: with "max" collectives over
    different links run at once, behind the matmuls (the book of 2026); with "sum" they run in sequence, but behind the
    matmuls (2025); with "none" nothing overlaps. `headroom` is the share of a chip's memory that is planned with; the
    rest is for the runtime, its buffers and fragments. `shards` are the axes over which ZeRO-3 shards weights, and
    ZeRO-1, in addition to data, the optimizer's state. The memory is that of a `framework` of FRAMEWORKS. With
    `offload` the layers' inputs that block checkpointing keeps wait in the hosts' memory; their way there is not timed.
    """

    config: Config
    batch: int
    seq: int = 4096
    dtype: str = "bf16"
    param_bytes: float = 2
    grad_bytes: float = 2
    optimizer_bytes: float = 8
    overlap: str = "max"
    headroom: float = ROOM
    shards: tuple[str, ...] = SHARDS
    framework: str = "this"
    offload: bool = False

    def __post_init__(self):
        within: dict[str, Any] = dict.fromkeys(("batch", "seq"), "[1, inf)") | {"headroom": "(0, 1]"}
        within |= dict.fromkeys(("param_bytes", "grad_bytes", "optimizer_bytes"), "[0, 1000)")
        check_fields(self, "", within | {"dtype": DTYPES, "overlap": OVERLAPS, "framework": tuple(FRAMEWORKS)})
        if self.seq > self.batch:
            raise ValueError(
                f"a sequence of {self.seq:,} tokens is longer than the batch of {self.batch:,}"
                "\n  fix: give a larger batch, or a shorter sequence"
            )

    @cached_property
    def work(self) -> LayerWork:
        """The work of a layer."""
        return work_of(self.config, self.seq)

    @property
    def sequences(self) -> int:
        """Sequences of the global batch; the last one may be shorter."""
        return -(-self.batch // self.seq)

    @property
    def runs(self) -> bool:
        """Whether memory is counted as `scaling.train` uses it, which shards over fsdp alone, not as an ideal step."""
        return self.framework == "this" and self.shards == ("fsdp",)

    @property
    def wide(self) -> str:
        """The dtype of the dot products, of the unembedding and of everything that is sent."""
        return "bf16" if DTYPE_BYTES[self.dtype] < 2 else self.dtype

    @property
    def act_bytes(self) -> float:
        """Bytes of an element of activations."""
        return dtype_bytes(self.wide)

    def flops(self) -> float:
        """Return the FLOPs of a step that attention kernels need: six per weight and token, and causal dot products."""
        return self.work.flops(self.batch)


@dataclass(frozen=True)
class Fixed:
    """The user's decisions, where None leaves the choice open. `axes`: sizes by mesh axis."""

    axes: tuple[tuple[str, int], ...] = ()
    remat: str | None = None
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    zero: int | None = None
    pods: int | None = None
    reduce: str | None = None

    def __post_init__(self):
        for axis, size in self.axes:
            one_of("mesh axis", axis, AXES)
            whole(**{axis: size})
        for name, allowed in {**CODED, "zero": ZEROS}.items():
            one_of(name, getattr(self, name), (None, *allowed))


ANY = Fixed()


@dataclass(frozen=True)
class Question:
    """A question to the planner: the layout of a job on `chips` chips, given the user's decisions (`fixed`)."""

    job: Job
    chip: Chip
    chips: int
    fixed: Fixed = ANY


@dataclass(frozen=True)
class Layout:
    """The sizes of AXES and the recipe of a step.

    Fields may be columns, one entry for each of many layouts. In columns words are given as numbers (CODED).

    `zero` is the stage of ZeRO: 0, 1 or 3. `schedule` is that of the stages, with `chunks` of layers each. `remat` says
    which arrays are saved for backward. `reduce` applies to ZeRO-3: gradients are either scattered after each
    microbatch ("each"), or summed whole and scattered once ("once"), which sends less and holds more.
    """

    pod: int = 1
    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    zero: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    remat: str = "none"
    reduce: str = "each"

    def __post_init__(self):
        if isinstance(self.pod, np.ndarray):
            return
        whole(**{name: getattr(self, name) for name in (*AXES, "microbatches", "chunks")})
        for name, allowed in {**CODED, "zero": ZEROS}.items():
            one_of(name, getattr(self, name), allowed)
        if self.fsdp > 1 and self.zero != 3:
            raise ValueError(f"fsdp = {self.fsdp} shards the params\n  fix: give zero=3, or put the chips on data")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each mesh axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def chips(self) -> int:
        """The number of chips."""
        return math.prod(self.sizes.values())

    @property
    def shards(self) -> int:
        """The number of ZeRO-3 shards of the dense weights, not counting tensor, if the job's `shards` are SHARDS."""
        return self.fsdp * self.context * self.expert if self.zero == 3 else 1

    @property
    def name(self) -> str:
        """The axes with their sizes, such as "pods 2 x FSDP 64 x TP 8"."""
        named = [f"{WORDS[axis]} {size:,}" for axis, size in self.sizes.items() if size > 1]
        if self.zero == 3 and self.fsdp == 1 and self.shards > 1:
            named.append(
                "FSDP over " + " x ".join(WORDS[axis] for axis in ("context", "expert") if self.sizes[axis] > 1)
            )
        return " x ".join(named) or "one chip"

    @property
    def pipeline(self) -> str:
        """The schedule of the stages, as `scaling.train --pipeline` names it."""
        if self.pipe == 1:
            return "1f1b"
        return self.schedule + (f":{self.chunks}" if self.schedule == "interleaved" else "")

    def meaning(self, over: Sequence[str] = SHARDS) -> str:
        """Return the name in words: the dims that the axes split, and what ZeRO shards `over` a job's axes."""
        parts = math.prod(getattr(self, axis) for axis in ("context", "expert") if axis in over)
        shards, replicas = self.fsdp * parts if self.zero == 3 else 1, self.data * parts
        words = [
            (self.pod > 1, f"{self.pod:,} pods, each a replica"),
            (self.pipe > 1, f"layers in {self.pipe} pipeline stages"),
            (self.data > 1, f"data parallel over {self.data:,}"),
            (shards > 1, f"params, gradients and optimizer state sharded over {shards:,} (ZeRO-3, FSDP)"),
            (self.context > 1, f"sequences in {self.context} parts (context parallel)"),
            (self.expert > 1, f"experts over {self.expert}"),
            (self.tensor > 1, f"heads and features over {self.tensor} (tensor parallel)"),
            (self.zero == 1 and replicas > 1, f"optimizer state sharded over {replicas:,} (ZeRO-1)"),
        ]
        return ", ".join(text for holds, text in words if holds) or "nothing is split"

    @property
    def recipe(self) -> str:
        """The other choices that determine the step: checkpointing, microbatches, schedule."""
        words = [SAVES[self.remat]]
        if self.microbatches > 1:
            words.append(f"{self.microbatches} microbatches")
        if self.pipe > 1:
            words.append(self.schedule + (f" of {self.chunks} chunks" if self.schedule == "interleaved" else ""))
        if self.zero == 3 and self.microbatches > 1:
            words.append(f"gradients scattered {'each time' if self.reduce == 'each' else 'once'}")
        return ", ".join(words)


def row(many: Layout, i: int) -> Layout:
    """Return one layout of columns of layouts."""
    values: dict[str, Any] = {field.name: int(getattr(many, field.name)[i]) for field in fields(Layout)}
    return Layout(**{name: CODED[name][value] if name in CODED else value for name, value in values.items()})
