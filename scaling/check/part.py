"""What the parts of the reader share: `Reader` is made of them (see scaling.check.statements)."""

import ast
from collections.abc import Callable
from typing import Any

from scaling.spec import Spec


class Part:
    """`specs`: the module's SPECS; `functions` by name; `followed`: those read as a listing's; `appended`: what joins
    lists, by function; `depth`, `current`: of the function that is being read."""

    specs: dict[str, Spec]
    functions: dict[str, ast.FunctionDef]
    followed: set[str]
    appended: dict[str, list]
    depth: int
    current: Any
    report: Callable[..., None]
    value: Callable[..., Any]
    function: Callable[..., Any]
    stored: Callable[..., None]
