"""Find the rank that the others wait for, and which of its lines take the time.

All ranks run the same lines. The work that a rank does alone, which is each product and the time before each line, is
compared with the median of the same work on the other ranks. A rank is slow at a line if it is late there in its median
step, by more than its steps differ among themselves. It is slow once if it is late in a single step, after subtracting
the time for which it waited for a core. Collectives are left out because their time depends on the slower ranks.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import hypot
from statistics import median

from scaling.profile.timeline import Interval, RankStep, RankTimeline, length

LEAST, SHARE = 0.005, 0.05  # seconds and share of a step that make a rank slow; once: 4 times and twice these
FEW = 3  # fewer steps do not show a habit
NOISE = 4  # a slow rank is late by this many times the usual difference between its steps
END = "the end of the step"
Piece = tuple[str, int, bool]  # a line, the number of its run in the step, and whether inside it (else before it)


@dataclass(frozen=True)
class Straggler:
    """A rank that takes longer than the others, by `seconds` a step, `inside` or before a line.

    `occurrence` is the number of the line's run in the step; `line` is "" if the rank is slower in all lines. The ranks
    that wait for it do so for `waited` seconds on average. `step` is the only step in which it is slow, or None for
    all.
    """

    rank: int
    line: str
    occurrence: int
    inside: bool
    seconds: float
    waited: float
    step: int | None = None

    def __str__(self) -> str:
        where = f"{'in' if self.inside else 'before'} {self.line}" if self.line else "in all its lines"
        when = "" if self.step is None else f" in step {self.step}"
        waits = f"others wait {self.waited * 1e3:.1f} ms"
        return f"rank {self.rank} is {self.seconds * 1e3:.1f} ms slow {where}{when}: {waits}"


def pieces(step: RankStep) -> dict[Piece, list[Interval]]:
    """Return the times of a rank's own work in a step, by piece."""
    found, count, intervals = defaultdict(list), Counter(), []
    for run in step.runs:
        count[run.line] += 1
        name = run.line, count[run.line]
        intervals += [(*held, name) for held in run.held]
        if run.held and not run.communicates:
            found[*name, True] += run.held
    begin = step.start
    for start, end, name in sorted(intervals):
        found[*name, False].append((begin, max(begin, start)))
        begin = max(begin, end)
    found[END, 1, False].append((begin, max(begin, step.end)))
    return found


def waited_for(timelines: Sequence[RankTimeline]) -> dict[int, list[float]]:
    """Return the seconds that others wait for each rank, by step: the mean over the waiting ranks."""
    numbers = range(len(timelines[0].steps))
    found: dict = {timeline.rank: [defaultdict(float) for _ in numbers] for timeline in timelines}
    for timeline in timelines:
        for number, step in zip(numbers, timeline.steps, strict=False):
            for run in step.runs:
                if run.behind is not None:
                    found[run.behind][number][timeline.rank] += run.waiting
    return {rank: [sum(step.values()) / max(1, len(step)) for step in each] for rank, each in found.items()}


def lateness(seconds: Mapping[Piece, float], others: Sequence[Mapping[Piece, float]]) -> dict[Piece, float]:
    """Return the seconds by which a rank takes longer than the median of the others, at each piece that they share."""
    theirs = {piece: [each[piece] for each in others if piece in each] for piece in seconds}
    return {piece: seconds[piece] - median(each) for piece, each in theirs.items() if each}


def find(timelines: Sequence[RankTimeline]) -> list[Straggler]:
    """Return the slow ranks, slowest first: those slow in the median step, and those slow in a single step.

    A rank that nobody waits for is not slow.
    """
    if len(timelines) < 2:
        return []
    own = [[pieces(step) for step in timeline.steps] for timeline in timelines]
    took = [[{piece: length(each) for piece, each in step.items()} for step in steps] for steps in own]
    medians: list[dict[Piece, float]] = []
    noise: dict[Piece, float] = defaultdict(float)  # the median distance of a step from the median step
    for steps in took:
        medians.append({})
        for piece in dict.fromkeys(chain(*steps)):
            seconds = [step.get(piece, 0.0) for step in steps]
            medians[-1][piece] = middle = median(seconds)
            noise[piece] = max(noise[piece], median(abs(each - middle) for each in seconds))
    least = max(LEAST, SHARE * median(step.seconds for step in timelines[0].steps))
    found, waited, enough = [], waited_for(timelines), len(timelines[0].steps) >= FEW
    once = max(2 * least, 4 * LEAST if enough else 0.0)
    for i, timeline in enumerate(timelines):
        waits, others = waited[timeline.rank], [j for j in range(len(timelines)) if j != i]
        late = lateness(medians[i], [medians[j] for j in others])
        always = usual(timeline.rank, late, noise, median(waits), least) if enough else []
        found += always
        if any(not slow.line for slow in always):
            continue
        known = {(slow.line, slow.occurrence, slow.inside) for slow in always}
        for step, wait in enumerate(waits):
            for piece, seconds in lateness(took[i][step], [took[j][step] for j in others]).items():
                begin, end = own[i][step][piece][0][0], own[i][step][piece][-1][1]
                seconds -= waited_within(timeline.waited, begin, end)
                if piece not in known and seconds >= max(once, NOISE * noise[piece]) and wait >= seconds / 2:
                    found.append(Straggler(timeline.rank, *piece, seconds, wait, step))
    return sorted(found, key=lambda straggler: -straggler.seconds)


def waited_within(waited: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Return the seconds waited for a core between the last look before `start` and the first look after `end`."""
    if not waited:
        return 0.0
    first = max(0, bisect_right(waited, start, key=lambda look: look[0]) - 1)
    last = min(len(waited) - 1, bisect_left(waited, end, key=lambda look: look[0]))
    return max(0.0, waited[last][1] - waited[first][1])


def usual(
    rank: int, late: Mapping[Piece, float], noise: Mapping[Piece, float], waits: float, least: float
) -> list[Straggler]:
    """Return the pieces at which a rank is slow in its median step.

    A rank that is slow at no piece, but slower over all lines together, counts as slow in all its lines.
    """
    found = [
        Straggler(rank, *piece, seconds, waits)
        for piece, seconds in late.items()
        if seconds >= max(least, NOISE * noise[piece]) and waits >= seconds / 2
    ]
    total, differ = sum(late.values()), hypot(*(noise[piece] for piece in late))
    if not found and total >= max(2 * least, NOISE * differ) and waits >= total / 2:
        found.append(Straggler(rank, "", 0, True, total, waits))
    return found
