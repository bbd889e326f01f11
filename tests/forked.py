"""A program in a fork of this process, which has imported torch already: started in no time, ended as any other."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable


class Forked:
    """`main()` in a process group of its own, with what it writes in `stdout`: as a Popen."""

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
