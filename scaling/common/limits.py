"""The thresholds at which the code of a training step changes, in one record that may be passed in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The thresholds at which the code of a training step changes.

    Attributes:
        chunk: The most bytes of float32 logits in memory at a time; the loss cuts tokens into chunks accordingly.
        small: The most bytes that a layer's shards on a rank may have to be sent in one message.
        row: The number of squares that are summed in float32 before the partial sums are added in float64.
        span: The tokens of packed documents that attention computes together and masks; longer ones are alone.
        ahead: The receives that a stage posts ahead on each channel, so that a sender need not wait for its receiver.
    """

    chunk: int = 1 << 28
    small: int = 2 << 20
    row: int = 1024
    span: int = 256
    ahead: int = 8


LIMITS = Limits()
