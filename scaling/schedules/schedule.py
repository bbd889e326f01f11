"""A pipeline schedule as data: the instructions, and the schedule that is built from each rank's order of computations.

Instructions are frozen data, which can be compared (see `scaling.schedules`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from scaling.common.arguments import whole


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


PARTS_BY_LETTER = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}


@dataclass(frozen=True)
class Schedule(Sequence):
    """The programs of all ranks: a sequence with a tuple of instructions for each rank along the pipeline axis."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    placement: tuple[int, ...]  # virtual stage -> rank
    programs: tuple[tuple, ...]

    def __len__(self) -> int:
        return self.stages

    def __getitem__(self, rank):
        return self.programs[rank]

    def __iter__(self) -> Iterator[tuple]:
        return iter(self.programs)

    @property
    def virtual_stages(self) -> int:
        """The number of virtual stages, stages * chunks."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the virtual stages that a rank holds, first chunk first."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def layer_order(self, layers: int) -> list[int]:
        """Return the layer at each position of a parameter stacked as `W[L_Z, ...]`.

        With one chunk per rank this is the identity.

        Raises:
            ValueError: The layers do not divide into the virtual stages.
        """
        if layers % self.virtual_stages:
            raise ValueError(
                f"{self.name}: {layers} layers do not divide into {self.virtual_stages} virtual stages "
                f"({self.stages} stages * {self.chunks} chunks)\n  fix: use a multiple of {self.virtual_stages} layers"
            )
        depth = layers // self.virtual_stages
        stages = [stage for rank in range(self.stages) for stage in self.stages_of(rank)]
        return [stage * depth + layer for stage in stages for layer in range(depth)]


def from_orders(name: str, stages: int, microbatches: int, orders: list, placement: tuple[int, ...]) -> Schedule:
    """Turn each rank's order of computations into instructions, and add the transfers between the ranks.

    An order has tuples (kind, chunk, microbatch), or pairs of such tuples, which become a ForwardBackward. The
    kinds are F for forward, B for backward, and I and W for the backward's input half and weight half.
    """
    programs = []
    for rank, order in enumerate(orders):
        local, program = [stage for stage, owner in enumerate(placement) if owner == rank], []
        for item in order:
            pair = item if isinstance(item[0], tuple) else (item,)
            steps = [PARTS_BY_LETTER[kind](local[chunk], m) for kind, chunk, m in pair]
            transfers = [_transfers(step, rank, placement) for step in steps]
            program += [receive for receives, _ in transfers for receive in receives]
            program += [ForwardBackward(*steps)] if len(steps) == 2 else steps
            program += [send for _, sends in transfers for send in sends]
        programs.append(_with_reductions(program))
    return Schedule(name, stages, microbatches, len(placement) // stages, placement, tuple(programs))


def _with_reductions(program: list) -> tuple:
    """Add a ReduceGrads for each virtual stage, after the last instruction that adds to its dW and after its Send."""
    last = {}
    for i, step in enumerate(program):
        last |= {part.stage: i for part in parts(step) if isinstance(part, (Backward, BackwardWeight))}
    last = {stage: i + (i + 1 < len(program) and isinstance(program[i + 1], SendGrad)) for stage, i in last.items()}
    for stage, i in sorted(last.items(), key=lambda item: -item[1]):
        program = [*program[: i + 1], ReduceGrads(stage), *program[i + 1 :]]
    return tuple(program)


def _transfers(step: Instruction, rank: int, placement: tuple[int, ...]) -> tuple[list, list]:
    """Return the Recv that a computation waits for and the Send of its result; chunks of one rank need neither."""
    stage, m = step.stage, step.microbatch
    prior = placement[stage - 1] if stage > 0 else rank
    next_ = placement[stage + 1] if stage + 1 < len(placement) else rank
    if isinstance(step, Forward):
        receives = [RecvActivation(stage - 1, m, prior)] if prior != rank else []
        return receives, [SendActivation(stage, m, next_)] if next_ != rank else []
    if isinstance(step, BackwardWeight):
        return [], []
    receives = [RecvGrad(stage + 1, m, next_)] if next_ != rank else []
    return receives, [SendGrad(stage, m, prior)] if prior != rank else []


def split_backward(schedule: Schedule, collect: int = 1) -> Schedule:
    """Split each Backward of a schedule into its two halves, and return the new schedule.

    dIn is then sent before dW is computed, so no stage waits for the weight gradients of another one. This makes the
    bubble of GPipe and 1F1B smaller by (P-1) W.

    Args:
        schedule: A schedule without ForwardBackward.
        collect: The number of weight halves to wait for, which then run as one matmul over the rows of all their
            microbatches. That costs less, since the sum of gradients is read and written only once, but a rank keeps up
            to collect - 1 more activations (in GPipe, which keeps all M, no more).

    Raises:
        ValueError: `collect` is not an int of at least 1, or the schedule has a ForwardBackward.
    """
    whole(collect=collect)
    chunk, programs = attrgetter("stage"), []
    for program in schedule:
        split, weights = [], []
        for step in program:
            if isinstance(step, ReduceGrads):
                continue
            if isinstance(step, ForwardBackward):
                raise ValueError(
                    f"{schedule.name}: a ForwardBackward overlaps a whole Backward, which is not split"
                    "\n  fix: put the Backward in one piece"
                )
            if len(weights) >= collect and not isinstance(step, SendGrad):
                split, weights = split + sorted(weights, key=chunk), []
            if isinstance(step, Backward):
                split.append(BackwardInput(step.stage, step.microbatch))
                weights.append(BackwardWeight(step.stage, step.microbatch))
            else:
                split.append(step)
        programs.append(_with_reductions(split + sorted(weights, key=chunk)))
    return replace(schedule, programs=tuple(programs))
