"""A file, run once by the judge: what it hands to ranks runs here instead, on an abstract mesh of the same sizes.

What it prints goes nowhere, what waits does not, and no rank is started. A statement that fails, since an abstract mesh
has no values, is left out. What is not called by the file itself is called here: a strategy (SPECS, forward, backward),
and a function whose docstring gives the type of each of its arguments.
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
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from unittest.mock import patch

import torch

from scaling import launch, tree
from scaling import mesh as meshes
from scaling.check.compared import axes_named, place_of_function, raised_at
from scaling.check.contracts import documented, run_watched
from scaling.check.findings import Finding, Judgement, said
from scaling.check.lines import check_lines, silent_lines
from scaling.check.mode import Judge
from scaling.check.strategy import LAYERS, run_layers
from scaling.check.watched import shard_of, watching
from scaling.collectives.linear import who_watches
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, format_axes

SECONDS = 60
OPTIONS = ("--small",)


def _on_abstract(fn: Callable, sizes: Any, *args: Any, **options: Any) -> list:
    """As launch.run: fn(mesh, *args), of one rank, whose result stands for that of each; of stages the last one too."""
    mesh = AbstractMesh(dict(sizes))
    result = fn(mesh, *args)
    if sizes.get("Z", 1) > 1:
        fn(AbstractMesh(dict(sizes), {"Z": sizes["Z"] - 1}), *args)
    return [result] * mesh.size()


def _one_rank(fn: Callable, sizes: Any, *args: Any, **options: Any) -> Any:
    """As launch.start, which returns rank 0's result."""
    return looked_at_alone(_on_abstract(fn, sizes, *args)[0], fn)


def looked_at_alone(result: Any, fn: Callable) -> Any:
    """What fn returned on one rank, which nobody puts together with the others'."""
    if (watch := who_watches()) is not None:
        for x in filter(torch.is_tensor, tree.leaves(result)):
            held = watch.held(x)
            if axes := format_axes(sorted(held.axes | (held.unreduced or frozenset()))):
                fix = "all_gather, reduce_scatter or all_reduce it before it is returned"
                text = said(f"{held} is one rank's part along {axes}", "one-rank", fix)
                watch.find("one-rank", text, held.place, place_of_function(fn))
    return result


def _abstract(sizes: Any, *args: Any, **options: Any) -> AbstractMesh:
    return AbstractMesh(dict(sizes))


