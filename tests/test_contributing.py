"""The strategy that CONTRIBUTING.md writes out is one: its lines are checked, and it equals one device."""

import importlib.util
from pathlib import Path

import torch

from scaling import tree
from scaling.book.largest import largest
from scaling.check import check_source

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
L, B, D, F = 2, 4, 6, 8


def listing() -> str:
    return PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]


def gradients(mesh, path):
    spec = importlib.util.spec_from_file_location("strategy", path)
    strategy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(strategy)
    rng = torch.Generator().manual_seed(0)
    params = {
        "W_in": torch.randn(L, D, F, generator=rng).double(),
        "W_out": torch.randn(L, F, D, generator=rng).double(),
    }
    In, dOut = torch.randn(2, B, D, generator=rng).double()
    types = {name: strategy.SPECS[name].replace("[", "[L, ") for name in params}
    shards = tree.shard(params, types, mesh)
    Out, saved = strategy.forward(shards, In, mesh)
    dIn, grads = strategy.backward(dOut, saved, shards, mesh)
    leaves = [x.requires_grad_() for x in (In, params["W_in"], params["W_out"])]
    x = In
    for l in range(L):
        x = torch.nn.functional.gelu(x @ params["W_in"][l]) @ params["W_out"][l]
    wanted = torch.autograd.grad(x, leaves, dOut)
    got = [dIn, *(tree.unshard(grads, types, mesh)[name] for name in params)]
    return largest((a - b).abs().max().item() for a, b in zip([Out, *got], [x, *wanted], strict=True))


def test_the_strategy_of_the_page(ranks, tmp_path):
    path = tmp_path / "strategy.py"
    path.write_text(listing(), encoding="utf-8")
    assert check_source(listing()) == []
    assert check_source(listing().replace("    Out = all_reduce(", "    all_reduce(")) != []
    assert largest(ranks(gradients, {"Y": 2}, str(path))) < 1e-12
