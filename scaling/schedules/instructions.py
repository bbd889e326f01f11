"""The instructions of which a pipeline schedule consists, frozen, comparable data; and when each ran on which rank,
simulated (`simulator`) or measured (`scaling.strategies.pipeline`).

The time of a simulation is in the units of its `Times`, that of a measurement in seconds.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a rank's program, for one microbatch at one virtual stage."""

    stage: int
    microbatch: int


class Forward(Instruction):
    """Out = f(W, In); keeps what the backward needs."""


class Backward(Instruction):
    """dIn and dW at once, from dOut."""


class BackwardInput(Instruction):
    """The half of the backward that the previous stage waits for: dIn from dOut."""


class BackwardWeight(Instruction):
    """The other half, which nobody waits for: dW, after the BackwardInput of the same microbatch."""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A Forward and the Backward of another microbatch as one unit, whose transfers hide behind each other's matmuls
    (DeepSeek's F&B): it starts when the inputs of both are there and sends when both are done."""

    forward: Forward
    backward: Backward


@dataclass(frozen=True, slots=True)
class Transfer(Instruction):
    """A transfer between this rank and the rank `peer` along the pipeline axis. `stage` is the sender's."""

    peer: int


class SendActivation(Transfer):
    """Out of `stage` goes to the rank of stage + 1; the program goes on."""


class RecvActivation(Transfer):
    """Waits until Out of `stage`, which is the input of stage + 1, has arrived from its rank."""


class SendGrad(Transfer):
    """dIn of `stage` goes to the rank of stage - 1; the program goes on."""


class RecvGrad(Transfer):
    """Waits until dIn of `stage`, which is dOut of stage - 1, has arrived from its rank."""


@dataclass(frozen=True, slots=True)
class ReduceGrads:
    """The gradients of the chunk at virtual stage `stage` are complete: reduce them over the data axes."""

    stage: int


COMPUTE = (Forward, Backward, BackwardInput, BackwardWeight, ForwardBackward)
SENDS = (SendActivation, SendGrad)
RECVS = (RecvActivation, RecvGrad)
RECV_OF = {SendActivation: RecvActivation, SendGrad: RecvGrad}


def parts(step) -> tuple:
    """The computations of which an instruction consists: two for a ForwardBackward, itself for any other."""
    return (step.forward, step.backward) if isinstance(step, ForwardBackward) else (step,)


Time = float | Fraction  # in a simulation exact


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction as it ran, and from when to when."""

    rank: int
    step: Any
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks. `live`: the peak number of activations that each rank kept, in microbatches: a chunk's
    activations of one microbatch count 1/chunks, from the start of its Forward to the end of its backward."""

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
        return min((span.start for span in self.spans), default=0)

    @cached_property
    def makespan(self) -> Time:
        """From the start of the first computation to the end of the last, over all ranks."""
        return max(span.end for span in self.compute) - min(span.start for span in self.compute)

    def idle(self, rank: int) -> Time:
        """The makespan less the time that a rank computed."""
        return self.makespan - self.busy(rank)

    def busy(self, rank: int) -> Time:
        """The time that a rank computed."""
        return self._busy[rank]

    @cached_property
    def _busy(self) -> tuple[Time, ...]:
        busy: list[Time] = [0] * self.ranks
        for span in self.compute:
            busy[span.rank] += span.end - span.start
        return tuple(busy)

    @property
    def bubble_time(self) -> Time:
        """The time that a rank is idle, on average over the ranks."""
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
        """Each rank's peak of live activations, in microbatches."""
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
