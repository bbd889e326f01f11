"""The instructions of which a pipeline schedule consists: frozen, comparable data (see `scaling.schedules`)."""

from dataclasses import dataclass


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
