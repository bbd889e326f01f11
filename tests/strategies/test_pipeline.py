"""Pipelines executed on ranks: loss, gradients and two AdamW steps equal one device and torch's own pipelines."""

import pytest
import torch
from pipeline_problem import OPTIONS, WEIGHTS, D, both, close, loss, one_device, problem, stack_of, train

from scaling import tree
from scaling.collectives import all_reduce
from scaling.schedules import SCHEDULES, make
from scaling.strategies import pipeline
from scaling.strategies.stage import mlp

CASES = [(name, m, None, "mlp", None) for name in SCHEDULES for m in (1, 4, 8, 16)]
CASES += [("gpipe", 8, None, "mlp", 8), ("1f1b", 8, None, "mlp", 3), ("interleaved", 8, None, "mlp", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "counts"),
    [
        (2, (1, 8)),
        (4, (8,)),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in ((2, (4, 16)), (4, (1, 4, 16)))),
    ],
)
def test_every_schedule_equals_one_device(ranks, stages, counts):
    expected, plain = one_device(OPTIONS), one_device({"activation": "relu", "residual": False, "norm": False})
    for i, (name, microbatches, chunks, stage, collect) in enumerate(CASES):
        try:
            make(name, stages, microbatches)
        except ValueError:
            continue
        if microbatches not in counts:
            continue
        options = OPTIONS if i % 3 else {"activation": "relu", "residual": False, "norm": False}
        everyone = ranks(train, {"Z": stages}, name, microbatches, chunks, stage, options, collect)
        for losses, grads, params in everyone:
            close(losses, (expected if i % 3 else plain)[0])
            close((grads, params), (expected if i % 3 else plain)[1:])
        assert len({tuple(losses) for losses, _, _ in everyone}) == 1  # the same bits on every rank


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["1f1b", "interleaved", "dualpipev", *(pytest.param(n, marks=pytest.mark.sweep) for n in ("gpipe", "zb-h1"))],
)
def test_with_fsdp_and_tensor_parallelism(ranks, name):
    expected = one_device(OPTIONS, steps=1)
    for actual in ranks(train, {"Z": 2, "X": 2, "Y": 2}, name, 4, None, "fsdp_tp", OPTIONS, None, 1):
        close(list(actual), list(expected))


def pairs(mesh, name, microbatches):
    """As on NCCL: a process group for each direction and kind."""
    original = pipeline.Channels
    pipeline.Channels = lambda *args: original(*args, pairs=True)
    try:
        return train(mesh, name, microbatches, None, "mlp", OPTIONS, None)
    finally:
        pipeline.Channels = original


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipev"])
def test_channels_of_two_ranks(ranks, name):
    expected = one_device(OPTIONS)
    for actual in ranks(pairs, {"Z": 2}, name, 8):
        close(list(actual), list(expected))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_equal_to_torch(ranks, name, stages):
    each = ranks(both, {"Z": stages}, name, 8)
    for (Loss, grads), (their_loss, their_grads) in each:
        close(grads, their_grads)
        if their_loss is not None:
            close(Loss, their_loss.detach())
    assert sum(their_loss is not None for _, (their_loss, _) in each) == 1


def ends(mesh, name):
    """(Loss, gradients of embedding, layers, head) with the embedding before and the head behind the pipeline."""
    schedule = make(name, mesh.sizes["Z"], 8)
    whole, In, Target = problem()
    params, E = tree.shard(pipeline.arrange(whole, schedule), WEIGHTS, mesh), torch.eye(D, dtype=torch.float64)
    Loss, grads = pipeline.with_ends(params, {"E": E}, In @ E, Target, mesh, schedule, head_loss, mlp(**OPTIONS))
    dIn = all_reduce("dIn[B, D] {U_Z} -> dIn[B, D]", grads.dIn, mesh)
    dE = all_reduce("dE[D, E] {U_Z} -> dE[D, E]", grads.head["E"], mesh)
    return Loss, dIn, pipeline.restore(tree.unshard(grads.params, WEIGHTS, mesh), schedule), dE


def head_loss(head, Out, Target):
    return loss(Out @ head["E"], Target)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipev"])
def test_ends_of_a_model(ranks, name):
    params, In, Target = problem()
    E = torch.eye(D, dtype=torch.float64)

    def f(In, params, E):
        return head_loss({"E": E}, stack_of(OPTIONS)(params, In), Target)

    grads, Loss = torch.func.grad_and_value(f, argnums=(0, 1, 2))(In, params, E)
    for actual in ranks(ends, {"Z": 2}, name):
        close(actual, (Loss, *grads))
