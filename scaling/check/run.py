"""Run a file once under the judge: the functions that it hands to ranks run on an abstract mesh of equal sizes instead.

Printing and waiting are suppressed, and no rank is started. A statement that fails, since an abstract mesh has no
values, is left out. Functions that the file itself does not call are called here: a strategy (SPECS, forward,
backward), and a function whose docstring gives the type of each of its arguments. `judge_each` judges several files on
all processors, and `judge_library` the library by its own programs.
"""

import ast
import contextlib
import inspect
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from unittest.mock import patch

import torch

from scaling import launch, tree
from scaling import mesh as meshes
from scaling.check.contracts import run_watched, typed_arguments, types_reported
from scaling.check.findings import Judgement, fault_text, place_of_error, place_of_function, real_path
from scaling.check.mode import Judge
from scaling.check.strategy import LAYERS, run_layers
from scaling.check.watched import shard_of, watching
from scaling.collectives.linear import Pending, who_watches
from scaling.collectives.multiply import Deferred
from scaling.common.torchrun import without_torchrun
from scaling.launch import can_fork
from scaling.launch.ranks import give_threads_back
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, format_axes

SECONDS = 60
OPTIONS = ("--small",)


def _on_abstract(fn: Callable, sizes: Any, *args: Any, **options: Any) -> list:
    """Call fn as launch.run does, on one rank of an abstract mesh and on the last stage; all ranks get its result."""
    mesh = AbstractMesh(dict(sizes))
    result = fn(mesh, *args)
    if sizes.get("Z", 1) > 1:
        fn(AbstractMesh(dict(sizes), {"Z": sizes["Z"] - 1}), *args)
    return [result] * mesh.size()


def _one_rank(fn: Callable, sizes: Any, *args: Any, **options: Any) -> Any:
    """Call fn as launch.start does, which returns rank 0's result."""
    return looked_at_alone(_on_abstract(fn, sizes, *args)[0], fn)


def looked_at_alone(result: Any, fn: Callable) -> Any:
    """Return fn's result on one rank, and report an array in it that is only this rank's part."""
    if (watch := who_watches()) is not None:
        for x in filter(torch.is_tensor, tree.leaves(result)):
            held = watch.held(x)
            if axes := format_axes(sorted(held.axes | (held.unreduced or frozenset()))):
                fix = "all_gather, reduce_scatter or all_reduce it before it is returned"
                text = fault_text(f"{held} is one rank's part along {axes}", "one-rank", fix)
                watch.find("one-rank", text, held.place, place_of_function(fn))
    return result


@contextlib.contextmanager
def nothing_outside(path: str, seconds: int = SECONDS) -> Iterator[None]:
    """Start no ranks, print nothing, do not wait, and stop after `seconds` seconds (0: never)."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        for room, name, value in (
            (launch, "run", _on_abstract), (launch, "start", _one_rank),
            (meshes, "Mesh", lambda sizes, *_, **__: AbstractMesh(dict(sizes))),
            (launch, "start_by_torchrun", lambda *_: None),
            (time, "sleep", lambda _: None), (sys, "argv", [path, *OPTIONS]),
            (torch.Tensor, "__format__", lambda x, how: format(str(x) if x.dim() else x.item(), how)),
        ):  # fmt: skip
            stack.enter_context(patch.object(room, name, value))
        stack.enter_context(patch("scaling.measure.rates.timed", lambda fn, *_, **__: (fn(), 1e-3)[1]))  # runs once
        stack.enter_context(patch.dict("os.environ", without_torchrun(os.environ) | {"MPLBACKEND": "agg"}, clear=True))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if main:
            stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, stop))
            stack.callback(signal.alarm, 0)
            signal.alarm(seconds)
        yield


def not_reached(
    calls: Mapping[str, Iterable[tuple[int, int]]], reached: Iterable[tuple[str, int]]
) -> Iterator[tuple[str, str]]:
    """Yield (place, why) for each of the files' typed calls, {path: its (first, last line)}, that no run reached."""
    lines: dict[str, set[int]] = {}
    for file, line in reached:
        lines.setdefault(real_path(file), set()).add(line)
    for path, places in calls.items():
        for first, last in places:
            if not lines.get(real_path(path), set()) & set(range(first, last + 1)):
                yield f"{path}:{first}", "this call was not reached"


def judge_file(path: "str | Path", text: "str | None" = None, files: Iterable[str] = ()) -> Judgement:
    """Run a file under the judge.

    Args:
        path: the file.
        text: the file's content, if it is not the one on the disk.
        files: other judged files: a fault in one that this file imports is placed there.
    """
    path = str(path)
    text = Path(path).read_text(encoding="utf-8") if text is None else text
    report = Judgement()
    module = ModuleType("__main__")
    module.__file__ = path
    judge = Judge(report)
    judge.run, judge.files = path, {real_path(name): name for name in (*files, path)}
    with nothing_outside(path), watching(judge), modules_beside(str(Path(path).resolve().parent)):
        kept = sys.modules.get("__main__")
        try:
            program = ast.parse(text)
            targets = [target for node in program.body if isinstance(node, ast.Assign) for target in node.targets]
            strategy = any(getattr(target, "id", "") == "SPECS" for target in targets)
            _statements(program, text, path, module, judge)
            _uncalled(path, module, judge, strategy)
        except TimeoutError:
            report.unjudged.append((path, f"it did not end within {SECONDS} seconds"))
        finally:
            if kept is not None:
                sys.modules["__main__"] = kept
    return report


