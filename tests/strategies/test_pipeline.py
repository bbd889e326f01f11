"""Pipelines executed on ranks: loss, gradients and two AdamW steps equal one device and torch's own pipelines."""

from unittest.mock import patch

import pytest
import torch
from problems import BLOCKS, D, close, one_device, squares, stack, summed, trained, whole

from scaling import tree
from scaling.mesh import Mesh
from scaling.schedules import SCHEDULES, make, split_backward
from scaling.strategies import fsdp_tp, pipeline
from scaling.strategies.stage import mlp, of_strategy

LAYERS = 8
STAGE, BARE = BLOCKS[0], BLOCKS[2]
FSDP_TP = of_strategy(fsdp_tp.STRATEGY, *STAGE)


def weights_of(stage):
    return {name: type_ for name, type_ in stage.specs.items() if name.startswith("W")}


WEIGHTS = weights_of(mlp())


def problem(mesh, schedule, types=WEIGHTS):
    """This rank's params, and the first batch: In and Target."""
    params, batches = whole(L=LAYERS)
    return tree.shard(pipeline.arrange(params, schedule), types, mesh), *batches[0]


def restored(params, mesh, schedule, types=WEIGHTS):
    return pipeline.restore(tree.unshard(params, types, mesh), schedule)


def train(mesh, name, microbatches, block=STAGE, collect=None, how=""):
    """Losses, the first gradients and the params after two steps, whole and in the model's order of layers.

    `how`: "fsdp_tp": with FSDP and tensor parallelism in each stage; "pairs": as on NCCL, with a process group for each
    direction and kind; "unchecked": on a mesh that compares nothing, the loss is reduced while the backward goes on.
    """
    channels = pipeline.Channels
    schedule = make(name, mesh.sizes["Z"], microbatches)
    schedule = split_backward(schedule, collect) if collect is not None else schedule
    mesh = Mesh(mesh.sizes, checked=False) if how == "unchecked" else mesh
    stage = FSDP_TP if how == "fsdp_tp" else mlp(*block)
    types = weights_of(stage)

    def step(params, batch):
        if how == "fsdp_tp":
            batch = tree.shard(batch, "In[S, B_X, D_Y]", mesh)
        return pipeline.value_and_grad(params, *batch, mesh, schedule, squares, stage)

    with patch.object(pipeline, "Channels", lambda *args: channels(*args, pairs=True if how == "pairs" else None)):
        losses, (grads,), params = trained(problem(mesh, schedule, types)[0], step, whole()[1][:2])
    return losses, restored(grads, mesh, schedule, types), restored(params, mesh, schedule, types)


def several(mesh, cases):
    return [train(mesh, *case) for case in cases]


def trained_alone(block=STAGE):
    losses, (grads, _), params = one_device(block=block, L=LAYERS, steps=2)
    return losses, grads, params


CASES = [(name, m, None) for name in SCHEDULES for m in (1, 4, 8, 16)]
CASES += [("gpipe", 8, 8), ("1f1b", 8, 3), ("interleaved", 8, 2)]


def is_made(name, stages, microbatches):
    try:
        return make(name, stages, microbatches)
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("stages", "counts"),
    [
        (2, (1, 8)),
        (4, (8,)),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in ((2, (4, 16)), (4, (1, 4, 16)))),
    ],
)
def test_every_schedule_equals_one_device(ranks, stages, counts):
    wanted = {block: trained_alone(block) for block in (BARE, STAGE)}
    cases = [case for case in CASES if case[1] in counts and is_made(case[0], stages, case[1])]
    cases = [(name, m, STAGE if i % 3 else BARE, collect) for i, (name, m, collect) in enumerate(cases)]
    everyone = ranks(several, {"Z": stages}, cases)
    for case, *found in zip(cases, *everyone, strict=True):
        for each in found:
            close(each, wanted[case[2]])
        assert all(torch.equal(losses, found[0][0]) for losses, *_ in found)  # the same bits on every rank


