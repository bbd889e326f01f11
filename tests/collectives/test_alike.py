"""Calls above the collectives whose arguments differ between ranks: every rank gets an error that names call, ranks and
argument, before anything is sent. Without it most would give wrong numbers: no message shows the difference."""

import re

import pytest
import torch

from scaling import optim, tree
from scaling.collectives import transfer
from scaling.collectives.checked import alike
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.schedules import gpipe, one_f_one_b
from scaling.spec import ShardingError
from scaling.strategies import fsdp, pipeline, transformer
from scaling.strategies.context import attention
from scaling.strategies.expert import moe
from scaling.train import checkpoint

CONFIG = Config("small", L=1, D=4, F=4, N=2, K=2, H=2, V=8)
EXPERTS = CONFIG.with_(E=2, k=1)
WEIGHT, SPLIT = {"w": torch.ones(2, 3)}, {"w": "w[I_X, J]"}


def forward(mesh, folder, activation="gelu"):
    params = {"W_in": torch.ones(1, 2, 4), "W_out": torch.ones(1, 4, 2)}
    fsdp.forward(params, torch.ones(2, 4), mesh, activation)


def attend(mesh, folder, window=None):
    attention(*torch.ones(3, 1, 2, 2, 2), mesh, axis="X", window=window)


def route(mesh, folder, k=1):
    params = {"router": torch.ones(4, 2)} | {name: torch.ones(1, 4, 4) for name in ("W_in", "W_gate", "W_out")}
    moe(params, torch.ones(1, 2, 4), EXPERTS.with_(k=k), mesh, "X")


def update(mesh, folder, lr=0.1, most=1.0):
    rule = optim.chain(optim.clip(most), optim.adamw(lr))
    rule.update(WEIGHT, rule.init(WEIGHT), WEIGHT, specs=SPLIT, mesh=mesh)


def init(mesh, folder, seed=0):
    tree.init({"w": tree.Normal(1.0)}, SPLIT, {"I": 4, "J": 3}, mesh, seed)


def save(mesh, folder, step=5, dtype=torch.float32, n=1):
    state = {"w": torch.ones(2, 3, dtype=dtype), "n": n}
    checkpoint.save(folder, state, SPLIT, mesh, step)


def train(mesh, folder, rows=2, **changed):
    options = {name: changed.pop(name) for name in ("z_loss", "remat") if name in changed}
    config = CONFIG.with_(**changed)
    params = transformer.shard(model.init(config, 0), config, mesh)
    ids = torch.zeros(rows, 4, dtype=torch.int64)
    transformer.loss_and_grads(params, ids, ids, config, mesh, **options)


def evaluate(mesh, folder, eps=1e-5):
    config = CONFIG.with_(eps=eps)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    transformer.loss(transformer.shard(model.init(config, 0), config, mesh), ids, ids, config, mesh)


def pipe(mesh, folder, make=gpipe, layers=1):
    params = {"W_in": torch.ones(layers, 4, 6), "W_out": torch.ones(layers, 6, 4)}
    x = torch.ones(4, 4)
    pipeline.value_and_grad(params, x, x, mesh, make(2, 2), lambda Out, Target: Out.sum(), axis="X")


def move(mesh, folder, rows=2):
    transfer("A[I_X] -> A[I]", torch.ones(rows), mesh, mesh)


# (the call, what rank 1 gives otherwise) -> what each of the two ranks is told of
CASES = {
    "activation": (forward, {"activation": "relu"}, "a forward of 1 layers with activation='{}'", ("gelu", "relu")),
    "window": (attend, {"window": 1}, "attention over X .* window={},", ("None", "1")),
    "experts": (route, {"k": 2}, "moe with config=Config.*{}", ("V=8, E=2\\)", "k=2\\)")),
    "learning rate": (update, {"lr": 0.2}, "update with lr={},", ("0.1", "0.2")),
    "clip": (update, {"most": 2.0}, "clip with max_norm={},", ("1.0", "2.0")),
    "seed": (init, {"seed": 1}, "init with seed={},", ("0", "1")),
    "step": (save, {"step": 6}, "checkpoint.save of step {} with", ("5", "6")),
    "dtype": (save, {"dtype": torch.float64}, r"checkpoint.save .*\[{}\[2, 3\], w\[I_X, J\]\]", ("float32", "float64")),
    "number": (save, {"n": 2}, r"checkpoint.save .*n[^:]*: \[{}, None\]", ("1", "2")),
    "rows": (train, {"rows": 3}, r"loss_and_grads .* tokens=int64\[{}, 4\]", ("2", "3")),
    "theta": (train, {"theta": 1e4}, "loss_and_grads with config=Config.*{}", ("V=8\\)", "theta=10000.0\\)")),
    "z loss": (train, {"z_loss": 0.1}, "loss_and_grads .* z_loss={},", ("0.0", "0.1")),
    "remat": (train, {"remat": "block"}, "loss_and_grads .* remat='{}'", ("none", "block")),
    "eps": (evaluate, {"eps": 0.1}, "loss with config=Config.*{}", ("V=8\\)", "eps=0.1\\)")),
    "schedule": (pipe, {"make": one_f_one_b}, "pipeline {},", ("gpipe", "1f1b")),
    "layers": (pipe, {"layers": 2}, r"pipeline gpipe, .*W_in: float32\[{}, 4, 6\]", ("1", "2")),
    "shards": (move, {"rows": 3}, r"transfer A\[I_X\] -> A\[I\] .* x=float32\[{}\]", ("2", "3")),
}


def differ(mesh, name, folder):
    call, otherwise, *_ = CASES[name]
    with pytest.raises(ShardingError) as error:
        call(mesh, folder, **(otherwise if mesh.rank else {}))
    return str(error.value)


@pytest.mark.parametrize("name", CASES)
def test_arguments_that_differ_between_ranks(ranks, name, tmp_path):
    _, _, said, values = CASES[name]
    for message in ranks(differ, {"X": 2}, name, tmp_path):
        for rank, value in enumerate(values):
            assert re.search(f"  rank {rank}: .*{said.format(value)}", message), message


def compared(mesh):
    alike(mesh, "a call", x=torch.ones(2), f=lambda: mesh.rank, long="a" * 200)
    with pytest.raises(ShardingError, match=r"rank 0: a call with long='a+\.\.\. \(digest \w+\)\n  rank 1: "):
        alike(mesh, "a call", long=["a" * 200, "a" * 199 + "b"][mesh.rank])


def test_functions_are_not_compared_and_long_arguments_by_their_digest(ranks):
    ranks(compared, {"X": 2})
