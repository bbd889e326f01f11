"""The judge runs a program on an abstract mesh: right programs have no finding, and each rule finds its own fault.

docs/rules.md names every rule; what it says is refused is refused, by that rule, and what is right passes.
A finding is shown at the line of the user's program that led to it, and a call counts as reached by its own line.
"""

import importlib
import re
import textwrap
from pathlib import Path

import pytest
import torch
from mutant_programs import replace, restore
from mutants import text_of
from refused import named
from test_judged_files import SILENT, STRATEGIES
from torch.func import grad
from torch.nn.functional import cross_entropy, nll_loss, scaled_dot_product_attention

from scaling.check import RULES, check_source, judge, judged
from scaling.check.files import check_files
from scaling.collectives import all_gather, all_reduce, einsum, masked, ppermute, reduce_scatter
from scaling.mesh import AbstractMesh
from scaling.spec import parse

MESH = AbstractMesh({"X": 2, "Y": 3})
U, WHOLE = "C[I, K] {U_X}", "C[I, K]"
A, B = "A[I, J_X]", "B[J_X, K]"
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

    return grad(loss)


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


def gathered(mesh):
    return lambda K: all_gather("K[B, T_Y, H] -> K[B, T, H]", K, mesh)


def attended(causal=False):
    return lambda Q, K: scaled_dot_product_attention(Q, K, K, is_causal=causal)


BOTH_AXES = "E[V_X, D_Y]"
ROWS = "Q[B, N, T_X, H]"
WORD = "what the mask leaves depends on values, so the line's type is believed"
JUDGED = {  # beside the examples of the page
    # a program, its arguments' types and its result's; the rule that it breaks first, the reasons why it cannot be
    # judged, or "" for a right one
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
        f"the derivative of {how}": (grad(lambda x, how=how: entropy(how)(x).sum()), ("x[B_X, V]",), "dx[B_X, V]", "")
        for how in ("none", "sum", "mean")
    },
    "classes that are split": (lambda x: nll_loss(x, torch.zeros(len(x)).long()), ("x[B, V_X]",), None, "split"),
    "own blocks alone": (ring(False), ("Q[B, T_X, H]", "K[B, T_X, H]"), None, "split"),
    "and those that are passed on": (ring(True), ("Q[B, T_X, H]", "K[B, T_X, H]"), None, ""),
    "keys that are split": (attended(), ("Q[B, N, T, H]", "K[B, N, S_X, H]"), None, "split"),
    "rows that see all keys": (attended(), (ROWS, "K[B, N, S, H]"), "O[B, N, T_X, H]", ""),
    "split rows that see the keys before them": (attended(True), (ROWS, "K[B, N, S, H]"), None, "split"),
    "a triangle that each device counts from its own first row": (
        lambda s: s + torch.ones(s.shape[-2:]).tril(), ("s[B, T_X, S]",), None, "split",
    ),
    "rows of a triangle of the whole": (
        lambda s: s + torch.ones(2 * s.shape[-2], s.shape[-1]).tril()[: s.shape[-2]], ("s[B, T_X, S]",), None, "",
    ),
    "rows chosen by number": (
        lambda E: all_reduce("x[B, D] {U_X} -> x[B, D]", E.index_select(0, torch.zeros(3).long()), MESH),
        ("E[V_X, D]",), None, "nonlinear",
    ),
    "repeats of split rows by number": (
        lambda x: einsum("x[I, J] -> y[J]", x.repeat_interleave(torch.ones(len(x)).long(), 0), None),
        ("x[I_X, J]",), None, "which rows are taken depends on their numbers",
    ),
    "counts of a split dim": (
        lambda x: all_reduce("n[V] {U_X} -> n[V]", torch.bincount(x.long().flatten(), minlength=5), MESH),
        ("x[I_X]",), "n[V]", "",
    ),
    "keys that are split over another axis": (gathered(MESH), ("K[B_X, T_Y, H]",), None, "split"),
    "and a line of each slice along it": (gathered(MESH.sliced), ("K[B_X, T_Y, H]",), "K[B_X, T, H]", ""),
    "heads that are split": (attended(True), ("Q[B, N_X, T, H]", "K[B, N_X, S, H]"), "O[B, N_X, T, H]", ""),
    "a mask around a look-up": (picked, ("l[B, V_Y]", "t[B]", "h[B]"), None, ""),
    "a mask around anything else": (masked_sum, ("l[B]", "h[B]"), None, "reduced-twice"),
    "of nothing, and not linear": (lambda a: reduced(a.new_zeros(4, 5).exp()), (A,), None, "nonlinear"),
    "no such op": (lambda a: torch.special.i0(a), (A,), None, "i0: not in the table of ops"),
    "a mask of no look-up": (lambda a: masked("A[I, J_X] {U_Y}", a, a > 0, MESH), (A,), "A[I, J_X] {U_Y}", WORD),
    "rows over another axis": (looked_up("x[B, D] {U_Y}"), ("E[V_X, D]",), "x[B, D] {U_Y}", WORD),
    "rows over one axis of two": (looked_up("x[B, D] {U_XY}"), ("E[V_X, D]",), "x[B, D] {U_XY}", WORD),
    "a mask of no partial sum": (lambda a: masked("A[I, J_X]", a, a > 0, MESH), (A,), None, "illegal-line"),
    "all rows but a device's first": (lambda x: x[1:], ("x[T_X, D]",), None, "takes rows of its own part"),
    "differences of rows": (lambda x: x.diff(dim=0), ("x[T_X, D]",), None, "takes rows of its own part"),
    "even parts of rows": (lambda x: x.chunk(3), ("x[T_X, D]",), None, ""),
    "a device's own rows, in another order": (
        reordered, ("x[T_X, D]",), "y[T_X, D] {U_Y}", f"{WORD} | each device orders its own part",
    ),
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
        reasons = said.split(" | ") if said else []
        assert len(report.unjudged) == len(reasons), str(report)
        assert all(any(reason in words for _, words in report.unjudged) for reason in reasons)


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


