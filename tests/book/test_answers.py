"""How answers are judged and written; who judges by the largest difference sees a NaN, which Python's max passes by."""

import ast
import builtins
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import running
import torch
from sources import parsed

from scaling.book import layout
from scaling.book.answers import Answer, answer_table, notation, rounding
from scaling.book.largest import largest
from scaling.book.listing import difference
from scaling.cost.units import significant

WHY = {"erratum": "why"}
PLAIN = """
4.2e11  4.23e11  agrees
4.2e11  4.27e11  rounding
4.2e11  4.4e11   DIFFERS
100     104      agrees
100     108      rounding
100     75       DIFFERS
3       2.6      DIFFERS
"""
VERDICTS = [(book, float(ours), {}, verdict) for book, ours, verdict in map(str.split, PLAIN.strip().splitlines())]
VERDICTS += [  # the book's, ours, what is said of it: the verdict
    ("4.2e11", 4.4e11, WHY, "erratum"),
    ("4.2e11", 4.2e11, WHY, "DIFFERS"),
    ("377", 372.8, {"rounded": (377.7, "34e6 bytes for 33.55e6")}, "rounding"),
    ("377", 372.8, {"rounded": (379, "what does not explain it")}, "DIFFERS"),
    ("377", 300, {"rounded": (377.7, "what is too far off")}, "DIFFERS"),
    ("377", 377.1, {"rounded": (377.7, "though there is no need")}, "DIFFERS"),
    ("377", 372.8, WHY | {"rounded": (377.7, "of them")}, "DIFFERS"),
    ("", 3.0, {"note": "derived"}, "ours"),
    ("", 3.0, {}, "DIFFERS"),
    ("", 3.0, WHY | {"note": "derived"}, "DIFFERS"),
    ("yes", "yes", {}, "agrees"),
    ("yes", "no", {}, "DIFFERS"),
    ("yes", "no", WHY, "erratum"),
    ("100", 100.2, {"hedged": "close to 100x"}, "agrees"),
    ("100", 133.0, {"hedged": "close to 100x"}, "rounding"),
    ("100", 66.0, {"hedged": "close to 100x"}, "DIFFERS"),
]


@pytest.mark.parametrize(("book", "ours", "said", "verdict"), VERDICTS)
def test_verdicts(book, ours, said, verdict):
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


def calls_in(node: ast.AST) -> list[ast.Call]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Call)]


def called(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - set(dir(builtins))


def assigned(node: ast.Assign) -> list[tuple[str, ast.expr]]:
    """(name, its value): of a tuple of names each with its own, where the values are written as one too."""
    found = []
    for target in node.targets:
        both = isinstance(target, ast.Tuple) and len(target.elts) == len(getattr(node.value, "elts", ()))
        sides = zip(target.elts, node.value.elts, strict=True) if both else [(target, node.value)]
        found += [(name, value) for to, value in sides for name in names_in(to)]
    return found


def literal_answers(text: str) -> list[str]:
    """The own sides that come of literals alone, also through names: nothing of the library computes them."""
    tree, values = ast.parse(text), defaultdict(list)
    for name, value in (pair for node in tree.body if isinstance(node, ast.Assign) for pair in assigned(node)):
        values[name].append(value)
    filled = {name for name, each in values.items() if any(ast.unparse(v) in ("{}", "[]") for v in each)}  # in a loop
    literal: set[str] = set()
    while more := {n for n in values.keys() - literal - filled if all(names_in(v) <= literal for v in values[n])}:
        literal |= more
    answers = [call for call in calls_in(tree) if called(call) == "Answer"]
    own = [([k.value for k in call.keywords if k.arg == "ours"] or call.args[2:3])[0] for call in answers]
    return [ast.unparse(each) for each in own if names_in(each) <= literal]


def test_no_answer_of_ours_is_a_literal():
    """Each is computed by the library, or from what the chapter has computed; what is given is named above."""
    texts = {name: running.source(name) for name in running.ALL}
    assert sum(text.count("    Answer(") for text in texts.values()) > 550
    found = {name: {*literal_answers(text)} for name, text in texts.items()}
    assert {name: own for name, own in found.items() if own} == GIVEN


JUDGED = {"abs", "apart", "difference", "errors", "off"}


def test_nan_is_the_largest():
    assert largest([1.0, 3.0, 2.0]) == 3
    assert all(math.isnan(largest(some)) for some in ([1.0, math.nan], [math.nan, 1.0]))
    right = {"W": torch.ones(3), "b": torch.ones(2)}
    assert math.isnan(difference(right | {"b": torch.full((2,), math.nan)}, right))


def judged(mesh):
    right, wrong = {"W": torch.ones(3)}, {"W": torch.ones(3) + (mesh.rank == 3)}
    nan = largest([math.nan if mesh.rank == 2 else 1.0], mesh)
    return difference(wrong, right), difference(wrong, right, mesh), math.isnan(nan)


def test_on_a_mesh_a_difference_is_of_all_ranks(ranks):
    assert ranks(judged, {"X": 2, "Y": 2}) == [(float(rank == 3), 1, True) for rank in range(4)]


def modules_with(pattern: str, *folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        if re.search(pattern, path.read_text(encoding="utf-8"), re.S):
            yield path.relative_to(ROOT), parsed(path)


def test_chapters_judge_what_every_rank_has():
    """`page.on_ranks` returns what rank 0 has: another rank's copy counts if the difference is taken on the mesh."""
    found = []
    for path, tree in modules_with(r"mesh.*\b(difference|largest)\(", "chapters", "scaling/book"):
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in (each for each in functions if "mesh" in [a.arg for a in each.args.args]):
            for call in calls_in(function):
                of_one = called(call) in ("difference", "largest") and "mesh" not in ast.unparse(call)
                found += [f"{path}:{call.lineno}"] * (of_one and path.stem != "largest")
    assert not found, f"fix: difference(got, want, mesh), largest(numbers, mesh) at {found}"


def test_no_difference_is_judged_by_max():
    found = []
    judged = rf"(?<![.\w])max\(.{{,300}}\b({'|'.join(JUDGED)})\b"
    for path, tree in modules_with(judged, "chapters", "tests", "scaling/book"):
        for call in (call for call in calls_in(tree) if getattr(call.func, "id", "") == "max"):
            inside = [part for argument in call.args for part in ast.walk(argument)]
            names = {getattr(part, "id", getattr(part, "attr", "")) for part in inside}
            found += [f"{path}:{call.lineno}"] * bool(names & JUDGED)
    assert not found, f"fix: largest(...) of scaling.book.largest instead of max(...) at {found}"
