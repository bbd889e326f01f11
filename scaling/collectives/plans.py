"""Run the steps of plans and programs on a mesh by `scaling.collectives` (Part 3).

Arrays are found by their type, a Spec with its name: `In[B_X, D]` differs from `In[B_X, D_Y]`. All functions are pure
functions of shards, differentiable where the collectives are, and run on a Mesh and on an AbstractMesh alike.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import cast

import torch

from scaling.algebra.resharding import reshard as plan_reshard
from scaling.algebra.rules import CALLS
from scaling.algebra.steps import Plan, Step, permutation
from scaling.collectives import calls as c
from scaling.collectives.linear import who_watches
from scaling.collectives.lines import check_operand
from scaling.collectives.moves import among_zeros
from scaling.collectives.multiply import einsum
from scaling.spec import ShardingError, Spec, parse_line


def run_step(step: Step, operands: Sequence[torch.Tensor], mesh) -> torch.Tensor:
    """Return the shard of `step.after` on this rank, from the shards of `step.before`."""
    if step.op == "Einsum":
        return einsum(step.line, *operands)
    (x,) = operands
    if step.op == "CollectivePermute":
        return c.ppermute(step.line, x, mesh, step.axes, permutation(step, mesh))
    if step.op in _BY_LINE and not (step.op == "AllGather" and len(_changed(step)) > 1):
        return _BY_LINE[step.op](step.line, x, mesh)
    result = _by_hand(step, x, mesh)
    watch = who_watches()
    return result if watch is None else watch.resharded(result, step.after, step.axes)


def _by_hand(step: Step, x: torch.Tensor, mesh) -> torch.Tensor:
    if step.op == "AllGather":
        return _gather_several(step, x, mesh)
    if step.op == "Pad":
        (dim,), group = _changed(step), mesh.group(step.axes)  # the dim that loses axes
        return among_zeros(x, dim, group.index, group.size)
    if step.op == "Mask":
        return x.clone() if mesh.group(step.axes).index == 0 else x.masked_fill(torch.tensor(True, device=x.device), 0)
    raise ShardingError(
        f"{step}: {step.op} is not a step that can be run\n  fix: give steps of a Plan or a Program of scaling.algebra"
    )


_BY_LINE = {kind: getattr(c, name) for name, kind in CALLS.items()}


def _changed(step: Step) -> list[int]:
    """Return the positions of the dims whose axes change."""
    return [i for i, (a, b) in enumerate(zip(step.operands[0].dims, step.after.dims, strict=True)) if a != b]


def _gather_several(step: Step, x: torch.Tensor, mesh) -> torch.Tensor:
    """Gather over the axes of several dims by one AllGather.

    It gathers whole shards, `[Blocks_XY, I, J] -> [Blocks, I, J]`, and then permutes them into the array.
    """
    local = Spec(step.after.name, tuple((dim, ()) for dim in step.after.dim_names), step.after.unreduced)
    blocks, whole = (Spec(local.name, (("Blocks", axes), *local.dims), local.unreduced) for axes in (step.axes, ()))
    gathered = c.all_gather(f"{blocks} -> {whole}", x[None], mesh)
    counts, shape = [], []
    for (_, was), (_, now), size in zip(step.operands[0].dims, step.after.dims, x.shape, strict=True):
        counts.append(mesh.size(was[len(now) :]))
        shape.append(counts[-1] * size)
    order = [place for i in range(x.dim()) for place in (i, x.dim() + i)]
    return gathered.reshape(*counts, *x.shape).permute(order).reshape(shape)


def run_steps(steps: Sequence[Step], held: dict, mesh, keep: Container[Spec], made=None) -> dict:
    """Run steps on typed shards, {type: shard}; each array is dropped after its last use.

    Args:
        steps: the steps, in order.
        held: the shards by type; it is changed and returned.
        mesh: the mesh.
        keep: the types that are not dropped.
        made: a function of (type, shard) that returns the shard to store in place of each new one.
    """
    last = {spec: number for number, step in enumerate(steps) for spec in step.operands}
    for number, step in enumerate(steps):
        result = run_step(step, [held[spec] for spec in step.operands], mesh)
        for spec in step.operands:
            if last[spec] == number and spec not in keep:
                held.pop(spec, None)
        held[step.after] = made(step.after, result) if made else result
    return held


def run(plan: Plan, *shards_and_mesh) -> torch.Tensor:
    """Run a plan, `run(plan, a, b, mesh)`: return the result's shard from the shards of `plan.operands`, in order."""
    *shards, mesh = shards_and_mesh
    if len(shards) != len(plan.operands):
        raise ShardingError(
            f"{len(shards)} shards for {len(plan.operands)} operands, {plan.operands}"
            "\n  fix: give one shard for each operand, in their order"
        )
    if not plan.steps:
        return shards[0].clone()
    result = plan.steps[-1].after
    return run_steps(plan.steps, dict(zip(plan.operands, shards, strict=True)), mesh, {result})[result]


