"""What a user can do wrong is refused with what to do instead, after the word "fix:"."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import parsed

import scaling

ROOT = Path(scaling.__file__).parent
CAUGHT = {
    "Illegal",
    "Mismatch",
    "NotInferred",
    "RuleBroken",
    "Unplaced",
    "UnpicklingError",
}  # what catches it tells it with the fix
ITS_OWN = {
    "AssertionError",
    "AttributeError",
    "IndexError",
    "RankError",
}  # which check failed, what is not there, who died
NO_FIX = {  # where a sentence alone is enough: why
    "common/console.py": "an option's range, or why a file cannot be written, in argparse's one line",
    "exercise/judge.py": "what an answer lacks; the answer itself is not told",
    "schedules/simulator.py": "a schedule that cannot run is quoted by rank and step",
    "serve/requests.py": "the reason, in one line, in the answer to a client's request",
}


def texts(node: ast.AST | None, names: dict[str, str]) -> str:
    """The constant parts of a message, with those of names that were given a text in the same function."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(texts(part, names) for part in parts)
        case ast.FormattedValue(value=value):
            return texts(value, names) or "{}"
        case ast.BinOp(left=left, right=right):
            return texts(left, names) + texts(right, names)
        case ast.IfExp(body=body, orelse=orelse):
            return texts(body, names) + texts(orelse, names)
        case ast.Name(id=name):
            return names.get(name, "")
        case ast.Call(func=ast.Name(id="_fix")):
            return "fix:"
    return ""


def kind_of(error: ast.expr) -> str:
    """The class of an error that is raised: argparse.ArgumentTypeError is ArgumentTypeError."""
    return error.attr if isinstance(error, ast.Attribute) else getattr(error, "id", "")


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, message) of each refusal of a module whose message, or a part of it, stands there."""
    module = parsed(path)
    constants = {
        node.targets[0].id: texts(node.value, {})
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes, names = [*ast.walk(function)], dict(constants)
        if not any(isinstance(node, ast.Raise) for node in nodes):
            continue
        for node in nodes:
            for target in node.targets if isinstance(node, ast.Assign) else ():
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                for name, value in pairs:
                    if isinstance(name, ast.Name):
                        names[name.id] = names.get(name.id, "") + texts(value, names)
        for node in nodes:
            match node:
                case ast.Raise(exc=ast.Call(func=error, args=[message, *_])) if kind_of(error) not in CAUGHT | ITS_OWN:
                    said = texts(message, names).replace("{}", "").strip()
                    if len(re.findall("[a-z]", said)) > 5:  # else it is written elsewhere
                        yield node.lineno, said


def test_every_refusal_says_what_to_do():
    silent, spared = [], set()
    for path in sorted(ROOT.rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for line, said in messages(path):
            if "fix:" not in said:
                spared.add(file) if file in NO_FIX else silent.append(f"{file}:{line}: {said}")
    assert not silent, "\n".join(silent)
    assert spared == set(NO_FIX), "an exception is needed no longer"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(x):\n    raise ValueError(f'{x} is wrong')", ["is wrong"]),
        (
            "def f(x):\n    why = f'{x} is wrong'\n    raise ValueError(f'{why}\\n  fix: give 1')",
            ["is wrong\n  fix: give 1"],
        ),
        ("def f(x):\n    raise ValueError(refusal(x))", []),
        ("def f(x):\n    raise RuntimeError('ours')", []),
    ],
)
def test_the_messages_that_are_looked_at(tmp_path, source, found):
    (tmp_path / "module.py").write_text(source)
    assert [said for _, said in messages(tmp_path / "module.py")] == found
