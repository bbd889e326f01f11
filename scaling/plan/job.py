"""What the planner is asked: a model, a batch, what is stored of each parameter, the chips, what the user decided."""

from dataclasses import dataclass
from functools import cached_property

from scaling.configs import Config
from scaling.hardware import Chip
from scaling.plan.layout import AXES, POLICIES, SCHEDULES
from scaling.plan.work import LayerWork, Stack, work_of
from scaling.spec import DTYPE_BYTES, dtype_bytes

OVERLAPS = ("max", "sum", "none")
DTYPES = ("bf16", "fp16", "fp32", "fp64", "fp8", "int8")


@dataclass(frozen=True)
class Job:
    """A batch of so many tokens, in sequences of `seq`, and the bytes of a parameter, its gradient, its optimizer
    state.

    `dtype`: of the layers' matmuls; with fp8 or int8 the dot products, the unembedding and what is sent stay bf16, but
    for tokens on their way to experts. `overlap`, of the bound: collectives over different links run at once, behind
    the matmuls ("max", the book of 2026); one after the other, but behind the matmuls ("sum", 2025); nothing behind
    anything ("none"). `headroom`: the share of a chip's memory that is planned with; the rest goes to the runtime, its
    buffers and fragments.
    """

    config: Config | Stack
    batch: int
    seq: int = 4096
    dtype: str = "bf16"
    param_bytes: float = 2
    grad_bytes: float = 2
    optimizer_bytes: float = 8
    overlap: str = "max"
    headroom: float = 0.9

    def __post_init__(self):
        for name in ("batch", "seq"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value!r}: must be a whole number of at least 1\n  fix: give an int")
        for name in ("param_bytes", "grad_bytes", "optimizer_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1000:
                raise ValueError(
                    f"{name} = {value!r}: must be a number of bytes, zero or more\n  fix: give one below 1,000"
                )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype!r} is not known\n  fix: choose one of {', '.join(DTYPES)}")
        if self.overlap not in OVERLAPS:
            raise ValueError(f"overlap = {self.overlap!r} is not known\n  fix: choose one of {', '.join(OVERLAPS)}")
        if not isinstance(self.headroom, (int, float)) or not 0 < self.headroom <= 1:
            raise ValueError(
                f"headroom = {self.headroom!r}: the share of memory to plan with, above 0 and at most 1"
                "\n  fix: give 0.9, say"
            )
        if self.seq > self.batch:
            raise ValueError(
                f"a sequence of {self.seq:,} tokens is longer than the batch of {self.batch:,}"
                "\n  fix: give a larger batch, or a shorter sequence"
            )

    @cached_property
    def work(self) -> LayerWork:
        return work_of(self.config, self.seq)

    @property
    def sequences(self) -> int:
        """Of the global batch, the last one perhaps a part of one."""
        return -(-self.batch // self.seq)

    @property
    def wide(self) -> str:
        """The dtype of the dot products, of the unembedding and of what is sent."""
        return "bf16" if DTYPE_BYTES[self.dtype] < 2 else self.dtype

    @property
    def act_bytes(self) -> float:
        return dtype_bytes(self.wide)

    def flops(self, remat: str = "none") -> float:
        """FLOPs of a step that attention kernels need: six per weight and token, and the causal dot products."""
        return self.work.flops(self.batch, remat)


@dataclass(frozen=True)
class Fixed:
    """What the user has decided: None is open. `axes`: sizes by mesh axis."""

    axes: tuple[tuple[str, int], ...] = ()
    remat: str | None = None
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    zero: int | None = None
    pods: int | None = None

    def __post_init__(self):
        for axis, size in self.axes:
            if axis not in AXES:
                raise ValueError(f"unknown mesh axis {axis!r}\n  fix: choose one of {', '.join(AXES)}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{axis} = {size!r}: must be a whole number, 1 or more\n  fix: give an int")
        for name, allowed in (("remat", POLICIES), ("schedule", SCHEDULES), ("zero", (0, 1, 3))):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ValueError(f"unknown {name} {value!r}\n  fix: choose one of {', '.join(map(str, allowed))}")


ANY = Fixed()


@dataclass(frozen=True)
class Question:
    """What is asked: the layout of a job on so many chips, with what the user has decided."""

    job: Job
    chip: Chip
    chips: int
    fixed: Fixed = ANY
