"""The judge runs a program on an abstract mesh: clean listings have no finding, and each rule finds its own fault.

docs/rules.md names every rule; what it says is refused is refused, by that rule, and what is right passes.
"""

import re
import textwrap
import types
from pathlib import Path

import pytest
import torch

import scaling.strategies
from scaling.check import RULES, check_source, judge, judged
from scaling.collectives import all_gather, all_reduce, einsum, masked, ppermute, reduce_scatter, shard
from scaling.mesh import AbstractMesh
from scaling.spec import parse

MESH = AbstractMesh({"X": 2, "Y": 3})
STRATEGIES = ("data_parallel", "fsdp", "tensor_parallel", "fsdp_tp")
FOLDER = Path(scaling.strategies.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n")[0]: re.findall(r"```python\n(.*?)```", part, re.S) for part in PAGE.split("\n## ")[1:]}
HEAD = "import torch\nfrom torch.func import grad\nfrom scaling.collectives import all_gather, all_reduce, einsum\n"
HEAD += "from scaling.collectives import reduce_scatter, shard, wait\n"


def report_of(text: str, **options):
    """A listing's forward and backward, judged against its own SPECS."""
    s = types.ModuleType("listing")
    exec(compile(text, "listing.py", "exec"), s.__dict__)
    params = {k: str(parse(v).stacked("L")) for k, v in s.SPECS.items() if k not in ("In", "Out")}

    def both(params, In, dOut):
        Out, saved = s.forward(params, In, MESH, **options)
        return Out, *s.backward(dOut, saved, params, MESH)

    In, Out = s.SPECS["In"], s.SPECS["Out"]
    return judge(both, params, In, Out, mesh=MESH, returns=(Out, In, params))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
def test_listing_is_clean_and_wholly_judged(name, keep):
    report = report_of((FOLDER / f"{name}.py").read_text(), keep=keep)
    assert not report.findings, str(report)
    assert not report.unjudged, str(report)
    assert report.judged > 20


def rules_of(example: str) -> set[str]:
    if "def " not in example and "SPECS" not in example and "ignore" not in example:
        about = '    """Of a[I, J_X], b[J_X, K], bias[K]."""\n'
        example = "def f(a, b, bias, mesh):\n" + about + textwrap.indent(example, "    ") + "    return w\n"
    return {finding.rule for finding in check_source(HEAD + example)}


def test_every_rule_is_on_the_page():
    assert list(SECTIONS) == list(RULES)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "python"])
def test_the_examples_are_as_the_page_says(rule):
    refused, right = SECTIONS[rule]
    assert rule in rules_of(refused)
    assert rules_of(right) == set()


U = "C[I, K] {U_X}"
A, B = "A[I, J_X]", "B[J_X, K]"


def product(a, b):
    return einsum(f"{A} * {B} -> {U}", a, b)


def reduced(x):
    return all_reduce(f"{U} -> C[I, K]", x, MESH)


FAULTS = [
    ("unreduced", lambda a, b: shard("C[I, K] -> C[I_X, K]", product(a, b), MESH)),
    ("reduced-twice", lambda a, b: reduced(reduced(product(a, b)))),
    ("nonlinear", lambda a, b: reduced(torch.relu(product(a, b)))),
    ("product-of-sums", lambda a, b: reduced(product(a, b) * product(a, b))),
    ("partial-plus-whole", lambda a, b: reduced(product(a, b) + reduced(product(a, b)))),
    ("how-reduced", lambda a, b: all_reduce(f"{U} -> C[I, K]", product(a, b), MESH, op="mean")),
    ("never-waited", lambda a, b: [all_reduce(f"{U} -> C[I, K]", product(a, b), MESH, async_op=True), a][1]),
    ("split", lambda a, b: einsum("A[I_X, J] * B[J, K] -> C[I_X, K]", a, all_gather("B[J_X, K] -> B[J, K]", b, MESH))),
]


