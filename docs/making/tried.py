"""The questions that chapters leave to try, each with a folded answer, and a program where a browser can run it."""

import ast
import builtins
import re
import subprocess
import sys
from html import escape

ASKED = re.compile(r"^( *)(\d\. .*?Evaluate\s+`([^`]+)`.*?)(?=^ *\d\. |\Z)", re.MULTILINE | re.DOTALL)
MOST = 25  # lines of a program that is shown
BLOCKED = "import sys\nfor name in ('torch', 'numpy', 'optree', 'matplotlib'):\n    sys.modules[name] = None\n"
FORM = """```{{raw}} html
<form data-ask="run">
  <textarea name="text" rows="{rows}" spellcheck="false" aria-label="a program">
{code}</textarea>
  <button type="submit">Run it here</button><output></output>
</form>
<script type="module" src="../_static/play.js"></script>
```"""


def expressions(text: str) -> list[str]:
    """The expressions that a text asks to evaluate."""
    return [" ".join(code.split()) for *_, code in ASKED.findall(text)]


def with_answers(text: str, source: str, found: list[str]) -> str:
    """The things to try, each question with the value `found` of its expression in the chapter's `source`."""
    values = iter(found)

    def answered(match: re.Match) -> str:
        value = next(values)
        program = program_of(source, " ".join(match[3].split()))
        runs = program is not None and printed(program) == value
        form = FORM.format(rows=program.count("\n") + 1, code=escape(program)).split("\n") if program and runs else []
        lines = [*form, "", "<details>", "<summary>Answer</summary>", "", "```text", *value.split("\n"), "```", ""]
        return "\n".join([match[0].rstrip(), "", *(f"   {line}".rstrip() for line in [*lines, "</details>"]), "", ""])

    return ASKED.sub(answered, text)


def program_of(source: str, expression: str) -> str | None:
    """The lines of a chapter that an expression needs, and its print; None if they need torch or are many."""
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        defined |= dict.fromkeys(_names_of(node), node)
    needed, names = set(), set()
    left = _loaded(ast.parse(expression))
    while left - names:
        name = (left - names).pop()
        names.add(name)
        if name in defined:
            needed.add(defined[name])
            left |= _loaded(defined[name])
        elif not hasattr(builtins, name) and not any(name in _bound(node) for node in [*needed, ast.parse(expression)]):
            return None
    lines = []
    for node in sorted(needed, key=lambda node: node.lineno):
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if (alias.asname or alias.name) in names]
            lines.append(ast.unparse(node))
        else:
            lines += (ast.get_source_segment(source, node) or "").split("\n")
    if len(lines) > MOST or any(re.search(r"\btorch\b|\bpage\b", line) for line in lines):
        return None
    return "\n".join([*lines, f"print({expression})\n"])


def printed(program: str) -> str:
    """What a program prints in a Python without torch, as in a browser; "" if it fails."""
    run = subprocess.run([sys.executable, "-c", BLOCKED + program], capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else ""


def _names_of(node: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module sets."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]


def _loaded(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def _bound(node: ast.AST) -> set[str]:
    """The names that are bound inside a statement: arguments, loops and assignments."""
    arguments = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    return arguments | {
        each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
