"""Files judged side by side; and the library, by its own programs, which no chapter needs that judges itself."""

import os
from collections.abc import Sequence
from itertools import starmap
from multiprocessing import get_context

from scaling.check.contracts import telling
from scaling.check.findings import Judgement
from scaling.check.mode import Judge
from scaling.check.run import attempt, judge_file, nothing_outside
from scaling.check.watched import watching
from scaling.launch import can_fork
from scaling.launch.process import give_threads_back
from scaling.mesh import AbstractMesh


def judge_each(jobs: Sequence[tuple[str, str]]) -> list[Judgement]:
    """What each file's run shows, (path, text), on all processors; of no path, what the library's programs show."""
    workers = min(len(jobs), os.cpu_count() or 1) if can_fork("cpu") else 1
    if workers < 2:
        return [*starmap(_judged, jobs)]
    give_threads_back()
    with get_context("fork").Pool(workers) as pool:  # which has imported torch
        return pool.starmap(_judged, jobs, chunksize=1)


def _judged(path: str, text: str) -> Judgement:
    return judge_file(path, text) if path else judge_library()


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
