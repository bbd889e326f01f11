"""The static checker: silent on the project's own code, and each fault planted in copies of the strategies is found."""

import ast
import gc
import subprocess
import sys
from pathlib import Path

import pytest

from scaling.check import check_file, check_source, files_of, main
from scaling.check.files import read_files
from scaling.check.modules import Module, Modules

ROOT = Path(__file__).parents[2]
STRATEGIES = ("data_parallel", "fsdp", "tensor_parallel", "fsdp_tp")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def called(node) -> str:
    return getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""


def wherever(tree, wanted):
    return [node for node in ast.walk(tree) if wanted(node)]


def drop(tree, kind):
    """Each call of a reduction in a listing is in turn replaced by its operand."""
    for fn in wherever(tree, lambda n: isinstance(n, ast.FunctionDef)):
        for parent in ast.walk(fn):
            for field, node in list(ast.iter_fields(parent)):
                if called(node) == kind:
                    setattr(parent, field, node.args[1])
                    yield f"dropped {kind} at line {node.lineno}"
                    setattr(parent, field, node)
                elif isinstance(node, list) and any(called(item) == kind for item in node):
                    setattr(parent, field, [item.args[1] if called(item) == kind else item for item in node])
                    yield f"dropped {kind} at line {parent.lineno}"
                    setattr(parent, field, node)


def reduce_twice(tree):
    """Each result of a reduction goes through an AllReduce as well."""
    for parent in wherever(tree, lambda n: isinstance(n, (ast.FunctionDef, ast.For, ast.If))):
        for i, node in enumerate(parent.body):
            if isinstance(node, ast.Assign) and called(node.value) == "reduce_scatter":
                after = ast.literal_eval(node.value.args[0]).split("->")[1].strip()
                name = node.targets[0].id
                wait = ".wait()" if node.value.keywords else ""
                axis = "Y" if "_Y" in after else "X"
                line = f"{after.replace('_' + axis, '')} {{U_{axis}}} -> {after.replace('_' + axis, '')}"
                parent.body.insert(i + 1, ast.parse(f"{name} = all_reduce({line!r}, {name}{wait}, mesh)").body[0])
                yield f"AllReduce of what line {node.lineno} reduced"
                del parent.body[i + 1]


def wrong_axis(tree):
    """Each line of a gather names the other axis."""
    for node in wherever(tree, lambda n: called(n) == "all_gather"):
        constant, text = node.args[0], node.args[0].value
        for one, other in (("X", "Y"), ("Y", "X")):
            if f"_{one}" in text:
                swapped = text.replace(f"_{one}", "_?").replace(f"_{other}", f"_{one}").replace("_?", f"_{other}")
                constant.value = swapped
                yield f"gather over {other} for {one} at line {node.lineno}"
                constant.value = text
                break


def swapped_operands(tree):
    for node in wherever(tree, lambda n: called(n) == "einsum" and len(n.args) == 3):
        node.args[1:] = node.args[:0:-1]
        yield f"swapped operands at line {node.lineno}"
        node.args[1:] = node.args[:0:-1]


def hidden_sum(tree):
    """Each product that leaves partial sums does not say so."""
    for node in wherever(tree, lambda n: called(n) == "einsum"):
        constant, text = node.args[0], node.args[0].value
        if "{U" in text:
            constant.value = text[: text.rindex("{U")].strip()
            yield f"no {{U}} at line {node.lineno}"
            constant.value = text


FAULTS = {
    "dropped ReduceScatter": lambda tree: drop(tree, "reduce_scatter"),
    "dropped AllReduce": lambda tree: drop(tree, "all_reduce"),
    "reduced twice": reduce_twice,
    "wrong axis": wrong_axis,
    "swapped operands": swapped_operands,
    "hidden sum": hidden_sum,
}


def strategy(name: str) -> str:
    return (ROOT / "scaling" / "strategies" / f"{name}.py").read_text()


@pytest.mark.sweep
@pytest.mark.slow
def test_the_projects_own_code_is_clean():
    paths = files_of([ROOT / "scaling", ROOT / "chapters"])
    modules = Modules()
    assert [str(finding) for path in paths for finding in check_file(path, modules)] == []
    assert all(any(path.stem == name for path in paths) for name in STRATEGIES)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_found(fault):
    """The same fault at every place where it can be planted, one at a time."""
    planted, missed = 0, []
    for name in STRATEGIES:
        tree = ast.parse(strategy(name))
        for what in FAULTS[fault](tree):
            planted += 1
            if not check_source(ast.unparse(ast.fix_missing_locations(tree)), name):
                missed.append(f"{name}: {what}")
        assert ast.dump(tree) == ast.dump(ast.parse(strategy(name)))
    assert planted >= 2
    assert missed == []


