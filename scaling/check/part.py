"""What the parts of the reader share: `Reader` is made of them (see scaling.check.reader)."""

import ast
from collections.abc import Callable
from typing import Any

from scaling.check.modules import Module, Modules
from scaling.spec import Spec


class Part:
    """`specs`: the module's SPECS; `seen`: {typed call: (its module, why it cannot be read, or "")}; `bound`: what was
    learned of arguments, by number; `holes`: numbers of what stands in f-strings and is not known, by its text;
    `numbered`: the same by the place; `active`: the functions that are being read; `memory`: what functions returned;
    `elsewhere`: faults in other modules' functions; `quiet`: above 0 nothing is reported."""

    module: Module
    modules: Modules
    specs: dict[str, Spec]
    seen: dict[ast.Call, tuple[Module, str]]
    bound: dict[int, Any]
    holes: dict[str, int]
    numbered: dict[ast.expr, int]
    holders: dict[int, Any]
    active: list[ast.AST]
    followed: set[ast.AST]
    memory: dict[tuple, Any]
    elsewhere: list[tuple[str, str]]
    quiet: int
    report: Callable[..., None]
    at_call: Callable[..., None]
    value: Callable[..., Any]
    known: Callable[..., Any]
    unknown: Callable[..., Any]
    bind: Callable[..., None]
    function: Callable[..., Any]
    types_of: Callable[..., dict[str, Spec]]
    followed_call: Callable[..., Any]
    unfollowed: Callable[..., Any]
    callee: Callable[..., Any]
    of_torch: Callable[..., Any]
    differentiated: Callable[..., None]
    combine: Callable[..., Any]
    matrix_product: Callable[..., Any]
    nonlinear: Callable[..., None]
    partial_plus_whole: Callable[..., None]
    stored: Callable[..., None]
    attribute_of: Callable[..., Any]
    global_name: Callable[..., Any]
    frame_of: Callable[..., Any]
    member: Callable[..., Any]
    imported: Callable[..., Any]
    class_body: Callable[..., None]
    annotated: Callable[..., Any]
    hold_gradients: Callable[..., None]