@contextlib.contextmanager
def modules_beside(folder: str) -> Iterator[None]:
    """Import from this folder first, and forget its modules at the end: another folder's may have the same names."""
    before = {*sys.modules}
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.pop(0)
        for name in sys.modules.keys() - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            installed = "site-packages" in file or name.split(".")[0] == "scaling"
            if file.startswith(os.path.join(folder, "")) and not installed:
                del sys.modules[name]


def _statements(program: ast.Module, text: str, path: str, module: ModuleType, judge: Judge) -> None:
    """Run the statements separately, so that a statement that needs values does not stop the others."""
    for node in program.body:
        with attempt(judge, f"{path}:{node.lineno}"):
            run_watched(text, path, vars(module), ast.Module([node], []))


@contextlib.contextmanager
def attempt(judge: Judge, place: str, must: bool = False) -> Iterator[None]:
    """Report an error raised inside: as not judged, or as a finding if the code `must` run, since its arguments fit.

    A ShardingError that a listing of the library raises after a fault was found is a consequence of that fault.
    """
    try:
        yield
        return
    except ShardingError as error:
        raised, shown = place_of_error(error) or place, place_of_error(error, judge.files) or place
        if raised != shown and judge.report.findings:
            judge.skip(str(error).splitlines()[0], shown)
        else:
            judge.find("illegal-line", str(error), "", raised, shown)
    except TimeoutError:
        raise
    except SystemExit as error:
        if error.code not in (None, 0, 1):
            judge.skip(f"it ends with {error.code}", place)
    except Exception as error:
        if "Pending" in str(error):
            text = fault_text(str(error), "pending", "wait(x), or x.wait(), first")
            judge.find("pending", text, "", place_of_error(error), place_of_error(error, judge.files) or place)
            return
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if must and not judge.report.findings:
            judge.find("result", fault_text(f"it does not run: {text}", "result", "see the error"), "", place)
        else:
            judge.skip(text, place)
    judge.pending.clear()  # the statement ended before it could wait for them
    judge.deferred.clear()


def _uncalled(path: str, module: ModuleType, judge: Judge, strategy: bool) -> None:
    """Run the functions that the file does not call: its strategy, and each function whose arguments all have types.

    `strategy` says whether the file defines SPECS; one that it imports is judged where it is defined.
    """
    values = vars(module)
    specs = values["SPECS"] if strategy and isinstance(values.get("SPECS"), dict) else {}
    if {"In", "Out"} <= {*specs} and any(callable(values.get(name)) for name in ("forward", "backward")):
        words = re.findall(r"_([A-Z]+)", " ".join(map(str, specs.values())))
        mesh = _mesh_along({axis for word in words for axis in word})
        for keep in (True, False):
            with attempt(judge, f"{path}:1", True):
                run_layers(module, keep, mesh)
    for fn in [f for f in values.values() if inspect.isfunction(f) and hasattr(f, "__wrapped__")]:
        _typed_function(fn, judge)


def _typed_function(fn: Any, judge: Judge) -> None:
    """Call a function that has not been called yet, with shards of the types that its docstring declares."""
    code, types = inspect.unwrap(fn).__code__, typed_arguments(fn)  # the program's own function, below its decorators
    if not types or code in judge.ran:
        return
    mesh = _mesh_along(_axes_of(code).union(*(spec.named_axes for spec in types.values() if spec)))
    given, sizes = [], dict(LAYERS)
    for spec in types.values():
        given.append(judge.typed(shard_of(spec, mesh, sizes), spec, "argument", mesh) if spec else mesh)
    with attempt(judge, place_of_function(fn), True):
        for x in tree.leaves(fn(*given)):
            if isinstance(x, (Pending, Deferred)):  # its caller waits
                x.wait()


def _mesh_along(axes: Collection[str]) -> AbstractMesh:
    """Return a mesh whose neighbouring axes differ in size."""
    return AbstractMesh({axis: 2 + i % 2 for i, axis in enumerate(sorted(axes))})


def _axes_of(code: CodeType) -> set[str]:
    """Return the axes that the lines of a function name."""
    lines = [c for c in code.co_consts if isinstance(c, str) and "[" in c]
    return {axis for line in lines for word in re.findall(r"_([A-Z]+)(?=[,\]}])", line) for axis in word}


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
    with types_reported(), nothing_outside("scaling", 0):
        from scaling.check.programs import programs

        for name, sizes, run in programs():
            judge = Judge(report, sizes)
            judge.files = {real_path(name): name for name in modules}
            with watching(judge), attempt(judge, name):
                run(AbstractMesh(sizes))
    return report
