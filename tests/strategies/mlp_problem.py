"""The strategies, sizes and meshes that their tests share, and what one device computes."""

from collections import Counter

import torch

from scaling import tree
from scaling.models.mlp import MLPConfig, MLPStack
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel

STRATEGIES = {s.__name__.split(".")[-1]: s for s in (data_parallel, fsdp, tensor_parallel, fsdp_tp)}
MESHES = {
    "data_parallel": [{"X": 1}, {"X": 2}, {"X": 4}],
    "fsdp": [{"X": 1}, {"X": 2}, {"X": 4}],
    "tensor_parallel": [{"Y": 2}, {"Y": 4}],
    "fsdp_tp": [{"X": 2, "Y": 2}, {"X": 4, "Y": 2}, {"X": 1, "Y": 2}, {"X": 4, "Y": 1}],
}
L, B, D, F = 3, 16, 16, 32
SIZES = {"L": L, "B": B, "D": D, "F": F}
BLOCKS = [("gelu", True, True), ("gelu", False, False), ("relu", False, False), ("none", False, False)]
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
    batches = torch.randn(3, 2, B, D, generator=g, dtype=torch.float64)  # inputs and targets of three steps
    return tree.map(lambda p: p.to(dtype), params), batches.to(dtype)


def one_device(dtype, block):
    """The reference, by nn.Module, autograd and torch.optim: losses, first gradients, params after 3 steps."""
    params, batches = whole(dtype)
    activation, residual, norm = block
    model = (
        MLPStack(MLPConfig(L=L, D=D, F=F, activation=activation, residual=residual, norm=norm))
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


def close(got, wanted, dtype):
    for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        assert (a - b).abs().max() <= TOLERANCE[dtype] * b.abs().max(), f"{(a - b).abs().max()} of {b.abs().max()}"


def counts(log):
    return Counter((event.op, "".join(event.axes)) for event in log.collectives())


AG, RS, AR = "AllGather", "ReduceScatter", "AllReduce"
