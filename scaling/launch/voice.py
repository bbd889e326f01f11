"""What a rank tells its parent: its result, or what ended it and how far it is to blame for that.

Both go through a pipe, and a stack, when the parent asks for one by a signal, through another: nothing lies in a file
that could stay behind.
"""

import faulthandler
import pickle
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from scaling.mesh.meeting import RankEnded

DIED, RAISED, LATE, LEFT = range(4)  # the order of blame: each may cause those after it in other ranks
OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


class Failure(NamedTuple):
    """How a rank ended. Of several, the least is to blame.

    `blame`: it DIED, RAISED an error of its own, waited and was LATE, or was LEFT by another one. `when`: seconds of
    time.monotonic(). `what`: with the traceback. `exception`: its class; `line`: "file:line" of the program's innermost
    line, outside of scaling and torch.
    """

    blame: int
    when: float
    rank: int
    what: str
    exception: str = ""
    line: str = ""


def blame_of(error: BaseException) -> int:
    """RAISED, or LATE or LEFT where it, or what it was raised from, comes of what other ranks did."""
    return max(map(_kind, _chain(error)))


def _kind(error: BaseException) -> int:
    said = str(error) if type(error) is RuntimeError or isinstance(error, dist.DistError) else ""  # torch's, of gloo
    if isinstance(error, RankEnded) or "by peer" in said:
        return LEFT
    return LATE if isinstance(error, TimeoutError) or "timed out" in said.lower() or "timeout" in said else RAISED


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class Voice:
    """A rank's ends of the two pipes."""

    def __init__(self, pipe, stack):
        self.pipe, self.stack = pipe, stack

    def show_stack_on_request(self) -> None:
        """Let this process write its stack when it gets SIGUSR1, wherever it hangs."""
        faulthandler.register(signal.SIGUSR1, self.stack, all_threads=False)

    def result(self, result: bytes) -> None:
        self.pipe.send_bytes(pickle.dumps(("result", result)))

    def failure(self, rank: int, error: BaseException) -> None:
        """What ended this rank, and when."""
        try:
            said = _told(rank, error)
        except MemoryError:  # what the rank holds is not needed any more
            traceback.clear_frames(error.__traceback__)
            said = _told(rank, error)
        self.pipe.send_bytes(said)


def _told(rank: int, error: BaseException) -> bytes:
    """With the traceback, but for its first two frames, which started the rank."""
    first = error.__traceback__ and error.__traceback__.tb_next
    frames = first and first.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    text = text.encode(errors="backslashreplace").decode()  # a lone surrogate cannot be printed
    places = traceback.extract_tb(frames)
    own = [place for place in places if not place.filename.startswith(OURS)] or places
    line = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
    failure = Failure(blame_of(error), time.monotonic(), rank, f"raised:\n{text}", type(error).__name__, line)
    return pickle.dumps(("failed", tuple(failure)))
