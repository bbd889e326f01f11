"""The types that a function's docstring begins with: `x[B_X, D], W[D, F] -> Out[B_X, F].`, what it gets and returns;
`Out[B_X, F].`, or `Out[B_X, F] of x[B_X, D], W[D, F]`, what it returns."""

import ast
import re

from scaling.spec import ShardingError, Spec, parse

TYPE = r"\w+\[[^\]]*\](?: \{U_\w+\})?"
SIGNATURE = re.compile(rf"({TYPE}(?:, {TYPE})*) -> ({TYPE})(?:[.:;]|$)")
RESULT = re.compile(rf"({TYPE})(?: of ({TYPE}(?:, {TYPE})*))?(?:[.,:;]| of |$)")


def documented(node: ast.AST) -> tuple[dict[str, Spec], "Spec | None"]:
    """({argument: its type}, the result's type) of a docstring that begins so; nothing of any other."""
    text = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    first = (text or "").split("\n")[0]
    if found := SIGNATURE.match(first):
        given, result = found.groups()
    elif found := RESULT.match(first):
        result, given = found.groups()
    else:
        return {}, None
    try:
        arguments = [parse(one) for one in re.findall(TYPE, given or "")]
        return {spec.name: spec for spec in arguments}, parse(result)
    except ShardingError:
        return {}, None
