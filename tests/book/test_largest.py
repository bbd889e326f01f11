"""Who judges by the largest difference sees a NaN: Python's own `max` passes over one that does not stand first."""

import ast
import math
import re
from pathlib import Path

import torch

from scaling.book.largest import largest
from scaling.book.listing import difference

ROOT = Path(__file__).parents[2]
JUDGED = {"abs", "apart", "difference", "errors", "off"}


def test_nan_is_the_largest():
    assert largest([1.0, 3.0, 2.0]) == 3
    assert all(math.isnan(largest(some)) for some in ([1.0, math.nan], [math.nan, 1.0], [math.nan, math.nan]))
    right = {"W": torch.ones(3), "b": torch.ones(2)}
    assert math.isnan(difference(right | {"b": torch.full((2,), math.nan)}, right))


def judged(mesh):
    right = {"W": torch.ones(3), "b": torch.ones(2)}
    wrong = right | {"b": right["b"] + (mesh.rank == 3)}
    return (
        difference(wrong, right),
        difference(wrong, right, mesh),
        largest([math.nan if mesh.rank == 2 else 1.0], mesh),
    )


def test_on_a_mesh_a_difference_is_of_all_ranks(ranks):
    found = ranks(judged, {"X": 2, "Y": 2})
    assert [own for own, *_ in found] == [0, 0, 0, 1]
    assert all(of_all == 1 and math.isnan(nan) for _, of_all, nan in found)


def test_chapters_judge_what_every_rank_has():
    """`page.on_ranks` returns what rank 0 has: another rank's copy counts if the difference is taken on the mesh."""
    found = []
    for path in (path for part in ("chapters", "scaling/book") for path in (ROOT / part).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)] if "mesh" in text else []
        for function in (each for each in functions if "mesh" in [a.arg for a in each.args.args]):
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                name = getattr(call.func, "id", getattr(call.func, "attr", ""))
                if name in ("difference", "largest") and "mesh" not in ast.unparse(call) and path.stem != "largest":
                    found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert not found, f"fix: difference(got, want, mesh), largest(numbers, mesh) at {found}"


def test_no_difference_is_judged_by_max():
    found = []
    for path in (path for part in ("chapters", "tests", "scaling/book") for path in (ROOT / part).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"\bmax\(", text) else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "max":
                inside = [part for argument in node.args for part in ast.walk(argument)]
                names = {getattr(part, "id", getattr(part, "attr", "")) for part in inside}
                found += [f"{path.relative_to(ROOT)}:{node.lineno}"] * bool(names & JUDGED)
    assert not found, f"fix: largest(...) of scaling.book.largest instead of max(...) at {found}"