@pytest.mark.parametrize(("rule", "fn"), FAULTS, ids=[rule for rule, _ in FAULTS])
def test_each_rule(rule, fn):
    report = judge(fn, A, B, mesh=MESH)
    assert report.findings[0].rule == rule, str(report)
    assert __file__ in report.findings[0].place


def test_right_program_has_no_finding():
    def fn(a, b):
        return torch.relu(reduce_scatter(f"{U} -> C[I_X, K]", product(a, b) * 2.0, MESH)) + 1.0

    report = judge(fn, A, B, mesh=MESH, returns="C[I_X, K]")
    assert not report.findings, str(report)
    assert not report.unjudged, str(report)


def test_result_is_compared_with_its_promise():
    assert [found.rule for found in judge(product, A, B, mesh=MESH, returns="C[I, K]").findings] == ["result"]
    assert judge(product, A, B, mesh=MESH).result == parse(U)
    assert judge(lambda a: None, A, mesh=MESH, returns="C[I, K]").result is None
    short = judge(lambda a: (a,), A, mesh=MESH, returns=(A, A))
    assert [found.rule for found in short.findings] == ["result"]


def test_what_is_made_of_nothing_is_what_the_line_says():
    def fn(a):
        return all_gather("A[I, J_X] -> A[I, J]", torch.zeros(tuple(a.shape), device="meta"), MESH)

    report = judge(fn, A, mesh=MESH, returns="A[I, J]")
    assert not report.findings


def test_what_is_not_in_the_table_is_named():
    report = judge(lambda a: torch.special.i0(a), A, mesh=MESH)
    assert [why for _, why in report.unjudged] == ["i0: not in the table of ops"]


def test_a_value_that_decides_is_named():
    report = judge(lambda a: a * 2 if a.sum() > 0 else a, A, mesh=MESH)
    assert "may decide" in report.unjudged[0][1]


def looked_up(line):
    ids = torch.zeros(4, dtype=torch.long, device="meta")
    return lambda E: masked(line, E[ids], ids >= 0, MESH)


def test_a_masked_look_up_is_a_sum_over_the_axes_of_its_rows():
    report = judge(looked_up("x[B, D] {U_X}"), "E[V_X, D]", mesh=MESH, returns="x[B, D] {U_X}")
    assert (report.findings, report.unjudged) == ([], []), str(report)
    both = judge(lambda E: masked("x[B] {U_XY}", E[[0, 1], [1, 0]], torch.ones(2) > 0, MESH), "E[V_X, D_Y]", mesh=MESH)
    assert (both.findings, both.unjudged) == ([], []), str(both)


def reordered(x):
    return masked("y[T_X, D] {U_Y}", x[x.sum(1).argsort()], x.sum(1) > 0, MESH)


WORDS = {  # a program, the type of its argument and of its result
    "no look-up": (lambda a: masked("A[I, J_X] {U_Y}", a, a > 0, MESH), A, "A[I, J_X] {U_Y}"),
    "rows over another axis": (looked_up("x[B, D] {U_Y}"), "E[V_X, D]", "x[B, D] {U_Y}"),
    "rows over one axis of two": (looked_up("x[B, D] {U_XY}"), "E[V_X, D]", "x[B, D] {U_XY}"),
    "a device's own rows, in another order": (reordered, "x[T_X, D]", "y[T_X, D] {U_Y}"),
}


@pytest.mark.parametrize("what", WORDS)
def test_of_any_other_mask_the_type_is_taken_at_its_word(what):
    fn, given, returns = WORDS[what]
    report = judge(fn, given, mesh=MESH, returns=returns)
    assert ([why for _, why in report.unjudged], report.findings) == (
        ["the mask decides, and the type is taken at its word"], [],
    )  # fmt: skip


LOSSES = [("loss", True, A), ("", False, A), ("result", False, "A[I, J]")]


