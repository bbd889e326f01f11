"""The strategy that CONTRIBUTING.md writes out is one: its lines are checked, and it equals one device."""

from pathlib import Path
from types import ModuleType

import torch
from machine import on_ranks
from problems import B, close, one_device, specs, whole

from scaling import tree
from scaling.check import check_source


@on_ranks({"Y": 2})
def test_the_strategy_of_the_page(mesh):
    page = Path(__file__).parents[1] / "CONTRIBUTING.md"
    listing = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert check_source(listing) == []
    assert check_source(listing.replace("    Out = all_reduce(", "    all_reduce(")) != []
    strategy = ModuleType("strategy")
    exec(listing, vars(strategy))
    params, ((In, target), *_) = whole(torch.float64)
    shards = tree.shard(params, specs(strategy), mesh)
    Out, saved = strategy.forward(shards, In, mesh)
    dIn, grads = strategy.backward(2 * (Out - target) / B, saved, shards, mesh)
    losses, wanted, _ = one_device(block=("gelu", False, False))
    close([(Out - target).square().sum() / B, tree.unshard(grads, specs(strategy), mesh), dIn], [losses[0], *wanted])
