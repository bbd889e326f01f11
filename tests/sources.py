"""Modules as syntax trees, each parsed once for all tests that look at it; and edits of them."""

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def replaced(text: str, node: ast.expr | ast.stmt, edit: str) -> str:
    """A file's text with the edit in the node's place."""
    data = text.encode()
    rows = data.splitlines(keepends=True)
    start = sum(map(len, rows[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, rows[: node.end_lineno - 1])) + node.end_col_offset
    return (data[:start] + edit.encode() + data[end:]).decode()
