"""Watching the ranks that `scaling.launch` started: which one failed first, and what it and the others were doing.

What a rank says of itself comes through a pipe (`scaling.launch.voice`).
"""

import contextlib
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

from scaling.launch.pulse import Pulse
from scaling.launch.voice import DIED, LATE, Failure, Voice

POLL = 0.05  # seconds after which a death is noticed at the latest
GRACE = 1.0  # seconds in which the rank that caused another one's error is looked for


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

    def look() -> None:
        while not done.wait(pulse.every):
            if stopped := pulse.stopped():
                stack = "".join(traceback.format_stack(sys._current_frames()[main or 0]))
                sys.stderr.write(f"rank {os.environ.get('RANK', 0)}: {stopped}{stack}")
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
