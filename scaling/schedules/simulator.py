"""Run a pipeline schedule on paper: times give a timeline, and a deadlock raises an exception instead of a hang.

    timeline = simulate(one_f_one_b(4, 8), Times(forward=1, backward_input=1, backward_weight=1, hop=0))
    timeline.makespan, timeline.bubble, timeline.live

Times are fractions, so that results can be compared with the `closed_forms` exactly. A `Timeline` says when each
instruction ran on which rank. It is simulated, with times in the unit of the simulation's `Times`, or measured
(`scaling.strategies.pipeline`) in seconds.
"""

from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from scaling.schedules.schedule import (
    COMPUTE,
    RECV_OF,
    RECVS,
    SENDS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    Schedule,
    SendActivation,
    parts,
)

Time = float | Fraction  # a simulation's times are exact fractions


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction that ran on a rank, with its start and its end."""

    rank: int
    step: Any
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks."""

    name: str
    ranks: int
    spans: tuple[Span, ...]
    chunks: int = 1

    @cached_property
    def compute(self) -> tuple[Span, ...]:
        """The spans that are computation, without transfers and reductions."""
        return tuple(span for span in self.spans if isinstance(span.step, COMPUTE))

    @property
    def start(self) -> Time:
        """The start of the first span, or 0 without spans."""
        return min((span.start for span in self.spans), default=0)

    @cached_property
    def makespan(self) -> Time:
        """The time from the start of the first computation to the end of the last, over all ranks."""
        return max(span.end for span in self.compute) - min(span.start for span in self.compute)

    def idle(self, rank: int) -> Time:
        """Return the makespan less the time for which a rank computed."""
        return self.makespan - self.busy(rank)

    def busy(self, rank: int) -> Time:
        """Return the time for which a rank computed."""
        return self._busy[rank]

    @cached_property
    def _busy(self) -> tuple[Time, ...]:
        busy: list[Time] = [0] * self.ranks
        for span in self.compute:
            busy[span.rank] += span.end - span.start
        return tuple(busy)

    @property
    def bubble_time(self) -> Time:
        """The time for which a rank is idle, averaged over the ranks."""
        return sum(self.idle(rank) for rank in range(self.ranks)) / self.ranks

    @property
    def bubble(self) -> Time:
        """The fraction of the makespan for which ranks are idle: (P-1)/(M+P-1) for GPipe."""
        return self.bubble_time / self.makespan

    @cached_property
    def live(self) -> tuple[Fraction, ...]:
        """Each rank's peak number of live activations, in microbatches.

        One chunk's activations of one microbatch count 1/chunks, from the start of the Forward to the end of the
        backward.
        """
        return tuple(Fraction(self._peak(rank), self.chunks) for rank in range(self.ranks))

    def _peak(self, rank: int) -> int:
        spans = sorted((span for span in self.compute if span.rank == rank), key=lambda span: (span.start, span.end))
        count = peak = 0
        for span in spans:
            if isinstance(span.step, Forward):
                count += 1
                peak = max(peak, count)
            elif isinstance(span.step, (Backward, BackwardWeight)):
                count -= 1
        return peak


@dataclass(frozen=True)
class Times:
    """The times that one microbatch takes on one rank, over all of the rank's layers, in any one unit.

    One of several chunks takes 1/chunks of the time. A whole Backward takes the sum of its two halves, a
    ForwardBackward that of its parts. `hop` is the time of a transfer to another rank.
    """

    forward: Time = 1
    backward_input: Time = 1
    backward_weight: Time = 1
    hop: Time = 0

    def per_chunk(self, chunks: int) -> dict[type, Fraction]:
        """Return the time of each computation on one chunk."""
        f, b, w = (Fraction(time) / chunks for time in (self.forward, self.backward_input, self.backward_weight))
        return {Forward: f, Backward: b + w, BackwardInput: b, BackwardWeight: w}


UNIT = Times()


class Deadlock(RuntimeError):
    """An error because no rank can go on; the message names the instruction at which each rank waits."""


