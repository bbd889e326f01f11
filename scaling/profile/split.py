"""Split the time of a step: each collective's into waiting, exposed and hidden; by line; and each rank's step in parts.

A collective cannot begin before the last rank that it needs has come. Until then a rank that stands still *waits* for
that rank. The time for which it stands still after that is *exposed*: the transfer itself. The part of the transfer
during which the rank stands still for no collective is *hidden*. If a rank goes on before another has come, it did not
need that rank, so it did not wait for it.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scaling import cost
from scaling.hardware import Chip
from scaling.profile.timeline import Interval, LineRun, RankStep, RankTimeline, gaps, intersect, length, subtract, union


def meetings(timelines: Sequence[RankTimeline]) -> dict[tuple[int, int], list[tuple[int, LineRun]]]:
    """Return {(rank, position of a run): the (rank, run) that take part in the same collective, this one included}.

    Ranks of a group call the same collectives in the same order. A message is identified by its type, its sender, its
    receiver and its number among those.
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


def split_waiting(timelines: Sequence[RankTimeline]) -> tuple[RankTimeline, ...]:
    """Return the timelines with their collectives' time split."""
    met, found = meetings(timelines), []
    for t in timelines:
        standing = union(interval for run in t.runs if run.communicates for interval in run.held)
        runs = [_split(t.rank, r, met[t.rank, i], standing) if r.communicates else r for i, r in enumerate(t.runs)]
        found.append(replace(t, runs=tuple(runs)))
    return tuple(found)


def _split(rank: int, run: LineRun, met: Sequence[tuple[int, LineRun]], standing: Sequence[Interval]) -> LineRun:
    """Return a run with its time split.

    `met` are the (rank, run) that took part; `standing` is when the run's rank stood still for any collective.
    """
    needed = [(r.called, who) for who, r in met if who != rank and (not run.peers or who in run.peers)]
    came, who = max(((t, who) for t, who in needed if t < run.end), default=(run.called, rank))
    waiting = length(intersect(union(run.held), [(run.called, came)]))
    moving = subtract(union([_transfer(run, came)]), standing)
    return replace(run, waiting=waiting, behind=who if waiting > 0 else None, moving=tuple(moving))


def _transfer(run: LineRun, came: float) -> Interval:
    """Return when a run moved its data.

    If the profiler saw the transfer, it is that interval after all ranks had come. Otherwise it is from the call to the
    end of the wait, or, if the rank did not stand still there, at most until it asked for the result.
    """
    begin = max(run.called, came)
    if run.transfer is not None:
        return max(begin, run.transfer[0]), max(begin, run.transfer[1])
    return min(begin, run.end), run.end


@dataclass(frozen=True)
class Parts:
    """One rank's step in seconds; the first five parts add up to the step.

    They are products, exposed transfers, waiting, operations between the lines that the profiler saw, and the rest,
    which is Python.
    """

    products: float
    exposed: float
    waiting: float
    between: float
    python: float
    hidden: float
    step: float

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return self.products + self.exposed + self.waiting + self.between + self.python


def step_parts(step: RankStep) -> Parts:
    """Return the parts of one rank's step; of a line that crosses the step's border only the time inside counts."""
    products = exposed = waiting = 0.0
    taken, runs = [], step.timeline.runs
    for run in runs:
        inside = intersect(union(run.held), [step.span])
        taken += inside
        seconds = length(inside)
        if run.communicates:
            waits = run.waiting * seconds / run.seconds if run.seconds else 0.0
            waiting, exposed = waiting + waits, exposed + seconds - waits
        else:
            products += seconds
    free = gaps(union(taken), step.span)
    busy = length(intersect(free, union((a, b) for _, a, b in step.timeline.ops)))
    hidden = length(intersect(union(interval for run in runs for interval in run.moving), [step.span]))
    return Parts(products, exposed, waiting, busy, length(free) - busy, hidden, step.seconds)


@dataclass(frozen=True)
class LineTotal:
    """The totals of one line in a step: the mean over steps and ranks.

    `seconds` is the time in which the line held the rank; for a collective that is `waiting` + `exposed`. `nbytes` is V
    for a collective. `behind` is the rank that was most waited for, or None.
    """

    run: LineRun
    calls: float
    behind: int | None
    seconds: float
    waiting: float
    exposed: float
    hidden: float
    flops: float
    nbytes: float

    @property
    def line(self) -> str:
        """The line's text."""
        return self.run.line

    def predicted(self, chip: Chip, dtype: str = "fp32") -> float | None:
        """Return the seconds of the line's runs by the chip's roofline, or None if the chip's file does not say.

        That is FLOPs at the chip's rate or bytes at its memory's, whichever takes longer; for a collective it is the
        time by the chip's links or its measurements.
        """
        if self.run.op in ("Send", "Recv", "Broadcast", "Reduce", "Scatter", "Gather"):
            return None
        try:
            if self.run.communicates:
                return self.calls * cost.seconds(self.run.op, self.run.nbytes, chip, len(self.run.group))
            rate = chip.flops(self.run.dtype or dtype)
            return cost.roofline(self.flops, self.nbytes, rate, chip.need("hbm_bw")).lower if self.flops else None
        except ValueError:
            return None


MEANS = ("seconds", "waiting", "exposed", "hidden", "flops", "nbytes")


def by_line(timelines: Sequence[RankTimeline]) -> list[LineTotal]:
    """Return the totals of the lines, in the order of their first runs."""
    every = [step for timeline in timelines for step in timeline.steps]
    lines, found = defaultdict(list), []
    for step in every:
        for run in step.runs:
            lines[run.line].append(run)
    for runs in lines.values():
        delays = Counter()
        for run in runs:
            if run.behind is not None:
                delays[run.behind] += run.waiting
        means = {name: sum(getattr(run, name) for run in runs) / len(every) for name in MEANS}
        found.append(
            LineTotal(runs[0], len(runs) / len(every), max(delays, key=delays.__getitem__, default=None), **means)
        )
    return found
