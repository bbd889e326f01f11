"""Watch the ranks that `scaling.launch` started, and find the one that failed first.

A rank sends its parent its result, or the error that ended it and how far the rank is to blame, through a pipe. Through
another pipe it sends its stack when the parent asks for it by a signal. No file is written that could stay behind. A
`Pulse` tells whether ranks hang, from what Linux counts of their threads: processor time, and bytes read and written.
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
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from scaling.common.torchrun import this_rank
from scaling.mesh.lost import OURS, RankEnded

POLL = 0.05  # seconds after which a death is noticed at the latest
GRACE = 1.0  # seconds to look for the rank that caused another rank's error
IDLE = 0.02  # share of one processor: a thread that uses less is waiting
PATIENCE = 5  # timeouts for which ranks may compute without any communication
TICK = os.sysconf("SC_CLK_TCK")
DIED, RAISED, LATE, LEFT = range(4)  # the order of blame: each may cause the later ones in other ranks


class Failure(NamedTuple):
    """A rank's failure. Of several, the smallest tuple is the cause: the least `blame`, then the first.

    `blame`: the rank DIED, RAISED an error that it caused, timed out while it waited (LATE), or was LEFT by another
    rank. `when` is in seconds of time.monotonic(). `what` includes the traceback. `exception` is the error's class, and
    `line` is "file:line" of the program's innermost line outside of scaling and torch.
    """

    blame: int
    when: float
    rank: int
    what: str
    exception: str = ""
    line: str = ""


def blame_of(error: BaseException) -> int:
    """Return RAISED, or LATE or LEFT if the error, or its cause, follows from the acts of other ranks."""
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
        """Send the pickled result to the parent."""
        self.pipe.send_bytes(pickle.dumps(("result", result)))

    def failure(self, rank: int, error: BaseException) -> None:
        """Send the parent the error that ended this rank, and when."""
        try:
            said = _pickled_failure(rank, error)
        except MemoryError:  # free the rank's objects, which are no longer needed
            traceback.clear_frames(error.__traceback__)
            said = _pickled_failure(rank, error)
        self.pipe.send_bytes(said)


def _pickled_failure(rank: int, error: BaseException) -> bytes:
    """Return the pickled failure, with the traceback but without its first two frames, which started the rank."""
    first = error.__traceback__ and error.__traceback__.tb_next
    frames = first and first.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    text = text.encode(errors="backslashreplace").decode()  # a lone surrogate cannot be printed
    places = traceback.extract_tb(frames)
    users = [place for place in places if not place.filename.startswith(OURS)] or places
    line = f"{users[-1].filename}:{users[-1].lineno}" if users else ""
    failure = Failure(blame_of(error), time.monotonic(), rank, f"raised:\n{text}", type(error).__name__, line)
    return pickle.dumps(("failed", tuple(failure)))


class RankError(RuntimeError):
    """A rank raised, died or hangs; the message says which one and holds its traceback.

    `failure` holds this as data: `rank`, `exception` and `line`; it is None if all hang.
    """

    def __init__(self, message: str, failure: Failure | None = None):
        super().__init__(message)
        self.failure = failure

    def __reduce__(self):
        return RankError, (str(self), self.failure)


class Rank:
    """One rank as its parent sees it; its process is started with the other ends of the pipes."""

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
        """Receive the rank's messages."""
        try:
            while self.open and self.pipe.poll():
                kind, said = pickle.loads(self.pipe.recv_bytes())
                setattr(self, kind, said)
        except (EOFError, OSError):  # the rank has ended, perhaps while it was sending
            self.open = False

    def failure(self) -> Failure | None:
        """Return how the rank failed, or None if it runs or ended well."""
        code = self.process.exitcode
        self.listen()
        if self.failed is not None:
            return Failure(*self.failed)
        if code is None or (code == 0 and self.result is not None):
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Failure(DIED, 0.0, self.number, f"{how}, so the other ranks were ended")

    def where(self) -> str:
        """Return where the rank was when it was asked by SIGUSR1."""
        text = os.read(self.stack.fileno(), 1 << 16).decode(errors="replace") if self.stack.poll() else ""
        lines = re.sub(r".* in _work\n(.*\n)*", "", text).partition("\n")[2]
        return f"\nrank {self.number} was still running" + (
            f", here (most recent call first):\n{lines}" if lines else "\n"
        )

    def end(self) -> None:
        """Free the ended rank's resources."""
        self.process.join()
        self.pipe.close()
        self.stack.close()


