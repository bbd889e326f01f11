"""A run's metrics as TensorBoard shows them (`pip install 'scaling-book-torch[tensorboard]'`)."""

import importlib.util
from collections.abc import Mapping

from scaling.train.settings import Settings


def check_installed(settings: Settings) -> None:
    """ValueError if TensorBoard's files are asked for, and what writes them is not installed."""
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "--tensorboard: tensorboard is not installed\n  fix: pip install 'scaling-book-torch[tensorboard]'"
        )


class Board:
    """Writes each number of a step's record as a curve, and its sample as text, into a folder."""

    def __init__(self, folder: str):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder)

    def write(self, record: Mapping) -> None:
        for name, value in record.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, record["step"])
            elif name != "step" and value is not None:
                self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()  # a run that is killed has written what it said
