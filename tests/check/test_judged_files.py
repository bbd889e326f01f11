"""Whole files: listings of strategies and chapters, right variants of them, and programs as users write them are found
right; faults of whole statements are found in them, and faulty edits of typed lines: those that on ranks change numbers
and say nothing, and those that raise there. What came of each edit on ranks is stored (outcomes.py runs them); here
some are judged, and all by outcomes.py."""

import ast
import re
import sys
from importlib import import_module
from itertools import combinations, product
from pathlib import Path

import pytest
from machine import Forked, ended
from mutant_programs import judgement, replace, restore
from mutants import ROOT, mutants, text_of
from outcomes import stored, variants
from refused import named
from sources import parsed

from scaling.check import check_source, judged, main
from scaling.check.contracts import documented
from scaling.check.files import check_lines
from scaling.check.programs import TRANSFORMERS, programs, train_transformer
from scaling.check.run import judge_file
from scaling.mesh import AbstractMesh

STRATEGIES = [f"scaling/strategies/{name}.py" for name in ("data_parallel", "fsdp", "tensor_parallel", "fsdp_tp")]
*_, TENSOR_PARALLEL, FSDP_TP = STRATEGIES


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
    # the other stage of ZeRO
    ("scaling/strategies/zero.py", r"return dIn, scatter_grads\(sums, mesh\)", "return dIn, sums", "result"),
    # an update that the optimizer would not make
    ("scaling/strategies/zero.py", r"return new, state", "return params, state", "derivative"),
    # an array of the right type in the wrong place
    (FSDP_TP, r"dTmp = block\.act_vjp\(Tmp, dAct\)", "dTmp = dAct", "derivative"),
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