IMPORTS = """
import torch
from scaling.collectives import all_gather, all_reduce, einsum, recv, send, wait
from scaling.models.pointwise import act, rms_norm
"""
PRODUCT = 'u = einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", a, b)'
SUM = 'w = all_reduce("C[I, K] {U_X} -> C[I, K]", u, mesh)'
# the rule that the last line breaks, or "" of a right program
LINES = named(
    r"""
what                                          lines, rule
the library's norm of partial sums            ([PRODUCT, "u = rms_norm(u)"], "nonlinear")
the library's activation of partial sums      ([PRODUCT, 'u = act(u, "gelu")'], "nonlinear")
a type that the library cannot read           ([PRODUCT, "w = all_reduce('C[I, K] {U_', u, mesh)"], "illegal-line")
a deferred product of other operands
    (["w = b", "w = einsum('A[I, J] * B[J, K] -> C[I, K]', a, b, defer=True)\n    w = wait(w)"], "split")
a deferred product that nobody waits for
    (["w = a", "p = einsum('A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}', a, b, defer=True)"], "never-waited")
a deferred product that the caller waits for
    (["p = einsum('A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}', a, b, defer=True)", "w = p"], "")
a message of another type                     ([PRODUCT, "send('C[I, K]', u, mesh, 'X', 1)"], "unreduced")
a message of its type                         ([PRODUCT, "send('C[I, K] {U_X}', u, mesh, 'X', 1)"], "")
what another rank sends
    ([PRODUCT, "w = torch.relu(recv('C[I, K] {U_X}', u, mesh, 'X', 1))"], "nonlinear")
""",
    globals(),
)


@pytest.mark.parametrize("what", LINES)
def test_a_fault_is_shown_at_the_line_that_led_to_it(what):
    (first, last), rule = LINES[what]
    about = '    """Of a[I, J_X], b[J_X, K]."""\n    w = a\n'
    found = check_source(f"{IMPORTS}def f(a, b, mesh):\n{about}    {first}\n    {last}\n    return w\n")
    shown = [(finding.line, finding.rule) for finding in found]
    assert (shown[:1] == [(9, rule)]) if rule else not shown, list(map(str, found))


