"""The strategies, sizes and meshes that their tests share, a layer of experts, and what one device computes."""

from collections import Counter

import torch

from scaling import tree
from scaling.configs import Config
from scaling.models.mlp import MLPConfig, MLPStack
from scaling.spec import parse
from scaling.strategies import data_parallel, expert, fsdp, fsdp_tp, tensor_parallel

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


OF_EXPERTS = {"L": 1, "D": 6, "F": 8, "N": 2, "K": 1, "H": 4, "V": 7}
SOFTMAX = Config("softmax", **OF_EXPERTS, E=8, k=2)
SIGMOID = Config(
    "sigmoid", **OF_EXPERTS, E=8, k=3, shared=2, routing="sigmoid", expert_groups=4, top_groups=2, routed_scale=2.5
)


def mask_of(how: str) -> "torch.Tensor | None":
    """bool[4, 6]: sequences of 6, 4, 0 and 5 tokens, the rest padding."""
    return torch.arange(6) < torch.tensor([6, 4, 0, 5])[:, None] if how == "padded" else None


def problem(config: Config, how: str):
    """Params, x[4, 6, D] and the cotangent dy, whole: normal numbers, in which no two tokens or experts are alike."""
    rng = torch.Generator().manual_seed(len(how))
    sizes = {"D": config.D, "E": config.E, "F": config.F}
    wide = {"D": config.D, "F": config.S}

    def draw(types, sizes):
        return {
            name: draw(text, wide)
            if isinstance(text, dict)
            else torch.randn(parse(text).global_shape(sizes), generator=rng, dtype=torch.float64) / 2
            for name, text in types.items()
        }

    params = draw(expert.specs(config, None), sizes)
    x, dy = (torch.randn(4, 6, config.D, generator=rng, dtype=torch.float64) for _ in range(2))
    if how == "one":  # all tokens choose expert 5 first; most others are empty
        x[..., 0] = x[..., 0].abs() + 1
        params["router"] *= 0.1
        params["router"][0] = torch.tensor([0, 0, 0, 0, 0, 9.0, 0, 0])
    if how == "ties":
        params["router"][:, 4:] = params["router"][:, :4]
        x[1] = 0
    return params, x, dy
