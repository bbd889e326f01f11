"""The judge runs a program on an abstract mesh: right programs have no finding, and each rule finds its own fault.

docs/rules.md names every rule; what it says is refused is refused, by that rule, and what is right passes. Whole files:
listings of strategies and chapters, right variants of them, and programs as users write them are found right; faults of
whole statements are found in them, and faulty edits of typed lines: those that on ranks change numbers and say nothing,
and those that raise there. What came of each edit on ranks is stored (outcomes.py runs them); here some are judged, and
all by outcomes.py.
"""

import re
import sys
import textwrap

import pytest
import torch
from machine import Forked
from mutants import ROOT, mutants, variants
from outcomes import judgement, stored, text_of
from torch.nn.functional import cross_entropy, nll_loss

from scaling.check import RULES, check_source, judge, judged, main
from scaling.check.lines import check_lines
from scaling.check.run import judge_file
from scaling.collectives import all_gather, all_reduce, einsum, masked, ppermute, reduce_scatter
from scaling.mesh import AbstractMesh
from scaling.spec import parse

MESH = AbstractMesh({"X": 2, "Y": 3})
PARTS = text_of("docs/rules.md").split("\n## ")[1:]
SECTIONS = {part.split("\n")[0]: re.findall(r"```python\n(.*?)```", part, re.S) for part in PARTS}
HEAD = "import torch\nfrom torch.func import grad\nfrom scaling.collectives import all_gather, all_reduce, einsum\n"
HEAD += "from scaling.collectives import reduce_scatter, shard, wait\n"


def rules_of(example: str) -> set[str]:
    if "def " not in example and "SPECS" not in example and "ignore" not in example:
        about = '    """Of a[I, J_X], b[J_X, K], bias[K]."""\n'
        example = "def f(a, b, bias, mesh):\n" + about + textwrap.indent(example, "    ") + "    return w\n"
    return {finding.rule for finding in check_source(HEAD + example)}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "python"])
def test_the_examples_are_as_the_page_says(rule):
    assert list(SECTIONS) == list(RULES)
    refused, right = SECTIONS[rule]
    assert rule in rules_of(refused)
    assert rules_of(right) == set()


U, WHOLE = "C[I, K] {U_X}", "C[I, K]"
A, B = "A[I, J_X]", "B[J_X, K]"


def product(a, b):
    return einsum(f"{A} * {B} -> {U}", a, b)


def reduced(x):
    return all_reduce(f"{U} -> {WHOLE}", x, MESH)


def right(a, b):
    return torch.relu(reduce_scatter(f"{U} -> C[I_X, K]", product(a, b) * 2.0, MESH)) + 1.0


def made_of_nothing(a):
    return all_gather(f"{A} -> A[I, J]", torch.zeros(tuple(a.shape), device="meta"), MESH)


def derivative(reduces: bool):
    def loss(a, b):
        return (reduced(product(a, b)) if reduces else product(a, b)).sum()

    return torch.func.grad(loss)


def looked_up(line):
    ids = torch.zeros(4, dtype=torch.long, device="meta")
    return lambda E: masked(line, E[ids], ids >= 0, MESH)


def reordered(x):
    return masked("y[T_X, D] {U_Y}", x[x.sum(1).argsort()], x.sum(1) > 0, MESH)


def entropy(reduction):
    return lambda x: cross_entropy(x, torch.zeros(len(x)).long(), reduction=reduction)


def ring(passed_on: bool):
    """Its first hop is a product of own blocks."""

    def scores(Q, K):
        total = 0.0
        for _ in range(2):
            total = total + (Q @ K.mT).exp() @ K
            K = ppermute("K[B, T_X, H]", K, MESH, "X", [(0, 1), (1, 0)]) if passed_on else K
        return total

    return scores


def masked_sum(x, here):
    return all_reduce("p[B] {U_Y} -> p[B]", torch.where(here > 0, x, 0.0), MESH)


def picked(logits, targets, here):
    """Without `masked`: elements of a split vocabulary, zero where the target is another rank's."""
    return masked_sum(logits.gather(1, targets[:, None].long())[:, 0], here)


