"""Our strategies against PyTorch's own on the same ranks: loss, gradients, and params after two AdamW steps.

DistributedDataParallel, the same with ZeroRedundancyOptimizer, fully_shard, DTensor's parallelize_module, and the last
two together on a mesh of two axes.
"""

import warnings
from functools import partial

import pytest
import torch
from benchmarks.native import Native
from problems import STRATEGIES, B, L, close, specs, squares, whole

from scaling import optim, tree
from scaling.strategies import zero

STRATEGIES = STRATEGIES | {"zero": zero}
CASES = [({"X": 2}, name, torch.float64) for name in ("data_parallel", "zero", "fsdp")]
CASES += [({"Y": 2}, "tensor_parallel", torch.float64)]
CASES += [({"X": 2, "Y": 2}, "fsdp_tp", dtype) for dtype in (torch.float64, torch.float32)]
STEPS = 2


def ours(mesh, name, params, batches):
    strategy = STRATEGIES[name]
    params = tree.shard(params, specs(strategy), mesh)
    adamw, losses, first = optim.adamw(0.01), [], None
    grad_specs = {key: [spec] * L for key, spec in zero.SHARDS.items()} if name == "zero" else specs(strategy)
    state = zero.init(adamw, params, mesh) if name == "zero" else adamw.init(params)
    for In, target in batches:
        Out, saved = strategy.forward(params, In, mesh)
        losses.append(squares(Out, target))
        dIn, grads = strategy.backward(2 / B * (Out - target), saved, params, mesh)
        if first is None:
            whole_grads = tree.unshard(grads, grad_specs, mesh)
            first = {key: torch.stack([*g]) for key, g in whole_grads.items()}, dIn
        if name == "zero":
            params, state = zero.update(adamw, grads, state, params, mesh)
        else:
            params, state = adamw.update(grads, state, params)
    return losses, *first, tree.unshard(params, specs(strategy), mesh)


def theirs(mesh, name, params, batches):
    native, losses, first = Native(name, params, mesh, lr=0.01), [], None
    for In, target in batches:
        In.requires_grad_()
        losses.append(native.backward(In, partial(squares, Target=target)))
        first = first or (native.grads(), In.grad / mesh.sizes.get("X", 1))
        native.optimizer.step()
    return losses, *first, native.params()


@pytest.mark.parametrize(("mesh", "name", "dtype"), CASES)
def test_equal_to_torch(mesh, name, dtype):
    """Losses, gradients of params and of the input, new params."""
    params, batches = whole(dtype)
    types = [STRATEGIES[name].SPECS[key] for key in ("In", "Out")]
    terms, found = [f"Loss[] {{U_{''.join(mesh.sizes)}}}"] * STEPS, []
    for train in (ours, theirs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own code
            losses, *rest = train(mesh, name, params, [tree.shard([*b], types, mesh) for b in batches[:STEPS]])
        found.append([tree.unshard(losses, terms, mesh), *rest])
    assert len(tree.leaves(found[1])) == STEPS + 2 + 1 + 2
    close(*found)
