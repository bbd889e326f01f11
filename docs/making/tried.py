"""What chapters leave to try, each with its answer folded, and a program where a browser can run it.

An item is `1. Edit: ...`, `2. Question: ... Evaluate `expression`.` or `3. Flag: ...`, and its own answer follows it as
a paragraph `Answer: ...`. The value of an expression is computed.
"""

import ast
import builtins
import re
import subprocess
import sys
from html import escape

ITEM = re.compile(r"^ *\d\. .*?(?=^ *\d\. |\Z)", re.MULTILINE | re.DOTALL)
ASKED = re.compile(r"Evaluate\s+`([^`]+)`")
ANSWER = re.compile(r"^ *Answer: (.*)", re.MULTILINE | re.DOTALL)
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
    return [" ".join(code.split()) for code in ASKED.findall(text)]


def with_answers(text: str, source: str, found: list[str]) -> str:
    """The things to try with folded answers; a question has the value `found` of its expression in the `source`."""
    values = iter(found)

    def answered(match: re.Match) -> str:
        written = ANSWER.search(match[0])
        asked = match[0][: written.start()] if written else match[0]
        form, folded = [], [written[1].strip(), ""] if written else []
        if expression := ASKED.search(asked):
            value, program = next(values), program_of(source, " ".join(expression[1].split()))
            if program is not None and printed(program) == value:
                form = FORM.format(rows=program.count("\n") + 1, code=escape(program)).split("\n")
            folded = ["```text", *value.split("\n"), "```", "", *folded]
        if not folded:
            return match[0]
        lines = [*form, "", "<details>", "<summary>Answer</summary>", "", *folded, "</details>"]
        return "\n".join([asked.rstrip(), "", *(f"   {line}".rstrip() for line in lines), "", ""])

    return ITEM.sub(answered, text)


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