BOTH_AXES = "E[V_X, D_Y]"
WORD = "the mask decides, and the type is taken at its word"
JUDGED = {  # beside the examples of the page
    # a program, its arguments' types and its result's; the rule that it breaks first, what is said of it where it
    # cannot be judged, or "" of a right one
    "right": (right, (A, B), "C[I_X, K]", ""),
    "a promise": (product, (A, B), WHOLE, "result"),
    "too few results": (lambda a: (a,), (A,), (A, A), "result"),
    "rows over X": (looked_up("x[B, D] {U_X}"), ("E[V_X, D]",), "x[B, D] {U_X}", ""),
    "over X and Y": (lambda E: masked("x[B] {U_XY}", E[[0], [1]], torch.ones(1) > 0, MESH), (BOTH_AXES,), None, ""),
    "a loss that was reduced": (derivative(True), (A, B), A, "loss"),
    "a loss that was not": (derivative(False), (A, B), A, ""),
    "nor is what its result promises": (derivative(False), (A, B), "A[I, J]", "result"),
    "each row's loss": (entropy("none"), ("x[B_X, V]",), "L[B_X]", ""),
    "their sum": (entropy("sum"), ("x[B_X, V]",), "L[] {U_X}", ""),
    "their mean": (entropy("mean"), ("x[B_X, V]",), "L[] {U_X}", ""),
    **{
        f"the derivative of {how}": (
            torch.func.grad(lambda x, how=how: entropy(how)(x).sum()), ("x[B_X, V]",), "dx[B_X, V]", "",
        )
        for how in ("none", "sum", "mean")
    },
    "classes that are split": (lambda x: nll_loss(x, torch.zeros(len(x)).long()), ("x[B, V_X]",), None, "split"),
    "own blocks alone": (ring(False), ("Q[B, T_X, H]", "K[B, T_X, H]"), None, "split"),
    "and those that are passed on": (ring(True), ("Q[B, T_X, H]", "K[B, T_X, H]"), None, ""),
    "a mask around a look-up": (picked, ("l[B, V_Y]", "t[B]", "h[B]"), None, ""),
    "a mask around anything else": (masked_sum, ("l[B]", "h[B]"), None, "reduced-twice"),
    "no such op": (lambda a: torch.special.i0(a), (A,), None, "i0: not in the table of ops"),
    "a mask of no look-up": (lambda a: masked("A[I, J_X] {U_Y}", a, a > 0, MESH), (A,), "A[I, J_X] {U_Y}", WORD),
    "rows over another axis": (looked_up("x[B, D] {U_Y}"), ("E[V_X, D]",), "x[B, D] {U_Y}", WORD),
    "rows over one axis of two": (looked_up("x[B, D] {U_XY}"), ("E[V_X, D]",), "x[B, D] {U_XY}", WORD),
    "a device's own rows, in another order": (reordered, ("x[T_X, D]",), "y[T_X, D] {U_Y}", WORD),
}  # fmt: skip


@pytest.mark.parametrize("what", JUDGED)
def test_a_program_is_right_breaks_its_rule_or_is_named(what):
    fn, arguments, returns, said = JUDGED[what]
    report = judge(fn, *arguments, mesh=MESH, returns=returns)
    rules = [found.rule for found in report.findings]
    if said in RULES:
        assert rules[0] == said, str(report)
        assert said == "result" or __file__ in report.findings[0].place
    else:
        assert not rules, str(report)
        assert len(report.unjudged) == bool(said), str(report)
        assert all(said in words for _, words in report.unjudged)


def test_what_is_found_beside_the_rules():
    assert judge(product, A, B, mesh=MESH).result == parse(U)
    assert judge(lambda a: None, A, mesh=MESH, returns=WHOLE).result is None
    assert not judge(made_of_nothing, A, mesh=MESH, returns="A[I, J]").findings  # it is what the line says
    assert "may decide" in judge(lambda a: a * 2 if a.sum() > 0 else a, A, mesh=MESH).unjudged[0][1]
    # code as it is written
    a, b = torch.empty(4, 6, device="meta"), torch.empty(6, 5, device="meta")
    with judged(MESH, {A: a, B: b}) as report:
        reduced(torch.relu(product(a, b)))
    assert [found.rule for found in report.findings] == ["nonlinear"]
    reduced(product(a, b))
    assert len(report.findings) == 1


