"""Where the time of a step went: each collective's in waiting, exposed and hidden; by line; each rank's step in parts.

A collective cannot begin before the last of those that it needs has come: until then a rank that stands still *waits*,
for that rank. What it stands still for after that is *exposed*: the transfer itself. What of the transfer runs while
the rank stands still for no collective is *hidden*. Where a rank goes on before a later one has come, it did not need
that one, and did not wait for it.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scaling import cost
from scaling.hardware import Chip
from scaling.profile.intervals import Interval, between, intersect, length, subtract, union
from scaling.profile.timeline import LineRun, RankTimeline


@dataclass(frozen=True)
class Split:
    """Seconds of one run on one rank: `waiting` for rank `behind` (None: for nobody), `exposed`, and when hidden.

    Of a transfer that the profiler did not see, and that was through when it was waited for, `hidden` is the most that
    it can be: all the time until then.
    """

    waiting: float = 0.0
    exposed: float = 0.0
    behind: int | None = None
    moving: tuple[Interval, ...] = ()

    @property
    def hidden(self) -> float:
        return length(self.moving)


def meetings(timelines: Sequence[RankTimeline]) -> dict[tuple[int, int], list[tuple[int, LineRun]]]:
    """(rank, position of a run) -> the (rank, run) that take part in the same collective, this one included.

    Ranks of a group call the same collectives in the same order; a message is the one of its type, in order, from its
    sender to its receiver.
    """
    met, places = defaultdict(list), {}
    for timeline in timelines:
        count: Counter = Counter()
        for i, run in enumerate(timeline.runs):
            if run.communicates:
                key: tuple = run.group
                if run.op in ("Send", "Recv"):
                    ends = (timeline.rank, *run.peers)
                    key = "message", run.after, ends if run.op == "Send" else ends[::-1]
                count[key] += 1
                places[timeline.rank, i] = (*key, count[key])
                met[places[timeline.rank, i]].append((timeline.rank, run))
    return {place: met[name] for place, name in places.items()}


def _split(rank: int, run: LineRun, met: Sequence[tuple[int, LineRun]], standing: Sequence[Interval]) -> Split:
    """The split of one run, which met these; `standing`: when its rank stands still for any collective."""
    needed = [(r.called, who) for who, r in met if who != rank and (not run.peers or who in run.peers)]
    came, who = max(((t, who) for t, who in needed if t < run.end), default=(run.called, rank))
    held = union(run.held)
    waiting = length(intersect(held, [(run.called, came)])) if came > run.called else 0.0
    moving = subtract(union([transfer_of(run, came)]), standing)
    return Split(waiting, length(held) - waiting, who if waiting > 0 else None, tuple(moving))


def transfer_of(run: LineRun, came: float) -> Interval:
    """When a run moved its data: as seen by the profiler, but not before all had come; else, from the call to the end
    of the wait if it stood still there, and at most until it was waited for if it did not."""
    begin = max(run.called, came)
    if run.transfer is not None:
        return max(begin, run.transfer[0]), max(begin, run.transfer[1])
    return min(begin, run.end), run.end


def splits(timelines: Sequence[RankTimeline]) -> list[list[Split]]:
    """The split of every run of every rank, in the order of the runs; of those that send nothing an empty one."""
    met, found = meetings(timelines), []
    for t in timelines:
        standing = union(interval for run in t.runs if run.communicates for interval in run.held)
        found.append(
            [_split(t.rank, r, met[t.rank, i], standing) if r.communicates else Split() for i, r in enumerate(t.runs)]
        )
    return found


@dataclass(frozen=True)
class Parts:
    """One rank's step in seconds: products, transfers that it stood still for, waiting, and what lies between lines:
    operations that the profiler saw, and the rest, which is Python. They add up to the step."""

    products: float
    exposed: float
    waiting: float
    between: float
    python: float
    hidden: float
    step: float

    @property
    def total(self) -> float:
        return self.products + self.exposed + self.waiting + self.between + self.python


def step_parts(timeline: RankTimeline, found: Sequence[Split], step: Interval) -> Parts:
    """The parts of one rank's step. A run that reaches over its border counts with what it holds within it."""
    products = exposed = waiting = 0.0
    taken: list[Interval] = []
    for run, each in zip(timeline.runs, found, strict=True):
        inside = intersect(union(run.held), [step])
        taken += inside
        seconds = length(inside)
        share = seconds / length(run.held) if length(run.held) else 0.0
        if run.communicates:
            waiting += each.waiting * share
            exposed += seconds - each.waiting * share
        else:
            products += seconds
    gaps = between(union(taken), step)
    busy = length(intersect(gaps, union((a, b) for _, a, b in timeline.ops)))
    hidden = length(intersect(union(interval for each in found for interval in each.moving), [step]))
    return Parts(products, exposed, waiting, busy, length(gaps) - busy, hidden, step[1] - step[0])


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
