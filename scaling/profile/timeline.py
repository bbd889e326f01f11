"""The recorded data of one rank: the runs of its lines by step, its memory, and the operations between the lines.

Times are seconds on one clock for all ranks, and a set of times is a sorted list of disjoint intervals (start, end):
union([(0, 2), (1, 3)]) is [(0, 3)], whose length is 3. `held` is when a line occupies the computing lane: an einsum
while it runs; a collective while the lane stands still for it, in the call and in the wait. The rest of a collective's
time is hidden behind other work.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise

Interval = tuple[float, float]
LOCAL = ("Einsum", "Slice")  # ops without communication


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times that any of the intervals covers; empty and reversed intervals cover none."""
    joined: list[Interval] = []
    for start, end in sorted(each for each in intervals if each[0] < each[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Return the seconds that disjoint intervals cover."""
    return sum(end - start for start, end in intervals)


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the times in both; for a short b this is as quick as if a were short, too."""
    found, i, j = [], max(0, bisect_right(a, b[0]) - 1) if b else 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        found += [(start, end)] if start < end else []
        i, j = (i + 1, j) if a[i][1] <= b[j][1] else (i, j + 1)
    return found


def gaps(intervals: Sequence[Interval], within: Interval) -> list[Interval]:
    """Return the times of `within` that the intervals do not cover."""
    start, end = within
    edges = [start, *chain(*intersect(intervals, [within])), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the times in a but not in b; for a short a this is as quick as if b were short, too."""
    return intersect(a, gaps(b, (a[0][0], a[-1][1]))) if a else []


@dataclass(frozen=True)
class LineRun:
    """One run of one line on one rank.

    `line`: as the book writes it; `op`, `axes`, `before`, `after`: as in `scaling.trace.Event`. `called`, `end`: when
    it was reached and when its result was ready. `held`: the intervals in which it occupied the computing lane;
    `transfer`: when the profiler saw a transport move it, if it did. `nbytes`: V of a collective, else the bytes of
    operands and result. `group`: the ranks that take part; `peers`: the ranks without which this one cannot go on, if
    not all.

    The last fields follow from all ranks' timelines together (`split_waiting`): seconds of `waiting` for rank `behind`
    (None: for nobody), and when it was `moving` data behind other work. If the profiler did not see a transfer that had
    finished before it was waited for, `moving` is an upper bound: all the time until then.
    """

    line: str
    op: str
    axes: tuple[str, ...]
    called: float
    end: float
    held: tuple[Interval, ...]
    before: str = ""
    after: str = ""
    transfer: Interval | None = None
    nbytes: int = 0
    wire_bytes: int = 0
    flops: int = 0
    dtype: str = ""
    key: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    async_op: bool = False
    waiting: float = 0.0
    behind: int | None = None
    moving: tuple[Interval, ...] = ()

    @property
    def communicates(self) -> bool:
        """Whether other ranks take part."""
        return self.op not in LOCAL and len(self.group) > 1

    @property
    def seconds(self) -> float:
        """The seconds in which it held the lane."""
        return length(self.held)

    @property
    def exposed(self) -> float:
        """The seconds of the transfer for which the lane stood still."""
        return self.seconds - self.waiting if self.communicates else 0.0

    @property
    def hidden(self) -> float:
        """The seconds of the transfer behind other work."""
        return length(self.moving)


@dataclass(frozen=True)
class Moment:
    """The live bytes when a line's result is ready, and their peak until the next line's.

    Only allocations since the profile began are counted.
    """

    line: str
    when: float
    live: int
    peak: int


@dataclass(frozen=True)
class RankStep:
    """One step of a rank, from `start` to `end`, with the runs that were called in it."""

    timeline: "RankTimeline"
    start: float
    end: float
    runs: tuple[LineRun, ...]

    @property
    def span(self) -> Interval:
        """The interval of the step."""
        return self.start, self.end

    @property
    def seconds(self) -> float:
        """The length of the step."""
        return self.end - self.start

    def memory(self) -> list[Moment]:
        """Return the live memory at the step's beginning and after each line, as the allocator reports it."""
        changes = self.timeline.memory
        totals = [0, *accumulate(nbytes for _, nbytes in changes)]  # running totals after each change
        runs = sorted(self.runs, key=lambda run: run.end)
        borders = [("", self.start), *((run.line, run.end) for run in runs), ("", self.end)]
        found = []
        for (line, when), (_, until) in pairwise(borders):
            first, last = (bisect_right(changes, t, key=lambda change: change[0]) for t in (when, until))
            found.append(Moment(line, when, totals[first], max(totals[first : last + 1])))
        return found


@dataclass(frozen=True)
class RankTimeline:
    """The timeline of one rank.

    `marks`: the steps' borders, ascending, the first one the beginning; `runs`: in the order of their calls; `memory`:
    (when, bytes allocated or, negative, freed); `ops`: (name, start, end) of the outermost operations that
    torch.profiler saw; `device`: cpu or cuda; `waited`: (when, seconds that the thread has waited for a core so far),
    if known.
    """

    rank: int
    marks: tuple[float, ...]
    runs: tuple[LineRun, ...]
    memory: tuple[tuple[float, int], ...] = ()
    ops: tuple[tuple[str, float, float], ...] = ()
    device: str = "cpu"
    waited: tuple[tuple[float, float], ...] = ()

    @cached_property
    def steps(self) -> list[RankStep]:
        """The steps, each with its runs."""
        return [
            RankStep(self, start, end, tuple(run for run in self.runs if start <= run.called < end))
            for start, end in pairwise(self.marks)
        ]


def disjoint(runs: Sequence[LineRun]) -> list[LineRun]:
    """Return a rank's runs so that no two hold the lane at once: of two nested runs the inner one holds it."""
    order = sorted(range(len(runs)), key=lambda i: runs[i].called)
    held = {}
    open_: list[int] = []  # runs that may contain the next one
    for i in order:
        open_ = [j for j in open_ if held[j] and held[j][-1][1] > runs[i].called]
        held[i] = union(runs[i].held)
        for j in open_:
            held[j] = subtract(held[j], held[i])
        open_.append(i)
    return [replace(run, held=tuple(held[i])) for i, run in enumerate(runs)]
