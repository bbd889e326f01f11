"""A finding is shown at the line of the user's program that led to it, and a call counts as reached by its own line."""

import importlib
from pathlib import Path

import pytest
from mutant_programs import replace, restore
from refused import named
from test_judged_files import SILENT, STRATEGIES

from scaling.check import check_source
from scaling.check.files import check_files

HEAD = """
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
    found = check_source(f"{HEAD}def f(a, b, mesh):\n{about}    {first}\n    {last}\n    return w\n")
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
CALLER = f"""{HEAD}from helper import f
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
    Path("two.py").write_text(f"""{HEAD}
def f(x, mesh):
    '''x[I_X, J] -> y[I, J].'''
    return all_gather("x[I_X, J] -> x[I, J]", x, mesh)

def k(x, y, mesh):
    if len(y) > 10**9:
        return all_gather("x[I_X, J] -> x[I, J]", x, mesh)
""")
    report, _ = check_files(["two.py"])
    assert report.unjudged == [("two.py:12", "this call was not reached")]
