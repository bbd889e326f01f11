"""Modules as the checker sees them: source that is found and parsed, and never imported.

A module is looked for beside the file that imports it, in the packages around that file, and on sys.path. Of what is
installed only this project is read: of other packages' functions nothing is known.
"""

import ast
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

TYPED = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ragged_all_to_all", "broadcast", "reduce"}
TYPED |= {"scatter", "gather", "einsum", "shard", "reshard", "unshard", "ppermute", "send", "recv", "masked"}
TYPED_IN = ("scaling.collectives", "scaling.strategies.axes")  # modules whose typed calls the checker knows by itself
IMPORTS = re.compile(r"^[ \t]*(?:from|import)\b.*(?:collectives|strategies|axes|scaling import)", re.MULTILINE)
INSIDE = ("body", "orelse", "handlers", "cases", "finalbody")  # where a statement holds others
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Module:
    """A parsed module. `scope`: its names, each with the statements that bind it at the top level."""

    def __init__(self, name: str, path: "Path | None", text: str):
        self.name, self.path, self.text, self.tree = name, path, text, ast.parse(text)
        self.scope: dict[str, list[tuple[Any, Any]]] = {}
        self.collect(self.tree.body)

    @cached_property
    def uses_lines(self) -> bool:
        """Whether the module imports typed calls."""
        if not IMPORTS.search(self.text):
            return False
        for node in imports_in(self.tree.body):
            if isinstance(node, ast.Import) and any(a.name.startswith(TYPED_IN) for a in node.names):
                return True
            if isinstance(node, ast.ImportFrom):
                source, names = self.absolute(node), [alias.name for alias in node.names]
                if source.startswith(TYPED_IN) or any(f"{source}.{name}" in TYPED_IN for name in names):
                    return True
                if source == "scaling" and any(name in TYPED for name in names):
                    return True
        return False

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def keys(self) -> set[str]:
        """The constant keys of all the module's dicts, `params["W_in"]`."""
        items = (n.slice for n in ast.walk(self.tree) if isinstance(n, ast.Subscript))
        return {s.value for s in items if isinstance(s, ast.Constant) and isinstance(s.value, str)}

    @property
    def package(self) -> str:
        inside = self.path is not None and self.path.name == "__init__.py"
        return self.name if inside else self.name.rpartition(".")[0]

    def collect(self, body) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.add(node.name, node, node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    self.add(alias.asname or alias.name.split(".")[0], node, alias)
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for part in ast.walk(target):
                        if isinstance(part, ast.Name):
                            self.add(part.id, node, target)
            elif isinstance(node, (ast.If, ast.Try, ast.With)):
                handlers = [statement for handler in getattr(node, "handlers", ()) for statement in handler.body]
                self.collect([*node.body, *getattr(node, "orelse", ()), *handlers, *getattr(node, "finalbody", ())])

    def add(self, name: str, node: ast.AST, detail: ast.AST) -> None:
        self.scope.setdefault(name, []).append((node, detail))

    def absolute(self, node: ast.ImportFrom) -> str:
        """The full name of the module that `from ... import` names."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".") if self.package else []
        return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def imports_in(body: Iterable[Any]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports among statements and inside them; an expression holds none."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not isinstance(node, ast.Expr):
            for inside in INSIDE:
                yield from imports_in(getattr(node, inside, ()))


class Modules:
    """Finds and parses modules; each once. Shared by the files of one run."""

    def __init__(self):
        self.found: dict[tuple, Module | None] = {}

    def find(self, name: str, near: "Path | None" = None) -> "Module | None":
        """The module of this name as a file at `near` would import it; None if there is no source that may be read."""
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in ("torch", "numpy", "pytest"):
            return None
        roots = () if near is None else roots_of(near)
        key = name, roots
        if key not in self.found:
            path = source_file(name, roots)
            self.found[key] = None if path is None else self.load(name, path)
        return self.found[key]

    def load(self, name: str, path: Path) -> "Module | None":
        key = "file", path.resolve()
        if key not in self.found:
            try:
                self.found[key] = Module(name, path, path.read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError):
                self.found[key] = None
        return self.found[key]


def source_file(name: str, roots: tuple[str, ...]) -> "Path | None":
    """The file of a module, of those that may be read; nothing is imported to find it."""
    found = located(name, roots)
    origin = found.origin or "" if found is not None else ""
    if not origin.endswith(".py") or (name.partition(".")[0] != "scaling" and origin.startswith(INSTALLED)):
        return None
    return Path(origin)


@lru_cache(maxsize=4096)
def located(name: str, roots: tuple[str, ...]) -> "ModuleSpec | None":
    """Where a module is: in a package that is there, or at the roots, or where any import would find it."""
    package, _, part = name.rpartition(".")
    if package:
        around = located(package, roots)
        folders = None if around is None else around.submodule_search_locations
        return inside(f"{around.name}.{part}", tuple(folders)) if around is not None and folders else None
    found = PathFinder.find_spec(name, [*roots]) if roots else None
    for finder in sys.meta_path if found is None else ():
        found = found or finder.find_spec(name, None)
    return found


@lru_cache(maxsize=4096)
def inside(name: str, folders: tuple[str, ...]) -> "ModuleSpec | None":
    return PathFinder.find_spec(name, list(folders))


@lru_cache(maxsize=4096)
def roots_of(path: Path) -> tuple[str, ...]:
    """Where a file's imports are looked for first: beside it, and beside the outermost package around it."""
    return tuple(dict.fromkeys((str(path.parent), str(root_of(path)))))


def root_of(path: Path) -> Path:
    """The directory that holds the outermost package around a file."""
    return root_around(path.parent)


@lru_cache(maxsize=4096)
def root_around(folder: Path) -> Path:
    folder = folder.resolve()
    while (folder / "__init__.py").exists() and folder.parent != folder:
        folder = folder.parent
    return folder


def module_name(path: Path) -> str:
    """The dotted name of the module in a file."""
    inside = path.resolve().with_suffix("").relative_to(root_of(path)).parts
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)
