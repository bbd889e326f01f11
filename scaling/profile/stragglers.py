"""Which rank the others wait for, and in which of its lines its time goes.

Ranks run the same lines. What a rank does by itself, each product and what lies before each line, is held against the
same work on the other ranks: their median; of several steps the median step, so that a moment in which the machine was
busy elsewhere counts for nothing; and a difference that is no larger than those between steps is none. Collectives are
left out: how long one takes is the slower ranks' doing.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from statistics import median

from scaling.profile.intervals import length
from scaling.profile.split import Split
from scaling.profile.timeline import Timeline

LEAST, SHARE = 0.005, 0.05  # seconds and share of a step from which a rank is called slow; of a few steps twice that
FEW = 3
NOISE = 4  # how often the usual difference between its steps a rank is late by
END = "the end of the step"
Piece = tuple[str, int, bool]  # a line, which of its runs in the step, and whether in it (else before it)


@dataclass(frozen=True)
class Straggler:
    """`rank` takes `seconds` a step longer than the others `inside` or before its `line`, the `occurrence`-th run of it
    in the step; the others wait for it for `waited` seconds a step, on average. `line` is "" if it is slower in all."""

    rank: int
    line: str
    inside: bool
    occurrence: int
    seconds: float
    waited: float

    def __str__(self) -> str:
        where = f"{'in' if self.inside else 'before'} {self.line}" if self.line else "in all its lines"
        return f"rank {self.rank} is {self.seconds * 1e3:.1f} ms slow {where}: others wait {self.waited * 1e3:.1f} ms"


def pieces(timeline: Timeline, step: int) -> Counter[Piece]:
    """Seconds of what a rank does by itself in a step."""
    found: Counter = Counter()
    count: Counter = Counter()
    intervals = []
    for run in timeline.of_step(step):
        count[run.line] += 1
        name = run.line, count[run.line]
        intervals += [(start, end, name) for start, end in run.held]
        if not run.communicates:
            found[*name, True] += length(run.held)
    begin, finish = timeline.steps[step]
    for start, end, name in sorted(intervals):
        found[*name, False] += max(0.0, start - begin)
        begin = max(begin, end)
    found[END, 1, False] += max(0.0, finish - begin)
    return found


def typical(timeline: Timeline) -> dict[Piece, tuple[float, float]]:
    """Of each piece the median over the steps, and the median distance from it."""
    steps, found = [pieces(timeline, step) for step in range(len(timeline.steps))], {}
    for piece in set().union(*steps):
        middle = median(step[piece] for step in steps)
        found[piece] = middle, median(abs(step[piece] - middle) for step in steps)
    return found


def waited_for(timelines: Sequence[Timeline], splits: Sequence[Sequence[Split]]) -> dict[int, float]:
    """Seconds a step that each other rank waits for a rank: their mean in the median step."""
    by_step: dict[int, Counter] = defaultdict(Counter)
    for timeline, found in zip(timelines, splits, strict=True):
        for run, split in zip(timeline.runs, found, strict=True):
            if split.behind is not None:
                number = sum(mark <= run.called for mark in timeline.marks) - 1
                by_step[split.behind][number] += split.waiting / (len(timelines) - 1)
    steps = range(len(timelines[0].steps))
    return {rank: median(seconds[step] for step in steps) for rank, seconds in by_step.items()}


def find(timelines: Sequence[Timeline], splits: Sequence[Sequence[Split]]) -> list[Straggler]:
    """The slow ranks, slowest first; none where a rank is not waited for, or has more to compute than the others."""
    if len(timelines) < 2:
        return []
    steps = timelines[0].steps
    least = max(LEAST, SHARE * median(end - start for start, end in steps)) * (1 if len(steps) >= FEW else 2)
    own, waited = [typical(timeline) for timeline in timelines], waited_for(timelines, splits)
    found = []
    for timeline, mine in zip(timelines, own, strict=True):
        others = [theirs for theirs in own if theirs is not mine]
        late, noise = {}, {}
        for piece, (seconds, unsteady) in mine.items():
            theirs = [each[piece] for each in others if piece in each]
            if theirs:
                late[piece] = seconds - median(usual for usual, _ in theirs)
                noise[piece] = max(unsteady, *(other for _, other in theirs))
        waits = waited.get(timeline.rank, 0.0)
        slow = [(by, piece) for piece, by in late.items() if by >= max(least, NOISE * noise[piece]) and waits >= by / 2]
        found += [Straggler(timeline.rank, line, inside, k, seconds, waits) for seconds, (line, k, inside) in slow]
        total = sum(late.values())
        if not slow and total >= max(2 * least, NOISE * hypot(*noise.values())) and waits >= total / 2:
            found.append(Straggler(timeline.rank, "", True, 0, total, waits))
    return sorted(found, key=lambda straggler: -straggler.seconds)
