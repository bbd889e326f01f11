"""The sizes from which a training step's code does something else, in one record that may be passed in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The sizes from which a training step's code does something else.

    Attributes:
        chunk: The bytes of the loss's float32 logits that are in memory at a time.
        small: The bytes of a layer's shards on a rank that travel in one message.
        row: The number of squares that are summed in float32.
    """

    chunk: int = 1 << 28
    small: int = 2 << 20
    row: int = 1024


LIMITS = Limits()
