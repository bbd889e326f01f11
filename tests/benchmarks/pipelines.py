"""The pipelines of versus_torch.py: our schedules against torch.distributed.pipelining's, 8 microbatches.

Both sides send what a stage computed to the next as soon as it is there; ours computes dIn, sends it, and then dW
(`split_backward`), of which it collects several microbatches in one matmul; in 1F1B that keeps three more activations.
"""

from collections.abc import Callable
from functools import partial

import torch
from harness import RATE, Contest, Size, initial, rows
from native import OPTIMIZERS, Block

from scaling import optim, tree
from scaling.schedules import make, split_backward
from scaling.strategies import pipeline

MICROBATCHES = 8
COLLECT = 4  # microbatches in one weight gradient
RULES = {"sgd": optim.sgd(RATE), "adamw": optim.adamw(RATE)}
SPECS = {name: pipeline.SPECS[name] for name in ("W_in", "W_out")}


def ours(name: str, mesh, size: Size, optimizer: str) -> Callable:
    schedule = split_backward(make(name, mesh.sizes["Z"], MICROBATCHES), COLLECT)
    params, In = (
        tree.shard(pipeline.arrange(initial(size, mesh.device), schedule), SPECS, mesh),
        rows(size, mesh.device),
    )
    rule = RULES[optimizer]
    state = rule.init(params)

    def loss(Out, Target):
        return Out.square().sum() / size.rows

    def step():
        nonlocal params, state
        Loss, grads = pipeline.value_and_grad(params, In, In, mesh, schedule, loss)
        params, state = rule.update(grads, state, params, donate=True)
        return Loss / mesh.size()

    return step


def theirs(name: str, mesh, size: Size, optimizer: str, tuned: bool = False) -> Callable:
    from torch.distributed import pipelining

    kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
    kind = kinds.get(name, pipelining.ScheduleInterleaved1F1B)
    schedule, group = make(name, mesh.sizes["Z"], MICROBATCHES), mesh.group(("Z",)).pg
    params, In, depth = initial(size, mesh.device), rows(size, mesh.device), size.L // schedule.virtual_stages
    own, modules, stages = schedule.stages_of(mesh.coord["Z"]), [], []
    for stage in own:
        layers = slice(stage * depth, (stage + 1) * depth)
        modules.append(torch.nn.Sequential(*map(Block, params["W_in"][layers], params["W_out"][layers])))
        stages.append(pipelining.PipelineStage(modules[-1], stage, schedule.virtual_stages, mesh.device, group=group))

    def loss(Out, Target):
        return Out.square().sum() / size.rows

    options = {"loss_fn": loss, "scale_grads": False}
    run = kind(stages if name == "interleaved" else stages[0], MICROBATCHES, **options)
    weights = [weight for module in modules for weight in module.parameters()]
    update = OPTIMIZERS[optimizer](weights, lr=RATE, **({"fused": True} if tuned else {}))
    first, last = own[0] == 0, own[-1] == schedule.virtual_stages - 1

    def step():
        update.zero_grad()
        losses = []
        run.step(*([In] if first else []), **({"target": In, "losses": losses} if last else {}))
        update.step()
        return sum(losses) if last else torch.zeros((), device=mesh.device)

    return step


def wire_bytes(mesh: dict, size: Size, chunks: int = 1) -> float:
    """Of one rank, on average: an activation up and a dOut down between each two neighbours of the virtual stages."""
    return 2 * (chunks * mesh["Z"] - 1) / mesh["Z"] * size.rows * size.D * 4


def contests() -> list[Contest]:
    made = []
    for name, rival in (
        ("gpipe", "ScheduleGPipe"),
        ("1f1b", "Schedule1F1B"),
        ("interleaved", "ScheduleInterleaved1F1B"),
    ):
        chunks = 2 if name == "interleaved" else 1
        sides = partial(ours, name), partial(theirs, name)
        made.append(Contest(name, rival, lambda n: {"Z": n}, *sides, partial(wire_bytes, chunks=chunks), chunks))
    return made
