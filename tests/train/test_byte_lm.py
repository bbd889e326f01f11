"""The byte model trained by each strategy equals the byte model on one device."""

from itertools import islice

import pytest
import torch
from torch.func import grad_and_value

from scaling import data, optim, tree
from scaling.models import mlp
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel
from scaling.train.byte_lm import batch_axes, evaluate, loss_and_grads, param_specs, reduced

CONFIG = mlp.MLPConfig(L=2, D=16, F=32, K=4)
B, SEED = 32, 3
STRATEGIES = {s.__name__.split(".")[-1]: s for s in (data_parallel, fsdp, tensor_parallel, fsdp_tp)}


def text():
    return data.load_text(max_bytes=20_000)


def trained(loss_and_grads, params, batches, master=False):
    """(params, the losses, the first gradients, the optimizer's state) after a step of AdamW for each batch."""
    adamw, losses, first = optim.adamw(0.01, master=master), [], None
    state = adamw.init(params)
    for batch in batches:
        loss, grads = loss_and_grads(params, *batch)
        params, state = adamw.update(grads, state, params)
        losses.append(loss)
        first = first or grads
    return params, losses, first, state


def run_training(mesh, name, microbatches):
    strategy = STRATEGIES[name]
    specs = param_specs(strategy)
    params = mlp.init(CONFIG, SEED, torch.float64, mesh, specs)
    batches = [*islice(data.batches(text(), CONFIG.K, B, mesh, batch_axes(strategy), SEED), 3)]
    step = lambda params, *batch: loss_and_grads(strategy, params, *batch, CONFIG, mesh, microbatches)  # noqa: E731
    params, losses, grads, _ = trained(step, params, batches)
    tree.check(grads, specs, CONFIG.sizes, mesh, torch.float64)
    valid = evaluate(strategy, params, *batches[0], CONFIG, mesh)
    losses = [reduced(strategy, loss, mesh) for loss in losses]
    return tree.unshard(params, specs, mesh), losses, tree.unshard(grads, specs, mesh), valid


def one_device():
    batches = [*islice(data.batches(text(), CONFIG.K, B, seed=SEED), 3)]
    step = lambda params, *batch: grad_and_value(mlp.loss_fn)(params, *batch, CONFIG)[::-1]  # noqa: E731
    params, losses, grads, _ = trained(step, mlp.init(CONFIG, SEED, torch.float64), batches)
    return params, losses, grads, mlp.loss_fn(params, *batches[0], CONFIG)


@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"),
    [
        ("data_parallel", {"X": 4}, 1),
        ("fsdp", {"X": 4}, 2),
        ("tensor_parallel", {"Y": 4}, 2),
        ("fsdp_tp", {"X": 2, "Y": 2}, 1),
        ("fsdp_tp", {"X": 2, "Y": 2}, 4),
        ("fsdp_tp", {"X": 1, "Y": 1}, 1),
    ],
)
def test_equal_to_one_device(ranks, name, mesh, microbatches):
    wanted = one_device()
    for result in ranks(run_training, mesh, name, microbatches):
        for got, want in zip(tree.leaves(result), tree.leaves(wanted), strict=True):
            assert (got - want).abs().max() <= 1e-12 * want.abs().max()


def run_bfloat16(mesh, name):
    """Losses with params, activations and collectives in bfloat16, float32 master copies in the optimizer's state."""
    strategy = STRATEGIES[name]
    specs = param_specs(strategy)
    params = mlp.init(CONFIG, SEED, torch.bfloat16, mesh, specs)
    batches = islice(data.batches(text(), CONFIG.K, B, mesh, batch_axes(strategy), SEED), 8)
    step = lambda params, *batch: loss_and_grads(strategy, params, *batch, CONFIG, mesh)  # noqa: E731
    params, losses, _, state = trained(step, params, batches, master=True)
    tree.check(params, specs, CONFIG.sizes, mesh, torch.bfloat16)
    tree.check(state["master"], specs, CONFIG.sizes, mesh, torch.float32)
    return torch.stack([reduced(strategy, loss, mesh) for loss in losses]).double()


def test_bfloat16_with_float32_master_params(ranks):
    split, whole = (ranks(run_bfloat16, {"X": n, "Y": n}, "fsdp_tp")[0] for n in (2, 1))
    assert (split - whole).abs().max() < 0.05  # of 5.5: bfloat16 has 3 digits, and each mesh rounds in its own way
    assert split[-1] < split[0] - 0.1
