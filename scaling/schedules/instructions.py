"""The instructions of a pipeline schedule, and the timeline of their run.

Instructions are frozen data, which can be compared. A timeline says when each instruction ran on which rank. It is
simulated (`simulator`), with times in the unit of the simulation's `Times`, or measured (`scaling.strategies.pipeline`)
in seconds.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a rank's program, for one microbatch at one virtual stage."""

    stage: int
    microbatch: int


class Forward(Instruction):
    """Compute Out = f(W, In), and save the arrays that the backward needs."""


class Backward(Instruction):
    """Compute both dIn and dW from dOut."""


class BackwardInput(Instruction):
    """Compute dIn from dOut, the half of the backward that the previous stage waits for."""


class BackwardWeight(Instruction):
    """Compute dW, the half of the backward that no rank waits for, after the microbatch's BackwardInput."""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A Forward and the Backward of another microbatch as one unit (DeepSeek's F&B).

    The transfers of each are hidden behind the matmuls of the other. The unit starts when the inputs of both have
    arrived, and sends when both are done.
    """

    forward: Forward
    backward: Backward


@dataclass(frozen=True, slots=True)
class Transfer(Instruction):
    """A transfer between this rank and the rank `peer` along the pipeline axis. `stage` is the sender's."""

    peer: int


class SendActivation(Transfer):
    """Send Out of `stage` to the rank of stage + 1, without waiting for it."""


class RecvActivation(Transfer):
    """Wait until Out of `stage`, which is the input of stage + 1, has arrived from the rank of `stage`."""


class SendGrad(Transfer):
    """Send dIn of `stage` to the rank of stage - 1, without waiting for it."""


class RecvGrad(Transfer):
    """Wait until dIn of `stage`, which is dOut of stage - 1, has arrived from the rank of `stage`."""


@dataclass(frozen=True, slots=True)
class ReduceGrads:
    """Reduce the gradients of the chunk at virtual stage `stage`, which are complete, over the data axes."""

    stage: int


COMPUTE = (Forward, Backward, BackwardInput, BackwardWeight, ForwardBackward)
SENDS = (SendActivation, SendGrad)
RECVS = (RecvActivation, RecvGrad)
RECV_OF = {SendActivation: RecvActivation, SendGrad: RecvGrad}


def parts(step) -> tuple:
    """Return the parts of an instruction: the two computations of a ForwardBackward, or the instruction alone."""
    return (step.forward, step.backward) if isinstance(step, ForwardBackward) else (step,)


@dataclass(frozen=True, slots=True)
class WeightHalves:
    """The weight halves of several microbatches' backwards at one stage, which are one product."""

    stage: int
    microbatches: tuple[int, ...]


def units_of(program: tuple) -> list[list]:
    """Split a program into lists of what runs as one: one instruction, or consecutive weight halves of a stage."""
    alike = groupby(program, lambda step: step.stage if isinstance(step, BackwardWeight) else id(step))
    return [list(unit) for _, unit in alike]


def simple_parts(unit: list) -> list:
    """Return a unit as instructions that are not made of others."""
    match unit[0]:
        case BackwardWeight(s, _):
            return [WeightHalves(s, tuple(half.microbatch for half in unit))]
        case Backward(s, m):
            return [BackwardInput(s, m), WeightHalves(s, (m,))]
        case ForwardBackward(forward, backward):
            return [forward, *simple_parts([backward])]
    return unit


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

    @property
    def overhead(self) -> Time:
        """Bubble time over ideal time, as Narayanan et al. 2021 count: (P-1)/M for GPipe, (P-1)/(v*M) interleaved."""
        return self.bubble_time / (self.makespan - self.bubble_time)

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
