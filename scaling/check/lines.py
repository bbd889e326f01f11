"""Check each literal line of a text alone, without running anything, for faults that no operand can make right.

    faults, calls = check_lines(text)

This serves editors, a first look, and code that cannot be run. It does not import torch.
"""

import ast
import io
import re
import tokenize

from scaling.algebra.law import check_product
from scaling.algebra.rules import CALLS, check_quantize, collective_steps
from scaling.check.findings import RULES, Finding, said
from scaling.spec import ShardingError, parse, parse_line

KINDS = CALLS | {"ragged_all_to_all": "AllToAll"}
TYPED = (
    "einsum",
    "quantize",
    "dequantize",
    *KINDS,
    "ppermute",
    "masked",
    "unshard",
    "reshard",
    "send",
    "recv",
    "transfer",
)
RAW = r"(torch\.distributed|dist)\.(all_reduce|all_gather|reduce_scatter|all_to_all)\w*"
WORDS = re.compile(rf"\b(?:SPECS|{'|'.join(TYPED)})\b")
IGNORE = re.compile(r"#\s*scaling:\s*ignore\b(?:\[([^\]]*)\])?")


def check_lines(text: str, file: str = "<source>") -> "tuple[list[Finding], list[tuple[int, int]]]":
    """Return (the faults of a text's literal lines, the (first, last) line number of each typed call that has one)."""
    found: list[Finding] = []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        what = f"cannot be read: {error}"
        return [Finding(file, getattr(error, "lineno", None) or 1, said(what, "python", "correct it"), "python")], []
    comments = ignored(text)
    for line, names in comments.items():
        for name in names:
            if name not in RULES:
                what = f"nothing is ignored by {name!r}" if name else "nothing is ignored"
                found.append(Finding(file, line, said(what, "ignore", f"name one of: {', '.join(RULES)}"), "ignore"))
    if "scaling" not in text or not WORDS.search(text):
        return found, []
    calls, raw = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _thrown_away(node.value):
            what = f"{ast.unparse(node.value)}: its result is not used"
            text_ = said(what, "discarded", "name the result, and use it")
            found.append(Finding(file, node.lineno, text_, "discarded"))
        if isinstance(node, ast.Call) and re.fullmatch(RAW, ast.unparse(node.func)):
            what = f"{ast.unparse(node)}: no type says what it does"
            raw.append(Finding(file, node.lineno, said(what, "untyped", "write it as a typed line"), "untyped"))
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SPECS":
            found += _check_specs(node, file)
        if not isinstance(node, ast.Call) or not isinstance(first := _line_of(node), ast.Constant):
            continue
        line = str(first.value)
        if not _planned(node):
            calls.append((node.lineno, node.end_lineno or node.lineno))
        try:
            _check(_name(node), line)
        except ShardingError as error:
            text_ = str(error) if line in str(error) else f"{line}\n  {error}"
            found.append(Finding(file, node.lineno, text_, "illegal-line"))
    found += raw if calls else []
    return sorted(f for f in found if f.rule not in comments.get(f.line, ())), calls


def formats_lines(text: str) -> bool:
    """Return whether a text calls typed functions with f-strings, whose lines are known only when it runs."""
    if "scaling" not in text or not WORDS.search(text):
        return False
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return any(isinstance(_line_of(call), ast.JoinedStr) for call in calls)


def _check_specs(node: ast.Assign, file: str) -> list[Finding]:
    found = []
    for value in node.value.values if isinstance(node.value, ast.Dict) else ():
        try:
            if isinstance(value, ast.Constant):
                parse(str(value.value))
        except ShardingError as error:
            found.append(Finding(file, value.lineno, said(str(error), "specs", "give each name its type"), "specs"))
    return found


def _name(call: ast.Call) -> str:
    f = call.func
    return f.id if isinstance(f, ast.Name) else f.attr if isinstance(f, ast.Attribute) else ""


def _line_of(call: ast.Call) -> "ast.Constant | ast.JoinedStr | None":
    """Return the line of a typed call, a text or an f-string; None if it is neither."""
    if _name(call) not in TYPED or not call.args:
        return None
    match call.args[0]:
        case (ast.JoinedStr() | ast.Constant(value=str())) as first if "[" in ast.unparse(first):
            return first
    return None


def _planned(call: ast.Call) -> bool:
    """Return whether the call is the planner's reshard("A[I_X]", "A[I]", ...), which is given no array."""
    return len(call.args) > 1 and isinstance(call.args[1], ast.Constant) and isinstance(call.args[1].value, str)


def _thrown_away(call: ast.Call) -> bool:
    """Return whether a call, whose result is not used, is a typed line (by its name) that writes into no argument."""
    writes = any(option.arg in ("out", "donate") for option in call.keywords)
    moves = isinstance(call.func, ast.Name) and call.func.id in (*KINDS, "einsum")
    return moves and _line_of(call) is not None and not writes


def _check(name: str, line: str) -> None:
    if name == "einsum":
        check_product(line)
    elif name in ("quantize", "dequantize"):
        check_quantize(line, back=name == "dequantize")
    elif name in KINDS and not (name == "shard" and "->" not in line):
        collective_steps(KINDS[name], line)
    elif "->" in line:
        parse_line(line)
    else:
        parse(line)


def ignored(text: str) -> dict[int, list[str]]:
    """Return {line: the rules that its comment silences}, [""] for a comment that names none."""
    if not IGNORE.search(text):
        return {}
    found: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (match := IGNORE.search(token.string)):
            found[token.start[0]] = [name.strip() for name in (match[1] or "").split(",")]
    return found


def silent_lines(text: str) -> dict[int, list[str]]:
    """Return the rules silenced on each line: a comment in a statement counts for all lines of the statement."""
    comments = ignored(text)
    found = dict(comments)
    for node in ast.walk(ast.parse(text)) if comments else ():
        if isinstance(node, (ast.Assign, ast.Expr, ast.Return, ast.AugAssign)):
            inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            for line in set(comments) & set(inside):
                found |= dict.fromkeys(inside, comments[line])
    return found
