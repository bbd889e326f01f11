"""The page From laptop to cluster: its synchronised batch norm, and that its commands have these options."""

import re
from pathlib import Path

import pytest
import torch

import scaling
from scaling.collectives import all_reduce
from scaling.train.command import arguments

PAGE = (Path(scaling.__file__).parent.parent / "docs" / "from-laptop-to-cluster.md").read_text()


def normed(x, B, mesh):
    n = torch.stack([x.sum(0), x.square().sum(0)]) / B
    mean, square = all_reduce("n[K, D] {U_X} -> n[K, D]", n, mesh)
    return (x - mean) / (square - mean**2).sqrt()


def batch_norm(mesh):
    """(the normed rows of this rank, their gradient) of one batch split over X."""
    x, weights = batch()
    rows = slice(8 // mesh.size() * mesh.rank, 8 // mesh.size() * (mesh.rank + 1))
    mine = x[rows].clone().requires_grad_()
    y = normed(mine, 8, mesh)
    (y * weights[rows]).sum().backward()
    return y.detach(), mine.grad


def batch():
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, torch.arange(24, dtype=torch.float64).reshape(8, 3).sin()


@pytest.mark.parametrize("sizes", [{"X": 4}, {"X": 1}], ids=str)
def test_synchronised_batch_norm_is_one_device_s(ranks, sizes):
    x, weights = batch()
    y = torch.nn.functional.batch_norm(x.requires_grad_(), None, None, training=True, eps=1e-14)
    (y * weights).sum().backward()
    found = [torch.cat(parts) for parts in zip(*ranks(batch_norm, sizes), strict=True)]
    torch.testing.assert_close(found[0], y.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], x.grad, rtol=1e-10, atol=1e-10)


def test_the_page_s_commands_and_lines_are_these(capsys):
    assert 'mean, square = all_reduce("n[K, D] {U_X} -> n[K, D]", n, mesh)' in PAGE
    with pytest.raises(SystemExit):
        arguments(["--help"])
    known = capsys.readouterr().out
    lines = re.findall(r"-m scaling\.train (--[^\n`#]*)", PAGE.replace("\\\n", " "))
    used = {flag for line in lines for flag in re.findall(r"--[\w-]+", line)}
    assert used >= {"--data", "--out", "--mesh", "--dtype", "--resume"}
    assert [flag for flag in used if flag not in known] == []
