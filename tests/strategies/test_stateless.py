"""Unmodified modules under DP, FSDP and TP, by the types of their params: equal to one device, leaf by leaf.

Our strategies against PyTorch's own on the same ranks: loss, gradients, and params after two AdamW steps, by
DistributedDataParallel, the same with ZeroRedundancyOptimizer, fully_shard, DTensor's parallelize_module, and the last
two together on a mesh of two axes."""

import copy  # noqa: F401 - a call in REFUSED names it
import warnings
from functools import partial

import pytest
import torch
from benchmarks.native import Native
from problems import STRATEGIES, B, D, F, L, close, specs, squares, trained, whole
from refused import evaluated, refused
from torch import nn
from torch.func import functional_call, grad_and_value

from scaling import optim, tree
from scaling.collectives import reduce_scatter
from scaling.mesh import AbstractMesh
from scaling.strategies import zero
from scaling.strategies.stateless import call, parameters, reduce_grads
from scaling.trace import trace

DP = {"norm.weight": "g[D]", "norm.bias": "b[D]", "fc1.weight": "W[F, D]", "fc1.bias": "b[F]"}
DP |= {"fc2.weight": "W[D, F]", "fc2.bias": "b[D]"}
FSDP = {"norm.weight": "g[D_X]", "norm.bias": "b[D]", "fc1.weight": "W[F, D_X]", "fc1.bias": "b[F_X]"}
FSDP |= {"fc2.weight": "W[D_X, F]", "fc2.bias": "b[D]"}
TP = DP | {"fc1.weight": "W[F_Y, D]", "fc1.bias": "b[F_Y]", "fc2.weight": "W[D, F_Y]"}
BOTH = TP | {"fc1.weight": "W[F_Y, D_X]", "fc2.weight": "W[D_X, F_Y]", "norm.weight": "g[D_X]"}
LAST = {"fc2.bias": "b[D] {U_Y}"}  # one rank along Y adds the bias to the sum
WAYS = {"dp": (DP, DP, 0), "fsdp": (FSDP, DP, 4), "fsdp, gathered again": (FSDP, DP, 8), "tp": (TP, TP | LAST, 0),
        "fsdp + tp": (BOTH, TP | LAST, 3)}  # types as stored and as used, gathers a step  # fmt: skip
WAYS |= {f"{way}, of a mean over own rows": WAYS[way] for way in ("dp", "fsdp")}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


def mean_square(Out, Target):
    return (Out - Target).square().mean()


@pytest.mark.parametrize(("mesh", "way"), [({"X": 2, "Y": 2 if "tp" in way else 1}, way) for way in WAYS])
def test_equal_to_one_device(mesh, way):
    stored, used, gathers = WAYS[way]
    torch.manual_seed(0)
    net, batches = Net().double(), whole()[1][:2]
    for W in net.parameters():
        nn.init.normal_(W)
    specs = {name: stored[name] for name in parameters(net)}
    g = call(net, stored, used, mesh, again="again" in way)
    over, of = ("X", "Y") if "tp" in way else ("X",), mean_square if "mean" in way else squares
    targets = f"T[B_{''.join(over)}, D]"

    def alone(params, batch):
        grads, value = grad_and_value(lambda params: of(functional_call(net, params, (batch[0],)), batch[1]))(params)
        return value, grads

    def step(params, batch):
        x, Target = tree.shard([*batch], ["x[B_X, D]", targets], mesh)

        def loss(params):
            Out = g(params, x)  # Out[B_X, D], under tensor parallelism {U_Y}
            Out = reduce_scatter("Out[B_X, D] {U_Y} -> Out[B_XY, D]", Out, mesh) if "tp" in way else Out
            return of(Out, Target)

        grads, value = grad_and_value(loss)(params)
        value = value / mesh.size("X") if "mean" in way else value
        return value, reduce_grads(grads, stored, mesh, over, loss="mean" if "mean" in way else "sum")

    with trace() as log:
        losses, *found = trained(tree.shard(parameters(net), specs, mesh), step, batches)
    losses = tree.unshard(losses, f"Loss[S] {{U_{''.join(over)}}}", mesh)
    close((losses, *tree.unshard(found, [[specs], specs], mesh)), trained(parameters(net), alone, batches))
    assert log.count("AllGather", "X") == gathers * len(batches)


MESH = AbstractMesh({"X": 2})
PAIR = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
TYPES = {"0.weight": "W[F, D]", "0.bias": "b[F]", "1.weight": "g[F]", "1.bias": "h[F]"}
PARAMS, ROWS = parameters(PAIR), torch.ones(B, 2)


def called(params, used=TYPES, module=PAIR):
    return call(module, TYPES, used, MESH)(params, ROWS)


def without(tree, name):
    return {key: leaf for key, leaf in tree.items() if key != name}


REFUSED = """
call                                                    words of its error
reduce_grads(PARAMS, TYPES, MESH, 'X', loss='average')  one of 'sum', 'mean'
call(PAIR, *[without(TYPES, '1.weight')] * 2, MESH)     1.weight: this param of the module has no type
called(PARAMS, module=copy.deepcopy(PAIR).train())
    1: BatchNorm1d in training takes its statistics from this rank's rows
called(PARAMS, used={'0.weight': 'W[F, D]'})            used["0.bias"]: missing
called(without(PARAMS, '0.bias'))                       params["0.bias"]: missing
called(PARAMS | {'more': ROWS})                         params["more"]: has no spec
"""
test_refused = refused(evaluated(REFUSED, globals()))


def test_of_which_kind_a_loss_is_must_be_said():
    with pytest.raises(TypeError, match="loss"):
        reduce_grads(PARAMS, TYPES, MESH, "X")


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
