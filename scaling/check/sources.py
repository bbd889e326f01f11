"""The types that a module declares, its own or those of a module that it imports: SPECS and the like."""

import ast
import importlib.util
from pathlib import Path

from scaling.spec import Spec, parse


def specs_of(tree: ast.Module) -> dict[str, Spec]:
    """The types in a module's SPECS: written out, imported, or taken from another module, `data_parallel.SPECS`."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and not node.level and any(a.name == "SPECS" for a in node.names):
            other = source_of(node.module or "")
            return specs_of(other) if other else {}
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "SPECS" for target in node.targets):
            if isinstance(node.value, ast.Attribute) and node.value.attr == "SPECS":
                other = module_of(tree, ast.unparse(node.value.value))
                return specs_of(other) if other else {}
            try:
                written = ast.literal_eval(node.value)
            except ValueError:
                return {}
            return {name: parse(text) for name, text in written.items() if isinstance(text, str)}
    return {}


def types_in(tree: ast.Module, name: str) -> dict[str, Spec]:
    """The types in the dict that the module assigns to this name, as far as they are written out."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == name for target in node.targets):
            try:
                written = ast.literal_eval(node.value)
            except ValueError:
                return {}
            return {key: parse(text) for key, text in written.items() if isinstance(text, str)}
    return {}


def module_of(tree: ast.Module, name: str) -> "ast.Module | None":
    """The tree of a module that this one imports under a name, if its source can be found."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            return source_of(f"{node.module}.{original}")
    return None


def source_of(module: str) -> "ast.Module | None":
    """The tree of a module, if its source can be found."""
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        return None
    return ast.parse(Path(found.origin).read_text(encoding="utf-8")) if found and found.origin else None


def layer(spec: Spec) -> Spec:
    """The type of one layer of params, whose leading dim L, if their type names it, counts the layers."""
    return Spec(spec.name, spec.dims[1:], spec.unreduced) if spec.dim_names[:1] == ("L",) else spec
