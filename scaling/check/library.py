"""Judge files side by side, and the library by its own programs."""

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context

from scaling.check.contracts import telling
from scaling.check.findings import Judgement, real_path
from scaling.check.mode import Judge
from scaling.check.run import attempt, judge_file, nothing_outside
from scaling.check.watched import watching
from scaling.launch import can_fork
from scaling.launch.process import give_threads_back
from scaling.mesh import AbstractMesh


def judge_each(
    files: Sequence[tuple[str, str] | None], judged: Collection[str], modules: Collection[str]
) -> list[Judgement]:
    """Judge each file, (path, text), on all processors; None means the library's programs.

    Args:
        files: the files.
        judged: the paths of all files in which faults are shown.
        modules: the paths of the library's files in which faults of its programs are shown.

    Raises:
        RuntimeError: a file ended the process that ran it.
    """
    workers = min(len(files), os.cpu_count() or 1) if can_fork("cpu") else 1
    if workers < 2:
        return [_judge(file, judged, modules) for file in files]
    give_threads_back()
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:  # the workers have imported torch already
        try:
            return [*pool.map(partial(_judge, judged=judged, modules=modules), files)]
        except BrokenProcessPool:
            raise RuntimeError(
                "a file ended the process in which it was judged\n  fix: give one file at a time"
            ) from None


def _judge(file: "tuple[str, str] | None", judged: Collection[str], modules: Collection[str]) -> Judgement:
    return judge_library(modules) if file is None else judge_file(*file, judged)


def judge_library(modules: Collection[str] = ()) -> Judgement:
    """Judge each of the library's programs on its mesh, with the types that the listings' docstrings declare.

    A fault is shown at the innermost line that led to it in `modules`, the paths of files, or in any file without them.
    """
    report = Judgement()
    with telling(), nothing_outside("scaling", 0):
        from scaling.check.programs import programs

        for name, sizes, run in programs():
            judge = Judge(report, sizes)
            judge.files = {real_path(name): name for name in modules}
            with watching(judge), attempt(judge, name):
                run(AbstractMesh(sizes))
    return report