def watch(ranks: list[Rank], timeout: float, sockets: bool) -> list[bytes]:
    """Return the ranks' results once all have ended well.

    Raises:
        RankError: as soon as a rank fails, about the rank that failed first, or when all hang (see `Pulse`).
    """
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
    """Watch this process under torchrun, where no parent asks for stacks.

    If it hangs, it says where and ends with exit code 1.
    """
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
    """Return the error that names the rank to blame.

    If every failed rank failed while it waited for others, the error also shows where the ranks that still run are.
    """
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
        os.kill(rank.process.pid, signal.SIGUSR1)  # not reaped yet, so no other process has its number
    deadline = time.monotonic() + 2.0
    for rank in running:
        rank.stack.poll(max(0.0, deadline - time.monotonic()))
    time.sleep(0.05)  # until the rest of the stack is written
    return "".join(rank.where() for rank in running)


class Pulse:
    """Watches whether all ranks hang.

    They hang if none has computed for `timeout` seconds, or none has read or written for 5 times as long.

    A thread computes if it uses more than 2% of a processor between two looks. A thread that waits for a lock or sleeps
    uses none, and a thread of gloo, which wakes a hundred times a second to look for messages, uses about 0.1%. A rank
    has one of those for each process group, so each thread is judged alone and not by their sum. A thread that would
    compute if it had a processor counts as computing, since on a busy machine it may get none for long. Such a thread
    is ready to run at two looks and has not gone to sleep between them, unlike one that woke for a moment.

    Seconds in which this process could not look do not count, whether it lacked a processor or the machine was
    suspended. A rank that loops for ever computes, but neither sends nor receives. On GPUs (`sockets` False), where
    NCCL moves bytes that Linux does not count, silence is not held against a rank. A long wait for something outside,
    and very long computing without communication, look like a hang: there a longer timeout helps.
    """

    def __init__(self, pids: list[int], timeout: float, sockets: bool):
        self.pids, self.every = pids, min(max(timeout / 20, 0.2), 5.0)
        self.idle = timeout + 1.0  # a collective's own timeout says more, so it should come first
        self.mute = PATIENCE * self.idle if sockets else float("inf")
        self.looked = time.monotonic()
        self.still = self.silent = 0.0  # seconds without computing; without reading or writing
        self.used, self.bytes, self.ready = _counts(pids)

    def stopped(self) -> str:
        """Return which activity has stopped and for how long, in words; "" while there is hope."""
        gap = time.monotonic() - self.looked
        if gap < self.every or not os.path.exists("/proc/self/io"):
            return ""
        used, moved, ready = _counts(self.pids)
        self.looked += gap
        self.still, self.silent = (since + min(gap, 2 * self.every) for since in (self.still, self.silent))
        computed = any(seconds - self.used.get(thread, 0.0) > IDLE * gap for thread, seconds in used.items())
        if computed or ready.items() & self.ready.items():
            self.still = 0.0
        self.used, self.ready = used, ready
        if moved != self.bytes:
            self.bytes, self.silent = moved, 0.0
        if self.still > self.idle:
            what = f"computed for {self.still:.0f} s"
        elif self.silent > self.mute:
            what = f"sent or received anything for {self.silent:.0f} s"
        else:
            return ""
        who = f"all {len(self.pids)} ranks hang: none has" if len(self.pids) > 1 else "this rank hangs: it has not"
        return f"{who} {what}\n  fix: the traceback below shows where; if it may take so long, pass a longer timeout\n"


def _counts(pids: list[int]) -> tuple[dict[str, float], int, dict[str, str]]:
    """Return (each thread's processor seconds, the bytes that all processes have read and written, the ready threads).

    A ready thread is one that has a processor or waits for one; its value is how often it has gone to sleep so far. The
    ended children of a process are counted together.
    """
    used: dict[str, float] = {}
    moved, ready, me = 0, {}, str(threading.get_native_id())  # this thread, which only looks
    for pid in map(str, pids):
        try:
            threads = [place for place in Path(f"/proc/{pid}/task").iterdir() if place.name != me]
            used |= {thread.name: _seconds(thread) for thread in threads}
            used[f"{pid}, children"] = sum(map(int, _stat(Path(f"/proc/{pid}"))[13:15])) / TICK
            moved += sum(int(line.split()[1]) for line in Path(f"/proc/{pid}/io").read_text().splitlines()[:2])
            ready |= {thread.name: _sleeps(thread) for thread in threads if _stat(thread)[0] == "R"}
        except OSError:  # the process, or one of its threads, has just ended
            continue
    return used, moved, ready


def _stat(place: Path) -> list[str]:
    """Return Linux's counts for a process or thread, from its state on."""
    return (place / "stat").read_text().rpartition(")")[2].split()


def _seconds(thread: Path) -> float:
    """Return how many seconds a thread has had a processor."""
    try:
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    except OSError:  # this Linux counts only in ticks
        return sum(map(int, _stat(thread)[11:13])) / TICK


def _sleeps(thread: Path) -> str:
    """Return how often a thread has given its processor up to wait for something."""
    lines = (thread / "status").read_text().splitlines()
    return next((line for line in lines if line.startswith("voluntary_ctxt_switches")), "")