def simulate(schedule: Schedule, times: Times = UNIT) -> Timeline:
    """Return the timeline of a schedule in which each rank runs its own program in order.

    A Send takes no time, and its tensor arrives `hop` later; a Recv waits for that. Between two ranks, tensors of one
    kind arrive in the order in which they were sent.

    Raises:
        Deadlock: The ranks wait for each other, or for a tensor that is never sent.
        ValueError: A program needs an array before its own rank has it (a ReduceGrads, for example, before all
            microbatches have added to the weights' gradients), makes an array twice, expects another tensor than the
            one that is sent, or never receives one.
    """
    cost, hop = times.per_chunk(schedule.chunks), Fraction(times.hop)
    ranks = range(schedule.stages)
    position, clock = [0] * len(ranks), [Fraction(0)] * len(ranks)
    channels: dict[tuple, deque] = {}  # (source, target, kind of Recv) -> (instruction, time of arrival)
    have: set = set()  # (rank, array, stage, microbatch)
    spans: list[Span] = []

    def waits_at(rank: int):
        return schedule[rank][position[rank]] if position[rank] < len(schedule[rank]) else None

    def advance(rank: int) -> bool:
        """Run the next instruction of a rank if it can run now; return whether it ran."""
        step = waits_at(rank)
        if step is None:
            return False
        start = clock[rank]
        if isinstance(step, SENDS):
            channels.setdefault((rank, step.peer, RECV_OF[type(step)]), deque()).append((step, start + hop))
        elif isinstance(step, RECVS):
            queue = channels.get((step.peer, rank, type(step)))
            if not queue:
                return False
            sent, arrival = queue.popleft()
            if (sent.stage, sent.microbatch) != (step.stage, step.microbatch):
                raise ValueError(f"{schedule.name}: rank {rank} expects {step}, but rank {step.peer} sends {sent}")
            clock[rank] = max(start, arrival)
        else:
            clock[rank] = start + sum(cost.get(type(part), 0) for part in parts(step))
        for part in parts(step):
            if missing := [array for array in needs(part, schedule) if (rank, *array) not in have]:
                raise ValueError(
                    f"{schedule.name}: rank {rank} runs {part} without {missing[0]} (array, stage, microbatch)"
                    "\n  fix: put the step that makes it before"
                )
            made = {(rank, *array) for array in makes(part)}
            if made & have:
                raise ValueError(
                    f"{schedule.name}: rank {rank} runs {part}, whose result it has already\n  fix: run each step once"
                )
            have.update(made)
        waited = clock[rank] - start
        for part in parts(step):
            spans.append(Span(rank, part, start, start := start + cost.get(type(part), waited)))
        position[rank] += 1
        return True

    ran = True
    while ran:
        ran = False
        for rank in ranks:
            ran = advance(rank) or ran
    if any(waits_at(rank) is not None for rank in ranks):
        waiting = "\n".join(f"  rank {rank}: {waits_at(rank) or 'finished'}" for rank in ranks)
        raise Deadlock(f"{schedule.name}: deadlock after {len(spans)} instructions; the ranks wait at\n{waiting}")
    left = [step for queue in channels.values() for step, _ in queue]
    if left:
        raise ValueError(
            f"{schedule.name}: sent, but never received: {', '.join(map(str, left))}"
            "\n  fix: add the step that receives it, or leave out the one that sends"
        )
    return Timeline(schedule.name, schedule.stages, tuple(spans), schedule.chunks)


def needs(step, schedule: Schedule) -> list[tuple]:
    """Return the arrays that an instruction reads, as (name, virtual stage, microbatch)."""
    if isinstance(step, RECVS):
        return []
    if isinstance(step, ReduceGrads):
        return [("dW", step.stage, m) for m in range(schedule.microbatches)]
    stage, m, last = step.stage, step.microbatch, schedule.virtual_stages - 1
    if isinstance(step, Forward):
        return [("Out", stage - 1, m)] if stage > 0 else []
    if isinstance(step, (Backward, BackwardInput)):
        return [("saved", stage, m), *([("dIn", stage + 1, m)] if stage < last else [])]
    return [("Out" if isinstance(step, SendActivation) else "dIn", stage, m)]  # SendGrad, BackwardWeight


def makes(step) -> list[tuple]:
    """Return the arrays that an instruction gives to its rank, as (name, virtual stage, microbatch)."""
    names = {Forward: ("Out", "saved"), RecvActivation: ("Out",), RecvGrad: ("dIn",), BackwardWeight: ("dW",)}
    names |= {Backward: ("dIn", "dW"), BackwardInput: ("dIn",)}
    return [(name, step.stage, step.microbatch) for name in names.get(type(step), ())]
