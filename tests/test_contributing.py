"""The strategy that CONTRIBUTING.md writes out is one: its lines are checked, and it equals one device. The pages name
one torch, in the range that pyproject.toml and README say."""

import re
from pathlib import Path
from types import ModuleType

import torch
from machine import on_ranks
from problems import B, close, one_device, specs, whole

from scaling import tree
from scaling.check import check_source

ROOT = Path(__file__).parents[1]


def test_pages_install_one_torch_which_lies_in_the_range():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", ".github/workflows/site.yml")]
    pages += (ROOT / "docs").glob("*.md")
    tested = {found for page in pages for found in re.findall(r"torch==2\.(\d+)\.\*", page.read_text("utf-8"))}
    low, end = map(int, re.search(r"torch>=2\.(\d+),<2\.(\d+)", (ROOT / "pyproject.toml").read_text()).groups())
    assert [low <= int(minor) < end for minor in tested] == [True]
    assert f"torch 2.{low} to 2.{end - 1}" in (ROOT / "README.md").read_text("utf-8")


@on_ranks({"Y": 2})
def test_the_strategy_of_the_page(mesh):
    listing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
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