# Whole files

STRATEGIES = [f"scaling/strategies/{name}.py" for name in ("data_parallel", "fsdp", "tensor_parallel", "fsdp_tp")]


@pytest.mark.parametrize("file", STRATEGIES)
def test_a_listing_is_clean_and_wholly_judged(file):
    """Both passes, against its own SPECS."""
    report = judge_file(ROOT / file)
    assert not report.findings, str(report)
    assert not report.unjudged, str(report)
    assert report.judged > 20


PROGRAMS = [
    pytest.param(program, id=f"{page} {number}", marks=pytest.mark.slow)
    for page in ("docs/your-own-code.md", "docs/three-columns.md")
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", text_of(page), re.S))
]
SQUARE = """
import torch
from torch.func import vjp
from scaling import launch, tree
from scaling.collectives import reduce_scatter

def main(mesh, W, x):
    W, x = tree.shard(W, "W[L, D, F]", mesh), tree.shard(x, "x[B_X, D]", mesh)
    layer = lambda W, x: torch.tanh(x @ W)
    x, _ = vjp(layer, W[0], x)
    x, middle = vjp(layer, W[1], x)
    x, last = vjp(layer, W[2], x)
    dW, dx = middle(last(2 * x)[1])
    dW = reduce_scatter("dW[D, F] {U_X} -> dW[D_X, F]", dW, mesh)
    return tree.unshard(dW, "dW[D_X, F]", mesh)

launch.start(main, {"X": 2}, torch.ones(3, 6, 6), torch.ones(4, 6))
"""  # what goes into a square layer has the name that came out of one


@pytest.mark.parametrize("program", [*PROGRAMS, pytest.param(SQUARE, id="square layers")])
def test_nothing_is_found_in_right_programs(program):
    assert [str(found) for found in check_source(program)] == []


TENSOR_PARALLEL = "scaling/strategies/tensor_parallel.py"
GRADIENTS = {f"scaling/strategies/{name}.py": "dW_in" for name in ("fsdp_tp", "zero")}
GRADIENTS |= {"scaling/strategies/pods.py": "dW_out", "chapters/05_fsdp_tp.py": "dW_in"}
FAULTS = [  # (file, what stands there, what stands there instead, the rule that is broken last)
    # a residual of another type
    (TENSOR_PARALLEL, r'(Out = reduce_scatter\("Out\[.*", Out)(?=, mesh\))', r"\1 + In", "partial-plus-whole"),
    (TENSOR_PARALLEL, r"return Out(?=, \(In)", "return Out + In", "split"),
    *(  # a gradient that is returned unreduced
        (file, rf"    {weight} = (all_reduce|reduce_scatter)\(.*\n", "", "result")
        for file, weight in GRADIENTS.items()
    ),
    # an array of the right type in the wrong place
    (STRATEGIES[3], r"dTmp = block\.act_vjp\(Tmp, dAct\)", "dTmp = dAct", "derivative"),
]  # fmt: skip


def edited(file: str, pattern: str, edit: str) -> str:
    text, count = re.subn(pattern, edit, text_of(file), count=1)
    assert count == 1
    return text


@pytest.mark.parametrize(("file", "pattern", "edit", "rule"), FAULTS)
def test_a_fault_of_a_whole_statement_is_found(file, pattern, edit, rule):
    found = [fault.rule for fault in check_source(edited(file, pattern, edit), file)]
    assert found[-1] == rule
    assert {*found} == {rule} or rule not in ("result", "derivative")


def test_beside_a_gpu_a_loss_that_is_reduced_before_it_is_differentiated_is_found_and_nothing_started(monkeypatch):
    """There a chapter's ranks cannot be forked, and it would become torchrun."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("os.execve", lambda *call: pytest.fail("it started another program"))
    loss = r"return (.*\.square\(\)\.sum\(\))(?=  # Loss\[\] \{U_)"
    text = edited("chapters/05_tp.py", loss, r'return all_reduce("Loss[] {U_Y} -> Loss[]", \1, mesh)')
    head = "from scaling.collectives import all_reduce\n"
    assert "loss" in [fault.rule for fault in check_source(head + text, str(ROOT / "chapters/05_tp.py"))]


WAITS = """
import torch
from scaling.collectives import all_gather, wait