HEAD = "from scaling.collectives import all_gather, all_reduce, einsum, reduce_scatter, shard\nimport torch\n"


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ('x = einsum("A[I, J_X] * B[J, K] -> C[I, K]", a, b)', 4, "case 2"),
        ('x = einsum("A[I_X, J] * B[J, K_X] -> C[I_X, K_X]", a, b)', 4, "case 4|used twice"),
        (
            'x = einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", a, b)\n    return torch.relu(x)',
            5,
            "nonlinear function of partial sums",
        ),
        ('x = einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", a, b)\n    return x ** 2', 5, "nonlinear"),
        ('x = einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", a, b)\n    return x + 1', 5, "nonlinear"),
        ('x = einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", a, b)\n    return a', 4, "never reduced"),
        (
            'x = einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", a, b)\n'
            '    y = reduce_scatter("C[I, K] {U_X} -> C[I, K_X]", x, mesh)\n'
            "    return x + y",
            6,
            "one operand is",
        ),
        (
            'x = einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", a, b)\n'
            '    return x if a is None else all_reduce("C[I, K] {U_X} -> C[I, K]", x, mesh)',
            5,
            "whichever way it is made",
        ),
        (
            'p = all_gather("A[I_X, J] -> A[I, J]", a, mesh, async_op=True)\n'
            '    return shard("A[I, J] -> A[I, J_X]", p, mesh)',
            5,
            "still under way",
        ),
        (
            'for l in range(4):\n        y = einsum("A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]", a, b)\n'
            '        a = all_reduce("A[I_X, J] {U_Y} -> A[I_X, J]", y, mesh)',
            6,
            "dims differ",
        ),
    ],
)
def test_faults_in_small(body, line, message):
    import re

    findings = check_source(f"{HEAD}def f(a, b, mesh):\n    {body}\n", "f.py")
    assert findings, body
    assert any(re.search(message, f.message) and f.line == line and f.file == "f.py" for f in findings), findings


@pytest.mark.parametrize(
    "body",
    [
        'x = einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", a, b)\n    return x * 0.5 + x',
        'x, y = (all_gather("A[I_X, J] -> A[I, J]", a, mesh, async_op=True), b)\n    return x.wait() + 1',
        'x = all_gather("A[I_X, J] -> A[I, J]", a, mesh)\n    return einsum("A[I, J] * B[J, K] -> C[I, K]", x, b)',
        'x = einsum("A[I_X, J] * B[J, K] -> C[I_X, K]", a, b)\n'
        '    return einsum("T[K, I_X] * B[J, K] -> D[I_X, J]", x.T, b)',
        'line = "A[I_X, J] -> A[I, J]"\n    return all_gather(line, a, mesh)',
        "return torch.relu(a) + unknown(b)",
        'x = reshape(all_gather("A[I_X, J] -> A[I, J]", a, mesh))\n'
        '    return einsum("A[B, T, J] * B[J, K] -> C[B, T, K]", x, b)',
    ],
)
def test_no_false_alarm(body):
    assert check_source(f"{HEAD}def f(a, b, mesh):\n    {body}\n") == []


def test_helpers_of_the_module_are_followed():
    text = HEAD + (
        "def gather(x, mesh):\n"
        '    return all_gather("A[I_X, J] -> A[I, J]", x, mesh, async_op=True), x\n'
        "def f(a, b, mesh):\n"
        "    whole, part = gather(a, mesh)\n"
        '    einsum("A[I, J] * B[J, K] -> C[I, K]", whole.wait(), b)\n'
        '    return einsum("A[I_X, J] * B[J, K] -> C[I_X, K]", whole.wait(), b)\n'
    )
    findings = check_source(text)
    assert [finding.line for finding in findings] == [8]
    assert "I is split over no axis, not over X" in findings[0].message


def test_a_result_that_specs_does_not_allow():
    text = HEAD + (
        'SPECS = {"In": "In[B_X, D]", "W": "W[D, F]", "Out": "Out[B_X, F]"}\n'
        "def forward(params, In, mesh):\n"
        '    In_B = all_gather("In[B_X, D] -> In[B, D]", In, mesh)\n'
        '    return einsum("In[B, D] * W[D, F] -> Out[B, F]", In_B, params["W"][0]), None\n'
    )
    assert [f.message.split(":")[0] for f in check_source(text)] == [
        "forward returns Out[B, F], but SPECS says Out[B_X, F]"
    ]


def test_each_module_is_parsed_once(monkeypatch):
    parsed = []
    start = Module.__init__
    monkeypatch.setattr(
        Module, "__init__", lambda self, name, path, text: parsed.append(path) or start(self, name, path, text)
    )
    monkeypatch.chdir(ROOT)
    report = read_files([Path("scaling/strategies/fsdp.py"), Path("scaling/strategies/data_parallel.py")])
    assert (report.findings, report.files) == ([], 2)
    resolved = [path.resolve() for path in parsed]
    assert len(resolved) == len(set(resolved)) > 2
    assert gc.isenabled()


@pytest.mark.slow
def test_command_line(tmp_path, capsys):
    bad = tmp_path / "bad.py"
    bad.write_text(HEAD + 'def f(a, mesh):\n    return all_reduce("A[I] -> A[I]", a, mesh)\n')
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"{bad}:4: AllReduce: A[I] -> A[I]" in out
    assert f"{broken}:1: cannot be read" in out
    (empty := tmp_path / "empty").mkdir()
    for path, why in ((tmp_path / "absent.py", "no such file"), (empty, "no Python files in this directory")):
        with pytest.raises(SystemExit) as stopped:
            main([str(path)])
        assert stopped.value.code == 2
        assert f"{path}: {why}" in " ".join(capsys.readouterr().err.split())
    clean = [sys.executable, "-m", "scaling.check", "scaling/strategies"]
    run = subprocess.run(clean, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "")
