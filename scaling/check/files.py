"""Check the types of every line of Python files by running them: `python -m scaling.check FILE...`.

Each file that has typed lines is run once. The functions that it hands to ranks run on an abstract mesh instead, where
nothing is sent; printing and waiting are suppressed. A finding is a line that breaks a rule whatever its operands are;
an operand that does not have the type its line declares; a partial sum that is added to a whole array, goes through a
nonlinear function, or is never reduced; a collective that is never waited for; and a result that differs from SPECS or
a docstring. Derivatives are judged as they run. The report also names everything that could not be judged: a call that
the run did not reach, an op that is not in the table, a value that decides, a docstring whose types cannot be read, and
a file in which nothing was judged.

A strategy is SPECS, a dict of types, {"In": "In[B_X, D]", "W": "W[D, F]", "Out": "Out[B_X, F]"}, with functions given
to Strategy(SPECS, forward, backward, ...), or called forward and backward. A docstring that begins with types,
x[B_X, D] -> Out[B, D], declares them for any function; a comment such as u = fetch(a)  # u[B, D] {U_X} declares the
type of a variable. docs/rules.md names every rule.
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from scaling.algebra.law import check_product
from scaling.algebra.rules import CALLS, check_quantize, collective_steps
from scaling.check.findings import (
    FORMATTED,
    LIBRARY,
    NO_LINE,
    NOTHING,
    RULES,
    Finding,
    Judgement,
    fault_text,
    place_parts,
    real_path,
)
from scaling.common.console import Parser
from scaling.spec import ShardingError, parse, parse_line

SHOWN = 5  # the number of files without a typed line that are named
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
    """Return (the faults of a text's literal lines, the (first, last) line number of each typed call that has one).

    Each line is checked alone, for faults that no operand can make right. Nothing is run, and torch is not imported, so
    this serves editors, and code that cannot be run.
    """
    found: list[Finding] = []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        what = f"cannot be read: {error}"
        return [
            Finding(file, getattr(error, "lineno", None) or 1, fault_text(what, "python", "correct it"), "python")
        ], []
    comments = ignored(text)
    for line, names in comments.items():
        for name in names:
            if name not in RULES:
                what = f"nothing is ignored by {name!r}" if name else "nothing is ignored"
                found.append(
                    Finding(file, line, fault_text(what, "ignore", f"name one of: {', '.join(RULES)}"), "ignore")
                )
    if "scaling" not in text or not WORDS.search(text):
        return found, []
    calls, raw = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _thrown_away(node.value):
            what = f"{ast.unparse(node.value)}: its result is not used"
            text_ = fault_text(what, "discarded", "name the result, and use it")
            found.append(Finding(file, node.lineno, text_, "discarded"))
        if isinstance(node, ast.Call) and re.fullmatch(RAW, ast.unparse(node.func)):
            what = f"{ast.unparse(node)}: no type says what it does"
            raw.append(Finding(file, node.lineno, fault_text(what, "untyped", "write it as a typed line"), "untyped"))
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
            found.append(
                Finding(file, value.lineno, fault_text(str(error), "specs", "give each name its type"), "specs")
            )
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


def check_files(paths: Sequence, lines_only: bool = False) -> tuple[Judgement, dict[str, list]]:
    """Return the faults of files and {path: (first, last) line of each typed call}; `lines_only` runs nothing."""
    unread, texts = [], {}
    for path in map(str, paths):
        try:
            with tokenize.open(path) as file:
                texts[path] = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            unread.append(Finding(path, 1, f"cannot be read: {error}", "python"))
    own = {path for path in texts if real_path(path).startswith(LIBRARY)}
    report, calls = _check_texts(texts, own, lines_only)
    report.findings = sorted([*unread, *report.findings])
    return report, calls


def check_source(text: str, file: str = "<source>", strict: bool = False) -> list[Finding]:
    """Return the faults of one text, found in its lines and by running it.

    If nothing in it could be judged, a finding of the rule "unjudged" says so. With `strict` there is such a finding
    for each place that could not be judged, and for a text without a literal typed line.
    """
    report, calls = _check_texts({file: text}, set())
    unjudged = [(at, why) for at, why in report.unjudged if why in (NOTHING, FORMATTED)]
    unjudged = unjudged or (report.unjudged if strict else [])
    if strict and not (calls or report.findings or unjudged):
        unjudged = [(f"{file}:1", NO_LINE)]
    return sorted(
        [
            *report.findings,
            *(Finding(*place_parts(at), fault_text(why, "unjudged"), "unjudged") for at, why in unjudged),
        ]
    )


def _check_texts(texts: dict[str, str], own: set[str], lines_only: bool = False) -> tuple[Judgement, dict[str, list]]:
    """Check {path: text} as `check_files` does. Texts whose paths are in `own` are run by the library's programs."""
    report, calls = Judgement(), {}
    for path, text in texts.items():
        found, places = check_lines(text, path)
        report.findings += found
        calls |= {path: places} if places else {}
    if lines_only:
        return report, calls
    from scaling.check.run import judge_each, not_reached

    others = {path: text for path, text in texts.items() if path not in own}
    faulty = {finding.file for finding in report.findings}
    runs: list = [(path, text) for path, text in others.items() if path in calls]
    if own & {*calls}:
        runs.insert(0, None)  # the library is first: its modules declare their types only if they are imported then
    unread = {*others} - {*calls} - faulty
    report.unjudged += [(f"{path}:1", FORMATTED) for path in sorted(unread) if formats_lines(others[path])]
    reached: set[tuple[str, int]] = set()

    def silenced(finding: Finding) -> bool:
        return finding.rule in silent_lines(texts[finding.file]).get(finding.line, ())

    for run, judged in zip(runs, judge_each(runs, [*others], own), strict=True):
        found = [replace(each, message=_from_here(each.message)) for each in judged.findings if not silenced(each)]
        report.findings += [finding for finding in found if finding not in report.findings]
        report.unjudged += [(_from_here(place), _from_here(why)) for place, why in judged.unjudged]
        if run and not judged.judged and not found and run[0] not in faulty:
            report.unjudged.append((f"{run[0]}:1", NOTHING))
        reached |= judged.reached
    faulty = {finding.file for finding in report.findings}
    report.unjudged += not_reached({path: places for path, places in calls.items() if path not in faulty}, reached)
    return report, calls


def _from_here(text: str) -> str:
    """Return a text in which files in the working directory have their paths from there."""
    return text.replace(f"{Path.cwd()}/", "")


def files_of(paths: Sequence) -> list[Path]:
    """Return the Python files that are named or lie in named directories; raise ValueError for a path without any."""
    found = []
    for path in map(Path, paths):
        inside = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        what = "" if path.exists() else "no such file"
        what = what or ("" if inside else "no Python files in this directory")
        if what or (path.is_file() and not is_python(path)):
            what = what or "is not a Python file"
            raise ValueError(f"{path}: {what}\n  fix: give .py files, or directories that hold some")
        found += inside
    return list(dict.fromkeys(found))


def is_python(path: Path) -> bool:
    """Return whether a file is called .py, or is a script that names Python in its first line."""
    if path.suffix in (".py", ".pyi"):
        return True
    with path.open("rb") as file:
        first = file.readline(200)
    return not path.suffix and first.startswith(b"#!") and b"python" in first


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _summary(report: Judgement, calls: dict[str, list], files: Sequence[Path], lines_only: bool) -> str:
    """Return a line that counts the judged calls, and a line for each place that was not judged."""
    unjudged = sorted((*place_parts(place), why) for place, why in set(report.unjudged))
    at = {(path, line) for path, places in calls.items() for first, last in places for line in range(first, last + 1)}
    own = sum((file, line) in at for file, line, _ in unjudged)
    text = f"{_counted(sum(map(len, calls.values())), 'call')} in {_counted(len(files), 'file')}"
    others = _counted(len(unjudged) - own, "other place")
    text += ", each line by itself" if lines_only else f", {own} of them not judged, and {others}"
    lines = [f"  {file}:{line}: {why}" for file, line, why in unjudged]
    silent = [str(file) for file in files if str(file) not in calls and not real_path(str(file)).startswith(LIBRARY)]
    if silent or not calls:
        what = "NOT JUDGED" if calls else "NOTHING WAS JUDGED"
        text_of = f"{what}: no literal typed line is written in {_counted(len(silent) or len(files), 'file')}"
        lines += [text_of, *(f"  {path}" for path in silent[:SHOWN] if len(files) > 1)]
        lines += [f"  and {len(silent) - SHOWN} others"] if len(silent) > SHOWN else []
    return "\n".join([text, *lines, _counted(len(report.findings), "finding")])


def main(argv: "list[str] | None" = None) -> int:
    """Check the files that the command line names; return the exit status."""
    about, *more = (__doc__ or "").strip().split("\n\n")
    status = "Exit status: 0, nothing was found; 1, something was; 2, an argument cannot be checked."
    parser = Parser(prog="python -m scaling.check", description=about, epilog="\n\n".join([*more, status]))
    parser.add_argument("files", nargs="+", help="Python files, or directories of them")
    parser.add_argument("--lines", action="store_true", help="each literal line by itself; nothing is run")
    parser.add_argument("--strict", action="store_true", help="what is not judged counts as a finding")
    parser.add_argument("--json", action="store_true", help="print findings and what was judged as JSON")
    args = parser.parse_args(argv)
    try:
        files = files_of(args.files)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    report, calls = check_files(files, args.lines)
    if args.json:
        places = [(*place_parts(place), why) for place, why in report.unjudged]
        unjudged = [{"file": file, "line": line, "why": why} for file, line, why in places]
        found = {"findings": [asdict(finding) for finding in report.findings], "checked": sum(map(len, calls.values()))}
        print(json.dumps(found | {"files": len(files), "unjudged": unjudged}, indent=1))
    for finding in () if args.json else report.findings:
        print(finding)
    print(_summary(report, calls, files, args.lines), file=sys.stderr)
    return 1 if report.findings or (args.strict and (report.unjudged or not calls)) else 0