def f(A, B, mesh):
    '''Of A[I_X, J], B[J, K_X].'''
    a = all_gather("A[I_X, J] -> A[I, J]", A, mesh, async_op=True)
    b = all_gather("B[J, K_X] -> B[J, K]", B, mesh, async_op=True)
    """


@pytest.mark.parametrize(("lines", "rule"), [
    ("a, b = wait(a), wait(b)\n    return torch.relu(a), torch.relu(b)", ""),
    ("wait(a)\n    return torch.relu(a), wait(b)", "pending"),
    ("a = wait(a)\n    return a @ b", "pending"),
    ("a = wait(b)\n    return torch.relu(a), torch.relu(b)", "pending"),
    ("a = a.wait()\n    return a, torch.relu(b)", "pending"),
    ("b = wait(a)\n    return b", "never-waited"),
    ("a = wait(a)\n    return a", "never-waited"),
])  # fmt: skip
def test_a_wait_for_the_wrong_array(lines, rule):
    found = [found.rule for found in check_source(WAITS + lines)]
    assert rule in found if rule else not found


@pytest.mark.parametrize("above", ["", "@torch.no_grad()\n", "@torch.no_grad()\n@torch.enable_grad()\n"])
def test_a_decorated_function_is_judged_as_any_other(above):
    """Nothing calls it: the mesh that it is run on has the axes of its lines, which no type of its docstring names."""
    text = f"""
import torch
from scaling.collectives import all_gather, shard

{above}def f(x, mesh):
    '''x[B, D] -> Out[B, D].'''
    own = shard("x[B, D] -> x[B_X, D]", x, mesh)
    return all_gather("x[B_X, D] -> Out[B, D]", own, mesh)
"""
    assert check_source(text) == []
    wrong = text.partition("    return all_gather")[0] + "    return own\n"
    assert [found.rule for found in check_source(wrong)] == ["result"]


@pytest.mark.slow
def test_a_file_that_ends_its_process_ends_the_judging(tmp_path):
    head = "import torch\nfrom scaling.collectives import all_gather\n"
    for name, first in ("ends.py", "__import__('os')._exit(3)"), ("right.py", ""):
        (tmp_path / name).write_text(f"{head}{first}\nx = all_gather('x[B_X] -> x[B]', torch.ones(2), None)\n")
    process = Forked(lambda: sys.exit(main([str(tmp_path)])))
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "fix:" in out or process.returncode == 3  # of one processor: as the file says


KNOWN, EVERY = stored(), list(mutants())
SILENT, RAISED = ([each for each in EVERY if KNOWN.get(each.digest) == outcome] for outcome in ("wrong", "raises"))
HOPS = [each for each in SILENT if each.kind == "collective dropped" and each.before.startswith("ppermute")]
TYPES = "axis dropped in one type", "another axis in one type", "{U} dropped"
SEEN = [*{each.kind: each for each in reversed(SILENT)}.values(), *HOPS]  # the first of each kind
SEEN += [each for each in RAISED if each.kind in TYPES and each.file in STRATEGIES][::7]


def test_enough_were_run():
    assert len(KNOWN) > 3400
    assert len(SILENT) > 660
    assert len(RAISED) > 1800
    assert HOPS  # of a ring, which are not passed on


@pytest.mark.parametrize("edit", SEEN, ids=lambda each: f"{each.kind}: {each.file}:{each.line}: {each.edit}")
def test_an_edit_is_refused(edit):
    assert judgement(edit.file, edit.text).findings


EXPERTS = "scaling/serve/forms/experts.py"
CHOSEN = edited(EXPERTS, r"(shard\(\"y\[.*\))", r"__import__('torch').stack([\1, \1])[1]")  # which device chose a row?


@pytest.mark.slow
@pytest.mark.parametrize(("file", "done", "text"), [*variants(12, seed=0), (EXPERTS, "rows chosen in a stack", CHOSEN)])
def test_nothing_is_found_in_right_variants(file, done, text):
    report = judgement(file, text)
    assert [str(found) for found in [*check_lines(text, file)[0], *report.findings]] == [], done
    assert report.judged > 5, done
