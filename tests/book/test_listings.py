"""The listings of Part 5 beside the book's: each numbered step once, with its number, its function and the type that it
leaves, in the book's order; and the chapters' own beside the library's."""

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


ROOT = Path(__file__).parents[2]
LINE = re.compile(r'\b(\w+)\("[^"]* -> (\w+\[[^"]*)".*\)  # (\d+)\.(?:, in the backward (\d+)\.)?')
OPS = {"*": "einsum", "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}

# The book's numbered steps; what is a product is written *, and past the activation, which the book leaves out, its
# dTmp is dAct first. Steps about the loss, "Loss[B] = ..." and "dOut[B, D] = ...", belong to no layer.
DATA_PARALLEL = """
forward   1 * Tmp[B_X, F];  2 * Out[B_X, D]
backward  2 * dW_out[F, D] {U_X};  3 AllReduce dW_out[F, D];  4 * dAct[B_X, F];  5 * dW_in[D, F] {U_X}
backward  6 AllReduce dW_in[D, F];  7 * dIn[B_X, D]
"""
FSDP = """
forward   1 AllGather W_in[D, F];  2 * Tmp[B_X, F];  3 AllGather W_out[F, D];  4 * Out[B_X, D]
backward  2 * dW_out[F, D] {U_X};  3 ReduceScatter dW_out[F, D_X];  4 AllGather W_out[F, D];  5 * dAct[B_X, F]
backward  6 * dW_in[D, F] {U_X};  7 ReduceScatter dW_in[D_X, F];  8 AllGather W_in[D, F];  9 * dIn[B_X, D]
"""
TENSOR_PARALLEL = """
forward   1 AllGather In[B, D];  2 * Tmp[B, F_Y];  3 * Out[B, D] {U_Y};  4 ReduceScatter Out[B, D_Y]
backward  2 AllGather dOut[B, D];  3 * dW_out[F_Y, D];  4 * dAct[B, F_Y];  5 AllGather In[B, D]
backward  6 * dW_in[D, F_Y];  7 * dIn[B, D] {U_Y};  8 ReduceScatter dIn[B, D_Y]
"""
FSDP_TP = """
forward   1 AllGather In[B_X, D];  2 AllGather W_in[D, F_Y];  3 * Tmp[B_X, F_Y];  4 AllGather W_out[F_Y, D]
forward   5 * Out[B_X, D] {U_Y};  6 ReduceScatter Out[B_X, D_Y]
backward  2 AllGather dOut[B_X, D];  3 * dW_out[F_Y, D] {U_X};  4 ReduceScatter dW_out[F_Y, D_X]
backward  5 AllGather W_out[F_Y, D];  6 * dAct[B_X, F_Y];  7 AllGather In[B_X, D];  8 * dW_in[D, F_Y] {U_X}
backward  9 ReduceScatter dW_in[D_X, F_Y];  10 AllGather W_in[D, F_Y];  11 * dIn[B_X, D] {U_Y}
backward  12 ReduceScatter dIn[B_X, D_Y]
"""
FILES = {
    "scaling/strategies/data_parallel.py": DATA_PARALLEL, "chapters/05_dp.py": DATA_PARALLEL,
    "scaling/strategies/fsdp.py": FSDP, "chapters/05_fsdp.py": FSDP,
    "scaling/strategies/tensor_parallel.py": TENSOR_PARALLEL, "chapters/05_tp.py": TENSOR_PARALLEL,
    "scaling/strategies/fsdp_tp.py": FSDP_TP, "chapters/05_fsdp_tp.py": FSDP_TP,
}  # fmt: skip


def steps(listing: str) -> list[tuple[str, int, str, str]]:
    """[(pass, number, function, the type that it leaves)] of the book."""
    found = []
    for line in listing.strip().split("\n"):
        where, rest = line.split(maxsplit=1)
        for step in rest.split(";  "):
            number, op, result = step.strip().split(maxsplit=2)
            found.append((where, int(number), OPS[op], result))
    return found


def functions(file: str) -> dict[str, list[tuple[int, int | None, str, str]]]:
    """{function: [(number, the number in the backward of what both passes do, function called, type left)]}."""
    found, name = {}, ""
    for line in (ROOT / file).read_text(encoding="utf-8").split("\n"):
        if line.startswith("def "):
            name = line[4:].split("(")[0]
        if (match := LINE.search(line)) and name:
            op, result, number, late = match.groups()
            found.setdefault(name.removeprefix("layer_"), []).append(
                (int(number), int(late) if late else None, op, result)
            )
    return found


@pytest.mark.parametrize("file", FILES)
def test_each_step_of_the_book_once(file):
    found = []
    for name, lines in functions(file).items():
        where = {"gather": "forward", "reduce": "backward"}.get(name, name)
        found += [(where, number, op, result) for number, _, op, result in lines]
        found += [("backward", late, op, result) for _, late, op, result in lines if late]
    assert sorted(found) == sorted(steps(FILES[file]))


@pytest.mark.parametrize("file", FILES)
def test_in_the_book_s_order(file):
    for name, lines in functions(file).items():
        numbers = [number for number, *_ in lines]
        assert numbers == sorted(numbers), name


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("scaling")])
def test_in_sixty_lines(file):
    assert len((ROOT / file).read_text(encoding="utf-8").split("\n")) <= 61
