"""Calls whose arguments differ between ranks, above the collectives too, where no message shows it and most would give
wrong numbers: every rank gets an error that names call, ranks and argument, before anything is sent. Those of which an
act is in tests/misuse are taken from there, the others are a table."""

import os
import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from misuse.ranks import Case, finding, page_of, tell
from misuse.rooms import ON_RANKS
from misuse.steps import CHANGED
from test_checked import TWO, are_told, refused

from scaling import collectives as c
from scaling import tree
from scaling.collectives.checked import alike
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.schedules import gpipe, one_f_one_b
from scaling.spec import ShardingError, parse
from scaling.strategies import pipeline, transformer
from scaling.strategies.expert import moe

CONFIG = Config("small", L=1, D=4, F=4, N=2, K=2, H=2, V=8)
IDS = torch.zeros(2, 4, dtype=torch.int64)


def route(mesh, k=1):
    params = {"router": torch.ones(4, 2)} | {name: torch.ones(1, 4, 4) for name in ("W_in", "W_gate", "W_out")}
    moe(params, torch.ones(1, 2, 4), CONFIG.with_(E=2, k=k), mesh, "X")


def init(mesh, seed=0):
    tree.init({"w": tree.Normal(1.0)}, {"w": "w[I_X, J]"}, {"I": 4, "J": 3}, mesh, seed)


def evaluate(mesh, eps=1e-5):
    config = CONFIG.with_(eps=eps)
    transformer.loss(transformer.shard(model.init(config, 0), config, mesh), IDS, IDS, config, mesh)


def pipe(mesh, make=gpipe, layers=1):
    params = {"W_in": torch.ones(layers, 4, 6), "W_out": torch.ones(layers, 6, 4)}
    x = torch.ones(4, 4)
    pipeline.value_and_grad(params, x, x, mesh, make(2, 2), lambda Out, Target: Out.sum(), axis="X")


def move(mesh, rows=2):
    c.transfer("A[I_X] -> A[I]", torch.ones(rows), mesh, mesh)


# (the call, what rank 1 gives otherwise) -> what all are told of each of the two
ABOVE = {
    "experts": (route, {"k": 2}, "moe with config=Config.*{}", "V=8, E=2\\)", "k=2\\)"),
    "seed": (init, {"seed": 1}, "init with seed={},", "0", "1"),
    "eps": (evaluate, {"eps": 0.1}, "loss with config=Config.*{}", "V=8\\)", "eps=0.1\\)"),
    "schedule": (pipe, {"make": one_f_one_b}, "pipeline {},", "gpipe", "1f1b"),
    "layers": (pipe, {"layers": 2}, r"pipeline gpipe, .*W_in: float32\[{}, 4, 6\]", "1", "2"),
    "shards": (move, {"rows": 3}, r"transfer A\[I_X\] -> A\[I\] .* x=float32\[{}\]", "2", "3"),
}


@TWO
@pytest.mark.parametrize("what", ABOVE)
def test_arguments_that_differ_between_ranks(mesh, what):
    call, otherwise, words, *values = ABOVE[what]
    message = refused(partial(call, **(otherwise if mesh.rank else {})), mesh)
    are_told(message, [".*" + words.format(value) for value in values])


@TWO
def test_if_one_rank_acts_differently_all_raise_or_the_numbers_are_right(mesh, tmp_path):
    """Of the acts of tests/misuse with each twist of rank 1; of the configs that may be others, with one. Meshes are
    made in tests/mesh."""
    control, wrong = dist.new_group(backend="gloo"), []
    for name, act in ON_RANKS.items():
        left_out = {*CHANGED} - {"theta"} if name == "training" else {}
        twists = [] if act.messages or name == "mesh" else [twist for twist in act.twists if twist not in left_out]
        for number, twist in enumerate(twists):
            case, told = Case([(name, number)], odd=1, at=0, twist=twist), [None, None]
            with warnings.catch_warnings():  # of what is dropped
                warnings.simplefilter("ignore")
                mine = tell(mesh, case, tmp_path)
            dist.all_gather_object(told, mine, group=control)
            page_of(mesh).set_pid(os.getpid())
            dist.barrier(control)
            wrong += [f"{case}: {found}"] if (found := finding(case, told)) else []
    assert not wrong, "\n\n".join(wrong)


@TWO
def test_numbers_that_do_not_go_together_are_an_error_on_every_rank(mesh):
    """Of calls that are alike but for these."""
    line, sends, receives = "A[G_X, E, R, D] -> A[G, E_X, R, D]", [2, 2], [1, 2] if mesh.rank else [2, 2]
    told = refused(lambda mesh: c.ragged_all_to_all(line, torch.ones(4, 3), sends, receives, mesh), mesh)
    assert "the ranks send [[2, 2], [2, 2]], but expect [[2, 2], [1, 2]]" in told
    for mask, words in (
        (torch.ones(2, 3) > 0, "6 of 6 elements are held by several devices along X"),
        (torch.arange(6).view(2, 3) > 2, "3 of 6 elements are held"),
    ):
        told = refused(lambda mesh: c.masked("x[B, T, D] {U_X}", torch.ones(2, 3, 4), mask, mesh), mesh)  # noqa: B023
        assert words in told


@TWO
def test_how_arguments_are_compared(mesh):
    """Of a function nothing is compared, of a long argument its digest, of a config what is not its default."""
    given = {"state": {"w": (torch.ones(2, 3), parse("w[I_X, J]")), "n": (1, None)}, "config": CONFIG}
    alike(mesh, "a call", f=lambda: mesh.rank, long="a" * 200, **given)
    with pytest.raises(ShardingError, match=r"rank 0: a call with long='a+\.\.\. \(digest \w+\)\n  rank 1: "):
        alike(mesh, "a call", long=["a" * 200, "a" * 199 + "b"][mesh.rank])
    said = "state={n: [1, None], w: [float32[2, 3], w[I_X, J]]}, config=Config(name='small', L=1,"
    with pytest.raises(ShardingError, match=re.escape(said)):
        alike(mesh, "a call", **given, f=1 if mesh.rank else print)
