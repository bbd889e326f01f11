"""What to change, and what it would gain: each rule looks for one waste in the timelines and prices it.

A gain is seconds a step of the mean rank, from what was measured: what goes away if nothing else changes. Where the
change has a price of its own, which no profile of the program as it is shows, the gain is a bound: a transfer that is
hidden takes cores and memory from what it hides behind (where all cores compute, as much as it saves); a shorter dtype
must be converted to, and the transport may sum it more slowly; work shared otherwise is other, smaller products; of
an update that is shared, the params are gathered.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from scaling.hardware import Chip
from scaling.profile import stragglers
from scaling.profile.intervals import between, length, union, within
from scaling.profile.split import Split
from scaling.profile.timeline import LineRun, RankTimeline

LEAST = 0.01  # of a step: what gains less is not suggested
SMALL = 2**18  # bytes V below which a collective's time is its latency
SHORT_DTYPES = ("bfloat16", "float16")
CONVERT = "aten::to"  # an operation that changes a dtype, by its name in torch.profiler
UNEVEN = 1.1  # the busiest rank's FLOPs over the mean, from which work is unbalanced


@dataclass(frozen=True)
class Suggestion:
    """`kind` names the rule; `line` is where to change `what`; `gain` in seconds a step, `bound`: at most that."""

    kind: str
    line: str
    what: str
    gain: float
    bound: bool = False

    def __str__(self) -> str:
        return f"{self.what} (gains {'at most ' * self.bound}{self.gain * 1e3:.1f} ms a step)"


@dataclass(frozen=True)
class Evidence:
    """What rules look at: `steps` has, for each rank and step, its timeline and the (run, split) of the step."""

    timelines: Sequence[RankTimeline]
    splits: Sequence[Sequence[Split]]
    chip: Chip | None

    def steps(self) -> Iterator[tuple[RankTimeline, int, list[tuple[LineRun, Split]]]]:
        for timeline, found in zip(self.timelines, self.splits, strict=True):
            for number, (start, end) in enumerate(timeline.steps):
                pairs = zip(timeline.runs, found, strict=True)
                yield timeline, number, [(run, split) for run, split in pairs if start <= run.called < end]

    def per_step(self, seconds: dict) -> dict:
        """Of what was found by (line, rank, step): by line, the mean over ranks of their median step."""
        count = len(self.timelines[0].steps)
        by_rank: dict = defaultdict(lambda: [0.0] * count)
        for (line, rank, step), each in seconds.items():
            by_rank[line, rank][step] += each
        found: defaultdict[Any, float] = defaultdict(float)
        for (line, _), each in by_rank.items():
            found[line] += median(each) / len(self.timelines)
        return found


def straggler(evidence: Evidence) -> Iterator[Suggestion]:
    if _work(evidence)[0] > UNEVEN:
        return
    steps = len(evidence.timelines[0].steps)
    for slow in stragglers.find(evidence.timelines, evidence.splits)[:1]:
        gain = min(slow.seconds, slow.waited) / (1 if slow.step is None else steps)  # then the others are the slowest
        yield Suggestion("straggler", slow.line, f"look at why {slow}", gain)


def unbalanced(evidence: Evidence) -> Iterator[Suggestion]:
    """Some ranks have more FLOPs in a line than others: what exceeds the mean would be waited for by nobody."""
    ratio, line, seconds = _work(evidence)
    if ratio > UNEVEN:
        what = f"share the work of {line} evenly: the busiest rank has {ratio:.2f} of the mean"
        what += "; of causal attention the zig-zag order does it"
        yield Suggestion("unbalanced", line, what, seconds * (1 - 1 / ratio), bound=True)


def _work(evidence: Evidence) -> tuple[float, str, float]:
    """(busiest rank's FLOPs over the mean, the line in which they differ most, the busiest rank's seconds in them)."""
    flops: defaultdict[Any, float] = defaultdict(float)
    by_line: defaultdict[Any, float] = defaultdict(float)
    seconds: defaultdict[Any, float] = defaultdict(float)
    for timeline, _, runs in evidence.steps():
        for run, _ in runs:
            flops[timeline.rank] += run.flops
            by_line[run.line, timeline.rank] += run.flops
            seconds[timeline.rank] += length(run.held) if run.flops else 0.0
    busiest = max(flops, key=flops.__getitem__, default=0)
    mean = sum(flops.values()) / max(1, len(evidence.timelines))
    lines = {line for line, _ in by_line}
    count = len(evidence.timelines)

    def excess(line: str) -> float:
        return by_line[line, busiest] - sum(by_line[line, t.rank] for t in evidence.timelines) / count

    worst = max(lines, key=excess, default="")
    return (flops[busiest] / mean if mean else 1.0), worst, seconds[busiest] / len(evidence.timelines[0].steps)


def gathered_twice(evidence: Evidence) -> Iterator[Suggestion]:
    """A gather of an array that was gathered before, with no other one of the same line between."""
    wasted: defaultdict[Any, float] = defaultdict(float)
    for timeline, step, runs in evidence.steps():
        last: dict[str, tuple] = {}
        for run, split in runs:
            if run.op in ("AllGather", "AllReduce", "AllToAll") and run.key:
                if last.get(run.line) == run.key:
                    wasted[run.line, timeline.rank, step] += split.exposed + split.waiting
                last[run.line] = run.key
    for line, gain in evidence.per_step(wasted).items():
        yield Suggestion("twice", line, f"keep the result of {line}: the same array is moved again", gain)


def no_prefetch(evidence: Evidence) -> Iterator[Suggestion]:
    """A gather on the critical path of an array that no line of the step made: it can start as soon as the one before
    it is through, and hide behind what is computed from there on."""
    hideable: defaultdict[Any, float] = defaultdict(float)
    for timeline, step, runs in evidence.steps():
        made, begin = {run.after for run, _ in runs}, None  # begin: of the first product since the last such gather
        standing = union(interval for run, _ in runs if run.communicates for interval in run.held)
        computing = between(standing, timeline.steps[step])
        for run, split in runs:
            if run.op == "AllGather" and not run.async_op and run.before not in made:
                cover = length(within(computing, begin, run.called)) if begin is not None else 0.0
                hideable[run.line, timeline.rank, step] += min(split.exposed, cover)
                begin = None
            elif run.flops and begin is None:
                begin = run.called
    for line, gain in evidence.per_step(hideable).items():
        what = f"start {line} ahead of time (async_op=True), while the lines before it compute"
        yield Suggestion("prefetch", line, what, gain, bound=True)


def wide_wire(evidence: Evidence) -> Iterator[Suggestion]:
    """Collectives in float32 where the products are in 16 bits: half the transfer, and what widened the operand."""
    flops: defaultdict[Any, float] = defaultdict(float)
    saved: defaultdict[Any, float] = defaultdict(float)
    widened = {t.rank: union((start, end) for name, start, end in t.ops if name == CONVERT) for t in evidence.timelines}
    for timeline, step, runs in evidence.steps():
        begin = timeline.steps[step][0]
        for run, split in runs:
            flops[run.dtype] += run.flops
            if run.communicates and run.dtype == "float32" and run.nbytes > SMALL:
                converting = length(within(widened[timeline.rank], begin, run.called))
                saved[run.line, timeline.rank, step] += split.exposed / 2 + converting
            begin = run.held[-1][1] if run.held else begin
    if sum(flops[dtype] for dtype in SHORT_DTYPES) > sum(flops.values()) / 2:
        for line, gain in evidence.per_step(saved).items():
            what = f"convert before {line}: float32 is sent, 16 bits are computed with"
            yield Suggestion("wire", line, what, gain, bound=True)


def tiny_buckets(evidence: Evidence) -> Iterator[Suggestion]:
    """Many small collectives of one kind: joined they have the latency of one."""
    seconds: defaultdict[Any, float] = defaultdict(float)
    counts: defaultdict[Any, float] = defaultdict(float)
    names = {}
    for timeline, step, runs in evidence.steps():
        for run, split in runs:
            if run.op in ("AllReduce", "ReduceScatter", "AllGather") and run.communicates and run.nbytes <= SMALL:
                kind = run.op, run.axes
                names.setdefault(kind, run.line)
                seconds[kind, timeline.rank, step] += split.exposed
                counts[kind, timeline.rank, step] += 1
    most = {kind: int(max(n for (other, _, _), n in counts.items() if other == kind)) for kind in names}
    for kind, gain in evidence.per_step(seconds).items():
        if (n := most[kind]) >= 4:
            what = f"join the {n} small collectives like {names[kind]} into one"
            yield Suggestion("buckets", names[kind], what, gain * (1 - 1 / n))


def blocking_send(evidence: Evidence) -> Iterator[Suggestion]:
    """A Send that the lane stands still for."""
    seconds: defaultdict[Any, float] = defaultdict(float)
    for timeline, step, runs in evidence.steps():
        for run, split in runs:
            if run.op == "Send" and not run.async_op:
                seconds[run.line, timeline.rank, step] += split.exposed + split.waiting
    for line, gain in evidence.per_step(seconds).items():
        yield Suggestion("send", line, f"send without waiting for it (async_op=True): {line}", gain)


def replicated_update(evidence: Evidence) -> Iterator[Suggestion]:
    """After the last gradients are reduced to every rank, all of them compute the same update."""
    seconds: defaultdict[Any, float] = defaultdict(float)
    ranks: dict[str, int] = {}
    for timeline, step, runs in evidence.steps():
        gradients = [run for run, _ in runs if run.op == "AllReduce" and run.communicates and run.after.startswith("d")]
        if gradients:
            last, end = max(gradients, key=lambda run: run.end), timeline.steps[step][1]
            lane = union(interval for run, _ in runs for interval in run.held)
            ranks[last.line] = len(last.group)
            seconds[last.line, timeline.rank, step] += length(between(lane, (last.end, end)))
    for line, gain in evidence.per_step(seconds).items():
        what = f"update 1/{ranks[line]} of the params on each rank (ZeRO-1): ReduceScatter instead of {line}"
        yield Suggestion("replicated", line, what, gain * (1 - 1 / ranks[line]), bound=True)


RULES: tuple[Callable[[Evidence], Iterator[Suggestion]], ...] = (
    straggler, unbalanced, gathered_twice, no_prefetch, wide_wire, tiny_buckets, blocking_send, replicated_update,
)  # fmt: skip


def suggestions(timelines: Sequence[RankTimeline], splits: Sequence[Sequence[Split]], chip: Chip | None = None):
    """All that gain at least 1% of a step, the largest gain first."""
    evidence = Evidence(timelines, splits, chip)
    step = median(end - start for timeline in timelines for start, end in timeline.steps)
    found = [each for rule in RULES for each in rule(evidence) if each.gain >= LEAST * step]
    return sorted(found, key=lambda suggestion: -suggestion.gain)