WAYS = [
    ("fsdp_tp", {"Z": 2, "X": 2, "Y": 2}, ["1f1b", "dualpipev"]),
    ("pairs", {"Z": 4}, ["1f1b", "interleaved", "dualpipev"]),
    ("unchecked", {"Z": 2}, ["1f1b", "interleaved", "dualpipev"]),
]
SWEPT = [pytest.param(*way, ["gpipe", "interleaved", "zb-h1"], marks=pytest.mark.sweep) for *way, _ in WAYS]


@pytest.mark.parametrize(("way", "sizes", "names"), WAYS + SWEPT)
def test_other_stages_and_meshes(ranks, way, sizes, names):
    for everyone in ranks(several, sizes, [(name, 8, STAGE, None, way) for name in names]):
        for found in everyone:
            close(found, trained_alone())


class Layers(torch.nn.Module):
    """The same stack as an ordinary module, for torch's own pipelines."""

    def __init__(self, params):
        super().__init__()
        self.W_in, self.W_out = (torch.nn.Parameter(params[name].clone()) for name in ("W_in", "W_out"))

    def forward(self, In):
        return stack({"W_in": self.W_in, "W_out": self.W_out}, In)


def both(mesh, name, microbatches):
    """(loss, grads) of this rank's layers, ours and torch.distributed.pipelining's (loss None off the last stage)."""
    from torch.distributed import pipelining

    schedule, group = make(name, mesh.sizes["Z"], microbatches), mesh.group(("Z",)).pg
    params, In, Target = problem(mesh, schedule)
    Loss, grads = pipeline.value_and_grad(params, In, Target, mesh, schedule, squares, mlp(*STAGE))

    own, modules, stages = schedule.stages_of(mesh.coord["Z"]), [], []
    for c, stage in enumerate(own):
        modules.append(Layers(tree.map(lambda W, c=c: W.unflatten(0, (len(own), -1))[c], params)))
        stages.append(pipelining.PipelineStage(modules[-1], stage, schedule.virtual_stages, "cpu", group=group))
    kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
    kind = kinds.get(name, pipelining.ScheduleInterleaved1F1B)
    run = kind(stages if name == "interleaved" else stages[0], microbatches, loss_fn=squares, scale_grads=False)
    losses, last = [], own[-1] == schedule.virtual_stages - 1
    run.step(*([In] if own[0] == 0 else []), **({"target": Target, "losses": losses} if last else {}))
    close(grads, {name: torch.cat([getattr(module, name).grad for module in modules]) for name in params})
    if last:
        close(Loss, sum(losses).detach())
    return last


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_equal_to_torch(ranks, name, stages):
    assert sum(ranks(both, {"Z": stages}, name, 8)) == 1


def ends(mesh, name):
    """(Loss, gradients of embedding, layers, head) with the embedding before and the head behind the pipeline."""
    schedule = make(name, mesh.sizes["Z"], 8)
    params, In, Target = problem(mesh, schedule)
    E = torch.eye(D, dtype=torch.float64)
    Loss, grads = pipeline.with_ends(params, {"E": E}, In @ E, Target, mesh, schedule, head_loss, mlp(*STAGE))
    dIn, dE = summed([grads.dIn, grads.head["E"]], ["dIn[B, D]", "dE[D, E]"], mesh)
    return Loss, dIn, restored(grads.params, mesh, schedule), dE


def head_loss(head, Out, Target):
    return squares(Out @ head["E"], Target)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipev"])
def test_ends_of_a_model(ranks, name):
    params, ((In, Target), *_) = whole(L=LAYERS)

    def f(In, params, E):
        return head_loss({"E": E}, stack(params, In), Target)

    grads, Loss = torch.func.grad_and_value(f, argnums=(0, 1, 2))(In, params, torch.eye(D, dtype=torch.float64))
    for found in ranks(ends, {"Z": 2}, name):
        close(found, (Loss, *grads))
