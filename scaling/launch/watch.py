"""Watching the ranks that `scaling.launch` started: which one failed first, and what it and the others were doing.

A rank sends its result, or the error that ended it, through a pipe; when asked by a signal it writes its stack into
another. Nothing lies in a file that could stay behind.
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

from scaling.launch.pulse import Pulse

POLL = 0.05  # seconds after which a death is noticed at the latest
GRACE = 1.0  # seconds in which the rank that caused another one's error is looked for
CLOSED = "by peer"  # in the error of a rank when another one is gone
GONE = "a rank has ended"  # the same, of a rank that would have met it
SOURCE = r'(?m)^  File ".*\n(?:    .*\n)*'  # of a traceback: a place and its lines, which may hold any word
LATE = ("Timed out", "timed out", "timeout")  # in the error of a rank whose wait timed out


class RankError(RuntimeError):
    """A rank raised, died or hangs; the message says which one and holds its traceback."""


class Rank:
    """One rank as its parent sees it. `started` gives the process its ends of the pipes and starts it."""

    def __init__(self, number: int, context, target, *args):
        self.number, self.open = number, True
        self.result: bytes | None = None
        self.error: tuple[float, str] | None = None
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

    def failure(self) -> tuple | None:
        """(order of blame, time, rank, what happened), or None if it runs or ended well.

        First a rank that died, then one that raised, one whose wait timed out, one whose peer was gone.
        """
        code = self.process.exitcode
        self.listen()
        if self.error is not None:
            when, text = self.error
            said = re.sub(SOURCE, "", text)
            blame = 3 if CLOSED in said or GONE in said else 2 if any(word in said for word in LATE) else 1
            return blame, when, self.number, f"raised:\n{text}"
        if code is None or (code == 0 and self.result is not None):
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return 0, 0.0, self.number, f"{how}, so the other ranks were ended"

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


class Voice:
    """How a rank tells its parent what became of it: its ends of the two pipes."""

    def __init__(self, pipe, stack):
        self.pipe, self.stack = pipe, stack

    def show_stack_on_request(self) -> None:
        """Let this process write its stack when it gets SIGUSR1, wherever it hangs."""
        faulthandler.register(signal.SIGUSR1, self.stack, all_threads=False)

    def result(self, result: bytes) -> None:
        self.pipe.send_bytes(pickle.dumps(("result", result)))

    def error(self, error: BaseException) -> None:
        """What ended this rank, and when."""
        try:
            said = _told(error)
        except MemoryError:  # what the rank holds is not needed any more
            traceback.clear_frames(error.__traceback__)
            said = _told(error)
        self.pipe.send_bytes(said)


def _told(error: BaseException) -> bytes:
    """The traceback without its first two frames, which started the rank."""
    first = error.__traceback__ and error.__traceback__.tb_next
    frames = first and first.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    text = text.encode(errors="backslashreplace").decode()  # a lone surrogate cannot be printed
    return pickle.dumps(("error", (time.monotonic(), text)))


def watch(ranks: list[Rank], timeout: float, sockets: bool) -> list[bytes]:
    """The ranks' results, once all have ended well. RankError as soon as one does not, about the one that failed first,
    or when all hang (see `Pulse`)."""
    pulse = Pulse([rank.process.pid for rank in ranks], timeout, sockets)
    while True:
        connection.wait([rank.pipe for rank in ranks if rank.open], POLL)
        if any(rank.failure() for rank in ranks):
            raise RankError(_explain(ranks))
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


def _explain(ranks: list[Rank]) -> str:
    """Name the rank to blame; if all that failed did so while waiting, show also where those are that still run."""
    deadline = time.monotonic() + GRACE
    while True:
        blame, _, number, what = min(filter(None, (rank.failure() for rank in ranks)))
        if blame < 2 or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    message = f"rank {number} of {len(ranks)} {what}"
    return message if blame < 2 else message + _stacks(ranks)


def _stacks(ranks: list[Rank]) -> str:
    running = [rank for rank in ranks if rank.process.is_alive()]
    for rank in running:
        os.kill(rank.process.pid, signal.SIGUSR1)  # not reaped yet, so its number is its own
    deadline = time.monotonic() + 2.0
    for rank in running:
        rank.stack.poll(max(0.0, deadline - time.monotonic()))
    time.sleep(0.05)  # from a stack's first line to its last
    return "".join(rank.where() for rank in running)
