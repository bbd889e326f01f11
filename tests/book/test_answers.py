"""How answers are judged and written; who judges by the largest difference sees a NaN, which Python's max passes by."""

import ast
import builtins
import math
import re
from pathlib import Path

import pytest
import running
import torch
from machine import on_ranks
from refused import read_table
from sources import parsed

from scaling.book import layout
from scaling.book.answers import Answer, answer_table, notation, rounding
from scaling.book.arrays import largest
from scaling.book.listing import difference
from scaling.common.console import significant

TABLE = """
book's    ours     verdict   options
"4.2e11"  4.23e11  agrees
"4.2e11"  4.27e11  rounding
"4.2e11"  4.4e11   DIFFERS
"100"     104      agrees
"100"     108      rounding
"100"     75       DIFFERS
"3"       2.6      DIFFERS
"4.2e11"  4.4e11   erratum   erratum="why"
"4.2e11"  4.2e11   DIFFERS   erratum="why"
"377"     372.8    rounding  rounded=(377.7, "34e6 bytes for 33.55e6")
"377"     372.8    DIFFERS   rounded=(379, "what does not explain it")
"377"     300      DIFFERS   rounded=(377.7, "what is too far off")
"377"     377.1    DIFFERS   rounded=(377.7, "though there is no need")
"377"     372.8    DIFFERS   erratum="why", rounded=(377.7, "of them")
""        3.0      ours      note="derived"
""        3.0      DIFFERS
""        3.0      DIFFERS   erratum="why", note="derived"
"yes"     "yes"    agrees
"yes"     "no"     DIFFERS
"yes"     "no"     erratum   erratum="why"
"100"     100.2    agrees    hedged="close to 100x"
"100"     133.0    rounding  hedged="close to 100x"
"100"     66.0     DIFFERS   hedged="close to 100x"
"4"       4.77     rounding  coarse="the formula"
"4"       4.1      DIFFERS   coarse="though there is no need"
"4"       8.5      DIFFERS   coarse="what is too far off"
"""
VERDICTS = read_table(TABLE, {}, ("verdict",))


@pytest.mark.parametrize(("book", "ours", "verdict", "said"), VERDICTS)
def test_verdicts(book, ours, verdict, said):
    answer = Answer("", book, ours, **said)
    assert answer.verdict == verdict
    assert said.get("hedged", "") in answer.why


def test_numbers_are_read_and_written_as_the_book_writes_them():
    read = {
        "4.2e11": (4.2e11, 1e10),
        "47,000": (47e3, 1e3),
        "0.33": (0.33, 0.01),
        "100": (100, 100),
    }
    assert {text: rounding(text) for text in read} == {text: pytest.approx(pair) for text, pair in read.items()}
    with pytest.raises(ValueError, match="is not a number"):
        rounding("about ten")
    beside = {
        (4.915e13, "5e13"): "4.915e13",
        (57500, "57,500"): "57,500",
        (71876, ""): "71,876",
        (18823.53, "18,823"): "18,824",
        (8192, "8960"): "8192",
        (1 / 3, ""): "0.3333",
    }
    assert {pair: notation(*pair) for pair in beside} == beside
    for write, texts in {
        significant: {13.0154e9: "13.02e9", 0.91506: "0.9151", 850: "850", 3.2e-6: "3.2e-6", 0: "0"},
        layout.format_number: {1.97e14: "1.97e14", 57500: "57,500", 999_999.9: "1e6", 1.2e-4: "1.2e-4", 0: "0",
                               math.inf: "inf"},
        layout.exact: {33_554_432: "33,554,432", 0.5: "0.5", 2.0**50: "1.1259e15"},
        lambda n: layout.bar(n, 64): {0: "", 32: "#" * 6, 80: "#" * 15},
    }.items():  # fmt: skip
        assert {number: write(number) for number in texts} == texts


TABLES = """
chip  what it is             FLOPs/s  a header of many words
----  ---------------------  -------  ----------------------
v5e   words that go on and   1.97e14                     12%
      on, words that go on
      and on, words that go
      on and on, words that
      go on and on,
v5p   short                  4.59e14                       -

question               book    ours  unit    off by  verdict
-------------------  ------  ------  ------  ------  -------
words that go on        1.0       1  tokens       0  agrees
  and on, words
  that go on and
  on, words that go
  on and on, words
  that go on and
  on,
    words that go on and on, words that go on and on, words
    that go on and on, words that go on and on,
q                    a word  a word                  agrees
params               13.0e9  13.9e9           +6.9%  erratum
    why"""


