"""The chapters' own listings have the same numbers and collectives as the library's; an edited one does not."""

import ast
import inspect
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from mlp_problem import STRATEGIES, close, specs, whole

from scaling import tree
from scaling.book import learning
from scaling.check import check_source
from scaling.strategies.stack import Strategy
from scaling.trace import trace

CHAPTERS = Path(__file__).parents[2] / "chapters"
NAMES = {"05_dp": "data_parallel", "05_fsdp": "fsdp", "05_tp": "tensor_parallel", "05_fsdp_tp": "fsdp_tp"}
DROPPED = '    dW_in = all_reduce("dW_in[D, F] {U_X} -> dW_in[D, F]", dW_in, mesh)  # 6. not on the critical path\n'


def listed(node: ast.stmt) -> bool:
    """Whether a statement belongs to a chapter's listing: its imports, SPECS and functions."""
    types = isinstance(node, ast.Assign) and ast.unparse(node).startswith("SPECS = ")
    return types or isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef))


def listing(name: str, drop: str = "") -> Strategy:
    text = (CHAPTERS / f"{name}.py").read_text()
    assert drop in text
    module, parsed = ModuleType(name), ast.parse(text.replace(drop, "") if drop else text)
    parsed.body = [node for node in parsed.body if listed(node)]  # the chapter itself is not run
    exec(compile(parsed, name, "exec"), module.__dict__)
    return Strategy(module.SPECS, module.forward, module.backward)


def gradients(mesh, strategy, types, keep):
    params, (batch, *_) = whole(torch.float64)
    params = tree.shard(params, types, mesh)
    In, dOut = tree.shard(list(batch), [strategy.SPECS["In"], strategy.SPECS["Out"]], mesh)
    with trace() as log:
        Out, saved = strategy.forward(params, In, mesh, "gelu", True, True, **keep)
        result = Out, *strategy.backward(dOut, saved, params, mesh)
    return result, Counter((event.op, event.axes, str(event.after)) for event in log.collectives())


def both(mesh, name):
    library = STRATEGIES[NAMES[name]]
    keep = {"keep": False} if "tp" in name else {}  # the book's step 7: In is gathered again
    ours, lines = gradients(mesh, listing(name), specs(library), {})
    theirs, library_lines = gradients(mesh, library, specs(library), keep)
    close(ours, theirs, torch.float64)
    return lines == library_lines


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_s_listing_is_the_library_s(ranks, name):
    assert all(ranks(both, {"X": 2, "Y": 2}, name))


def edited(mesh):
    types = specs(STRATEGIES["data_parallel"])
    right, _ = gradients(mesh, listing("05_dp"), types, {})
    wrong, _ = gradients(mesh, listing("05_dp", DROPPED), types, {})
    return (wrong[2]["W_in"] - right[2]["W_in"]).abs().max().item(), torch.equal(wrong[2]["W_out"], right[2]["W_out"])


def test_a_chapter_without_one_of_its_lines_trains_otherwise(ranks):
    for difference, other_is_right in ranks(edited, {"X": 2}):
        assert difference > 0.1
        assert other_is_right


@pytest.mark.slow
def test_and_is_refused_before_a_rank_starts():
    text = (CHAPTERS / "05_dp.py").read_text()
    assert check_source(text) == []
    (finding,) = check_source(text.replace(DROPPED, ""))
    assert "result dW_in[D, F] of backward" in finding.message
    assert "it is still unreduced over X" in finding.message


def test_the_loop_that_05_dp_shows_is_the_one_that_the_others_run():
    def body(text: str) -> str:
        return re.search(r"^def train\(.*?\n(?:    \"\"\".*?\"\"\"\n)?(.*?)\n\n\n", text, re.M | re.S)[1]

    shown = body((CHAPTERS / "05_dp.py").read_text()).replace("learning.", "")
    assert shown == body(inspect.getsource(learning))
