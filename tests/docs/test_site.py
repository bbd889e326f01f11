"""What the site is made of, without building it: the playground, the questions, the contents, links; the page that
walks through a training step names the files that a step enters, in their order. The strategy that CONTRIBUTING.md
writes out is one: its lines are checked, and it equals one device. The pages name one torch, in the range that
pyproject.toml and README say."""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import visit
from machine import on_ranks
from problems import B, close, one_device, specs, whole
from refused import read_table

from scaling import collectives, tree
from scaling.check import check_source
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.strategies import transformer

ROOT = Path(__file__).parents[2]
QUESTIONS = tomllib.loads((ROOT / "docs/questions.toml").read_text())["question"]
ASK = """
import sys, json
for name in ("torch", "numpy", "optree", "matplotlib"):
    sys.modules[name] = None  # as in a browser, where they are not
import play
print(json.dumps([json.loads(play.answer(form, json.dumps(fields))) for form, fields in json.load(sys.stdin)]))
"""
TABLE = """
form      options                                                       says
check     call="einsum", line="A[I"                                     A[I
devices   types="A[I_X, J_X]", mesh="X=2"                               fix:
devices   types="A[I_X]", mesh="X"                                      fix:
reshard   line="A[I] * B[I] -> C[I]", mesh="X=2", sizes="", chip="v5e"  fix:
matmul    line="A[I] -> C[I]", mesh="X=2", sizes="", chip="v5e"         fix:
derive    line="A[I]"                                                   expected '->'
schedule  name="1f1b", stages="four", microbatches="8"                  whole number
schedule  name="1f1b", stages="0", microbatches="8"                     '0' is not a whole number of at least 1
schedule  name="dualpipev", stages="4", microbatches="2"                fix: use at least 8
memory    model="llama3-8b", mesh="E=2"                                 fix:
memory    model="llama3-8b", mesh="Y=3"                                 Y divides K
memory    model="llama3-8b", mesh="X=7"                                 D=4096 model dims do not divide into 7 blocks
memory    model="llama3-8b", mesh="Z=5"                                 divide
memory    model="no such model", mesh="X=2"                             fix:
"""
REFUSED = read_table(TABLE, {}, ("form", "says"))


def test_the_playground_has_an_answer_of_each_form_and_needs_no_torch():
    page = (ROOT / "docs/playground.md").read_text()
    assert set(re.findall(r'data-ask="(\w+)"', page)) == {form for form, *_ in visit.LINES + REFUSED} | {"thresholds"}
    asked, path = [*visit.LINES, *REFUSED], {"PYTHONPATH": f"{ROOT}:{ROOT / 'docs/static'}"}
    given = json.dumps([(form, fields) for form, fields, _ in asked])
    run = subprocess.run([sys.executable, "-c", ASK], input=given, capture_output=True, text=True, env=path)
    assert run.returncode == 0, run.stderr
    for i, ((form, fields, expected), answer) in enumerate(zip(asked, json.loads(run.stdout), strict=True)):
        text = answer["text"] + answer.get("picture", "")
        assert expected in text, (form, fields, text)
        assert "usage:" not in text
        assert i >= len(visit.LINES) or (expected == visit.RULE) == (visit.RULE in text)


CHAPTER = """
import torch
from scaling import cost, data
from scaling.hardware import chip

v5p = chip("v5p")
C, W = v5p.flops("bf16"), v5p.bandwidth("ici", axes=3)
many = [torch.zeros(1)]


def least(chips):
    total = chips * cost.data_threshold(C, W)
    return total
"""
RUNS = {"least(64)": "54400.0", "len(many)": None, "least(torch.tensor(1))": None, "[n * 2 for n in (1, 2)]": "[2, 4]"}


@pytest.mark.parametrize("expression", RUNS)
def test_a_question_has_its_program_where_it_needs_no_torch(monkeypatch, expression):
    monkeypatch.syspath_prepend(str(ROOT / "docs/making"))
    tried = importlib.import_module("tried")
    program = tried.program_of(CHAPTER, expression)
    assert (program and tried.printed(program)) == RUNS[expression]
    text = f"1. Edit: a.\n   Answer: so,\n   it is.\n2. Question: why? Evaluate\n   `{expression}`.\n3. Flag: b."
    page = tried.with_answers(text, CHAPTER, [RUNS[expression] or "7"])
    assert tried.expressions(text) == [expression]
    assert (page.count("<details>"), page.count("data-ask")) == (2, int(program is not None))
    assert page.startswith("1. Edit: a.\n\n\n   <details>\n   <summary>Answer</summary>\n\n   so,\n   it is.\n\n   </")
    assert page.endswith("3. Flag: b.")


def test_a_cells_outputs_stay_in_order(monkeypatch):
    pytest.importorskip("jupytext")
    monkeypatch.syspath_prepend(str(ROOT / "docs/making"))
    kinds = ["\na\n", "b\n", "table", "\n", "table", "'yes'", "c\n\n"]
    names = {"table": "display_data", "'yes'": "execute_result"}
    outputs = [SimpleNamespace(output_type=names.get(text, "stream"), name="stdout", text=text) for text in kinds]
    kept = importlib.import_module("notebooks").shown_outputs(outputs)
    assert [out.text for out in kept] == ["a\nb\n", "table", "table", "c\n"]


