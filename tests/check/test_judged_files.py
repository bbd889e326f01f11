"""Whole files: programs as users write them are found right, and one that ends its process ends the judging."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scaling.check import check_source

DOCS = Path(__file__).parents[2] / "docs"
HEAD = "import torch\nfrom scaling.collectives import all_gather\n"
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
"""


def test_what_goes_into_a_square_layer_has_the_name_that_came_out_of_one():
    assert [str(found) for found in check_source(SQUARE)] == []


@pytest.mark.slow
def test_a_file_that_ends_its_process_ends_the_judging(tmp_path):
    for name, first in ("ends.py", "__import__('os')._exit(3)"), ("right.py", ""):
        (tmp_path / name).write_text(f"{HEAD}{first}\nx = all_gather('x[B_X] -> x[B]', torch.ones(2), None)\n")
    command = [sys.executable, "-m", "scaling.check", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "fix:" in done.stderr or done.returncode == 3  # of one processor: as the file says


PROGRAMS = [
    pytest.param(program, id=f"{page.name} {number}", marks=pytest.mark.slow)
    for page in (DOCS / "your-own-code.md", DOCS / "three-columns.md")
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_found_in_the_programs_of_the_docs(program):
    assert [str(found) for found in check_source(program)] == []
