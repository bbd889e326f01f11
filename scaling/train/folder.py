"""Lock a run's folder, check that a run can begin in it or go on from it, and write the run's options there."""

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from scaling.common.torchrun import first_rank
from scaling.configs.sources import RUN
from scaling.launch.ranks import on_signals
from scaling.train import flight
from scaling.train.durable import LATEST, stray_files, write_atomically
from scaling.train.loop import STOP
from scaling.train.origin import keep_origin
from scaling.train.progress import METRICS, NORMS
from scaling.train.record import (
    OF_MODEL,
    check_options_kept,
    check_unchanged,
    first_readable_record,
    record_of,
    resumable_steps,
)
from scaling.train.settings import Settings

NOT_KEPT = ("model", "weights", "resume", "new_data", "step", "out")  # run.toml has these in another form, or not
LOCK = "lock"  # a file in a run's folder, which is locked by the run that writes there


@contextmanager
def prepared(settings: Settings, model: str, mesh: str) -> Iterator[Callable[[], None]]:
    """Lock and check the run's folder; yield a function that writes the options there after the ranks' own checks.

    Ctrl-C and SIGTERM ask the run to save and end, and a second Ctrl-C ends it at once.
    ValueError if the folder is in use, or if this run can neither begin in it nor go on from it.
    """
    out = Path(settings.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is not a folder\n  fix: give another --out")
    if (out / "config.json").is_file():
        raise ValueError(f"{out}: is a model's folder: it has a config.json\n  fix: give another --out")

    with on_signals(stopper(out)), locked(out) if first_rank() else nullcontext():
        if first_rank():
            check_startable(out, settings)
        yield partial(keep_options, out, settings, model, mesh, touched(out / STOP))


def stopper(out: Path) -> Callable[[int], None]:
    """Return a handler of signals that asks the run in a folder to save and end, and at a second Ctrl-C ends it."""
    asked = False

    def ask(number: int) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True
        with suppress(OSError):
            (out / STOP).touch()

    return ask


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock a run's folder, creating it if needed; after an error, remove a created folder unless it holds files.

    ValueError if another run has locked it.
    """
    new = [path for path in (out / STOP, out / LOCK, out, *out.parents) if not path.exists()]
    out.mkdir(parents=True, exist_ok=True)
    with open(out / LOCK, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(lock.fileno()).st_nlink  # 0: the run that held the lock has just deleted the file
        except OSError:
            held = 0
        if not held:
            raise ValueError(f"{out}: another run writes here\n  fix: give this one another --out")
        try:
            yield
        except BaseException:
            for path in new:
                with suppress(OSError):  # a folder that is not empty stays
                    path.rmdir() if path.is_dir() else path.unlink()
            raise


def check_startable(out: Path, settings: Settings) -> None:
    """Check that a run with these settings can begin in this folder, or go on from its checkpoints.

    Raises:
        ValueError: The folder does not suit this run, or was begun with other settings.
        OSError: A file in it cannot be read.
    """
    for path in (out / name for name in (RUN, METRICS, NORMS, LATEST, STOP)):
        if path.is_dir():
            raise ValueError(f"{path}: is a folder, where a run has a file\n  fix: move it away, or give another --out")
    if not settings.resume:
        if any(out.glob("step-*")):
            raise already_begun_error(out)
        return
    for warning in stray_files(out):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    steps = resumable_steps(settings)
    step, before = first_readable_record(out, steps)
    if steps:
        check_options_kept(out, before)
    check_unchanged(settings, before, record_of(settings))
    if step is None:
        print(f"{out}: there is no checkpoint yet: starting at step 1", flush=True)
    else:
        check_steps_left(settings, step)


def already_begun_error(out: Path) -> ValueError:
    """Return the error for a new run in a folder that holds the checkpoints of another."""
    return ValueError(f"{out}: holds checkpoints already\n  fix: give --resume to go on from them, or another --out")


def check_steps_left(settings: Settings, step: int) -> None:
    """Raise a ValueError if a run that is at this step has no steps left."""
    if step >= settings.steps:
        raise ValueError(f"{settings.out}: is at step {step} of {settings.steps}\n  fix: give --steps above {step}")


def keep_options(out: Path, settings: Settings, model: str, mesh: str, stop: int) -> None:
    """Write the model's files, then run.toml; remove the stop file if it was touched at `stop`, before this run."""
    if touched(out / STOP) == stop:
        (out / STOP).unlink(missing_ok=True)
    flight.keep_earlier(out)
    kept = {k: v for k, v in asdict(settings).items() if k not in NOT_KEPT and v is not None}  # TOML has no null
    kept |= {name: getattr(settings.model, name) for name in OF_MODEL}
    kept |= {"mesh": mesh} | keep_origin(out, model, settings)
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in sorted(kept.items())]
    write_atomically(out / RUN, "".join(lines))  # atomic, because ranks that start later may be reading it


def touched(path: Path) -> int:
    """Return when a file was touched, in nanoseconds, or 0 if it does not exist."""
    return path.stat().st_mtime_ns if path.exists() else 0
