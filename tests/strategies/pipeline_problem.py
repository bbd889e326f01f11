"""The stages and batches that the tests of pipelines share, and how they are trained."""

import torch
from torch.func import functional_call

from scaling import tree
from scaling.models.mlp import MLPConfig, MLPStack
from scaling.optim import adamw
from scaling.schedules import make, split_backward
from scaling.strategies import fsdp_tp as fsdp_tp_listing
from scaling.strategies import pipeline
from scaling.strategies.stage import mlp, of_strategy

L, D, F, B = 8, 6, 10, 32
WEIGHTS = {"W_in": "W_in[L_Z, D, F]", "W_out": "W_out[L_Z, F, D]"}
OPTIONS = {"activation": "gelu", "residual": True, "norm": True}


def fsdp_tp(**options):
    return of_strategy(fsdp_tp_listing.STRATEGY, **options)


def problem():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    params = {"W_in": normal(L, D, F) * D**-0.5, "W_out": normal(L, F, D) * F**-0.5}
    return params, normal(B, D), normal(B, D)


def loss(Out, Target):
    """The mean over B = 32 rows of the squared error, as the terms of the rows at hand."""
    return (Out - Target).square().sum() / B


def reference(params, In, Target, options):
    stack = MLPStack(MLPConfig(L=L, D=D, F=F, **options))
    return torch.func.grad_and_value(lambda p: loss(functional_call(stack, p, (In,)), Target))(params)


def train(mesh, name, microbatches, chunks, stage, options, collect=None, steps=2):
    """Losses, the first gradients and the params after AdamW steps, whole and in the model's order of layers."""
    schedule = make(name, mesh.sizes["Z"], microbatches, chunks)
    schedule = split_backward(schedule, collect) if collect is not None else schedule
    kinds = {"mlp": mlp, "fsdp_tp": fsdp_tp}
    specs = {name: spec for name, spec in kinds[stage](**options).specs.items() if name.startswith("W")}
    whole, In, Target = problem()
    if stage == "fsdp_tp":
        In, Target = (tree.shard(x, "In[B_X, D_Y]", mesh) for x in (In, Target))
    params = tree.shard(pipeline.arrange(whole, schedule), specs, mesh)
    optimizer = adamw(1e-2)
    state, losses, first = optimizer.init(params), [], None
    for _ in range(steps):
        Loss, grads = pipeline.value_and_grad(params, In, Target, mesh, schedule, loss, kinds[stage](**options))
        first = grads if first is None else first
        losses.append(float(Loss))
        params, state = optimizer.update(grads, state, params)
    return losses, *(pipeline.restore(tree.unshard(x, specs, mesh), schedule) for x in (first, params))


def stack_of(options):
    def f(params, In):
        config = MLPConfig(L=len(params["W_in"]), D=D, F=F, **options)
        return functional_call(MLPStack(config), params, (In,))

    return f


def one_device(options, steps=2):
    params, In, Target = problem()
    optimizer = adamw(1e-2)
    state, losses, first = optimizer.init(params), [], None
    for _ in range(steps):
        grads, Loss = reference(params, In, Target, options)
        first = grads if first is None else first
        losses.append(float(Loss))
        params, state = optimizer.update(grads, state, params)
    return losses, first, params


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


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
