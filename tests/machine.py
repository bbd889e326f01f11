"""Tests on a machine that does other things too: what ends soon, ranks that fail, programs in forks, gloo's threads,
processes and commands that have ended; counts of steps on fake devices, each made once.

What other programs delay now and then holds once among several tries; what is wrong fails each of them. And what has to
end soon ends long before the timeout that would end it otherwise."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from scaling.collectives import all_reduce
from scaling.common import torchrun

SOON = 40.0  # seconds: most of them are other programs'; without these it is well under one


def once(check: Callable[[], None], tries: int = 6) -> None:
    """The check must hold in one of so many tries."""
    for left in reversed(range(tries)):
        try:
            return check()
        except AssertionError:
            if not left:
                raise


def on_ranks(*meshes: dict[str, int]):
    """A test with a `mesh`, which all ranks of each of these run (conftest.py)."""
    return pytest.mark.parametrize("mesh", meshes, ids=str)


class RankFailed(Exception):
    """What the `ranks` fixture raises when a rank fails."""


class Forked:
    """`main()` in a fork of this process, which has imported torch already: started in no time, in a process group of
    its own, with what it writes in `stdout`, as a Popen."""

    def __init__(self, main: Callable[[], object]):
        reader, writer = os.pipe()
        self.process = multiprocessing.get_context("fork").Process(target=_as_program, args=(main, writer))
        self.process.start()
        os.close(writer)
        self.pid, self.stdout = self.process.pid, os.fdopen(reader)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        with self.stdout as stream:
            out = stream.read()
        self.process.join(timeout)
        return out, None


def _as_program(main: Callable[[], object], writer: int) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(writer, stream)
    os.close(writer)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1) for stream in (1, 2))  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


def ranks_of_torchrun(start: Callable[[], Forked], **environment: str) -> list[Forked]:
    """What torchrun does for a script of two ranks, by forks of this process, which has imported torch."""
    begun, port = [], 20_000 + os.getpid() % 10_000
    for rank in range(2):
        with patch.dict(os.environ, torchrun.as_rank(os.environ, rank, 2, port) | environment, clear=True):
            begun.append(start())
    return begun


def be_rank(monkeypatch, rank: int = 0, size: int = 1, **environment: str) -> None:
    """Let this process read that torchrun has started it so."""
    for name, value in (torchrun.as_rank({}, rank, size, 29_500) | environment).items():
        monkeypatch.setenv(name, value)


def ended(main, arguments) -> int | None:
    """A command's return code, where argparse ends it too."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


def share_gloo_device() -> None:
    """Let all gloo groups that this process makes from now on send by one device of the loopback interface: each device
    has a thread that wakes a hundred times a second, and tests have many ranks on few cores."""
    c10d = dist.distributed_c10d
    device = c10d.ProcessGroupGloo.create_device(interface="lo")

    class OnOneDevice(c10d.ProcessGroupGloo):
        def __init__(self, store, rank, size, timeout, **_):  # torch 2.15 gives enable_reconfigure as well
            options = c10d.ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnOneDevice


def total(mesh) -> float:
    """The number of ranks, by a collective over all axes."""
    axes = "".join(mesh.sizes)
    return all_reduce(f"A[] {{U_{axes}}} -> A[]", torch.ones(()), mesh).item()


def running(pid: int) -> bool:
    """Whether a process exists and has not ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def all_ended(pids: list[int], limit=SOON) -> bool:
    deadline = time.monotonic() + limit
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def hangs(mesh):
    time.sleep(60)


@contextmanager
def counted_once() -> Iterator[pytest.MonkeyPatch]:
    """While the block runs, a step of one rank of a mesh is counted once, whatever asks for it."""
    from scaling.train import programs

    known, count = {}, programs.count

    def counted(some, sizes, coord=None, *given):
        key = some, tuple(sizes.items()), tuple((coord or {}).items()), *given
        if key not in known:
            known[key] = count(some, sizes, coord, *given)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "count", counted)
        yield patch
