"""The types that a function's docstring begins with, `x[B_X, D], W[D, F] -> Out[B_X, F].`: what it gets and returns."""

import ast
import re

from scaling.spec import ShardingError, Spec, parse

TYPE = r"\w+\[[^\]]*\](?: \{U_\w+\})?"
SIGNATURE = re.compile(rf"({TYPE}(?:, {TYPE})*) -> ({TYPE})(?:[.:;]|$)")


def documented(node: ast.AST) -> tuple[dict[str, Spec], "Spec | None"]:
    """({argument: its type}, the result's type) of a docstring that begins so; nothing of any other."""
    text = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    if not (text and (found := SIGNATURE.match(text.split("\n")[0]))):
        return {}, None
    try:
        arguments = [parse(one) for one in re.findall(TYPE, found[1])]
        return {spec.name: spec for spec in arguments}, parse(found[2])
    except ShardingError:
        return {}, None