def test_questions_are_as_many_as_the_books_and_name_what_is_there():
    for question in QUESTIONS:
        text = (ROOT / f"chapters/{question['chapter']}.py").read_text()
        assert int(question["chapter"][:2]) == question["part"], question
        assert question["asks"].endswith((".", "?")), question
        if "section" in question:
            assert re.search(rf"^# ## {re.escape(question['section'])}", text, re.MULTILINE), question
        else:
            assert re.compile(question["answers"])
            assert "page.answers(" in text, question
    wanted = {1: 5, 2: 7, 3: 13, 4: 8, 5: 4, 6: 11, 7: 8, 8: 15, 9: 2, 10: 4, 12: 23}
    assert Counter(part for part, _ in {(each["part"], each["name"]) for each in QUESTIONS}) == wanted
    assert len(QUESTIONS) == sum(wanted.values())


def test_the_fields_words_name_chapters_and_functions_that_are_there():
    rows = re.findall(r"^\| (.+) \| `(\w+\.py)` \| `(scaling[\w.]+)` \|$", (ROOT / "docs/words.md").read_text(), re.M)
    assert len(rows) > 30
    for _, chapter, name in rows:
        assert (ROOT / "chapters" / chapter).is_file(), chapter
        pkgutil.resolve_name(name)


def test_every_typed_call_is_in_the_notations_table():
    table = (ROOT / "notation.md").read_text().partition("## Lines")[2]
    programs = {"Deferred", "Message", "Pending", "join_products", "plan_transfer"}  # and those that run a plan
    calls = [name for name in collectives.__all__ if name not in programs and not name.startswith("run")]
    assert [name for name in calls if f"`{name}(" not in table] == []


def test_links_that_lead_nowhere(tmp_path):
    (tmp_path / "one.html").write_text('<h1 id="here">1</h1><a href="two.html#there">2</a><a href="#here">1</a>')
    (tmp_path / "two.html").write_text('<a href="three.html">3</a><a href="one.html#gone">1</a><script src="http://x">')
    found, count = visit.faults(tmp_path)
    assert (len(found), count) == (4, 4)
    assert any("loads http://x" in fault for fault in found)


LIBRARY = ROOT / "scaling"
PAGE = ROOT / "docs" / "a-training-step.md"
ASIDE = """
    strategies/transformer/step.py strategies/transformer/types.py models/leaves.py collectives/lines.py
    strategies/transformer/stages.py strategies/pipeline.py models/latent.py
"""  # of a first step, of stages, and of other models
ONE_IDEA = {"__init__", "wait", "gather", "exchange", "forward"}  # of one thing in several classes


@on_ranks({"X": 2, "Y": 2})
@pytest.mark.slow
def test_a_step_enters_the_files_in_the_order_of_the_page(mesh):
    """No two functions on the way have one name."""
    config = Config("tiny", L=2, D=32, F=64, N=4, K=2, H=8, V=64)
    params = transformer.shard(model.init(config, 0), config, mesh)
    tokens = torch.arange(34).view(2, 17)
    entered: dict[str, None] = {}
    functions = set()

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(str(LIBRARY)):
            entered.setdefault(Path(frame.f_code.co_filename).relative_to(LIBRARY).as_posix())
            functions.add(frame.f_code)

    for profile in (None, None, note):  # later steps enter fewer files than the first one
        sys.setprofile(profile)
        transformer.loss_and_grads(params, tokens[:, :-1], tokens[:, 1:], config, mesh)
        sys.setprofile(None)
    entered.pop("mesh/page.py", None)  # only if a rank waits long for another
    named = dict.fromkeys(name for name in re.findall(r"`([\w/]+/\w+\.py|tree\.py)`", PAGE.read_text(encoding="utf-8")))
    assert all((LIBRARY / name).exists() for name in named)
    on_the_way = ([name for name in names if name not in ASIDE.split()] for names in (named, entered))
    assert next(on_the_way) == next(on_the_way)
    names = Counter(code.co_name.strip("_") for code in functions if not code.co_name.startswith("<"))
    assert {name for name, count in names.items() if count > 1} <= {name.strip("_") for name in ONE_IDEA}


def test_pages_install_one_torch_which_lies_in_the_range():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", ".github/workflows/site.yml")]
    pages += (ROOT / "docs").glob("*.md")
    tested = {found for page in pages for found in re.findall(r"torch==2\.(\d+)\.\*", page.read_text("utf-8"))}
    low, end = map(int, re.search(r"torch>=2\.(\d+),<2\.(\d+)", (ROOT / "pyproject.toml").read_text()).groups())
    assert [low <= int(minor) < end for minor in tested] == [True]
    assert f"torch 2.{low} to 2.{end - 1}" in (ROOT / "README.md").read_text("utf-8")


@on_ranks({"Y": 2})
def test_the_strategy_of_the_page(mesh):
    listing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert check_source(listing) == []
    assert check_source(listing.replace("    Out = all_reduce(", "    all_reduce(")) != []
    strategy = ModuleType("strategy")
    exec(listing, vars(strategy))
    params, ((In, target), *_) = whole(torch.float64)
    shards = tree.shard(params, specs(strategy), mesh)
    Out, saved = strategy.forward(shards, In, mesh)
    dIn, grads = strategy.backward(2 * (Out - target) / B, saved, shards, mesh)
    losses, wanted, _ = one_device(block=("gelu", False, False))
    close([(Out - target).square().sum() / B, tree.unshard(grads, specs(strategy), mesh), dIn], [losses[0], *wanted])
