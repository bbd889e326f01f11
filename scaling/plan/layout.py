"""A layout: how many chips each mesh axis has, and how the step runs on them. Its fields may be columns of many
layouts.

pod (replicas joined by the datacenter's network), pipe (stages of layers), data (replicas), fsdp, context (parts of a
sequence), expert, tensor: outermost first. Tokens are split over pod, data, fsdp, context and expert. Weights are split
over tensor and pipe, those of experts over expert, and by ZeRO: stage 3 also over fsdp, context and expert, gathered
for each use; stage 1 only what the optimizer holds, over data, context and expert; 0 nothing.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from scaling.cost.transformer import POLICIES

AXES = ("pod", "pipe", "data", "fsdp", "context", "expert", "tensor")
WORDS = {
    "pod": "pods", "pipe": "PP", "data": "DP", "fsdp": "FSDP", "context": "CP", "expert": "EP", "tensor": "TP",
}  # fmt: skip
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "dualpipev")
SAVES = {
    "none": "nothing recomputed", "attention": "attention recomputed", "matmuls": "big matmuls saved",
    "block": "block checkpointing",
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Sizes of AXES; `zero`: 0, 1 or 3; `schedule` of the stages, with `chunks` of layers each; `remat`: what is saved.

    `reduce`: with ZeRO-3, gradients are scattered after each microbatch ("each"), or summed whole and scattered once
    ("once"), which sends less and holds more.
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
        for name in (*AXES, "microbatches", "chunks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value!r}: must be a whole number, 1 or more\n  fix: give an int")
        for name, allowed in (("schedule", SCHEDULES), ("remat", POLICIES), ("reduce", ("each", "once"))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} is not known\n  fix: choose one of {', '.join(allowed)}"
                )
        if self.zero not in (0, 1, 3):
            raise ValueError(f"zero = {self.zero!r}: 0, 1 or 3\n  fix: choose one of the three")
        if self.fsdp > 1 and self.zero != 3:
            raise ValueError(f"fsdp = {self.fsdp} shards the params\n  fix: give zero=3, or put the chips on data")

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def chips(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def shards(self) -> int:
        """Ways in which ZeRO-3 splits the dense weights, beyond tensor."""
        return self.fsdp * self.context * self.expert if self.zero == 3 else 1

    @property
    def name(self) -> str:
        """pods 2 x FSDP 64 x TP 8."""
        named = [f"{WORDS[axis]} {size:,}" for axis, size in self.sizes.items() if size > 1]
        if self.zero == 3 and self.fsdp == 1 and self.shards > 1:
            named.append(
                "FSDP over " + " x ".join(WORDS[axis] for axis in ("context", "expert") if self.sizes[axis] > 1)
            )
        return " x ".join(named) or "one chip"

    @property
    def recipe(self) -> str:
        """What else decides the step: checkpointing, microbatches, schedule."""
        words = [SAVES[self.remat]]
        if self.microbatches > 1:
            words.append(f"{self.microbatches} microbatches")
        if self.pipe > 1:
            words.append(self.schedule + (f" of {self.chunks} chunks" if self.schedule == "interleaved" else ""))
        if self.zero == 3 and self.microbatches > 1:
            words.append(f"gradients scattered {'each time' if self.reduce == 'each' else 'once'}")
        return ", ".join(words)


CODED = {"schedule": SCHEDULES, "remat": POLICIES, "reduce": ("each", "once")}  # words are numbers in columns


def row(many: Layout, i: int) -> Layout:
    """One layout of columns of them."""
    values: dict[str, Any] = {field.name: int(getattr(many, field.name)[i]) for field in fields(Layout)}
    return Layout(**{name: CODED[name][value] if name in CODED else value for name, value in values.items()})