@contextlib.contextmanager
def nothing_outside(path: str, seconds: int = SECONDS) -> Iterator[None]:
    """No ranks, no output, no waiting, and an end after so many seconds; 0: none."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        for room, name, value in (
            (launch, "run", _on_abstract), (launch, "start", _one_rank), (meshes, "Mesh", _abstract),
            (launch, "start_by_torchrun", lambda *_: None),
            (time, "sleep", lambda _: None), (sys, "argv", [path, *OPTIONS]),
        ):  # fmt: skip
            stack.enter_context(patch.object(room, name, value))
        stack.enter_context(patch("scaling.measure.rates.timed", lambda fn, *_, **__: (fn(), 1e-3)[1]))  # it runs once
        stack.enter_context(patch.dict("os.environ", {"WORLD_SIZE": "1", "RANK": "0", "MPLBACKEND": "agg"}))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if main:
            stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, stop))
            stack.callback(signal.alarm, 0)
            signal.alarm(seconds)
        yield


def check_source(text: str, file: str = "<source>") -> list[Finding]:
    """The faults of one text, by its lines and by running it."""
    found, calls = check_lines(text, file)
    if calls and not any(finding.rule == "python" for finding in found):
        found += found_in(judge_file(file, text), {file: text})
    return sorted(found)


def found_in(judged: Judgement, texts: dict[str, str]) -> list[Finding]:
    """What was found in these files, by the paths that they are named by, but for what their comments silence."""
    names, found = {os.path.realpath(path): path for path in texts}, []
    for finding in judged.findings:
        path = names.get(os.path.realpath(finding.file))
        if path is not None and finding.rule not in silent_lines(texts[path]).get(finding.line, ()):
            found.append(replace(finding, file=path))
    return found


def judge_file(path: "str | Path", text: "str | None" = None) -> Judgement:
    """What the judge finds in a file when it is run."""
    path = str(path)
    text = Path(path).read_text(encoding="utf-8") if text is None else text
    report = Judgement()
    module = ModuleType("__main__")
    module.__file__ = path
    judge = Judge(report)
    with nothing_outside(path), watching(judge):
        kept = sys.modules.get("__main__")
        sys.path.insert(0, str(Path(path).resolve().parent))
        try:
            _statements(text, path, module, judge)
            _uncalled(path, module, judge)
        except TimeoutError:
            report.unjudged.append((path, f"it did not end within {SECONDS} seconds"))
        finally:
            sys.path.pop(0)
            if kept is not None:
                sys.modules["__main__"] = kept
    return report


def _statements(text: str, path: str, module: ModuleType, judge: Judge) -> None:
    """One after the other, so that one that needs values stops no other."""
    tree = ast.parse(text)
    for node in tree.body:
        with attempt(judge, f"{path}:{node.lineno}"):
            run_watched(text, path, vars(module), ast.Module([node], []))


@contextlib.contextmanager
def attempt(judge: Judge, place: str, must: bool = False) -> Iterator[None]:
    """What is raised inside is named; as a finding, if it `must` run: its arguments are what it says."""
    try:
        yield
        return
    except ShardingError as error:
        judge.find("illegal-line", str(error), "", raised_at(error) or place)
    except TimeoutError:
        raise
    except SystemExit as error:
        if error.code not in (None, 0, 1):
            judge.skip(f"it ends with {error.code}", place)
    except Exception as error:
        if "Pending" in str(error):
            judge.find(
                "pending", said(str(error), "pending", "wait(x), or x.wait(), first"), "", raised_at(error) or place
            )
            return
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if must and not judge.report.findings:
            judge.find("result", said(f"it does not run: {text}", "result", "see the error"), "", place)
        else:
            judge.skip(text, place)
    judge.pending.clear()  # what it would have waited for


def _uncalled(path: str, module: ModuleType, judge: Judge) -> None:
    """A strategy of the file, and each function all of whose arguments have types."""
    values = vars(module)
    specs = values["SPECS"] if isinstance(values.get("SPECS"), dict) else {}
    if {"In", "Out"} <= {*specs} and any(callable(values.get(name)) for name in ("forward", "backward")):
        words = re.findall(r"_([A-Z]+)", " ".join(map(str, specs.values())))
        mesh = _mesh_along({axis for word in words for axis in word})
        for keep in (True, False):
            with attempt(judge, f"{path}:1", True):
                run_layers(module, keep, mesh)
    for fn in [f for f in values.values() if inspect.isfunction(f) and hasattr(f, "__wrapped__")]:
        _typed_function(fn, judge)


def _typed_function(fn: Any, judge: Judge) -> None:
    types, _ = documented(fn.__doc__ or "")
    wanted = inspect.signature(fn).parameters.values()
    needed = [p.name for p in wanted if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if not needed or not all(name in types or name == "mesh" for name in needed) or not types:
        return
    code = inspect.unwrap(fn).__code__  # the program's own, below whatever decorates it
    mesh = _mesh_along(_axes_of(code).union(*map(axes_named, types.values())))
    watch = who_watches()
    if watch is None or code in judge.ran:
        return
    given, sizes = [], dict(LAYERS)
    for name in needed:
        if name == "mesh":
            given.append(mesh)
            continue
        given.append(watch.typed(shard_of(types[name], mesh, sizes), types[name], "argument", mesh))
    with attempt(judge, place_of_function(fn), True):
        fn(*given)


def _mesh_along(axes: Collection[str]) -> AbstractMesh:
    """A mesh whose neighbouring axes differ in size."""
    return AbstractMesh({axis: 2 + i % 2 for i, axis in enumerate(sorted(axes))})


def _axes_of(code: CodeType) -> set[str]:
    """The axes that the lines of a function name."""
    lines = [c for c in code.co_consts if isinstance(c, str) and "[" in c]
    return {axis for line in lines for word in re.findall(r"_([A-Z]+)(?=[,\]}])", line) for axis in word}
