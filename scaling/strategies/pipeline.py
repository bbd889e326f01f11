"""Pipeline parallelism (Part 5, Pipelining):  In[B, D] * W_in[L_Z, D, F] * W_out[L_Z, F, D] -> Out[B, D].

Layers are split over Z; a batch is cut into microbatches, whose activations move from stage to stage, forward, and
whose dOut move back. Who does what when is a schedule (`scaling.schedules`), which `value_and_grad` executes:

    schedule = one_f_one_b(stages=4, microbatches=8)
    Loss, grads = value_and_grad(params, In, Target, mesh, schedule, loss)

With FSDP and tensor parallelism inside each stage, W_in[L_Z, D_X, F_Y], give `stage=of_strategy(fsdp_tp.STRATEGY)`.
torch.compile takes a stage's functions, `stage._replace(forward=torch.compile(stage.forward))`: between them lies
Python that waits for other ranks.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from scaling import tree
from scaling.collectives import all_reduce, wait
from scaling.collectives.checked import alike
from scaling.common.limits import LIMITS
from scaling.models.pointwise import vjp
from scaling.schedules import (
    BackwardInput,
    Forward,
    ForwardBackward,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    Schedule,
    SendActivation,
    SendGrad,
)
from scaling.schedules.schedule import WeightHalves, parts, simple_parts, units_of
from scaling.schedules.simulator import Span, Timeline, simulate
from scaling.spec import format_axes, parse
from scaling.strategies.channels import Channels
from scaling.strategies.stage import SPECS, Stage, mlp
from scaling.trace import now

__all__ = ["SPECS", "EndsGradients", "arrange", "measure", "restore", "value_and_grad", "with_ends"]

_simulated = lru_cache(maxsize=64)(simulate)  # raises, once per schedule, if it would hang or leave out a microbatch


def value_and_grad(params, In, Target, mesh, schedule: Schedule, loss: Callable, stage: Stage | None = None, axis="Z"):
    """Return (Loss[], grads typed as params), by executing a schedule.

    The last stage computes the loss, `Loss[] {U_Z}`, and an AllReduce then gives every rank the same number.

    Args:
        params: This rank's layers, stacked, `W_in[L_Z, D, F]`. With several chunks per rank they are in the order of
            `schedule.layer_order` (see `arrange`).
        In: In[B, D], replicated over Z; the first stage reads it.
        Target: Target[B, ...], replicated over Z; the last stage reads it.
        mesh: The mesh.
        schedule: The schedule.
        loss: `loss(Out, Target)` returns a microbatch's terms. The loss is their sum over microbatches, and over the
            axes that split Out; so for a mean, divide by the size of the whole batch.
        stage: The stage's functions; by default the book's layers.
        axis: The pipeline axis.

    Raises:
        ValueError: The schedule does not fit the mesh or the batch, or leaves something out.
        Deadlock: The schedule's ranks would wait for each other.
    """
    return interpret(params, None, In, Target, mesh, schedule, _without_head(loss), stage or mlp(), axis)[:2]


class EndsGradients(NamedTuple):
    """The gradients that `with_ends` returns.

    Attributes:
        params: The gradients of the layers, typed as params.
        dIn: dIn[B, D] {U_Z}, from the first stage. It is zero on other ranks, so an AllReduce over Z makes it whole.
        head: The head's gradients {U_Z}, from the last stage, and zero on other ranks.
    """

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
    out=None,
    ahead=LIMITS.ahead,
):
    """Return (Loss[], EndsGradients), for a model with ends before the first layer and after the last.

    It is `value_and_grad` with a loss that has params, `loss(head, Out, Target)`, and it returns dIn as well. The other
    arguments are as in `value_and_grad`.

    Args:
        params: This rank's layers, stacked.
        head: The params of the loss.
        In: In[B, D], the result of the first end.
        Target: Target[B, ...].
        mesh: The mesh.
        schedule: The schedule.
        loss: The function above.
        stage: The stage's functions; by default the book's layers.
        axis: The pipeline axis.
        dtype: The dtype of the gradients of params and head, if not their own.
        differentiated: Whether the loss returns (terms, gradients of the head, dOut).
        out: A tree that receives the params' gradients, if they are sharded otherwise than the params.
        ahead: The receives that are posted ahead on each channel.
    """
    with_gradients = loss if differentiated else _by_vjp(loss)
    given = params, head, In, Target, mesh, schedule, with_gradients, stage or mlp(), axis
    Loss, grads, dIns, dhead = interpret(*given, dtype, out=out, ahead=ahead)
    dIn = torch.cat(dIns) if dIns else In.new_zeros(()).expand(In.shape)  # zeros that take no memory
    if dhead is None:  # another rank has the last stage
        dhead = tree.map(lambda W: torch.zeros_like(W, dtype=dtype), head)
    return Loss, EndsGradients(grads, dIn, dhead)


def _by_vjp(loss: Callable) -> Callable:
    """Return a function that returns (terms, gradients of the head, dOut), from a loss that returns only terms."""

    def with_gradients(head, Out, Target):
        terms, loss_vjp = vjp(lambda head, Out: loss(head, Out, Target), head, Out)
        dhead, dOut = loss_vjp(torch.ones_like(terms))
        return terms, tree.map(torch.clone, dhead), dOut

    return with_gradients


def _without_head(loss: Callable) -> Callable:
    return _by_vjp(lambda _, Out, Target: loss(Out, Target))


def measure(params, In, Target, mesh, schedule: Schedule, loss: Callable, stage: Stage | None = None, axis="Z"):
    """Return what `value_and_grad` does, and the Timeline of the run, in seconds, with all ranks along the axis."""
    spans: list[Span] = []
    group, everyone, rank = mesh.group((axis,)), [spans], mesh.coord[axis]
    if group.pg is not None:
        dist.barrier(group.pg)
    began = [now()]

    def observe(unit: list) -> None:
        """Record the time since the previous unit ended; instructions that ran as one product share it equally."""
        if In.is_cuda:
            torch.cuda.synchronize(In.device)
        began.append(now())
        shares, (start, end) = [part for instruction in unit for part in parts(instruction)], began[-2:]
        width = (end - start) / len(shares)
        spans.extend(Span(rank, part, start + i * width, start + (i + 1) * width) for i, part in enumerate(shares))

    given = params, None, In, Target, mesh, schedule, _without_head(loss), stage or mlp(), axis
    Loss, grads, *_ = interpret(*given, observe=observe)
    if group.pg is not None:
        everyone = [None] * group.size
        dist.all_gather_object(everyone, spans, group=group.pg)
    every = tuple(span for one in everyone for span in one)
    return Loss, grads, Timeline(f"{schedule.name}, measured", schedule.stages, every, schedule.chunks)


def arrange(params, schedule: Schedule):
    """Return whole params with their layers in the order that `L_Z` deals to the stages; unchanged for 1 chunk."""
    return tree.map(lambda W: W[schedule.layer_order(len(W))], params)


def restore(params, schedule: Schedule):
    """Invert `arrange`."""
    return tree.map(lambda W: W[torch.tensor(schedule.layer_order(len(W)), device=W.device).argsort()], params)


@torch.no_grad()
def interpret(
    params,
    head,
    In,
    Target,
    mesh,
    schedule: Schedule,
    loss: Callable,
    stage: Stage,
    axis: str,
    dtype: torch.dtype | None = None,
    observe: Callable | None = None,
    out: Any = None,
    ahead: int = LIMITS.ahead,
) -> tuple[torch.Tensor, Any, list[torch.Tensor], Any]:
    """Run this rank's program, instruction by instruction, through the functions of a stage.

    The dicts hold all live arrays, by virtual stage and microbatch. An instruction pops its inputs from one dict, and
    puts its results into another. Results for another rank wait in `outputs` or `dIns` until they are sent. Results
    that stay on this rank become at once an input, or a dOut, of the neighbouring stage.

    Args:
        params: This rank's layers, stacked.
        head: The params of the loss, or None.
        In: In[B, D].
        Target: Target[B, ...].
        mesh: The mesh.
        schedule: The schedule.
        loss: `loss(head, Out, Target) -> (terms, gradients of the head, dOut)` of a microbatch. The gradients are new
            tensors, to which later microbatches' are added.
        stage: The stage's functions.
        axis: The pipeline axis.
        dtype: The dtype of the gradients, if not the params'.
        observe: Called with each unit of the program, a list of instructions that run as one, after it has run.
        out: A tree that receives the gradients; None makes one of the params' shapes.
        ahead: The receives that are posted ahead on each channel.

    Returns:
        The loss, the gradients typed as params, dIn of each microbatch where the first stage is and a head was given,
        and the gradients of the head where the last stage is, else None.
    """
    _check(params, In, Target, mesh, schedule, axis)
    rank, placement, last = mesh.coord[axis], schedule.placement, schedule.virtual_stages - 1
    microbatches = In.unflatten(0, (schedule.microbatches, -1))
    targets = Target.unflatten(0, (schedule.microbatches, -1))
    grads = tree.map(lambda W: torch.empty_like(W, dtype=dtype), params) if out is None else out
    chunks = _chunks(params, grads, mesh, schedule, rank, stage)
    line = str(parse(stage.specs["In"]).with_name("x"))
    channels = Channels(mesh, axis, schedule, microbatches[0], line, ahead=ahead)
    inputs: dict = {(0, m): x for m, x in enumerate(microbatches)}
    outputs, saved, dOuts, dIns, rest = ({} for _ in range(5))
    wide = torch.float64 if tree.leaves(params)[0].dtype == torch.float64 else torch.float32
    total, dhead, Loss = torch.zeros((), dtype=wide, device=In.device), None, None
    reduced = f"Loss[] {{U_{format_axes((axis, *parse(stage.specs['Out']).axes))}}} -> Loss[]"
    units = units_of(schedule[rank])
    forwards = [i for i, unit in enumerate(units) if isinstance(unit[0], (Forward, ForwardBackward))]

    for i, unit in enumerate(units):
        for instruction in simple_parts(unit):
            match instruction:
                case RecvActivation(s, m):
                    inputs[s + 1, m] = channels.take(instruction)
                case Forward(s, m):
                    outputs[s, m], saved[s, m] = stage.forward(chunks[s], inputs.pop((s, m)), mesh, m)
                    if s == last:
                        terms, dW, dOuts[s, m] = loss(head, outputs.pop((s, m)), targets[m])
                        total, dhead = total.add_(terms), _added(dhead, dW, dtype)
                        del dW
                    elif placement[s + 1] == rank:
                        inputs[s + 1, m] = outputs.pop((s, m))
                case SendActivation(s, m):
                    channels.send(instruction, outputs.pop((s, m)))
                case RecvGrad(s, m):
                    dOuts[s - 1, m] = channels.take(instruction)
                case BackwardInput(s, m):
                    dIns[s, m], rest[s, m] = stage.backward_input(chunks[s], dOuts.pop((s, m)), saved.pop((s, m)), mesh)
                    if s > 0 and placement[s - 1] == rank:
                        dOuts[s - 1, m] = dIns.pop((s, m))
                    elif s == 0 and (head is None or dIns[s, m] is None):
                        del dIns[s, m]
                case SendGrad(s, m):
                    channels.send(instruction, dIns.pop((s, m)))
                case WeightHalves(s, ms):
                    stage.backward_weight(chunks[s], [rest.pop((s, m)) for m in ms], mesh)
                case ReduceGrads(s):
                    chunks[s].reduce_all()
        if observe:
            observe(unit)
        if i == forwards[-1] and not mesh.checked:  # comparing calls would wait for ranks that wait for us
            Loss = all_reduce(reduced, total, mesh, async_op=True)

    channels.finish()
    for chunk in chunks.values():
        stage.finish(chunk)
    Loss = all_reduce(reduced, total, mesh) if Loss is None else wait(Loss)
    return Loss, grads, [dIns[key] for key in sorted(dIns)], dhead


def _added(total, dW, dtype: torch.dtype | None):
    """Add a microbatch's gradients in place to the total, in a dtype, of those before; None is a total without any."""
    if total is None:
        return tree.map(lambda g: g.to(dtype or g.dtype), dW)
    return tree.map(torch.Tensor.add_, total, dW)


def _chunks(params, grads, mesh, schedule: Schedule, rank: int, stage: Stage) -> dict[int, Any]:
    """Prepare this rank's chunks, by virtual stage; gradients are written into `grads`."""
    stages = schedule.stages_of(rank)

    def chunk(stack, c: int):
        return tree.map(lambda W: W.unflatten(0, (len(stages), -1))[c], stack)

    return {s: stage.prepare(chunk(params, c), mesh, s, chunk(grads, c)) for c, s in enumerate(stages)}


def _check(params, In, Target, mesh, schedule: Schedule, axis: str) -> None:
    """Raise ValueError, on every rank alike, unless params, batch, schedule and mesh fit each other."""
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
