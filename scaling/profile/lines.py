"""The lines of the algorithm with what they took: one row for all runs of a line in a step."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scaling import cost
from scaling.hardware import Chip
from scaling.profile.intervals import length
from scaling.profile.split import Split
from scaling.profile.timeline import LineRun, RankTimeline


@dataclass
class LineTotal:
    """A line, by step: the mean over steps and ranks. `calls`; `seconds` in which it held the lane that computes, for a
    collective `waiting` + `exposed`; `hidden`; FLOPs, bytes (V of a collective); `behind`: the rank most waited for."""

    run: LineRun
    calls: float = 0.0
    seconds: float = 0.0
    waiting: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0
    delays: defaultdict[Any, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def line(self) -> str:
        return self.run.line

    @property
    def behind(self) -> int | None:
        """The rank most waited for, None if nobody is."""
        return max(self.delays, key=self.delays.__getitem__) if self.delays else None

    def add(self, run: LineRun, split: Split, share: float) -> None:
        """A run that counts as `share` of one: 1 / (steps x ranks)."""
        self.calls += share
        self.seconds += share * length(run.held)
        self.waiting += share * split.waiting
        self.exposed += share * split.exposed
        self.hidden += share * split.hidden
        self.flops += share * run.flops
        self.nbytes += share * run.nbytes
        if split.behind is not None:
            self.delays[split.behind] += split.waiting

    def predicted(self, chip: Chip, dtype: str = "fp32") -> float | None:
        """Seconds that its runs take by the chip's roofline: FLOPs at its rate or bytes at its memory's, whichever
        takes longer; of a collective by its links or as measured. None if the chip's file does not say."""
        if self.run.op in ("Send", "Recv", "Broadcast", "Reduce", "Scatter", "Gather"):
            return None
        try:
            if self.run.communicates:
                return self.calls * cost.seconds(self.run.op, self.run.nbytes, chip, len(self.run.group))
            rate = chip.flops(SHORT.get(self.run.dtype, dtype))
            return cost.roofline(self.flops, self.nbytes, rate, chip.need("hbm_bw")).lower if self.flops else None
        except ValueError:
            return None


SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}  # torch's dtypes in chip files


def by_line(timelines: Sequence[RankTimeline], splits: Sequence[Sequence[Split]]) -> list[LineTotal]:
    """The lines in the order in which they first run."""
    totals: dict[str, LineTotal] = {}
    share = 1 / sum(len(timeline.steps) for timeline in timelines)
    for timeline, found in zip(timelines, splits, strict=True):
        last = timeline.marks[-1]
        for run, split in zip(timeline.runs, found, strict=True):
            if timeline.marks[0] <= run.called < last:
                totals.setdefault(run.line, LineTotal(run)).add(run, split, share)
    return list(totals.values())
