"""Watching the ranks that `scaling.launch` started: which one failed first, and what it and the others were doing."""

import faulthandler
import os
import re
import signal
import time
import traceback
from multiprocessing import connection
from pathlib import Path

GRACE = 1.0  # seconds in which the rank that caused another one's error is looked for
CLOSED, LATE = "by peer", ("Timed out", "timed out", "timeout")  # in errors that a rank gets when another dies or hangs


class RankError(RuntimeError):
    """A rank raised, died or hangs; the message says which one and holds its traceback."""


def show_stack_on_request(folder: Path, rank: int) -> None:
    """Let this process write its stack to a file in the folder when it gets SIGUSR1, wherever it hangs."""
    file = open(folder / f"stack-{rank}", "w")  # noqa: SIM115 (open as long as the process lives: faulthandler keeps it)
    faulthandler.register(signal.SIGUSR1, file, all_threads=False)


def report(folder: Path, rank: int, error: BaseException) -> None:
    """Write down what ended this rank, and when; the first two frames, which started it, are left out."""
    frames = error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    draft = folder / f"draft-{rank}"
    draft.write_text(f"{time.monotonic()}\n{text}")
    draft.rename(folder / f"error-{rank}")


def watch(ranks: list, folder: Path) -> None:
    """Wait for all processes to end well. RankError as soon as one does not, about the rank that failed first."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        for sentinel in connection.wait(list(running)):
            if _failure(ranks, running.pop(sentinel), folder):
                raise RankError(_explain(ranks, folder))


def _failure(ranks: list, rank: int, folder: Path) -> tuple | None:
    """(order of blame, time, rank, what happened), or None if it runs or ended well.

    First a rank that died, then one that raised, one that waited in vain, one whose peer was gone.
    """
    code, error = ranks[rank].exitcode, folder / f"error-{rank}"
    if error.exists():
        when, text = error.read_text().split("\n", 1)
        blame = 3 if CLOSED in text else 2 if any(word in text for word in LATE) else 1
        return blame, float(when), rank, f"raised:\n{text}"
    if code is None or (code == 0 and (folder / f"result-{rank}").exists()):
        return None
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return 0, 0.0, rank, f"{how}, so the other ranks were ended"


def _explain(ranks: list, folder: Path) -> str:
    """Name the rank to blame; if all that failed did so while waiting, show also where those are that still run."""
    deadline = time.monotonic() + GRACE
    while True:
        blame, _, rank, what = min(filter(None, (_failure(ranks, r, folder) for r in range(len(ranks)))))
        if blame < 2 or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    message = f"rank {rank} of {len(ranks)} {what}"
    return message if blame < 2 else message + _stacks(ranks, folder)


def _stacks(ranks: list, folder: Path) -> str:
    text, running = "", [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in running:
        os.kill(ranks[rank].pid, signal.SIGUSR1)
    time.sleep(0.1 if running else 0)
    for rank in running:
        stack = re.sub(r".* in _work\n(.*\n)*", "", (folder / f"stack-{rank}").read_text()).partition("\n")[2]
        text += f"\nrank {rank} was still running" + (f", here (most recent call first):\n{stack}" if stack else "\n")
    return text
