"""Suggest changes and price them: each rule looks for one kind of waste in the timelines.

A gain is the measured seconds a step, as the mean over ranks, that go away if nothing else changes. Some changes have a
price that no profile of the present program shows; then the gain is a bound. A hidden transfer takes cores and memory
from the work that hides it (if all cores compute, as much as it saves). A shorter dtype needs conversions, and the
transport may sum it more slowly. Work that is shared out differently makes other, smaller products. A shared update
must gather the params.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from scaling.profile.timeline import RankStep, RankTimeline, gaps, intersect, length, union

LEAST = 0.01  # share of a step: smaller gains are not suggested
SMALL = 2**18  # bytes V below which a collective's time is its latency
FEW = 4  # small collectives of one kind, from which they are worth joining
SHORT_DTYPES = ("bfloat16", "float16")
CONVERT = "aten::to"  # torch.profiler's name of an operation that changes a dtype
UNEVEN = 1.1  # least ratio of the busiest rank's FLOPs to the mean


@dataclass(frozen=True)
class Suggestion:
    """One change: `kind` names the rule, `line` is the line to change, and `what` says how.

    `gain` is in seconds a step; `bound` says that it is at most that.
    """

    kind: str
    line: str
    what: str
    gain: float
    bound: bool = False

    def __str__(self) -> str:
        return f"{self.what} (gains {'at most ' * self.bound}{self.gain * 1e3:.1f} ms a step)"


Wasted = Iterator[tuple[str, float, int]]  # (line, wasted seconds of a step, the number for the text)


def gathered_twice(step: RankStep) -> Wasted:
    """Find gathers of an array that the same line has just gathered."""
    last: dict[str, tuple] = {}
    for run in step.runs:
        if run.op in ("AllGather", "AllReduce", "AllToAll") and run.key:
            if last.get(run.line) == run.key:
                yield run.line, run.exposed + run.waiting, 2
            last[run.line] = run.key


def no_prefetch(step: RankStep) -> Wasted:
    """Find gathers on the critical path of an array that no line of the step made.

    Such a gather can start as soon as the one before it has finished, and be hidden by the products from there on.
    """
    made, begin = {run.after for run in step.runs}, None  # begin: of the first product since the last such gather
    standing = union(interval for run in step.runs if run.communicates for interval in run.held)
    computing = gaps(standing, step.span)
    for run in step.runs:
        if run.op == "AllGather" and not run.async_op and run.before not in made:
            cover = length(intersect(computing, [(begin, run.called)])) if begin is not None else 0.0
            yield run.line, min(run.exposed, cover), 1
            begin = None
        elif run.flops and begin is None:
            begin = run.called


def wide_wire(step: RankStep) -> Wasted:
    """Find collectives in float32 where the products are in 16 bits.

    The waste is half of the transfer, and the time of widening the operand.
    """
    if 2 * sum(run.flops for run in step.runs if run.dtype in SHORT_DTYPES) <= sum(run.flops for run in step.runs):
        return
    widened, begin = union((a, b) for name, a, b in step.timeline.ops if name == CONVERT), step.start
    for run in step.runs:
        if run.communicates and run.dtype == "float32" and run.nbytes > SMALL:
            yield run.line, run.exposed / 2 + length(intersect(widened, [(begin, run.called)])), 1
        begin = run.held[-1][1] if run.held else begin


def tiny_buckets(step: RankStep) -> Wasted:
    """Find many small collectives of one kind; joined into one they would pay its latency only once."""
    kinds: defaultdict[tuple, list] = defaultdict(list)
    for run in step.runs:
        if run.op in ("AllReduce", "ReduceScatter", "AllGather") and run.communicates and run.nbytes <= SMALL:
            kinds[run.op, run.axes].append((run.line, run.exposed))
    for found in kinds.values():
        if (n := len(found)) >= FEW:
            yield found[0][0], sum(exposed for _, exposed in found) * (1 - 1 / n), n


def blocking_send(step: RankStep) -> Wasted:
    """Find Sends that block the rank."""
    for run in step.runs:
        if run.op == "Send" and not run.async_op:
            yield run.line, run.exposed + run.waiting, 1


def replicated_update(step: RankStep) -> Wasted:
    """Find the update that all ranks compute after the last gradients are reduced to every rank."""
    gradients = [run for run in step.runs if run.op == "AllReduce" and run.communicates and run.after[:1] == "d"]
    if gradients:
        last = max(gradients, key=lambda run: run.end)
        lane = union(interval for run in step.runs for interval in run.held)
        n = len(last.group)
        yield last.line, length(gaps(lane, (last.end, step.end))) * (1 - 1 / n), n


RULES: tuple[tuple[str, Callable[[RankStep], Wasted], str, bool], ...] = (  # kind, rule, change, bound?
    ("twice", gathered_twice, "keep the result of {line}: the same array is moved again", False),
    ("prefetch", no_prefetch, "start {line} ahead of time (async_op=True), while the lines before it compute", True),
    ("wire", wide_wire, "convert before {line}: float32 is sent, 16 bits are computed with", True),
    ("buckets", tiny_buckets, "join the {n} small collectives like {line} into one", False),
    ("send", blocking_send, "send without waiting for it (async_op=True): {line}", False),
    ("replicated", replicated_update,
     "update 1/{n} of the params on each rank (ZeRO-1): ReduceScatter instead of {line}", True),
)  # fmt: skip


def wastes(every: Sequence[Sequence[RankStep]]) -> Iterator[Suggestion]:
    """Yield a suggestion for each line that a rule finds; the gain is the mean over ranks of their median steps."""
    for kind, find, what, bound in RULES:
        seconds: dict[str, list[list[float]]] = {}
        most: defaultdict[str, int] = defaultdict(int)
        for rank, steps in enumerate(every):
            for number, step in enumerate(steps):
                for line, each, n in find(step):
                    seconds.setdefault(line, [[0.0] * len(own) for own in every])[rank][number] += each
                    most[line] = max(most[line], n)
        for line, ranks in seconds.items():
            yield Suggestion(kind, line, what.format(line=line, n=most[line]), mean(map(median, ranks)), bound)


def unbalanced(every: Sequence[Sequence[RankStep]]) -> Iterator[Suggestion]:
    """Yield a suggestion if one rank has many more FLOPs than the mean.

    The gain is at most the time that the busiest rank computes beyond the mean.
    """
    flops: list[defaultdict[str, float]] = [defaultdict(float) for _ in every]
    for own, steps in zip(flops, every, strict=True):
        for step in steps:
            for run in step.runs:
                own[run.line] += run.flops
    totals = [sum(own.values()) for own in flops]
    busiest = totals.index(max(totals))
    ratio = totals[busiest] / mean(totals) if sum(totals) else 1.0
    if ratio <= UNEVEN:
        return
    line = max(flops[busiest], key=lambda line: flops[busiest][line] - mean(own[line] for own in flops))
    seconds = mean(sum(run.seconds for run in step.runs if run.flops) for step in every[busiest])
    what = f"share the work of {line} evenly: the busiest rank has {ratio:.2f} of the mean"
    what += "; of causal attention the zig-zag order does it"
    yield Suggestion("unbalanced", line, what, seconds * (1 - 1 / ratio), bound=True)


def suggestions(timelines: Sequence[RankTimeline]) -> list[Suggestion]:
    """Return all suggestions that gain at least 1% of a step, the largest gain first."""
    every = [timeline.steps for timeline in timelines]
    found = [*wastes(every), *unbalanced(every)]
    least = LEAST * median(step.seconds for steps in every for step in steps)
    return sorted((each for each in found if each.gain >= least), key=lambda suggestion: -suggestion.gain)