LISTINGS = [*STRATEGIES, "scaling/strategies/pods.py"]
EDITS = {
    (each.kind, each.edit.count("act("), "rms_norm" in each.edit): each for each in SILENT if each.file in LISTINGS
}
EDITS |= {("zero", each.line): each for each in SILENT if each.file == "scaling/strategies/zero.py"}  # also its update


@pytest.mark.parametrize("edit", EDITS.values(), ids=lambda each: f"{each.file}:{each.line}: {each.kind}")
def test_what_an_edit_of_a_listing_breaks_is_shown_in_it(edit):
    found = [finding for finding in check_source(edit.text, edit.file) if finding.file == edit.file]
    assert found
    if edit.kind == "operands swapped" or "act(" in edit.edit or "rms_norm" in edit.edit:
        assert edit.line + 2 in [finding.line for finding in found]  # below two imports


STEP = """
import torch
from scaling import launch, tree
from scaling.collectives import all_reduce
from {module} import SPECS, backward, forward

def step(mesh, W_in, W_out, In):
    total = all_reduce("x[N] {{U_X}} -> x[N]", torch.ones(2), mesh)  # a file without typed lines is not run
    types = {{W: SPECS[W].replace("[", "[L, ") for W in ("W_in", "W_out")}}
    params = tree.shard({{"W_in": W_in, "W_out": W_out}}, types, mesh)
    Out, saved = forward(params, tree.shard(In, SPECS["In"], mesh), mesh, "gelu", True, True)
    dIn, grads = backward(Out, saved, params, mesh)
    return tree.unshard({{"dIn": dIn, **grads}}, {{"dIn": SPECS["In"], **types}}, mesh)

launch.start(step, {{"P": 2, "X": 2, "Y": 2}}, torch.ones(2, 8, 16), torch.ones(2, 16, 8), torch.ones(8, 8))
"""
IN_MODULES = [each for each in SILENT if each.file in LISTINGS][::9]


@pytest.mark.parametrize("edit", IN_MODULES, ids=lambda each: f"{each.file}:{each.line}: {each.kind}")
def test_a_fault_in_a_module_of_the_library_is_shown_at_its_caller_s_line(edit):
    module = importlib.import_module(edit.file.removesuffix(".py").replace("/", "."))
    caller = STEP.format(module=module.__name__)
    assert check_source(caller) == []
    replace(module, edit.text)
    try:
        found = check_source(caller)
    finally:
        restore(module)
    assert {finding.line for finding in found} & {11, 12, 13}, found  # the calls of forward, backward and unshard
    assert all(finding.file == "<source>" for finding in found)
    assert any(Path(edit.file).name in finding.message for finding in found)


HELPER = "import torch\n\ndef f(x):\n    return torch.relu(x)\n"
CALLER = f"""{IMPORTS}from helper import f
def g(a, b, mesh):
    '''Of a[I, J_X], b[J_X, K].'''
    {PRODUCT}
    return f(u)
"""


@pytest.mark.parametrize(("judged", "shown"), [
    (["caller.py", "helper.py"], "helper.py:4"),
    (["caller.py"], "caller.py:9"),
])  # fmt: skip
def test_a_fault_in_an_imported_module_belongs_to_it_if_it_is_judged(judged, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "helper", raising=False)
    for name, text in (("caller.py", CALLER), ("helper.py", HELPER)):
        Path(name).write_text(text)
    assert [finding.place for finding in check_files(judged)[0].findings] == [shown]


def test_a_call_is_reached_by_its_line_and_not_by_another_call_s(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("two.py").write_text(f"""{IMPORTS}
def f(x, mesh):
    '''x[I_X, J] -> y[I, J].'''
    return all_gather("x[I_X, J] -> x[I, J]", x, mesh)

def k(x, y, mesh):
    if len(y) > 10**9:
        return all_gather("x[I_X, J] -> x[I, J]", x, mesh)
""")
    report, _ = check_files(["two.py"])
    assert report.unjudged == [("two.py:12", "this call was not reached")]
