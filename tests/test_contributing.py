"""The strategy that CONTRIBUTING.md writes out is one: its lines are checked, and it equals one device."""

import importlib.util
from pathlib import Path

import torch
from problems import B, close, one_device, specs, whole

from scaling import tree
from scaling.check import check_source

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def listing() -> str:
    return PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]


def beside_one_device(mesh, path):
    spec = importlib.util.spec_from_file_location("strategy", path)
    strategy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(strategy)
    params, ((In, target), *_) = whole(torch.float64)
    shards = tree.shard(params, specs(strategy), mesh)
    Out, saved = strategy.forward(shards, In, mesh)
    dIn, grads = strategy.backward(2 * (Out - target) / B, saved, shards, mesh)
    losses, wanted, _ = one_device(block=("gelu", False, False))
    close([(Out - target).square().sum() / B, tree.unshard(grads, specs(strategy), mesh), dIn], [losses[0], *wanted])


def test_the_strategy_of_the_page(ranks, tmp_path):
    path = tmp_path / "strategy.py"
    path.write_text(listing(), encoding="utf-8")
    assert check_source(listing()) == []
    assert check_source(listing().replace("    Out = all_reduce(", "    all_reduce(")) != []
    ranks(beside_one_device, {"Y": 2}, str(path))
