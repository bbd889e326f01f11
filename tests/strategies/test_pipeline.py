"""Pipelines executed on ranks: loss, gradients and two AdamW steps equal one device and torch's own pipelines."""

from unittest.mock import patch

import pytest
import torch
from torch.func import functional_call

from scaling import tree
from scaling.collectives import all_reduce
from scaling.mesh import Mesh
from scaling.models.mlp import MLPConfig, MLPStack
from scaling.optim import adamw
from scaling.schedules import SCHEDULES, make, split_backward
from scaling.strategies import fsdp_tp, pipeline
from scaling.strategies.stage import mlp, of_strategy

L, D, F, B = 8, 6, 10, 32
WEIGHTS = {"W_in": "W_in[L_Z, D, F]", "W_out": "W_out[L_Z, F, D]"}
OPTIONS, BARE = {"activation": "gelu", "residual": True, "norm": True}, {"activation": "relu", "residual": False}


def problem():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    params = {"W_in": normal(L, D, F) * D**-0.5, "W_out": normal(L, F, D) * F**-0.5}
    return params, normal(B, D), normal(B, D)


def loss(Out, Target):
    """The mean over B = 32 rows of the squared error, as the terms of the rows at hand."""
    return (Out - Target).square().sum() / B


def stack_of(options):
    def f(params, In):
        config = MLPConfig(L=len(params["W_in"]), D=D, F=F, **{"norm": False} | options)
        return functional_call(MLPStack(config), params, (In,))

    return f


def trained(params, value_and_grad):
    """Losses, the first gradients and the params after two AdamW steps."""
    optimizer = adamw(1e-2)
    state, losses, first = optimizer.init(params), [], None
    for _ in range(2):
        Loss, grads = value_and_grad(params)
        first = grads if first is None else first
        losses.append(float(Loss))
        params, state = optimizer.update(grads, state, params)
    return losses, first, params


def one_device(options):
    params, In, Target = problem()
    of = torch.func.grad_and_value(lambda p: loss(stack_of(options)(p, In), Target))
    return trained(params, lambda params: of(params)[::-1])


def train(mesh, name, microbatches, options=OPTIONS, collect=None, how=""):
    """The same, whole and in the model's order of layers.

    `how`: "fsdp_tp": with FSDP and tensor parallelism in each stage; "pairs": as on NCCL, with a process group for each
    direction and kind; "unchecked": on a mesh that compares nothing, the loss is reduced while the backward goes on.
    """
    channels = pipeline.Channels
    schedule = make(name, mesh.sizes["Z"], microbatches)
    schedule = split_backward(schedule, collect) if collect is not None else schedule
    mesh = Mesh(mesh.sizes, checked=False) if how == "unchecked" else mesh
    stage = of_strategy(fsdp_tp.STRATEGY, **options) if how == "fsdp_tp" else mlp(**options)
    specs = {name: spec for name, spec in stage.specs.items() if name.startswith("W")}
    params, In, Target = problem()
    if how == "fsdp_tp":
        In, Target = (tree.shard(x, "In[B_X, D_Y]", mesh) for x in (In, Target))
    given = In, Target, mesh, schedule, loss, stage
    with patch.object(pipeline, "Channels", lambda *args: channels(*args, pairs=True if how == "pairs" else None)):
        shards = tree.shard(pipeline.arrange(params, schedule), specs, mesh)
        losses, *found = trained(shards, lambda params: pipeline.value_and_grad(params, *given))
    return losses, *(pipeline.restore(tree.unshard(x, specs, mesh), schedule) for x in found)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


CASES = [(name, m, None) for name in SCHEDULES for m in (1, 4, 8, 16)]
CASES += [("gpipe", 8, 8), ("1f1b", 8, 3), ("interleaved", 8, 2)]


@pytest.mark.parametrize(
    ("stages", "counts"),
    [
        (2, (1, 8)),
        (4, (8,)),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in ((2, (4, 16)), (4, (1, 4, 16)))),
    ],
)
def test_every_schedule_equals_one_device(ranks, stages, counts):
    expected = [one_device(options) for options in (BARE, OPTIONS, OPTIONS)]
    for i, (name, microbatches, collect) in enumerate(CASES):
        try:
            make(name, stages, microbatches)
        except ValueError:
            continue
        if microbatches in counts:
            options = OPTIONS if i % 3 else BARE
            everyone = ranks(train, {"Z": stages}, name, microbatches, options, collect)
            for found in everyone:
                close(list(found), list(expected[i % 3]))
            assert len({tuple(losses) for losses, _, _ in everyone}) == 1  # the same bits on every rank


@pytest.mark.parametrize("way", ["fsdp_tp", "pairs", "unchecked"])
@pytest.mark.parametrize(
    "name",
    ["1f1b", "interleaved", "dualpipev", *(pytest.param(n, marks=pytest.mark.sweep) for n in ("gpipe", "zb-h1"))],
)
def test_other_stages_and_meshes(ranks, name, way):
    sizes = {"Z": 2, "X": 2, "Y": 2} if way == "fsdp_tp" else {"Z": 4 if way == "pairs" else 2}
    expected = one_device(OPTIONS)
    for actual in ranks(train, sizes, name, 8, OPTIONS, None, way):
        close(list(actual), list(expected))


class Layers(torch.nn.Module):
    """The same stack as an ordinary module, for torch's own pipelines."""

    def __init__(self, params):
        super().__init__()
        self.W_in, self.W_out = (torch.nn.Parameter(params[name].clone()) for name in ("W_in", "W_out"))

    def forward(self, In):
        return stack_of(OPTIONS)({"W_in": self.W_in, "W_out": self.W_out}, In)


def both(mesh, name, microbatches):
    """(loss, grads) of this rank's layers, ours and torch.distributed.pipelining's (loss None off the last stage)."""
    from torch.distributed import pipelining

    schedule, group = make(name, mesh.sizes["Z"], microbatches), mesh.group(("Z",)).pg
    whole, In, Target = problem()
    params = tree.shard(pipeline.arrange(whole, schedule), WEIGHTS, mesh)
    Loss, grads = pipeline.value_and_grad(params, In, Target, mesh, schedule, loss, mlp(**OPTIONS))

    own, modules, stages = schedule.stages_of(mesh.coord["Z"]), [], []
    for c, stage in enumerate(own):
        modules.append(Layers(tree.map(lambda W, c=c: W.unflatten(0, (len(own), -1))[c], params)))
        stages.append(pipelining.PipelineStage(modules[-1], stage, schedule.virtual_stages, "cpu", group=group))
    kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
    kind = kinds.get(name, pipelining.ScheduleInterleaved1F1B)
    run = kind(stages if name == "interleaved" else stages[0], microbatches, loss_fn=loss, scale_grads=False)
    losses, last = [], own[-1] == schedule.virtual_stages - 1
    run.step(*([In] if own[0] == 0 else []), **({"target": Target, "losses": losses} if last else {}))
    their_grads = {name: torch.cat([getattr(module, name).grad for module in modules]) for name in params}
    return (Loss, grads), (sum(losses) if last else None, their_grads)


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