def test_tables_drawn():
    """No line is longer than 60 columns, numbers stand to the right, and what is said of an answer below it."""
    long = "words that go on and on, " * 4
    rows = [("v5e", long, 1.97e14, "12%"), ("v5p", "short", 4.59e14, "-")]
    answers = [Answer(long, "1.0", 1.0, "tokens", note=long), Answer("q", "a word", "a word")]
    answers += [Answer("params", "13.0e9", 13.9e9, erratum="why")]
    table = layout.table(rows, ["chip", "what it is", "FLOPs/s", "a header of many words"], 60)
    assert f"\n{table}\n\n{answer_table(answers, 60)}" == TABLES


ROOT = Path(__file__).parents[2]
GIVEN = {  # own sides that are the question's own givens, or what the book's figures show, by one operation
    "04_problems": {"hours * 3600 * peak"},
    "05_when_bound": {"3 * 2 ** 20 / length"},
    "06_applied_training": {"B / 4096"},
    "12_gpu_networks": {"max(BUS.values()) / GB", "100 * (sharp - 1)", "max(BUS.values()) / GB * sharp"},
    "12_gpu_rooflines": {"deepseek_batch", "deepseek['EP'] * deepseek['PP']", "own"},
    "12_gpus": {"SUBPARTITIONS * REGISTERS * 4 / KIB", "SUBPARTITIONS * REGISTERS / (32 * 256)",
                "1024 / (SUBPARTITIONS * LANES)"},
}  # fmt: skip


def called(node: ast.AST) -> str:
    """The name of what is called, if this is a call."""
    func = getattr(node, "func", None)
    return getattr(func, "id", getattr(func, "attr", ""))


def names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def literal_answers(name: str) -> set[str]:
    """The own sides that come of literals alone, also through names: nothing of the library computes them."""
    tree, literal, found = parsed(running.CHAPTERS / f"{name}.py"), {*dir(builtins)}, set()
    for node in tree.body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            both = isinstance(target, ast.Tuple) and len(target.elts) == len(getattr(node.value, "elts", ()))
            for to, value in zip(target.elts, node.value.elts, strict=True) if both else [(target, node.value)]:
                empty = ast.unparse(value) in ("{}", "[]")  # filled in a loop
                if empty or names_in(value) - literal:
                    literal -= names_in(to)
                else:
                    literal |= names_in(to)
        for call in (call for call in ast.walk(node) if called(call) == "Answer"):
            (own,) = [k.value for k in call.keywords if k.arg == "ours"] or call.args[2:3]
            if names_in(own) <= literal:
                found.add(ast.unparse(own))
    return found


def test_no_answer_of_ours_is_a_literal():
    """Each is computed by the library, or from what the chapter has computed; what is given is named above."""
    assert sum(running.source(name).count("    Answer(") for name in running.ALL) > 550
    assert {name: own for name in running.ALL if (own := literal_answers(name))} == GIVEN


def test_nan_is_the_largest():
    assert largest([1.0, 3.0, 2.0]) == 3
    assert all(math.isnan(largest(some)) for some in ([1.0, math.nan], [math.nan, 1.0]))
    right = {"W": torch.ones(3), "b": torch.ones(2)}
    assert math.isnan(difference(right | {"b": torch.full((2,), math.nan)}, right))


@on_ranks({"X": 2, "Y": 2})
def test_on_a_mesh_a_difference_is_of_all_ranks(mesh):
    right, wrong = {"W": torch.ones(3)}, {"W": torch.ones(3) + (mesh.rank == 3)}
    assert math.isnan(largest([math.nan if mesh.rank == 2 else 1.0], mesh))
    assert (difference(wrong, right), difference(wrong, right, mesh)) == (mesh.rank == 3, 1)


OFF = r"\b(abs|apart|difference|errors|off)\b"


def test_a_difference_is_judged_so_that_a_nan_and_every_rank_count():
    """Python's max passes by a NaN; and `page.on_ranks` returns what rank 0 has: another rank's copy counts if the
    difference is taken on the mesh."""
    judged = re.compile(rf"mesh.*\b(difference|largest)\(|(?<![.\w])max\(.{{,300}}{OFF}", re.S)
    for path in (path for folder in ("chapters", "scaling/book", "tests") for path in (ROOT / folder).rglob("*.py")):
        if path.stem == "largest" or not judged.search(path.read_text(encoding="utf-8")):
            continue
        shown = "tests" not in path.relative_to(ROOT).parts
        for node in ast.walk(parsed(path)):
            if called(node) == "max" and isinstance(node.func, ast.Name):
                assert not re.search(OFF, ast.unparse(node)), f"{path}:{node.lineno}\n  fix: largest of scaling.book"
            if shown and isinstance(node, ast.FunctionDef) and "mesh" in ast.unparse(node.args):
                for each in ast.walk(node):
                    if called(each) in ("difference", "largest"):
                        assert "mesh" in ast.unparse(each), f"{path}:{each.lineno}\n  fix: {node.name} gives the mesh"
