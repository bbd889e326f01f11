"""Check the types that a program's docstrings and comments declare, by making them part of the program.

    def layer(x, mesh):
        '''x[B_X, D] -> Out[B_X, D].'''        the arguments and the results, one array or several
        '''Of x[B_X, D].'''                      the arguments
        u = fetch(x)  # u[B, D] {U_X}          the variable

`run_watched` runs a program so that its functions and lines report these types to the watcher of
`scaling.collectives.linear`. Inside `types_reported()` the library's listings do so when they are imported.
"""

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, NamedTuple

from scaling.check.findings import place_of_function
from scaling.collectives.linear import who_watches
from scaling.spec import ShardingError, Spec, parse

TYPE = r"\w+\[[^\]]*\](?: \{U_\w+\})?"
SIGNATURE = re.compile(rf"({TYPE}(?:, {TYPE})*) -> \(?({TYPE}(?:, {TYPE})*)(?:[.,:;)]|$)")
RESULT = re.compile(rf"({TYPE})(?: of ({TYPE}(?:, {TYPE})*))?(?:[.,:;]| of |$)")
SEVERAL = re.compile(rf"{TYPE}(?:, {TYPE})+\.?$")
GIVEN = re.compile(rf"Of ({TYPE}(?:, {TYPE})*)[.,:;]")
COMMENT = re.compile(rf"#\s*({TYPE})(?:[.,:;]|\s|$)")


class Documented(NamedTuple):
    """The types that a docstring begins with.

    Attributes:
        given: the types of arguments, by name.
        results: the types of the returned values.
        unread: why its types could not be read, or "".
    """

    given: dict[str, Spec]
    results: list[Spec]
    unread: str = ""


def documented(text: str) -> Documented:
    """Return the types that a docstring begins with, or none if it begins otherwise."""
    first = text.split("\n")[0].strip()
    if SEVERAL.match(first):
        return Documented({}, [], "are they given or returned? write 'Of a[I], b[J].' or 'a[I], b[J] -> c[I].'")
    if found := SIGNATURE.match(first):
        given, results = found.groups()
    elif found := GIVEN.match(first):
        given, results = found[1], None
    elif found := RESULT.match(first):
        results, given = found.groups()
    else:
        return Documented({}, [])
    try:
        types, made = ([parse(one) for one in re.findall(TYPE, text or "")] for text in (given, results))
    except ShardingError as error:
        return Documented({}, [], str(error).splitlines()[0])
    if any(len(axis) > 1 for spec in types + made for axis in spec.named_axes):
        return Documented({}, [])  # x[B_axis], where `axis` is an argument
    return Documented({spec.name: spec for spec in types}, made)


def typed_arguments(fn: Callable) -> "dict[str, Spec | None]":
    """Return the types of the arguments without defaults, None for a mesh; {} if the docstring lacks one of them."""
    types, every = documented(fn.__doc__ or "").given, inspect.signature(fn).parameters.values()
    needed = [p.name for p in every if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    typed = types and all(name in types or name == "mesh" for name in needed)
    return {name: types.get(name) for name in needed} if typed else {}


def with_types_reported(fn: Callable) -> Callable:
    """Wrap fn so that its arguments and results are compared with its docstring's types while the judge watches."""
    types, results, _ = documented(fn.__doc__ or "")
    place = place_of_function(fn)
    signature = inspect.signature(fn)

    def checked(watch: Any, args: tuple, kwargs: dict) -> Any:
        meshes = [at for x in args if hasattr(at := getattr(x, "mesh", x), "coord") and hasattr(at, "sizes")]
        mesh = meshes[0] if meshes else None
        sliced = getattr(mesh, "slices", False)
        watch.called(fn.__code__, mesh)
        for name, x in signature.bind(*args, **kwargs).arguments.items():
            if name in types:
                watch.check_declared(x, types[name], f"argument {types[name]} of {fn.__name__}", place, sliced)
        result = fn(*args, **kwargs)
        made = result if isinstance(result, tuple) else (result,)
        for x, spec in zip(made, results, strict=False):
            watch.check_declared(x, spec, f"result {spec} of {fn.__name__}", place, sliced)
        return result

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:  # a compiler traces this: it closes over functions only
        watch = who_watches()
        return fn(*args, **kwargs) if watch is None else checked(watch, args, kwargs)

    return call


def report_type(text: str, x: Any, place: str) -> None:
    """Report the type that a comment declares for x."""
    if (watch := who_watches()) is not None:
        watch.check_declared(x, parse(text), text, place)


def run_watched(text: str, file: str, module: dict, tree: "ast.Module | None" = None) -> None:
    """Run a module's text, or a part of its `tree`, so that it reports its types. SyntaxError if it is not Python."""
    tree = ast.parse(text) if tree is None else tree
    _TypeReports(file, text.splitlines()).visit(tree)
    module.update({"__contracted__": with_types_reported, "__reported__": report_type})
    exec(compile(ast.fix_missing_locations(tree), file, "exec"), module)


class _TypeReports(ast.NodeTransformer):
    def __init__(self, file: str, lines: list[str]):
        self.file, self.lines = file, lines

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        types = documented(ast.get_docstring(node) or "")
        if types.unread and (watch := who_watches()) is not None:
            watch.skip(f"the types of its docstring could not be read: {types.unread}", f"{self.file}:{node.lineno}")
        if types.given or types.results:
            node.decorator_list.append(ast.copy_location(ast.Name("__contracted__", ast.Load()), node))
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        target, line = node.targets[0], self.lines[(node.end_lineno or node.lineno) - 1]
        found = COMMENT.search(line)
        if not isinstance(target, ast.Name) or found is None or found[1].partition("[")[0] != target.id:
            return node
        try:
            spec = parse(found[1])
        except ShardingError:
            return node
        args = [ast.Constant(str(spec)), ast.Name(target.id, ast.Load()), ast.Constant(f"{self.file}:{node.lineno}")]
        call = ast.Expr(ast.Call(ast.Name("__reported__", ast.Load()), args, []))
        return [node, ast.copy_location(call, node)]


LISTINGS = "scaling.strategies.", "scaling.serve.forms.", "scaling.models.layer", "scaling.models.latent"
AS_SEEN = "scaling.serve.forms.latent"  # its types omit axes that it does not use


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        run_watched(self.get_data(self.path).decode(), self.path, vars(module))


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> "ModuleSpec | None":
        is_listing = fullname.startswith(LISTINGS) and not fullname.startswith(AS_SEEN)
        spec = PathFinder.find_spec(fullname, path) if is_listing else None
        if spec is not None and (spec.origin or "").endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin or "")
        return spec


@contextmanager
def types_reported() -> Iterator[None]:
    """Import the library's listings, inside the block, so that they report the types in their docstrings."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
