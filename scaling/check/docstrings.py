"""The types that a function's docstring begins with: `x[B_X, D], W[D, F] -> Out[B_X, F].`, what it gets and returns,
one array or several; `Out[B_X, F].`, or `Out[B_X, F] of x[B_X, D], W[D, F]`, what it returns. And the type that the
comment beside an assignment begins with, `Out = f(x)  # Out[B_X, F]`."""

import ast
import re

from scaling.spec import ShardingError, Spec, parse

TYPE = r"\w+\[[^\]]*\](?: \{U_\w+\})?"
SIGNATURE = re.compile(rf"({TYPE}(?:, {TYPE})*) -> \(?({TYPE}(?:, {TYPE})*)(?:[.,:;)]|$)")
RESULT = re.compile(rf"({TYPE})(?: of ({TYPE}(?:, {TYPE})*))?(?:[.,:;]| of |$)")
COMMENT = re.compile(rf"#\s*({TYPE})(?:[.,:;]|\s|$)")


def documented(node: ast.AST) -> tuple[dict[str, Spec], list[Spec]]:
    """({argument: its type}, the types of what is returned) of a docstring that begins so; nothing of any other."""
    body = node.body[:1] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
    text = getattr(getattr(body[0], "value", None), "value", "") if body else ""
    first = text.split("\n")[0].strip() if isinstance(text, str) else ""
    if found := SIGNATURE.match(first):
        given, results = found.groups()
    elif found := RESULT.match(first):
        results, given = found.groups()
    else:
        return {}, []
    try:
        types, made = ([parse(one) for one in re.findall(TYPE, text or "")] for text in (given, results))
    except ShardingError:
        return {}, []
    if any(len(axis) > 1 for spec in types + made for axis in spec.axes):  # x[B_axis], where `axis` is an argument
        return {}, []
    return {spec.name: spec for spec in types}, made


def commented(line: str, name: str) -> "Spec | None":
    """The type of an array by the comment in its line, if that begins with one of this name."""
    found = COMMENT.search(line) if "#" in line else None
    try:
        spec = parse(found[1]) if found else None
    except ShardingError:
        return None
    return spec if spec is not None and spec.name == name else None
