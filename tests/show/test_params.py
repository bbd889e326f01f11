"""`python -m scaling.show params`: the types of a Transformer's leaves and their bytes on a rank."""

import math

import pytest

from scaling.configs import get
from scaling.cost import transformer as tm
from scaling.show.params import leaf_rows, main
from scaling.spec import parse


@pytest.mark.parametrize(
    ("name", "sizes"), [("llama3-70b", {"X": 64, "Y": 8}), ("llama3-405b", {"Z": 2, "X": 8, "Y": 8}),
                        ("mixtral-8x7b", {"X": 4, "E": 8})]
)  # fmt: skip
def test_all_ranks_together_hold_the_model(name, sizes):
    config, on_all = get(name), 0
    for _, text, _, nbytes in leaf_rows(config, sizes, "bf16"):
        on_all += nbytes * math.prod(
            sizes[axis] for axis in parse(text).axes
        )  # one copy of what the rest of the mesh replicates
    assert on_all == 2 * tm.num_params(config)


def test_command_line(capsys):
    assert main(["--model", "llama3-70b", "--mesh", "P=2,X=64,Y=8"]) == 0
    out = capsys.readouterr().out
    assert "W_Q[L, D_X, N_Y, H]  80x128x8x128  20,971,520" in out
    assert max(map(len, out.splitlines())) <= 100
    assert main(["--mesh", "Q=2"]) == 1
    assert "splits nothing of a Transformer" in capsys.readouterr().err
