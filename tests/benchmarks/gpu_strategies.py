"""For gpu.py: strategies, pipelines and the Transformer in float64, beside autograd on one device."""

import torch
from native import Block

from scaling import tree
from scaling.book.largest import largest
from scaling.configs import Config
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.schedules import make
from scaling.strategies import data_parallel, fsdp, fsdp_tp, pipeline, tensor_parallel, transformer
from scaling.strategies.axes import present

CLOSE = 1e-10  # relative to the largest: float64, in other orders of summation
STRATEGIES = {"dp": (data_parallel, "X"), "fsdp": (fsdp, "X"), "tp": (tensor_parallel, "Y"), "fsdp_tp": (fsdp_tp, "XY")}
L, B, D, F = 2, 32, 64, 128  # of the book's stack of layers
CONFIG = Config("tiny", L=4, D=64, F=128, N=8, K=8, H=16, V=128)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest of `wanted`."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def close(name: str, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> list[dict]:
    off = {what: apart(*each) for what, each in pairs.items()}
    if not largest(off.values()) <= CLOSE:
        raise ValueError(f"{name}: relative differences {off}, of which none may exceed {CLOSE:g}")
    return [{"kind": "strategy", "line": name, "off by": largest(off.values())}]


def one_device(device) -> tuple[dict, torch.Tensor, torch.Tensor, dict]:
    """(params, In, Out, gradients) of the book's stack as torch.nn has it; the loss is half the sum of Out's squares"""
    g = torch.Generator().manual_seed(0)
    params = {"W_in": torch.randn(L, D, F, generator=g) / D**0.5, "W_out": torch.randn(L, F, D, generator=g) / F**0.5}
    params = {name: W.double().to(device) for name, W in params.items()}
    In = torch.randn(B, D, generator=g).double().to(device)
    stack = torch.nn.Sequential(*map(Block, params["W_in"], params["W_out"]))
    Out = stack(In)
    (Out.square().sum() / 2).backward()
    grads = {"W_in": [b.up.weight.grad.T for b in stack], "W_out": [b.down.weight.grad.T for b in stack]}
    return params, In, Out.detach(), {name: torch.stack(layers) for name, layers in grads.items()}


def strategy(name: str, mesh: Mesh) -> list[dict]:
    listing, _ = STRATEGIES[name]
    params, In, wanted, grads = one_device(mesh.device)
    types = listing.SPECS
    specs = {leaf: types[leaf].replace("[", "[L, ") for leaf in params}
    shards = tree.shard(params, specs, mesh)
    Out, saved = listing.forward(shards, tree.shard(In, types["In"], mesh), mesh)
    _, found = listing.backward(Out, saved, shards, mesh)
    found = tree.unshard(found, specs, mesh)
    pairs = {"Out": (tree.unshard(Out, types["Out"], mesh), wanted)}
    return close(f"{name} on {mesh}", pairs | {leaf: (found[leaf], grads[leaf]) for leaf in params})


def pipelined(mesh: Mesh, schedule: str) -> list[dict]:
    plan = make(schedule, mesh.sizes["Z"], 8)
    params, In, _, grads = one_device(mesh.device)
    if plan.virtual_stages > L:
        more = plan.virtual_stages // L
        raise ValueError(f"{schedule} has {plan.virtual_stages} stages, {L} layers; fix: make it {more * L} layers")
    specs = {leaf: pipeline.SPECS[leaf] for leaf in params}
    shards = tree.shard(pipeline.arrange(params, plan), specs, mesh)
    _, found = pipeline.value_and_grad(shards, In, In, mesh, plan, lambda Out, _: Out.square().sum() / 2)
    wanted = tree.shard(pipeline.arrange(grads, plan), specs, mesh)
    return close(f"{schedule} on {mesh}", {leaf: (found[leaf], wanted[leaf]) for leaf in params})


def whole_transformer(mesh: Mesh, **options) -> list[dict]:
    """The Transformer's loss and gradients, with and without a schedule."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(CONFIG.V, (8, 33), generator=g).to(mesh.device)
    params = model.init(CONFIG, 0, torch.float64, mesh.device)
    loss, grads = model.loss_and_grads(params, tokens, config=CONFIG)
    layout = {"schedule": options["schedule"]} if options else {}
    batch = (tree.shard(t.contiguous(), str(present("t[B_X, T]", mesh)), mesh) for t in (tokens[:, :-1], tokens[:, 1:]))
    shards = transformer.shard(params, CONFIG, mesh, **layout)
    own, found = transformer.loss_and_grads(shards, *batch, CONFIG, mesh, **options)
    wanted = transformer.shard(grads, CONFIG, mesh, **layout)  # of a stage, its own layers
    pairs = {"loss": (own, loss.double())}
    for where, a, b in zip(tree.named_leaves(wanted), tree.leaves(found), tree.leaves(wanted), strict=True):
        pairs[str(where)] = (a, b)
    return close(f"Transformer on {mesh}", pairs)
