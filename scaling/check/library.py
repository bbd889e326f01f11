"""The library's own programs, judged; what its docstrings and comments say is a part of them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from scaling.check.contracts import run_watched
from scaling.check.findings import Judgement
from scaling.check.mode import Judge
from scaling.check.run import attempt, nothing_outside
from scaling.check.watched import watching
from scaling.mesh import AbstractMesh

LISTINGS = (
    "data_parallel",
    "fsdp",
    "tensor_parallel",
    "fsdp_tp",
    "pods",
    "zero",
    "transformer.layer",
    "transformer.ends",
)
FORMS = ("heads", "heads_batch", "sequence", "context", "weights_2d", "experts")
TOLD = {f"scaling.strategies.{name}" for name in LISTINGS} | {f"scaling.serve.forms.{name}" for name in FORMS}


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        run_watched(self.get_data(self.path).decode(), self.path, vars(module))


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> "ModuleSpec | None":
        spec = PathFinder.find_spec(fullname, path) if fullname in TOLD else None
        if spec is None or not (spec.origin or "").endswith(".py"):
            return None
        spec.loader = _Loader(fullname, spec.origin or "")
        return spec


@contextmanager
def telling() -> Iterator[None]:
    """Modules of the library that are imported inside tell the types that they say."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def judge_library() -> Judgement:
    """Every program of `programs`, each on its mesh."""
    from scaling.check.programs import programs

    report = Judgement()
    with telling(), nothing_outside("scaling"):
        for name, sizes, run in programs():
            mesh = AbstractMesh(sizes)
            judge = Judge(report, sizes)
            with watching(judge), attempt(judge, name):
                run(mesh)
    return report
