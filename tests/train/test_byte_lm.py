"""The byte model trained by each strategy equals the byte model on one device; and the page From laptop to cluster: its
synchronised batch norm, and that its commands have these options."""

import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from machine import on_ranks
from problems import STRATEGIES, close, drawn, trained
from torch.func import grad_and_value

import scaling
from scaling import data, optim, tree
from scaling.collectives import all_reduce
from scaling.models import mlp
from scaling.strategies import data_parallel
from scaling.train.byte_lm import batch_axes, evaluate, loss_and_grads, param_specs, reduced
from scaling.train.command import arguments

PAGE = (Path(scaling.__file__).parent.parent / "docs" / "from-laptop-to-cluster.md").read_text()
CONFIG = mlp.MLPConfig(L=2, D=16, F=32, K=4)
B, SEED = 32, 3


def batches(steps, mesh=None, strategy=data_parallel):
    given = (mesh, batch_axes(strategy)) if mesh else ()
    return [*islice(data.batches(data.load_text(max_bytes=20_000), CONFIG.K, B, *given, seed=SEED), steps)]


def run_training(mesh, name, microbatches=1, dtype=torch.float64):
    """(params, losses, the first gradients, the first batch's loss after it), whole."""
    strategy, master = STRATEGIES[name], dtype == torch.bfloat16
    specs, given = param_specs(strategy), batches(8 if master else 3, mesh, strategy)
    params = mlp.init(CONFIG, SEED, dtype, mesh, specs)
    step = lambda params, batch: loss_and_grads(strategy, params, *batch, CONFIG, mesh, microbatches)  # noqa: E731
    adamw = optim.adamw(0.01, master=master)
    losses, (grads,), params = trained(params, step, given, adamw)
    tree.check([params, grads], [specs, specs], CONFIG.sizes, mesh, dtype)
    if master:
        tree.check(adamw.init(params)["master"], specs, CONFIG.sizes, mesh, torch.float32)
    valid = evaluate(strategy, params, *given[0], CONFIG, mesh)
    losses = torch.stack([reduced(strategy, loss, mesh) for loss in losses])
    return tree.unshard(params, specs, mesh), losses, tree.unshard(grads, specs, mesh), valid


@pytest.mark.parametrize(("name", "mesh", "microbatches"), [
    ("data_parallel", {"X": 2}, 1), ("fsdp", {"X": 2}, 2), ("tensor_parallel", {"Y": 2}, 2),
    ("fsdp_tp", {"X": 2, "Y": 2}, 4), ("fsdp_tp", {"X": 1, "Y": 1}, 1),
])  # fmt: skip
def test_equal_to_one_device(ranks, name, mesh, microbatches):
    step = lambda params, batch: grad_and_value(mlp.loss_fn)(params, *batch, CONFIG)[::-1]  # noqa: E731
    losses, (grads,), params = trained(mlp.init(CONFIG, SEED, torch.float64), step, batches(3))
    wanted = params, losses, grads, mlp.loss_fn(params, *batches(1)[0], CONFIG)
    for result in ranks(run_training, mesh, name, microbatches):
        close(result, wanted)


def test_bfloat16_with_float32_master_params(ranks):
    split, whole = (ranks(run_training, {"X": n, "Y": n}, "fsdp_tp", 1, torch.bfloat16)[0][1] for n in (2, 1))
    assert (split - whole).abs().max() < 0.05  # of 5.5: bfloat16 has 3 digits, and each mesh rounds in its own way
    assert split[-1] < split[0] - 0.1


@on_ranks({"X": 2})
def test_synchronised_batch_norm_is_one_device_s(mesh):
    (whole,) = drawn((2, 8, 3))
    x, weights = tree.shard(whole, "x[K, B_X, D]", mesh)
    x.requires_grad_()
    n = torch.stack([x.sum(0), x.square().sum(0)]) / 8
    mean, square = all_reduce("n[K, D] {U_X} -> n[K, D]", n, mesh)
    y = (x - mean) / (square - mean**2).sqrt()
    (y * weights).sum().backward()
    x_1, weights_1 = whole
    y_1 = torch.nn.functional.batch_norm(x_1.requires_grad_(), None, None, training=True, eps=1e-14)
    (y_1 * weights_1).sum().backward()
    wanted = tree.shard([y_1.detach(), x_1.grad], ["x[B_X, D]"] * 2, mesh)
    torch.testing.assert_close([y.detach(), x.grad], wanted, rtol=1e-10, atol=1e-10)


def test_the_page_s_commands_and_lines_are_these(capsys):
    assert 'mean, square = all_reduce("n[K, D] {U_X} -> n[K, D]", n, mesh)' in PAGE
    with pytest.raises(SystemExit):
        arguments(["--help"])
    known = capsys.readouterr().out
    lines = re.findall(r"-m scaling\.train (--[^\n`#]*)", PAGE.replace("\\\n", " "))
    used = {flag for line in lines for flag in re.findall(r"--[\w-]+", line)}
    assert used >= {"--data", "--out", "--mesh", "--dtype", "--resume"}
    assert [flag for flag in used if flag not in known] == []