NORMED, BIASED, TWO_D = "transformer, normed, XY", "transformer, plain, XY", "serving, 2d"
STATE, RULE = "transformer, linear, CY", "models/linear"
LISTING, EXPERT = "strategies/transformer/layer", "strategies/expert/layer"
HEADS, FORM = "models/layer", "serve/forms/weights_2d"
PLANTED = {  # in lines that only some families have: a program that runs them, the file, what stands there, and instead
    "a bias on partial sums": (BIASED, LISTING, r'T_CY, D\]", Attn, at', 'T_CY, D]", biased(Attn, W, "b_O"), at'),
    "a norm after a block, of partial sums": (
        NORMED, LISTING, r'T_CY, D\]", Attn, at', 'T_CY, D]", normed(W, "norm_attn_out", Attn, at.config)[0], at',
    ),
    "a bias of the MLP on partial sums": (
        "transformer, parallel, XY", LISTING, r'T_CY, D\]", Out, at', 'T_CY, D]", biased(Out, W, "b_out"), at',
    ),
    "heads normed by a rank's own": (NORMED, HEADS, r"square = all_reduce\(line, (.*), at.mesh.*\)", r"square = \1"),
    "a sum of squares": (NORMED, HEADS, r'(mean_square\(wide\), at.mesh), op="mean"', r"\1"),
    "a mean of a part of D": (TWO_D, FORM, r'y - all_reduce\(.*, (y.mean.*), at.mesh.*\)', r"y - \1"),
    "squares of a part of D": (
        TWO_D, FORM, r"square = all_reduce\(.*, (mean_square\(y\)), at.mesh.*\)", r"square = \1",
    ),
    "a bias of an expert on each rank": (
        "transformer, sinks, XY", EXPERT, r"mesh.size\(at.tensor\), routing.counts", "1, routing.counts",
    ),
    "a state that is not handed on": (STATE, RULE, r"S = handed_on\(.*, S, mesh\)\n", "pass\n"),
    "a tail that is not handed on": (STATE, RULE, r"handed_on\(.*, (tail), mesh\)", r"\1"),
    "a gradient over C": (STATE, RULE, r"dW_BA\[D, k_Y, u\] {U_PXEC}", "dW_BA[D, k_Y, u] {U_PXE}"),
    "a cotangent that is not handed on": (
        "transformer, plain, derivative", LISTING, r'(dK, own\["W_K"\], out=dy, add)=True', r"\1=False",
    ),
    "another factor in a norm's backward": (
        "transformer, tied, derivative", "models/pointwise", r"-1 / x.shape\[-1\]", "-2 / x.shape[-1]",
    ),
    "sinks counted by each rank": ("serving, sequence", "serve/forms/sequence", r' / at.mesh.sizes.get\("Z", 1\)', ""),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_a_fault_in_the_lines_of_a_family_is_found(what):
    name, file, pattern, edit = PLANTED[what]
    module = import_module(f"scaling.{file.replace('/', '.')}")
    sizes, run = next((sizes, run) for program, sizes, run in programs() if program == name)
    replace(module, edited(f"scaling/{file}.py", pattern, edit))
    try:
        with judged(AbstractMesh(sizes)) as report:
            run(AbstractMesh(sizes))
        assert report.findings
    finally:
        restore(module)


@pytest.mark.parametrize("axes", ["XC", "CE", "PXC", "PCY"])
def test_nothing_is_found_where_the_sequence_and_the_batch_are_split(axes):
    for name, sizes, run in programs():
        if name.endswith(f", {axes}"):
            with judged(AbstractMesh(sizes)) as report:
                run(AbstractMesh(sizes))
            assert report.findings == [], name
            assert report.judged > 600


KINDS = sorted({kind for kinds in TRANSFORMERS.values() for kind in kinds.split()})
ONE_ROW = {"microbatches": 2, "remat": "block", "reduce": "each"}  # of a microbatch, on each rank
OPTIONS = {}, {"context": "gather"}, {"context": "ulysses"}, {"context": "ring"} | ONE_ROW, ONE_ROW
AXES = ["".join(some) for n in (2, 3) for some in combinations("PXCYE", n)]


@pytest.mark.sweep
@pytest.mark.parametrize(("axes", "kind"), [*product(AXES, KINDS)])
def test_nothing_is_found_in_any_model_on_any_axes(axes, kind):
    if "E" in axes and kind not in ("experts", "sinks", "chunks"):
        return  # it has no experts
    mesh, blocks = AbstractMesh(dict.fromkeys(axes, 2)), 2 ** sum(axis in "PXE" for axis in axes)
    for options, documents in product(OPTIONS, (False, True)):
        options = {name: value for name, value in options.items() if name != "context" or "C" in axes}
        rows = 2 * blocks if "remat" in options else 32
        with judged(mesh) as report:
            train_transformer(kind, mesh, rows, documents, **options)
        assert report.findings == [], f"{options}, {documents}"


@pytest.mark.slow
def test_a_cotangent_of_attention_whose_dims_are_exchanged_is_found():
    """Where a device has as many heads as a head has elements, no shape shows it."""
    listing = "scaling/strategies/transformer/layer.py"
    text = edited(listing, r"-> dO\[B_PXE, T_C, N_Y, H\]", "-> dO[B_PXE, T_C, H, N_Y]")
    assert [found.rule for found in judgement(listing, text).findings] == ["split"]


def test_beside_a_gpu_a_loss_that_is_reduced_before_it_is_differentiated_is_found_and_nothing_started(monkeypatch):
    """There a chapter's ranks cannot be forked, and it would become torchrun."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("os.execve", lambda *call: pytest.fail("it started another program"))
    loss = r"return (.*\.square\(\)\.sum\(\))(?=  # Loss\[\] \{U_)"
    text = edited("chapters/05_tp.py", loss, r'return all_reduce("Loss[] {U_Y} -> Loss[]", \1, mesh)')
    head = "from scaling.collectives import all_reduce\n"
    assert "loss" in [fault.rule for fault in check_source(head + text, str(ROOT / "chapters/05_tp.py"))]
    assert check_source(text_of("chapters/05_tp.py"), str(ROOT / "chapters/05_tp.py")) == []


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
def test_a_module_of_one_name_in_two_folders_is_each_folders_own(tmp_path):
    run = 'from helper import f\nfrom scaling import launch\nlaunch.run(f, {"X": 2})\n'
    head = "import torch\nfrom scaling.collectives import shard\n\ndef f(mesh):\n    x = shard("
    head += '"x[B, D] -> x[B_X, D]", torch.ones(4, 8), mesh)\n'
    for folder, line in (("right", "x.softmax(1)"), ("wrong", "x.softmax(0)")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper.py").write_text(f"{head}    {line}\n")
        (tmp_path / folder / "run.py").write_text(run)
    found = [judge_file(tmp_path / folder / "run.py").findings for folder in ("right", "wrong", "right")]
    assert [[finding.rule for finding in each] for each in found] == [[], ["split"], []]


def test_a_file_that_ends_its_process_ends_the_judging(tmp_path):
    head = "import torch\nfrom scaling.collectives import all_gather\n"
    for name, first in ("ends.py", "__import__('os')._exit(3)"), ("right.py", ""):
        (tmp_path / name).write_text(f"{head}{first}\nx = all_gather('x[B_X] -> x[B]', torch.ones(2), None)\n")
    process = Forked(lambda: sys.exit(main([str(tmp_path)])))
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "fix:" in out or process.returncode == 3  # of one processor: as the file says


UNJUDGED = {  # a program of one typed call, and what `check_source` says of it, with `strict` or without
    "x = all_gather('x[B_X] -> x[B]', torch.ones(2), AbstractMesh({'X': 2}))": ([], []),
    "x = all_gather(f'x[{chr(66)}_X] -> x[B]', torch.ones(2), AbstractMesh({'X': 2}))": (["f-strings"], ["f-strings"]),
    "if __name__ == 'another':\n    x = all_gather('x[B_X] -> x[B]', 1, 2)": (["nothing"], ["nothing"]),
    "x = all_gather('x[B_X] -> x[B]', torch.ones(2), AbstractMesh({'X': 2})).sum().item()": (
        [],
        ["a number of an array is read"],
    ),
}


@pytest.mark.parametrize("program", UNJUDGED)
def test_a_text_that_was_not_judged_is_not_called_right(program):
    for strict, reasons in zip((False, True), UNJUDGED[program], strict=True):
        found = check_source(HEAD + program, strict=strict)
        assert {finding.rule for finding in found} <= {"unjudged"}
        assert len(found) == len(reasons)
        assert all(reason in finding.message for reason, finding in zip(reasons, found, strict=True))


HEAD = "import torch\nfrom scaling.collectives import all_gather\nfrom scaling.mesh import AbstractMesh\n"
CALL = "all_gather('x[B_X] -> x[B]', torch.ones(2), AbstractMesh({'X': 2}))\n"
# arguments: the exit status, what is said
COMMANDS = named(
    r"""
arguments              exit code, words
right.py               (0, "1 call in 1 file, 0 of them not judged")
--strict right.py      (0, "0 findings")
--lines . right.py     (1, "6 calls in 8 files, each line by itself")
wrong.py               (1, "wrong.py:4: ")
--json wrong.py        (1, '"checked": 1')
never.py               (0, "never.py:5: this call was not reached")
--strict never.py      (1, "0 findings")
formatted.py           (0, "formatted.py:1: its typed lines are f-strings, so it was not run")
--strict formatted.py  (1, "0 findings")
plain.py               (0, "NOTHING WAS JUDGED: no literal typed line is written in 1 file")
--strict plain.py      (1, "0 findings")
unused.py              (0, "unused.py:1: nothing in this file was judged")
--strict unused.py     (1, "0 findings")
. right.py             (1, "NOT JUDGED: no literal typed line is written in 2 files\n  formatted.py\n  plain.py")
docstring.py           (0, "docstring.py:4: the types of its docstring could not be read: are they given or returned?")
illegal.py             (0, "illegal.py:4: the types of its docstring could not be read: mesh axis X is used twice")
nowhere.py             (2, "nowhere.py: no such file")
empty                  (2, "empty: no Python files in this directory")
notes.txt              (2, "notes.txt: is not a Python file")
""",
    globals(),
)


@pytest.mark.parametrize("given", COMMANDS)
def test_the_command(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for name, text in {
        "right.py": f"{HEAD}x = {CALL}",
        "wrong.py": HEAD + CALL.replace("x[B]", "x[C]"),
        "never.py": f"{HEAD}def f():\n    return {CALL}",
        "formatted.py": HEAD + CALL.replace("all_gather('x[B_X] -> x[B]'", "x = all_gather(f'x[{chr(66)}_X] -> x[C]'"),
        "plain.py": "x = 1\n",
        "unused.py": f"{HEAD}if __name__ == 'another':\n    x = {CALL}",
        "docstring.py": f"{HEAD}def f(a, b):\n    'a[I, J_X], b[J_X, K].'\n    return a\ny = {CALL}",
        "illegal.py": f"{HEAD}def f(x):\n    'x[I_X, J_X] -> y[I_X, J_X].'\n    return x\ny = {CALL}",
        "notes.txt": "",
    }.items():
        Path(name).write_text(text)
    status, said = COMMANDS[given]
    assert ended(main, given.split()) == status
    shown = capsys.readouterr()
    assert said in shown.out + shown.err


STORED = Path(__file__).with_name("typed_docstrings.txt")  # file: its functions whose docstrings begin with types


def test_no_docstring_loses_its_types():
    """The judge checks a function by the types that its docstring begins with, and says nothing where there are none:
    an edit of the prose must not take them away."""
    lost = []
    for file, names in (line.split(": ") for line in STORED.read_text().splitlines()):
        functions = [node for node in ast.walk(parsed(ROOT / file)) if isinstance(node, ast.FunctionDef)]
        texts = {node.name: ast.get_docstring(node) or "" for node in functions}
        typed = {name for name, text in texts.items() if documented(text).given or documented(text).results}
        lost += [f"{file}: {name}" for name in names.split() if name in texts and name not in typed]
    assert lost == []


KNOWN, EVERY = stored(), list(mutants())
SILENT, RAISED = ([each for each in EVERY if KNOWN.get(each.digest) == outcome] for outcome in ("wrong", "raises"))
HOPS = [each for each in SILENT if each.kind == "collective dropped" and each.before.startswith("ppermute")]
TYPES = "axis dropped in one type", "another axis in one type", "{U} dropped"
SEEN = [*{each.kind: each for each in reversed(SILENT)}.values(), *HOPS]  # the first of each kind
EXPERTS = "scaling/serve/forms/experts.py"  # whose rows are sent by their values: its edits are not seen
SEEN += [edit for file, edit in {each.file: each for each in SILENT}.items() if edit not in SEEN and file != EXPERTS]
SEEN += [each for each in RAISED if each.kind in TYPES and each.file in STRATEGIES][::7]


def test_enough_were_run():
    assert len(KNOWN) > 3300
    assert len(SILENT) > 660
    assert len(RAISED) > 1800
    assert HOPS  # of a ring, which are not passed on


@pytest.mark.parametrize("edit", SEEN, ids=lambda each: f"{each.kind}: {each.file}:{each.line}: {each.edit}")
def test_an_edit_is_refused(edit):
    assert judgement(edit.file, edit.text).findings


CHOSEN = edited(EXPERTS, r"(shard\(\"y\[.*\))", r"__import__('torch').stack([\1, \1])[1]")  # which device chose a row?


@pytest.mark.slow
@pytest.mark.parametrize(("file", "done", "text"), [*variants(12, seed=0), (EXPERTS, "rows chosen in a stack", CHOSEN)])
def test_nothing_is_found_in_right_variants(file, done, text):
    report = judgement(file, text)
    assert [str(found) for found in [*check_lines(text, file)[0], *report.findings]] == [], done
    assert report.judged > 5, done
