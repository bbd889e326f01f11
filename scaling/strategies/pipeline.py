"""Pipeline parallelism (Part 5, Pipelining):  In[B, D] * W_in[L_Z, D, F] * W_out[L_Z, F, D] -> Out[B, D].

Layers are split over Z; a batch is cut into microbatches, whose activations move from stage to stage, forward, and
whose dOut move back. Who does what when is a schedule (`scaling.schedules`), which `value_and_grad` executes:

    schedule = one_f_one_b(stages=4, microbatches=8)
    Loss, grads = value_and_grad(params, In, Target, mesh, schedule, loss)

With FSDP and tensor parallelism inside each stage, W_in[L_Z, D_X, F_Y], give `stage=of_strategy(fsdp_tp.STRATEGY)`.
torch.compile takes a stage's functions, `stage._replace(forward=torch.compile(stage.forward))`: between them lies
Python that waits for other ranks.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from scaling import tree
from scaling.collectives import all_reduce, wait
from scaling.collectives.checked import alike
from scaling.models.pointwise import vjp
from scaling.schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardBackward,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    Schedule,
    SendActivation,
    SendGrad,
)
from scaling.schedules.instructions import Span, Timeline, parts
from scaling.schedules.simulator import simulate
from scaling.spec import format_axes, parse
from scaling.strategies.channels import Channels
from scaling.strategies.stage import SPECS, Stage, mlp
from scaling.trace import now

__all__ = ["SPECS", "EndsGradients", "arrange", "measure", "restore", "value_and_grad", "with_ends"]

_simulated = lru_cache(maxsize=64)(simulate)  # what would hang, or leave out a microbatch, raises, once a schedule


def value_and_grad(params, In, Target, mesh, schedule: Schedule, loss: Callable, stage: Stage | None = None, axis="Z"):
    """(Loss[], grads typed as params), by executing a schedule.

    `params`: this rank's layers, stacked, `W_in[L_Z, D, F]`; with several chunks a rank in the order of
    `schedule.layer_order` (see `arrange`). In[B, D] and Target[B, ...] are replicated over Z; In is read by the first
    stage and Target by the last. `loss(Out, Target)` gives a microbatch's terms: the loss is their sum over
    microbatches, and over the axes that split Out; so a mean divides by the whole batch's size. The last stage
    computes it, `Loss[] {U_Z}`, and an AllReduce then gives every rank the same number. ValueError if the schedule does
    not fit the mesh or the batch, or leaves something out; Deadlock if its ranks would wait for each other.
    """
    rank = _Rank(params, In, Target, mesh, schedule, stage or mlp(), axis, _without_head(loss))
    return rank.execute(), rank.results


class EndsGradients(NamedTuple):
    """What `with_ends` returns: `params` typed as params; `dIn`[B, D] {U_Z}, from the first stage, and `head` {U_Z},
    from the last: zeros on the other ranks, so an AllReduce over Z makes them whole."""

    params: object
    dIn: torch.Tensor
    head: object


def with_ends(
    params,
    head,
    In,
    Target,
    mesh,
    schedule,
    loss: Callable,
    stage: Stage | None = None,
    axis="Z",
    dtype=None,
    differentiated=False,
):
    """(Loss[], EndsGradients): as `value_and_grad`, with a loss that has params, `loss(head, Out, Target)`, and with
    dIn: for a model whose ends lie before the first layer and after the last. `dtype`: the gradients' of the params
    and the head, if not their own. `differentiated`: the loss returns (terms, gradients of the head, dOut)."""
    pulled = loss if differentiated else _by_vjp(loss)
    rank = _Rank(params, In, Target, mesh, schedule, stage or mlp(), axis, pulled, head, dtype)
    Loss = rank.execute()
    dIns = [rank.held.pop(("dIn", m), None) for m in range(schedule.microbatches)]
    dIn = torch.cat(dIns) if dIns[0] is not None else In.new_zeros(()).expand(In.shape)  # zeros that take no room
    dhead = rank.dhead
    if dhead is None:  # another rank has the last stage
        dhead = tree.map(lambda W: torch.zeros_like(W, dtype=dtype), head)
    return Loss, EndsGradients(rank.results, dIn, dhead)


def _by_vjp(loss: Callable) -> Callable:
    """(terms, gradients of the head, dOut) of a loss(head, Out, Target) that says its terms alone."""

    def pulled(head, Out, Target):
        terms, pull = vjp(lambda head, Out: loss(head, Out, Target), head, Out)
        return terms, *pull(torch.ones_like(terms))

    return pulled


def _without_head(loss: Callable) -> Callable:
    return _by_vjp(lambda _, Out, Target: loss(Out, Target))


def measure(params, In, Target, mesh, schedule: Schedule, loss: Callable, stage: Stage | None = None, axis="Z"):
    """As `value_and_grad`, and a third result: the Timeline of the run, in seconds, with all ranks along the axis."""
    spans: list[Span] = []
    rank = _Rank(params, In, Target, mesh, schedule, stage or mlp(), axis, _without_head(loss))
    group, everyone = mesh.group((axis,)), [spans]
    if group.pg is not None:
        dist.barrier(group.pg)
    Loss = rank.execute(spans)
    if group.pg is not None:
        everyone = [None] * group.size
        dist.all_gather_object(everyone, spans, group=group.pg)
    every = tuple(span for one in everyone for span in one)
    return Loss, rank.results, Timeline(f"{schedule.name}, measured", schedule.stages, every, schedule.chunks)


def arrange(params, schedule: Schedule):
    """Whole params with their layers in the order in which `L_Z` deals them to the stages; the identity for 1 chunk."""
    return tree.map(lambda W: W[schedule.layer_order(len(W))], params)


def restore(params, schedule: Schedule):
    """The inverse of `arrange`."""
    return tree.map(lambda W: W[torch.tensor(schedule.layer_order(len(W)), device=W.device).argsort()], params)


class _Rank:
    """One rank's run of its program. `held`: what is alive, by what it is, virtual stage and microbatch."""

    def __init__(
        self, params, In, Target, mesh, schedule, stage: Stage, axis: str, loss: Callable, head=None, dtype=None
    ):
        _check(params, In, Target, mesh, schedule, axis)
        self.mesh, self.schedule, self.stage, self.axis, self.loss, self.head = mesh, schedule, stage, axis, loss, head
        self.rank, self.last = mesh.coord[axis], schedule.virtual_stages - 1
        self.In, self.Target = (x.unflatten(0, (schedule.microbatches, -1)) for x in (In, Target))
        self.results = tree.map(lambda W: torch.empty_like(W, dtype=dtype), params)
        self.dhead: Any = None  # the sum of the microbatches' gradients of the head, where there are some
        self.dtype = dtype
        self.chunks = {}
        own = schedule.stages_of(self.rank)
        for c, s in enumerate(own):
            chunk, out = (tree.map(lambda W, c=c: W.unflatten(0, (len(own), -1))[c], x) for x in (params, self.results))
            self.chunks[s] = stage.prepare(chunk, mesh, s, out)
        self.held: dict[tuple, Any] = {}
        wide = tree.leaves(params)[0].dtype == torch.float64
        self.total = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=In.device)
        self.channels = Channels(mesh, axis, schedule, self.In[0], str(parse(stage.specs["In"]).with_name("x")))

    def execute(self, spans: list[Span] | None = None):
        """Run the program; returns the Loss. `spans`: a list to which the time of each step is added."""
        axes = format_axes((self.axis, *parse(self.stage.specs["Out"]).axes))
        steps = list(_together(self.schedule[self.rank]))
        forwards = [i for i, (step, *_) in enumerate(steps) if isinstance(step, (Forward, ForwardBackward))]
        Loss = None
        with torch.no_grad():
            for i, some in enumerate(steps):
                start = self.clock() if spans is not None else 0.0
                self.do(some)
                if spans is not None:
                    spans += _spans(self.rank, some, start, self.clock())
                if i == forwards[-1] and not self.mesh.checked:  # comparing calls would wait for ranks that wait for us
                    Loss = all_reduce(f"Loss[] {{U_{axes}}} -> Loss[]", self.total, self.mesh, async_op=True)
            self.channels.finish()
            for chunk in self.chunks.values():
                self.stage.finish(chunk)
            if Loss is None:
                Loss = all_reduce(f"Loss[] {{U_{axes}}} -> Loss[]", self.total, self.mesh)
        return wait(Loss)

    def do(self, some: list) -> None:
        """One step; or the weight halves of several microbatches, which are one product."""
        match some[0]:
            case Forward(s, m):
                self.forward(s, m)
            case BackwardInput(s, m):
                self.backward_input(s, m)
            case BackwardWeight(s):
                rests = [self.held.pop(("rest", s, half.microbatch)) for half in some]
                self.stage.backward_weight(self.chunks[s], rests, self.mesh)
            case Backward(s, m):
                self.do([BackwardInput(s, m)])
                self.do([BackwardWeight(s, m)])
            case ForwardBackward(forward, backward):
                self.do([forward])
                self.do([backward])
            case ReduceGrads(s):
                self.chunks[s].reduce_all()
            case RecvActivation(s, m):
                self.held["In", s + 1, m] = self.channels.take(some[0])
            case RecvGrad(s, m):
                self.held["dOut", s - 1, m] = self.channels.take(some[0])
            case SendActivation(s, m):
                self.channels.send(some[0], self.held.pop(("Out", s, m)))
            case SendGrad(s, m):
                self.channels.send(some[0], self.held.pop(("dIn", s, m)))

    def forward(self, s: int, m: int) -> None:
        In = self.In[m] if s == 0 else self.held.pop(("In", s, m))
        Out, self.held["saved", s, m] = self.stage.forward(self.chunks[s], In, self.mesh, m)
        if s == self.last:
            self.held["dOut", s, m] = self.differentiate(Out, self.Target[m])
        elif self.schedule.placement[s + 1] == self.rank:
            self.held["In", s + 1, m] = Out
        else:
            self.held["Out", s, m] = Out

    def backward_input(self, s: int, m: int) -> None:
        dOut, saved = self.held.pop(("dOut", s, m)), self.held.pop(("saved", s, m))
        dIn, self.held["rest", s, m] = self.stage.backward_input(self.chunks[s], dOut, saved, self.mesh)
        if s == 0:
            self.held |= {("dIn", m): dIn} if self.head is not None else {}
        elif self.schedule.placement[s - 1] == self.rank:
            self.held["dOut", s - 1, m] = dIn
        else:
            self.held["dIn", s, m] = dIn

    def differentiate(self, Out, Target):
        """dOut of this microbatch's terms of the loss, which are added to the total; so are gradients of the head."""
        terms, dhead, dOut = self.loss(self.head, Out, Target)
        self.total += terms
        dhead = tree.map(lambda g: g.to(self.dtype or g.dtype), dhead)
        self.dhead = dhead if self.dhead is None else tree.map(torch.add, self.dhead, dhead)
        return dOut

    def clock(self) -> float:
        if self.In.is_cuda:
            torch.cuda.synchronize(self.In.device)
        return now()


