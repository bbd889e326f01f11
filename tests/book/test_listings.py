"""The listings of Part 5 beside the book's: each numbered step once, with its number, its function and the type that it
leaves, in the book's order, in the library and in the chapters; and the chapters' training loop."""

import inspect
import re
from pathlib import Path

import pytest

from scaling.book import learning
from scaling.check import check_source

ROOT = Path(__file__).parents[2]
LINE = re.compile(r'\b(\w+)\("[^"]* -> (\w+\[[^"]*)".*\)  # (\d+)\.(?:, in the backward (\d+)\.)?')
OPS = {"*": "einsum", "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
DROPPED = '    dW_in = all_reduce("dW_in[D, F] {U_X} -> dW_in[D, F]", dW_in, mesh)  # 6. not on the critical path\n'

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
LISTINGS = {
    ("scaling/strategies/data_parallel.py", "chapters/05_dp.py"): DATA_PARALLEL,
    ("scaling/strategies/fsdp.py", "chapters/05_fsdp.py"): FSDP,
    ("scaling/strategies/tensor_parallel.py", "chapters/05_tp.py"): TENSOR_PARALLEL,
    ("scaling/strategies/fsdp_tp.py", "chapters/05_fsdp_tp.py"): FSDP_TP,
}


def steps(listing: str) -> list[tuple[str, int, str, str]]:
    """[(pass, number, function, the type that it leaves)] of the book."""
    found = []
    for line in listing.strip().split("\n"):
        where, rest = line.split(maxsplit=1)
        for step in rest.split(";  "):
            number, op, result = step.strip().split(maxsplit=2)
            found.append((where, int(number), OPS[op], result))
    return found


def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(("file", "book"), [(file, book) for files, book in LISTINGS.items() for file in files])
def test_each_step_of_the_book_once_and_in_its_order(file, book):
    """What both passes do stands once, with its number in either."""
    found = []
    for name, body in re.findall(r"^def (\w+)(.*?)(?=^\S|\Z)", read(file), re.M | re.S):
        where = {"gather": "forward", "reduce": "backward"}.get(name, name.removeprefix("layer_"))
        lines = LINE.findall(body)
        numbers = [int(number) for *_, number, _ in lines]
        assert numbers == sorted(numbers), name
        found += [(where, int(number), op, result) for op, result, number, _ in lines]
        found += [("backward", int(late), op, result) for op, result, _, late in lines if late]
    assert sorted(found) == sorted(steps(book))


@pytest.mark.slow
def test_a_chapter_without_one_of_its_lines_is_refused_before_a_rank_starts():
    text = read("chapters/05_dp.py")
    assert text.count(DROPPED) == 1
    (finding,) = check_source(text.replace(DROPPED, ""))
    assert "result dW_in[D, F] of backward" in finding.message
    assert "it is still unreduced over X" in finding.message


def test_the_loop_that_05_dp_shows_is_the_one_that_the_others_run():
    def body(text: str) -> str:
        return re.search(r"^def train\(.*?\n(?:    \"\"\".*?\"\"\"\n)?(.*?)\n\n\n", text, re.M | re.S)[1]

    assert body(read("chapters/05_dp.py")).replace("learning.", "") == body(inspect.getsource(learning))
