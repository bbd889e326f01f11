"""Which rank the others wait for, and in which of its lines its time goes.

Ranks run the same lines. What a rank does by itself, each product and what lies before each line, is held against the
same work on the other ranks: their median. A rank is slow at a line if it is so in its median step, by more than steps
differ among themselves; or once, in one step, by what is left without its waiting for a core (`cores`). Collectives
are left out: how long one takes is the slower ranks' doing.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from statistics import median

from scaling.profile import cores
from scaling.profile.split import Split
from scaling.profile.timeline import RankTimeline

LEAST, SHARE = 0.005, 0.05  # seconds, and share of a step, from which a rank is slow; once: four times and twice that
FEW = 3  # steps, below which there is no telling what is usual
NOISE = 4  # how often the usual difference between its steps a rank is late by
END = "the end of the step"
LineInStep = tuple[str, int, bool]  # a line, which of its runs in the step, and whether in it (else before it)


@dataclass(frozen=True)
class Straggler:
    """`rank` takes `seconds` a step longer than the others `inside` or before its `line`, the `occurrence`-th run of it
    in the step; who waits for it does so for `waited` seconds, on average. `line` is "" if it is slower in all. `step`:
    the only one in which it is so, None if it is in each."""

    rank: int
    line: str
    inside: bool
    occurrence: int
    seconds: float
    waited: float
    step: int | None = None

    def __str__(self) -> str:
        where = f"{'in' if self.inside else 'before'} {self.line}" if self.line else "in all its lines"
        when = "" if self.step is None else f" in step {self.step}"
        waits = f"others wait {self.waited * 1e3:.1f} ms"
        return f"rank {self.rank} is {self.seconds * 1e3:.1f} ms slow {where}{when}: {waits}"


@dataclass
class Own:
    """Seconds of a piece of what a rank does by itself in a step, and from when to when it was at it."""

    seconds: float = 0.0
    begin: float = float("inf")
    end: float = float("-inf")

    def add(self, begin: float, end: float) -> None:
        self.seconds += max(0.0, end - begin)
        self.begin, self.end = min(self.begin, begin), max(self.end, end)


def pieces(timeline: RankTimeline, step: int) -> dict[LineInStep, Own]:
    """What a rank does by itself in a step."""
    found: dict[LineInStep, Own] = defaultdict(Own)
    count: Counter = Counter()
    intervals = []
    for run in timeline.of_step(step):
        count[run.line] += 1
        name = run.line, count[run.line]
        intervals += [(start, end, name) for start, end in run.held]
        for start, end in () if run.communicates else run.held:
            found[*name, True].add(start, end)
    begin, finish = timeline.steps[step]
    for start, end, name in sorted(intervals):
        found[*name, False].add(begin, start)
        begin = max(begin, end)
    found[END, 1, False].add(begin, finish)
    return found


def waited_for(timelines: Sequence[RankTimeline], splits: Sequence[Sequence[Split]]) -> dict[int, list[float]]:
    """Seconds that others wait for a rank, by step: the mean of those that do; ranks of other groups never do."""
    steps = range(len(timelines[0].steps))
    found: dict = {timeline.rank: [defaultdict(float) for _ in steps] for timeline in timelines}
    for timeline, own in zip(timelines, splits, strict=True):
        for run, split in zip(timeline.runs, own, strict=True):
            number = sum(mark <= run.called for mark in timeline.marks) - 1 if split.behind is not None else -1
            if split.behind is not None and number in steps:
                found[split.behind][number][timeline.rank] += split.waiting
    return {rank: [sum(step.values()) / max(1, len(step)) for step in each] for rank, each in found.items()}


def find(timelines: Sequence[RankTimeline], splits: Sequence[Sequence[Split]]) -> list[Straggler]:
    """The slow ranks, slowest first: in each step, or else once; none where nobody waits for them."""
    if len(timelines) < 2:
        return []
    steps = range(len(timelines[0].steps))
    own = [[pieces(timeline, step) for step in steps] for timeline in timelines]
    least = max(LEAST, SHARE * median(end - start for start, end in timelines[0].steps))
    found, waited = [], waited_for(timelines, splits)
    for i, timeline in enumerate(timelines):
        others = [each for j, each in enumerate(own) if j != i]
        late, waits = lateness(own[i], others), waited[timeline.rank]
        always = usual(timeline.rank, late, median(waits), least) if len(steps) >= FEW else []
        found += always
        if any(not slow.line for slow in always):
            continue
        known = {(slow.line, slow.occurrence, slow.inside) for slow in always}
        limit = max(2 * least, 4 * LEAST if len(steps) >= FEW else 0.0)
        for step in steps:
            once = lateness([own[i][step]], [[each[step]] for each in others])
            for piece, (seconds, _) in once.items():
                seconds -= cores.waited_within(timeline.waited, own[i][step][piece].begin, own[i][step][piece].end)
                enough = max(limit, NOISE * late[piece][1])
                if piece not in known and seconds >= enough and waits[step] >= seconds / 2:
                    line, occurrence, inside = piece
                    found.append(Straggler(timeline.rank, line, inside, occurrence, seconds, waits[step], step))
    return sorted(found, key=lambda straggler: -straggler.seconds)


def usual(rank: int, late: dict[LineInStep, tuple[float, float]], waits: float, least: float) -> list[Straggler]:
    """What a rank is slow at in its median step; or that it is slower in all its lines, by too little in each."""
    found = []
    for (line, occurrence, inside), (seconds, noise) in late.items():
        if seconds >= max(least, NOISE * noise) and waits >= seconds / 2:
            found.append(Straggler(rank, line, inside, occurrence, seconds, waits))
    total, noise = sum(seconds for seconds, _ in late.values()), hypot(*(noise for _, noise in late.values()))
    if not found and total >= max(2 * least, NOISE * noise) and waits >= total / 2:
        found.append(Straggler(rank, "", True, 0, total, waits))
    return found


def lateness(mine: Sequence[dict[LineInStep, Own]], others: Sequence[Sequence[dict[LineInStep, Own]]]):
    """{piece: (seconds by which a rank is late at it, by which its steps or the others' usually differ)}."""
    found = {}
    for piece in set().union(*mine):
        seconds, noise = spread(mine, piece)
        theirs = [spread(each, piece) for each in others if any(piece in step for step in each)]
        if theirs:
            found[piece] = seconds - median(other for other, _ in theirs), max(noise, *(other for _, other in theirs))
    return found


def spread(steps: Sequence[dict[LineInStep, Own]], piece: LineInStep) -> tuple[float, float]:
    """The median of a piece's seconds over the steps, and the median distance from it."""
    seconds = [step[piece].seconds if piece in step else 0.0 for step in steps]
    middle = median(seconds)
    return middle, median(abs(each - middle) for each in seconds)
