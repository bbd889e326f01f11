"""Unmodified modules under DP, FSDP and TP, by the types of their params: equal to one device, leaf by leaf."""

import pytest
import torch
from problems import close
from refused import refused
from torch import nn
from torch.func import functional_call, grad, grad_and_value

from scaling import optim, tree
from scaling.collectives import all_reduce, reduce_scatter
from scaling.mesh import AbstractMesh
from scaling.strategies.stateless import call, parameters, reduce_grads
from scaling.trace import trace

B, D, F = 8, 12, 20
DP = {"norm.weight": "g[D]", "norm.bias": "b[D]", "fc1.weight": "W[F, D]", "fc1.bias": "b[F]"}
DP |= {"fc2.weight": "W[D, F]", "fc2.bias": "b[D]"}
FSDP = {"norm.weight": "g[D_X]", "norm.bias": "b[D]", "fc1.weight": "W[F, D_X]", "fc1.bias": "b[F_X]"}
FSDP |= {"fc2.weight": "W[D_X, F]", "fc2.bias": "b[D]"}
TP = DP | {"fc1.weight": "W[F_Y, D]", "fc1.bias": "b[F_Y]", "fc2.weight": "W[D, F_Y]"}
BOTH = TP | {"fc1.weight": "W[F_Y, D_X]", "fc2.weight": "W[D_X, F_Y]", "norm.weight": "g[D_X]"}
LAST = {"fc2.bias": "b[D] {U_Y}"}  # one rank along Y adds the bias to the sum
WAYS = {"dp": (DP, DP), "fsdp": (FSDP, DP), "fsdp, gathered again": (FSDP, DP), "tp": (TP, TP | LAST),
        "fsdp + tp": (BOTH, TP | LAST)}  # fmt: skip


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


def problem():
    torch.manual_seed(0)
    net = Net().double()
    for W in net.parameters():
        nn.init.normal_(W)
    return net, torch.randn(2, B, D, dtype=torch.float64)


def terms(Out, Target):
    return (Out - Target).square().sum() / B


def one_device(steps=2):
    net, (x, Target) = problem()
    params, adamw = parameters(net), optim.adamw(0.01)
    state, seen = adamw.init(params), []
    for _ in range(steps):
        grads, loss = grad_and_value(lambda p: terms(functional_call(net, p, (x,)), Target))(params)
        params, state = adamw.update(grads, state, params)
        seen.append((loss, grads))
    return [loss for loss, _ in seen], seen[0][1], params


def train(mesh, way, steps=2):
    stored, used = WAYS[way]
    net, (x, Target) = problem()
    specs = {name: stored[name] for name in parameters(net)}
    params, adamw = tree.shard(parameters(net), specs, mesh), optim.adamw(0.01)
    g = call(net, stored, used, mesh, again="again" in way)
    x = tree.shard(x, "x[B_X, D]", mesh)

    def loss(params):
        Out = g(params, x)  # Out[B_X, D], under tensor parallelism {U_Y}
        if "tp" in way:
            Out = reduce_scatter("Out[B_X, D] {U_Y} -> Out[B_XY, D]", Out, mesh)
        return terms(Out, tree.shard(Target, "T[B_XY, D]" if "tp" in way else "T[B_X, D]", mesh))

    over = ("X", "Y") if "tp" in way else ("X",)
    state, losses, first = adamw.init(params), [], None
    for _ in range(steps):
        with trace() as log:
            grads, value = grad_and_value(loss)(params)
            grads = reduce_grads(grads, stored, mesh, over, loss="sum")
        first = tree.unshard(grads, specs, mesh) if first is None else first
        params, state = adamw.update(grads, state, params)
        losses.append(all_reduce(f"Loss[] {{U_{''.join(over)}}} -> Loss[]", value, mesh))
    return losses, first, tree.unshard(params, specs, mesh), log.count("AllGather", "X")


@pytest.mark.parametrize("way", WAYS)
def test_equal_to_one_device(ranks, way):
    losses, grads, params = one_device()
    mesh = {"X": 2, "Y": 2 if "tp" in way else 1}
    for got in ranks(train, mesh, way):
        close(torch.stack(got[0]), torch.stack(losses), torch.float64)
        close(got[1], grads, torch.float64)
        close(got[2], params, torch.float64)
        assert got[3] == {"dp": 0, "fsdp": 4, "fsdp, gathered again": 8, "tp": 0, "fsdp + tp": 3}[way]


def of_mean(mesh, way):
    """The gradients of a mean over each rank's own rows, and those of the mean over all rows."""
    stored, used = WAYS[way]
    net, (x, Target) = problem()
    specs = {name: stored[name] for name in parameters(net)}
    g, params = call(net, stored, used, mesh), tree.shard(parameters(net), specs, mesh)
    own, wanted = (tree.shard(each, "x[B_X, D]", mesh) for each in (x, Target))
    grads = grad(lambda p: (g(p, own) - wanted).square().mean())(params)
    grads = tree.unshard(reduce_grads(grads, stored, mesh, ("X",), loss="mean"), specs, mesh)
    return grads, grad(lambda p: (functional_call(net, p, (x,)) - Target).square().mean())(parameters(net))


@pytest.mark.parametrize("way", ["dp", "fsdp"])
def test_a_mean_over_own_rows_gives_the_mean_s_gradients(ranks, way):
    for got, wanted in ranks(of_mean, {"X": 4}, way):
        close(got, wanted, torch.float64)


MESH, PAIR = AbstractMesh({"X": 2}), nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, track_running_stats=False))
TYPES = {"0.weight": "W[F, D]", "0.bias": "b[F]", "1.weight": "g[F]", "1.bias": "h[F]"}
PARAMS, ROWS = parameters(PAIR), torch.ones(B, 2)


def called(params, module=PAIR):
    return lambda: call(module.eval(), TYPES, TYPES, MESH)(params, ROWS)


def without(name):
    return {key: type_ for key, type_ in TYPES.items() if key != name}


test_refused = refused(
    {
        "a loss of no kind": (
            lambda: reduce_grads(PARAMS, TYPES, MESH, "X", loss="average"),
            "one of 'sum', 'mean'",
        ),
        "a param without a type": (
            lambda: call(PAIR, without("1.weight"), without("1.weight"), MESH),
            "1.weight: this param of the module has no type",
        ),
        "a batch norm in training": (
            lambda: call(PAIR.train(), TYPES, TYPES, MESH),
            "1: BatchNorm1d in training takes its statistics from this rank's rows",
        ),
        "types that differ": (lambda: call(PAIR, TYPES, {"0.weight": "W[F, D]"}, MESH), "missing"),
        "a param too few": called({name: W for name, W in PARAMS.items() if name != "0.bias"}),
        "a param too many": called(PARAMS | {"more": ROWS}),
    }
)


def test_who_shards_a_module_says_of_which_kind_its_loss_is():
    with pytest.raises(TypeError, match="loss"):
        reduce_grads(PARAMS, TYPES, MESH, "X")
    assert call(PAIR.eval(), TYPES, TYPES, MESH)
