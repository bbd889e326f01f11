"""Faults of whole statements, which no edit of one typed call plants, in the listings of strategies and chapters.

A loss that is reduced before it is differentiated; a residual of another type; a gradient that is returned unreduced; a
wait for the wrong array. Without them the listings are clean.
"""

import re
from pathlib import Path

import pytest

from scaling.check import check_source

ROOT = Path(__file__).parents[2]
SPLIT = ["scaling/strategies/tensor_parallel.py", "scaling/strategies/fsdp_tp.py"]
SPLIT += ["chapters/05_tp.py", "chapters/05_fsdp_tp.py"]
LISTED = ["chapters/05_dp.py", "chapters/05_fsdp.py", "chapters/05_fsdp_tp.py"]
LATE = [f"scaling/strategies/{name}.py" for name in ("data_parallel", "fsdp", "fsdp_tp", "zero", "pods")]
LOSSES = {"chapters/05_dp.py": "X", "chapters/05_fsdp.py": "X", "chapters/05_tp.py": "Y"}


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def rules(file: str, before: str, after: str) -> list[str]:
    """The rules that are broken in a file with this edit."""
    text = text_of(file)
    assert before in text
    return [found.rule for found in check_source(text.replace(before, after, 1), file)]


@pytest.mark.parametrize("file", LOSSES)
def test_a_loss_reduced_before_it_is_differentiated(file):
    line = re.search(r"        return (.*\.square\(\)\.sum\(\))  # Loss\[\] \{U_", text_of(file))
    assert line is not None
    reduced = f'all_reduce("Loss[] {{U_{LOSSES[file]}}} -> Loss[]", {line[1]}, mesh)'
    head = "from scaling.collectives import all_reduce\n"
    found = check_source(head + text_of(file).replace(f"return {line[1]}", f"return {reduced}"), file)
    assert "loss" in [fault.rule for fault in found]


@pytest.mark.parametrize("file", SPLIT)
def test_a_residual_of_another_type(file):
    line = re.search(r'Out = reduce_scatter\("Out\[.*", Out, mesh\)', text_of(file))
    assert line is not None
    assert rules(file, line[0], line[0].replace("Out, mesh", "Out + In, mesh"))[-1] == "partial-plus-whole"
    assert rules(file, "return Out, (In", "return Out + In, (In")[-1] == "split"


@pytest.mark.parametrize("weight", ["dW_in", "dW_out"])
@pytest.mark.parametrize("file", LISTED + LATE)
def test_a_gradient_returned_unreduced(file, weight):
    line = re.search(rf"    {weight} = (all_reduce|reduce_scatter)\(.*\n", text_of(file))
    assert line is not None
    assert set(rules(file, line[0], "")) == {"result"}


WAITS = """
import torch
from scaling.collectives import all_gather, wait

def f(A, B, mesh):
    '''Of A[I_X, J], B[J, K_X].'''
    a = all_gather("A[I_X, J] -> A[I, J]", A, mesh, async_op=True)
    b = all_gather("B[J, K_X] -> B[J, K]", B, mesh, async_op=True)
    """


@pytest.mark.parametrize(("lines", "rule"), [
    ("wait(a)\n    return torch.relu(a), wait(b)", "pending"),
    ("a = wait(a)\n    return a @ b", "pending"),
    ("a = wait(b)\n    return torch.relu(a), torch.relu(b)", "pending"),
    ("a = a.wait()\n    return a, torch.relu(b)", "pending"),
    ("b = wait(a)\n    return b", "never-waited"),
    ("a = wait(a)\n    return a", "never-waited"),
])  # fmt: skip
def test_a_wait_for_the_wrong_array(lines, rule):
    assert rule in [found.rule for found in check_source(WAITS + lines)]
    assert check_source(WAITS + "a, b = wait(a), wait(b)\n    return torch.relu(a), torch.relu(b)") == []


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
