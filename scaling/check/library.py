"""Files judged side by side; and the library, by its own programs, which no chapter needs that judges itself."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from scaling.check.contracts import telling
from scaling.check.findings import Judgement
from scaling.check.mode import Judge
from scaling.check.run import attempt, judge_file, nothing_outside
from scaling.check.watched import watching
from scaling.launch import can_fork
from scaling.launch.process import give_threads_back
from scaling.mesh import AbstractMesh


def judge_each(files: Sequence[tuple[str, str] | None]) -> list[Judgement]:
    """What each file's run shows, (path, text), on all processors; of None, what the library's programs show.
    RuntimeError where a file ends the process that it runs in."""
    workers = min(len(files), os.cpu_count() or 1) if can_fork("cpu") else 1
    if workers < 2:
        return [*map(_judged, files)]
    give_threads_back()
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:  # which have imported torch
        try:
            return [*pool.map(_judged, files)]
        except BrokenProcessPool:
            raise RuntimeError(
                "a file ended the process in which it was judged\n  fix: give one file at a time"
            ) from None


def _judged(file: "tuple[str, str] | None") -> Judgement:
    return judge_library() if file is None else judge_file(*file)


def judge_library() -> Judgement:
    """Every program of `programs`, each on its mesh; what its listings say of their types is a part of them."""
    report = Judgement()
    with telling(), nothing_outside("scaling", 0):
        from scaling.check.programs import programs

        for name, sizes, run in programs():
            judge = Judge(report, sizes)
            with watching(judge), attempt(judge, name):
                run(AbstractMesh(sizes))
    return report
