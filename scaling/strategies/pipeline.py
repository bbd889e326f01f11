"""Pipeline parallelism (Part 5, Pipelining):  In[B, D] * W_in[L_Z, D, F] * W_out[L_Z, F, D] -> Out[B, D].

Layers are split over Z; a batch is cut into microbatches, whose activations move from stage to stage, forward, and
whose dOut move back. Who does what when is a schedule (`scaling.schedules`), which `value_and_grad` executes:

    schedule = one_f_one_b(stages=4, microbatches=8)
    Loss, grads = value_and_grad(params, In, Target, mesh, schedule, loss)

`rolled` is the same in one differentiable function, as JAX would write it: GPipe by ppermute. With FSDP and tensor
parallelism inside each stage, W_in[L_Z, D_X, F_Y], give `stage=stage_fsdp_tp.fsdp_tp()`. torch.compile takes a stage's
functions, `stage._replace(forward=torch.compile(stage.forward))`: between them lies Python that waits for other ranks.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from scaling import tree
from scaling.collectives import all_reduce, ppermute, wait
from scaling.collectives.checked import agree
from scaling.models.mlp import block
from scaling.schedules.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
    parts,
)
from scaling.schedules.schedule import Schedule
from scaling.schedules.timeline import Span, Timeline
from scaling.spec import format_axes, parse
from scaling.strategies.channels import Channels
from scaling.strategies.stage import SPECS, Stage, mlp
from scaling.trace import now

__all__ = ["SPECS", "Gradients", "arrange", "measure", "restore", "rolled", "value_and_grad", "with_ends"]


def value_and_grad(params, In, Target, mesh, schedule: Schedule, loss: Callable, stage: Stage | None = None, axis="Z"):
    """(Loss[], grads typed as params), by executing a schedule.

    `params`: this rank's layers, stacked, `W_in[L_Z, D, F]`; with several chunks a rank in the order of
    `schedule.layer_order` (see `arrange`). In[B, D] and Target[B, ...] are replicated over Z; In is read by the first
    stage and Target by the last. `loss(Out, Target)` gives a microbatch's terms: the loss is their sum over
    microbatches, and over the axes that split Out; so a mean divides by the whole batch's size. The last stage
    computes it, `Loss[] {U_Z}`, and an AllReduce then gives every rank the same number. ValueError if the schedule does
    not fit the mesh or the batch.
    """
    run = _Run(params, In, Target, mesh, schedule, loss, stage or mlp(), axis)
    return run.execute(), run.grads


class Gradients(NamedTuple):
    """What `with_ends` returns: `params` typed as params; `dIn`[B, D] {U_Z}, from the first stage, and `head` {U_Z},
    from the last: zeros on the other ranks, so an AllReduce over Z makes them whole."""

    params: object
    dIn: torch.Tensor
    head: object


def with_ends(params, head, In, Target, mesh, schedule, loss: Callable, stage: Stage | None = None, axis="Z"):
    """(Loss[], Gradients): as `value_and_grad`, with a loss that has params, `loss(head, Out, Target)`, and with dIn:
    for a model whose ends lie before the first layer and after the last."""
    run = _Run(params, In, Target, mesh, schedule, loss, stage or mlp(), axis, head=head)
    Loss = run.execute()
    dIn = torch.cat([run.dIns[m] for m in range(schedule.microbatches)]) if run.dIns else torch.zeros_like(In)
    return Loss, Gradients(run.grads, dIn, run.head_grads)


def measure(params, In, Target, mesh, schedule: Schedule, loss: Callable, stage: Stage | None = None, axis="Z"):
    """As `value_and_grad`, and a third result: the Timeline of the run, in seconds, with all ranks along the axis."""
    spans: list[Span] = []
    run = _Run(params, In, Target, mesh, schedule, loss, stage or mlp(), axis, spans=spans)
    group, everyone = mesh.group((axis,)), [spans]
    if group.pg is not None:
        dist.barrier(group.pg)
    Loss = run.execute()
    if group.pg is not None:
        everyone = [None] * group.size
        dist.all_gather_object(everyone, spans, group=group.pg)
    every = tuple(span for one in everyone for span in one)
    return Loss, run.grads, Timeline(f"{schedule.name}, measured", schedule.stages, every, schedule.chunks)


def arrange(params, schedule: Schedule):
    """Whole params with their layers in the order in which `L_Z` deals them to the stages; the identity for 1 chunk."""
    return tree.map(lambda W: W[schedule.layer_order(len(W))], params)


def restore(params, schedule: Schedule):
    """The inverse of `arrange`."""
    return tree.map(lambda W: W[torch.tensor(schedule.layer_order(len(W)), device=W.device).argsort()], params)


def rolled(params, In, mesh, microbatches: int = 1, activation: str = "gelu", axis: str = "Z"):
    """In[B, D] -> Out[B, D] {U_Z}: what the last stage computed, zeros elsewhere. Differentiable: the transpose of each
    ppermute carries dOut one stage back, so torch.func.vjp of this is GPipe.

    At each of M + Z - 1 ticks every rank runs its layers and the results move up by one: In[L_Z, B, D]. Ranks that have
    no microbatch yet, or none left, compute on zeros.
    """
    z, Z = mesh.coord[axis], mesh.sizes[axis]
    up = [(i, i + 1) for i in range(Z - 1)]
    batches = In.unflatten(0, (microbatches, -1))
    first, last = (torch.tensor(z == stage, device=In.device) for stage in (0, Z - 1))
    x, Outs = torch.zeros_like(batches[0]), []
    for tick in range(microbatches + Z - 1):
        fed = batches[tick] if tick < microbatches else torch.zeros_like(x)
        x = torch.where(first, fed, x)  # on tensors, not `if`: every rank's backward then has the same ppermutes
        for W_in, W_out in zip(params["W_in"], params["W_out"], strict=True):
            x = block(x, W_in, W_out, activation)
        if tick >= Z - 1:
            Outs.append(torch.where(last, x, torch.zeros_like(x)))
        if tick < microbatches + Z - 2:
            x = ppermute("In[L_Z, B, D]".replace("Z", format_axes((axis,))), x[None], mesh, axis, up)[0]
    return torch.cat(Outs)


class _Run:
    """One execution of one rank's program: its state is what is alive at the moment. See `value_and_grad`."""

    def __init__(self, params, In, Target, mesh, schedule, loss, stage, axis, spans=None, head=None):
        self.mesh, self.schedule, self.axis, self.spans = mesh, schedule, axis, spans
        self.loss, self.stage = loss, stage
        self.rank, self.last = mesh.coord[axis], schedule.virtual_stages - 1
        own = schedule.stages_of(self.rank)
        _check(params, In, Target, mesh, schedule, axis)
        self.In, self.Target = (x.unflatten(0, (schedule.microbatches, -1)) for x in (In, Target))
        self.grads = tree.map(torch.empty_like, params)

        def chunk(c: int, whole):
            return tree.map(lambda W: W.unflatten(0, (len(own), -1))[c], whole)

        pieces = {s: (chunk(c, params), chunk(c, self.grads)) for c, s in enumerate(own)}
        self.weights = {s: stage.prepare(W, mesh) for s, (W, _) in pieces.items()}
        self.grads_of = {s: grads for s, (_, grads) in pieces.items()}
        self.sums = {s: stage.make_sums(W, grads, mesh) for s, (W, grads) in pieces.items()}
        self.head, self.head_grads, self.dIns = head, tree.map(torch.zeros_like, head), {}
        self.inputs, self.dOuts, self.saved, self.rests = {}, {}, {}, {}  # by (stage, microbatch)
        self.leaving = {}
        self.weight_group, self.untimed = [], []
        self.added: set[int] = set()
        self.late: list = []
        wide = tree.leaves(params)[0].dtype == torch.float64
        self.total = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=In.device)
        self.channels = Channels(mesh, axis, schedule, self.In[0], str(parse(stage.specs["In"]).with_name("x")))

    def execute(self):
        do = {Forward: self.forward, Backward: self.backward, BackwardInput: self.backward_input}
        do |= {BackwardWeight: self.backward_weight, ReduceGrads: self.reduce_grads}
        do |= {RecvActivation: self.recv_activation, RecvGrad: self.recv_grad}
        do |= dict.fromkeys((SendActivation, SendGrad), self.send)
        program = self.schedule[self.rank]
        forwards = [i for i, step in enumerate(program) if any(isinstance(part, Forward) for part in parts(step))]
        axes = format_axes((self.axis, *parse(self.stage.specs["Out"]).axes))
        Loss = None
        with torch.no_grad():
            for i, (step, following) in enumerate(pairwise((*program, None))):
                for part in parts(step):
                    if self.spans is None:
                        do[type(part)](part, following)
                    else:
                        self.timed(do[type(part)], part, following)
                if i == forwards[-1] and not self.mesh.checked:  # comparing calls would wait for ranks that wait for us
                    Loss = all_reduce(f"Loss[] {{U_{axes}}} -> Loss[]", self.total, self.mesh, async_op=True)
            self.channels.finish()
            for pending in self.late:
                wait(pending)
            if Loss is None:
                Loss = all_reduce(f"Loss[] {{U_{axes}}} -> Loss[]", self.total, self.mesh)
        return wait(Loss)

    def forward(self, step, following):
        key = step.stage, step.microbatch
        In = self.In[step.microbatch] if step.stage == 0 else self.inputs.pop(key)
        Out, self.saved[key] = self.stage.forward(self.weights[step.stage], In, self.mesh)
        if step.stage == self.last:
            self.dOuts[key] = self.differentiate(Out, self.Target[step.microbatch])
        elif self.schedule.placement[step.stage + 1] == self.rank:
            self.inputs[step.stage + 1, step.microbatch] = Out
        else:
            self.leaving[SendActivation, *key] = Out

    def differentiate(self, Out, Target):
        """dOut of this microbatch's terms of the loss, which are added to the total; so are gradients of a head."""
        with torch.enable_grad():
            Out = Out.detach().requires_grad_()
            if self.head is None:
                terms, leaves = self.loss(Out, Target), []
            else:
                head = tree.map(lambda W: W.detach().requires_grad_(), self.head)
                terms, leaves = self.loss(head, Out, Target), tree.leaves(head)
        dOut, *grads = torch.autograd.grad(terms, [Out, *leaves])
        self.total += terms.detach()
        for total, grad in zip(tree.leaves(self.head_grads), grads, strict=True):
            total += grad
        return dOut

    def backward_input(self, step, following):
        key, wanted = (step.stage, step.microbatch), step.stage > 0 or self.head is not None
        weights, dOut, saved = self.weights[step.stage], self.dOuts.pop(key), self.saved.pop(key)
        dIn, self.rests[key] = self.stage.backward_input(weights, dOut, saved, self.mesh, wanted)
        if step.stage == 0:
            self.dIns |= {step.microbatch: dIn} if wanted else {}
        elif self.schedule.placement[step.stage - 1] == self.rank:
            self.dOuts[step.stage - 1, step.microbatch] = dIn
        else:
            self.leaving[SendGrad, *key] = dIn

    def backward_weight(self, step, following):
        """Adds dW to the sums; of weight halves that stand together, in one go at the last of them."""
        self.weight_group.append(self.rests.pop((step.stage, step.microbatch)))
        if isinstance(following, BackwardWeight) and following.stage == step.stage:
            return
        add = step.stage in self.added
        weights, sums = self.weights[step.stage], self.sums[step.stage]
        self.stage.backward_weight(weights, self.weight_group, sums, self.mesh, add)
        self.added.add(step.stage)
        self.weight_group = []

    def backward(self, step, following):
        self.backward_input(step, following)
        self.backward_weight(step, None)

    def reduce_grads(self, step, following):
        self.late += self.stage.reduce(self.sums[step.stage], self.grads_of[step.stage], self.mesh)

    def recv_activation(self, step, following):
        self.inputs[step.stage + 1, step.microbatch] = self.channels.take(step)

    def recv_grad(self, step, following):
        self.dOuts[step.stage - 1, step.microbatch] = self.channels.take(step)

    def send(self, step, following):
        self.channels.send(step, self.leaving.pop((type(step), step.stage, step.microbatch)))

    def timed(self, do: Callable, step, following) -> None:
        """Appends a span; weight halves that run as one matmul share its time."""
        start = self.clock()
        do(step, following)
        self.untimed.append(step)
        if self.weight_group:
            return
        share = (self.clock() - start) / len(self.untimed)
        for i, each in enumerate(self.untimed):
            self.spans.append(Span(self.rank, each, start + i * share, start + (i + 1) * share))
        self.untimed = []

    def clock(self) -> float:
        if self.In.is_cuda:
            torch.cuda.synchronize(self.In.device)
        return now()


def _check(params, In, Target, mesh, schedule: Schedule, axis: str) -> None:
    """ValueError, on every rank alike, unless params, batch, schedule and mesh fit each other."""
    if mesh.sizes.get(axis) != schedule.stages:
        has = ", ".join(f"{name}={size}" for name, size in mesh.sizes.items())
        raise ValueError(
            f"{schedule.name}: has {schedule.stages} stages, but the mesh ({has}) has not {axis}={schedule.stages}: "
            f"make the schedule with stages=mesh.sizes[{axis!r}]"
        )
    for name, x in (("In", In), ("Target", Target)):
        if len(x) % schedule.microbatches:
            raise ValueError(
                f"{schedule.name}: {name} has {len(x)} rows, which do not divide into {schedule.microbatches} "
                f"microbatches: use a multiple of {schedule.microbatches}"
            )
    for where, W in tree.named_leaves(params).items():
        if len(W) % schedule.chunks:
            raise ValueError(f"{schedule.name}: {where} has {len(W)} layers here, not a multiple of {schedule.chunks}")
    if mesh.checked:
        call = f"pipeline {schedule.name}, {schedule.microbatches} microbatches, {schedule.chunks} chunks"
        agree(mesh.group((axis,)), call, In)