@pytest.mark.parametrize(("rule", "reduces", "returns"), LOSSES)
def test_the_derivative_of_torch_func(rule, reduces, returns):
    def loss(a, b):
        return (reduced(product(a, b)) if reduces else product(a, b)).sum()

    report = judge(torch.func.grad(loss), A, B, mesh=MESH, returns=returns)
    assert [found.rule for found in report.findings] == [rule] * bool(rule)


NLL = [("none", "L[B_X]"), ("sum", "L[] {U_X}"), ("mean", "L[] {U_X}")]


@pytest.mark.parametrize(("reduction", "type_"), NLL)
def test_cross_entropy_of_rows_that_are_split(reduction, type_):
    def loss(x):
        return torch.nn.functional.cross_entropy(x, torch.zeros(len(x)).long(), reduction=reduction)

    report = judge(loss, "x[B_X, V]", mesh=MESH, returns=type_)
    assert not report.findings, str(report)
    assert not report.unjudged, str(report)
    report = judge(torch.func.grad(lambda x: loss(x).sum()), "x[B_X, V]", mesh=MESH, returns="dx[B_X, V]")
    assert not report.findings, str(report)
    assert not report.unjudged, str(report)


def test_cross_entropy_of_classes_that_are_split_is_refused():
    def loss(x):
        return torch.nn.functional.nll_loss(x, torch.zeros(len(x)).long())

    assert [found.rule for found in judge(loss, "x[B, V_X]", mesh=MESH).findings] == ["split"]


def test_beside_a_gpu_a_chapter_is_judged_here_and_starts_nothing(monkeypatch):
    """There a chapter's ranks cannot be forked, and it would become torchrun."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("os.execve", lambda *call: pytest.fail("it started another program"))
    chapter = FOLDER.parents[1] / "chapters" / "05_fsdp.py"
    assert check_source(chapter.read_text(encoding="utf-8"), str(chapter)) == []


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_array_of_the_right_type_in_the_wrong_place_is_no_derivative(name):
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert check_source(text) == []
    edited = text.replace("dTmp = block.act_vjp(Tmp, dAct)", "dTmp = dAct")
    assert edited != text
    assert {finding.rule for finding in check_source(edited)} == {"derivative"}


@pytest.mark.parametrize("passed_on", [True, False])
def test_a_product_of_own_blocks_is_a_ring_s_first_hop_or_wrong(passed_on):
    def scores(Q, K):
        total = 0.0
        for _ in range(2):
            total = total + (Q @ K.mT).exp() @ K
            K = ppermute("K[B, T_X, H]", K, MESH, "X", [(0, 1), (1, 0)]) if passed_on else K
        return total

    report = judge(scores, "Q[B, T_X, H]", "K[B, T_X, H]", mesh=MESH)
    assert {found.rule for found in report.findings} == (set() if passed_on else {"split"}), str(report)


def test_a_look_up_that_a_mask_makes_a_part_of_a_sum():
    """As written by hand, without `masked`: elements of a split vocabulary, zero where the target is another rank's."""

    def picked(logits, targets, here):
        return masked_sum(logits.gather(1, targets[:, None].long())[:, 0], here)

    def masked_sum(x, here):
        return all_reduce("p[B] {U_Y} -> p[B]", torch.where(here > 0, x, 0.0), MESH)

    report = judge(picked, "l[B, V_Y]", "t[B]", "h[B]", mesh=MESH)
    assert not report.findings, str(report)
    report = judge(masked_sum, "l[B]", "h[B]", mesh=MESH)
    assert [found.rule for found in report.findings] == ["reduced-twice"]


def test_code_as_it_is_written():
    a, b = torch.empty(4, 6, device="meta"), torch.empty(6, 5, device="meta")
    with judged(MESH, {A: a, B: b}) as report:
        reduced(torch.relu(product(a, b)))
    assert [found.rule for found in report.findings] == ["nonlinear"]
    reduced(product(a, b))
    assert len(report.findings) == 1
