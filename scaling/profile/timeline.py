"""What happened on one rank, as data: the runs of its lines by step, its memory, the operations between the lines.

Times are seconds on one clock for all ranks. A line takes the lane that computes, `held`: an einsum while it runs; a
collective while the lane stands still for it, in the call and where it is waited for. What it does beside that is
hidden behind other work.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from scaling.profile.intervals import Interval, length, subtract, union

LOCAL = ("Einsum", "Slice")  # ops that no other rank takes part in


@dataclass(frozen=True)
class LineRun:
    """One run of one line on one rank.

    `line`: as the book writes it; `op`, `axes`, `before`, `after`: as in `scaling.trace.Event`. `called`, `end`: from
    where it was reached to where its result was there. `held`: the intervals in which the lane that computes was its;
    `transfer`: when a transport was seen to move it, if it was. `nbytes`: V of a collective, else the bytes of operands
    and result. `group`: the ranks that take part; `peers`: those without which this one cannot go on, if not all.

    What all ranks' timelines say together, of a collective (`split_waiting`): seconds of `waiting` for rank `behind`
    (None: for nobody), and when it was `moving` data behind other work. Of a transfer that the profiler did not see,
    and that was through when it was waited for, that is the most that it can be: all the time until then.
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
        return self.op not in LOCAL and len(self.group) > 1

    @property
    def seconds(self) -> float:
        """In which it held the lane."""
        return length(self.held)

    @property
    def exposed(self) -> float:
        """Seconds of a transfer that the lane stood still for."""
        return self.seconds - self.waiting if self.communicates else 0.0

    @property
    def hidden(self) -> float:
        return length(self.moving)


@dataclass(frozen=True)
class Moment:
    """Bytes allocated since the profile began that live when a line's result is there, and the most until the next."""

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
        return self.start, self.end

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def memory(self) -> list[Moment]:
        """The memory of live tensors after each line, as the allocator reports it; first at the step's beginning."""
        changes = self.timeline.memory
        totals = [0, *accumulate(nbytes for _, nbytes in changes)]  # once so many were made and freed
        runs = sorted(self.runs, key=lambda run: run.end)
        borders = [("", self.start), *((run.line, run.end) for run in runs), ("", self.end)]
        found = []
        for (line, when), (_, until) in pairwise(borders):
            first, last = (bisect_right(changes, t, key=lambda change: change[0]) for t in (when, until))
            found.append(Moment(line, when, totals[first], max(totals[first : last + 1])))
        return found


@dataclass(frozen=True)
class RankTimeline:
    """One rank's: `marks` are the steps' borders, ascending, the first one the beginning; `runs` in the order of their
    calls; `memory`: (when, bytes allocated or, negative, freed); `ops`: (name, start, end) of the operations as
    torch.profiler saw them, outermost only; `device`: cpu or cuda; `waited`: (when, seconds that the thread has waited
    for a core so far), where it is known."""

    rank: int
    marks: tuple[float, ...]
    runs: tuple[LineRun, ...]
    memory: tuple[tuple[float, int], ...] = ()
    ops: tuple[tuple[str, float, float], ...] = ()
    device: str = "cpu"
    waited: tuple[tuple[float, float], ...] = ()

    @cached_property
    def steps(self) -> list[RankStep]:
        return [
            RankStep(self, start, end, tuple(run for run in self.runs if start <= run.called < end))
            for start, end in pairwise(self.marks)
        ]


def disjoint(runs: Sequence[LineRun]) -> list[LineRun]:
    """Runs of one rank so that no two hold the lane at once: of two, one inside the other, the inner one has it."""
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
