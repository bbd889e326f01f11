"""Watching the ranks that `scaling.launch` started: which one failed first, and what it and the others were doing.

A rank tells its parent its result, or what ended it and how far it is to blame for that, through a pipe; its stack,
when the parent asks for that by a signal, through another: nothing lies in a file that could stay behind.
"""

import contextlib
import faulthandler
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing import connection
from typing import NamedTuple

import torch.distributed as dist

from scaling.common.torchrun import this_rank
from scaling.launch.pulse import Pulse
from scaling.mesh.lost import OURS, RankEnded

POLL = 0.05  # seconds after which a death is noticed at the latest
GRACE = 1.0  # seconds in which the rank that caused another one's error is looked for
DIED, RAISED, LATE, LEFT = range(4)  # the order of blame: each may cause those after it in other ranks


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


class RankError(RuntimeError):
    """A rank raised, died or hangs; the message says which one and holds its traceback.

    `failure`: the same as data, its `rank`, `exception` and `line`; None where all hang.
    """

    def __init__(self, message: str, failure: Failure | None = None):
        super().__init__(message)
        self.failure = failure

    def __reduce__(self):
        return RankError, (str(self), self.failure)


class Rank:
    """One rank as its parent sees it. `started` gives the process its ends of the pipes and starts it."""

    def __init__(self, number: int, context, target, *args):
        self.number, self.open = number, True
        self.result: bytes | None = None
        self.failed: tuple | None = None
        self.pipe, pipe = context.Pipe(duplex=False)
        self.stack, stack = context.Pipe(duplex=False)
        self.process = context.Process(target=target, args=(number, Voice(pipe, stack), *args))
        self.process.start()
        pipe.close()
        stack.close()

    def listen(self) -> None:
        """Take what it has sent."""
        try:
            while self.open and self.pipe.poll():
                kind, said = pickle.loads(self.pipe.recv_bytes())
                setattr(self, kind, said)
        except (EOFError, OSError):  # it has ended, perhaps while it was sending
            self.open = False

    def failure(self) -> Failure | None:
        """How it ended, or None if it runs or ended well."""
        code = self.process.exitcode
        self.listen()
        if self.failed is not None:
            return Failure(*self.failed)
        if code is None or (code == 0 and self.result is not None):
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Failure(DIED, 0.0, self.number, f"{how}, so the other ranks were ended")

    def where(self) -> str:
        """Where it was when it was asked by SIGUSR1."""
        text = os.read(self.stack.fileno(), 1 << 16).decode(errors="replace") if self.stack.poll() else ""
        lines = re.sub(r".* in _work\n(.*\n)*", "", text).partition("\n")[2]
        return f"\nrank {self.number} was still running" + (
            f", here (most recent call first):\n{lines}" if lines else "\n"
        )

    def end(self) -> None:
        """Free what belongs to it, once it has been ended."""
        self.process.join()
        self.pipe.close()
        self.stack.close()


def watch(ranks: list[Rank], timeout: float, sockets: bool) -> list[bytes]:
    """The ranks' results, once all have ended well. RankError as soon as one does not, about the one that failed first,
    or when all hang (see `Pulse`)."""
    pulse = Pulse([rank.process.pid for rank in ranks], timeout, sockets)
    while True:
        connection.wait([rank.pipe for rank in ranks if rank.open], POLL)
        if any(rank.failure() for rank in ranks):
            raise _explained(ranks)
        if all(rank.process.exitcode is not None for rank in ranks):
            return [rank.result or b"" for rank in ranks]
        if stopped := pulse.stopped():
            raise RankError(f"{stopped}{_stacks(ranks)}")


@contextlib.contextmanager
def watch_self(timeout: float) -> Iterator[None]:
    """Under torchrun, where no parent asks for stacks: end this process with exit code 1 if it hangs, and say where."""
    pulse, main, done = Pulse([os.getpid()], timeout, sockets=False), threading.main_thread().ident, threading.Event()
    rank = this_rank().rank

    def look() -> None:
        while not done.wait(pulse.every):
            if stopped := pulse.stopped():
                stack = "".join(traceback.format_stack(sys._current_frames()[main or 0]))
                sys.stderr.write(f"rank {rank}: {stopped}{stack}")
                sys.stderr.flush()
                os._exit(1)

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _explained(ranks: list[Rank]) -> RankError:
    """Name the rank to blame; if all that failed did so while waiting, show also where those are that still run."""
    deadline = time.monotonic() + GRACE
    while True:
        worst = min(filter(None, (rank.failure() for rank in ranks)))
        if worst.blame < LATE or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    message = f"rank {worst.rank} of {len(ranks)} {worst.what}"
    return RankError(message if worst.blame < LATE else message + _stacks(ranks), worst)


def _stacks(ranks: list[Rank]) -> str:
    running = [rank for rank in ranks if rank.process.is_alive()]
    for rank in running:
        os.kill(rank.process.pid, signal.SIGUSR1)  # not reaped yet, so its number is its own
    deadline = time.monotonic() + 2.0
    for rank in running:
        rank.stack.poll(max(0.0, deadline - time.monotonic()))
    time.sleep(0.05)  # from a stack's first line to its last
    return "".join(rank.where() for rank in running)
