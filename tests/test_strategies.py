"""The four strategies of Part 5 against one device: loss, gradients, params after AdamW steps; collectives and bytes."""

import pytest
import torch

from scaling import optim, tree
from scaling.models.mlp import Config, Stack
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel

STRATEGIES = {s.__name__.split(".")[-1]: s for s in (data_parallel, fsdp, tensor_parallel, fsdp_tp)}
L, B, D, F = 3, 16, 16, 32
SIZES = {"L": L, "B": B, "D": D, "F": F}
MESHES = {
    "data_parallel": [{"X": 1}, {"X": 2}, {"X": 4}],
    "fsdp": [{"X": 1}, {"X": 2}, {"X": 4}],
    "tensor_parallel": [{"Y": 2}, {"Y": 4}],
    "fsdp_tp": [{"X": 2, "Y": 2}, {"X": 4, "Y": 2}, {"X": 2, "Y": 4}, {"X": 1, "Y": 2}, {"X": 4, "Y": 1}],
}
BLOCKS = [("gelu", True, True), ("gelu", False, False), ("relu", False, False), ("none", False, False)]
CASES = [(name, mesh, BLOCKS[0]) for name, meshes in MESHES.items() for mesh in meshes]
CASES += [(name, MESHES[name][0 if name == "fsdp_tp" else 1], block) for name in MESHES for block in BLOCKS[1:]]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}  # relative to the largest element; never to be loosened


def specs(strategy):
    """The params' types with their stacked layers."""
    return {name: strategy.SPECS[name].replace("[", "[L, ") for name in ("W_in", "W_out")}


def whole(dtype):
    g = torch.Generator().manual_seed(0)
    params = {
        "W_in": torch.randn(L, D, F, generator=g, dtype=torch.float64) / D**0.5,
        "W_out": torch.randn(L, F, D, generator=g, dtype=torch.float64) / F**0.5,
    }
    batches = torch.randn(5, 2, B, D, generator=g, dtype=torch.float64)  # inputs and targets of five steps
    return tree.map(lambda p: p.to(dtype), params), batches.to(dtype)


def one_device(dtype, block):
    """The reference: nn.Module, autograd and torch.optim on one device. Losses, first gradients, params after 5 steps."""
    params, batches = whole(dtype)
    activation, residual, norm = block
    model = (
        Stack(Config(L=L, D=D, F=F, activation=activation, residual=residual, norm=norm))
        .to_empty(device="cpu")
        .to(dtype)
    )
    model.load_state_dict(params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, first = [], None
    for In, target in batches:
        In = In.clone().requires_grad_()
        optimizer.zero_grad()
        loss = (model(In) - target).square().sum() / B
        loss.backward()
        losses.append(loss.detach())
        first = first or ({name: p.grad.clone() for name, p in model.named_parameters()}, In.grad)
        optimizer.step()
    return losses, *first, {name: p.detach().clone() for name, p in model.named_parameters()}


def run_steps(mesh, name, dtype, block, options):
    strategy, (params, batches) = STRATEGIES[name], whole(dtype)
    types = strategy.SPECS
    params = tree.shard(params, specs(strategy), mesh)
    adamw, losses, first = optim.adamw(0.01), [], None
    state = adamw.init(params)
    for In, target in batches:
        In, target = tree.shard([In, target], [types["In"], types["Out"]], mesh)
        before = In.clone(), tree.map(torch.clone, params)
        Out, saved = strategy.forward(params, In, mesh, *block)
        losses.append((Out - target).square().sum() / B)  # Loss[] {U}: this rank's terms
        dIn, grads = strategy.backward(2 / B * (Out - target), saved, params, mesh, **options)
        assert torch.equal(before[0], In), "the input was changed"
        assert all(map(torch.equal, tree.leaves(before[1]), tree.leaves(params))), "the params were changed"
        tree.check(grads, specs(strategy), SIZES, mesh, dtype)
        if first is None:
            first = tree.unshard(grads, specs(strategy), mesh), tree.unshard(dIn, types["In"], mesh)
        params, state = adamw.update(grads, state, params)
    return torch.stack(losses), *first, tree.unshard(params, specs(strategy), mesh)


def close(got, wanted, dtype):
    for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        assert (a - b).abs().max() <= TOLERANCE[dtype] * b.abs().max(), f"{(a - b).abs().max()} of {b.abs().max()}"


def label(value):
    if isinstance(value, tuple):
        return value[0] + "-residual-norm" * value[1]
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value


@pytest.mark.parametrize(("name", "mesh", "block"), CASES, ids=label)
def test_equal_to_one_device(ranks, name, mesh, block):
    for dtype in (torch.float64, torch.float32):
        wanted = one_device(dtype, block)
        results = ranks(run_steps, mesh, name, dtype, block, {})
        close(sum(result[0] for result in results), torch.stack(wanted[0]), dtype)
        for result in results:
            close(result[1], wanted[1], dtype)
            close(result[2], wanted[2], dtype)
            close(result[3], wanted[3], dtype)