def reshard(line: str, x: torch.Tensor, mesh) -> torch.Tensor:
    """Change any type to any other of the same array, `A[I_XY] -> A[I_Y]`, by the cheapest plan that divides."""
    parsed = parse_line(line)
    if len(parsed.operands) != 1:
        raise ShardingError(f"{parsed}: a resharding has one operand\n  fix: use einsum for a product")
    (before,), after = parsed.operands, parsed.result
    before.check_axes(mesh)
    check_operand("reshard", parsed, mesh.group(()), x, mesh)
    shape = [n * mesh.size(axes) for n, (_, axes) in zip(x.shape, before.dims, strict=True)]
    return run(plan_reshard(before, after, shape, mesh), x, mesh)


def run_program(program, inputs: Mapping[str, torch.Tensor], dOut: torch.Tensor, mesh, activation=None):
    """Run both passes on this rank's shards and return (Out, {"In": dIn, "W_in": ...}).

    `inputs` are given by name; `dOut` has Out's type.
    """
    Out, saved = run_forward(program, inputs, mesh, activation)
    return Out, run_backward(program, dOut, saved, mesh, activation)


def run_forward(program, inputs: Mapping[str, torch.Tensor], mesh, activation=None):
    """Run a Program's forward pass and return (Out, saved), where `saved` maps types to shards for the backward pass.

    `inputs` are shards by name. `activation` is an elementwise function of a tensor that acts on each hidden array.
    """
    if missing := [spec.name for spec in program.operands if spec.name not in inputs]:
        raise ShardingError(
            f"no shard of {missing[0]} among the inputs {list(inputs)}"
            "\n  fix: give the program its operands under their names"
        )
    before = {}  # the hidden arrays before the activation

    def made(spec: Spec, shard: torch.Tensor) -> torch.Tensor:
        if activation is None or spec not in program.hidden:
            return shard
        before[spec] = shard
        return activation(shard)

    steps = [step for step in program.forward if step.op != "Loss"]
    held = {spec: inputs[spec.name] for spec in program.operands}
    held = run_steps(steps, held, mesh, {program.out, *program.saved}, made)
    return held[program.out], {spec: before.get(spec, held[spec]) for spec in program.saved}


def run_backward(program, dOut: torch.Tensor, saved: Mapping[Spec, torch.Tensor], mesh, activation=None) -> dict:
    """Return the inputs' cotangents by name, from `dOut`.

    Each has its array's type, but is replicated where that is unreduced.
    """
    first, *steps = program.backward
    held, transposed = {**saved, first.after: dOut}, {}
    for spec in program.hidden if activation is not None else ():
        held[spec], back, *_ = torch.func.vjp(cast(Callable, activation), saved[spec])
        transposed[spec.cotangent()] = back

    def made(spec: Spec, shard: torch.Tensor) -> torch.Tensor:
        return transposed[spec](shard)[0] if spec in transposed else shard

    wanted = {spec.name: spec.cotangent() for spec in program.operands}
    held = run_steps(steps, held, mesh, wanted.values(), made)
    return {name: held[spec] for name, spec in wanted.items()}