def _together(program: tuple) -> Iterator[list]:
    """The steps in order, each a list of one; weight halves of one stage that stand together are one list."""
    for _, some in groupby(program, lambda step: step.stage if isinstance(step, BackwardWeight) else id(step)):
        yield list(some)


def _spans(rank: int, some: list, start: float, end: float) -> list[Span]:
    """The time of a step; steps that ran as one product share it."""
    shares = [part for step in some for part in parts(step)]
    width = (end - start) / len(shares)
    return [Span(rank, part, start + i * width, start + (i + 1) * width) for i, part in enumerate(shares)]


def _check(params, In, Target, mesh, schedule: Schedule, axis: str) -> None:
    """ValueError, on every rank alike, unless params, batch, schedule and mesh fit each other."""
    if mesh.sizes.get(axis) != schedule.stages:
        has = ", ".join(f"{name}={size}" for name, size in mesh.sizes.items())
        raise ValueError(
            f"{schedule.name}: has {schedule.stages} stages, but the mesh is {has}, without {axis}={schedule.stages}\n"
            f"  fix: make the schedule with stages=mesh.sizes[{axis!r}]"
        )
    for rank, program in enumerate(schedule):
        reduced = sorted(step.stage for step in program if isinstance(step, ReduceGrads))
        if reduced != list(schedule.stages_of(rank)):
            raise ValueError(
                f"{schedule.name}: rank {rank} holds the virtual stages {list(schedule.stages_of(rank))}, and reduces "
                f"the gradients of {reduced}\n  fix: one ReduceGrads for each, after the last that adds to them"
            )
    _simulated(schedule)
    for name, x in (("In", In), ("Target", Target)):
        if len(x) % schedule.microbatches:
            raise ValueError(
                f"{schedule.name}: {name} has {len(x)} rows, which do not divide into {schedule.microbatches} "
                f"microbatches\n  fix: use a multiple of {schedule.microbatches}"
            )
    for where, W in tree.named_leaves(params).items():
        if len(W) % schedule.chunks:
            raise ValueError(
                f"{schedule.name}: {where} has {len(W)} layers here, not a multiple of {schedule.chunks}"
                "\n  fix: use as many layers on each rank as a multiple of the chunks"
            )
    call = f"pipeline {schedule.name}, {schedule.microbatches} microbatches, {schedule.chunks} chunks"
    alike(mesh, call, axis=axis, In=In, Target=Target, params=params)
