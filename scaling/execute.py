"""Running the steps of plans and programs on a mesh, by `scaling.collectives` (Part 3).

Arrays are found by their type: a Spec with its name, `In[B_X, D]` is not `In[B_X, D_Y]`. Everything is a pure function
of shards, differentiable where the collectives are, and runs on a Mesh and on an AbstractMesh alike.
"""

from collections.abc import Mapping, Sequence

import torch

from scaling import collectives as c
from scaling import rules
from scaling.resharding import reshard
from scaling.spec import ShardingError, Spec, parse_line
from scaling.steps import Plan, Step, permutation
from scaling.transport import Op


def run_step(step: Step, operands: Sequence[torch.Tensor], mesh) -> torch.Tensor:
    """The shard of `step.after` on this rank, from the shards of `step.before`."""
    if step.op == "Einsum":
        return c.einsum(step.line, *operands)
    (x,) = operands
    if step.op == "CollectivePermute":
        group = mesh.group(step.axes)
        op = Op.over(group, step.op, step.line, moves=permutation(step, mesh))
        return c._run(op, group, rules.Step(step.before, step.after, step.axes), x, mesh, False)
    if step.op in _BY_LINE:
        return _BY_LINE[step.op](step.line, x, mesh)
    if step.op == "Pad":
        return _pad(step, x, mesh)
    if step.op == "Mask":
        return x if mesh.group(step.axes).index == 0 else torch.zeros_like(x)
    raise ShardingError(f"{step}: {step.op} is no step that can be run")


_BY_LINE = {
    "AllGather": c.all_gather,
    "ReduceScatter": c.reduce_scatter,
    "AllReduce": c.all_reduce,
    "AllToAll": c.all_to_all,
    "Slice": c.shard,
}


def _pad(step: Step, x: torch.Tensor, mesh) -> torch.Tensor:
    """This rank's block in its place among zeros, along the one dim that loses axes."""
    (dim,) = (i for i, (a, b) in enumerate(zip(step.before.dims, step.after.dims, strict=True)) if a != b)
    group, size = mesh.group(step.axes), x.shape[dim]
    zeros = [0, 0] * (x.dim() - 1 - dim)
    return torch.nn.functional.pad(x, (*zeros, group.index * size, (group.size - 1 - group.index) * size))


def run_plan(plan: Plan, shards: Sequence[torch.Tensor], mesh) -> torch.Tensor:
    """The shard of `plan.result`; `shards` are those of `plan.operands`, in order."""
    if len(shards) != len(plan.operands):
        raise ShardingError(f"{len(shards)} shards for {len(plan.operands)} operands, {plan.operands}")
    held = dict(zip(plan.operands, shards, strict=True))
    result = plan.operands[0]
    for step in plan.steps:
        held[step.after] = run_step(step, [held[spec] for spec in step.operands], mesh)
        result = step.after
    return held[result]


def run_reshard(line: str, x: torch.Tensor, mesh) -> torch.Tensor:
    """`A[I_XY] -> A[I_Y]` by the cheapest plan on this mesh whose blocks divide at these sizes."""
    parsed = parse_line(line)
    if len(parsed.operands) != 1:
        raise ShardingError(f"{parsed}: a resharding has one operand; einsum multiplies")
    (before,), after = parsed.operands, parsed.result
    before.check_axes(mesh)
    if len(before.dims) != x.dim():
        raise ShardingError(f"{parsed}: the operand has shape {tuple(x.shape)}, not {len(before.dims)} dims")
    shape = [n * mesh.size(axes) for n, (_, axes) in zip(x.shape, before.dims, strict=True)]
    return run_plan(reshard(before, after, shape, mesh), (x,), mesh)


def run_forward(program, inputs: Mapping[str, torch.Tensor], mesh, activation=None):
    """(Out, saved) of a Program; see Program.run_forward. `saved` maps types to shards, all that the backward needs."""
    if missing := [spec.name for spec in program.operands if spec.name not in inputs]:
        raise ShardingError(f"no shard of {missing[0]} among the inputs {list(inputs)}")
    held = {spec: inputs[spec.name] for spec in program.operands}
    before = {}  # the hidden arrays as they were before the activation
    for step in program.forward:
        if step.op == "Loss":
            continue
        held[step.after] = run_step(step, [held[spec] for spec in step.operands], mesh)
        if activation is not None and step.after in program.hidden:
            before[step.after] = held[step.after]
            held[step.after] = activation(held[step.after])
    return held[program.out], {spec: before.get(spec, held[spec]) for spec in program.saved}


def run_backward(program, dOut: torch.Tensor, saved: Mapping[Spec, torch.Tensor], mesh, activation=None) -> dict:
    """The cotangents of the inputs, by their names; see Program.run_backward."""
    held, transposed = dict(saved), {}
    for spec in program.hidden if activation is not None else ():
        held[spec], back = torch.func.vjp(activation, saved[spec])
        transposed[spec.with_name("d" + spec.name)] = back
    for step in program.backward:
        if step.op == "Cotangent":
            held[step.after] = dOut
            continue
        held[step.after] = run_step(step, [held[spec] for spec in step.operands], mesh)
        if step.after in transposed:
            (held[step.after],) = transposed[step.after](held[step.after])
    return {spec.name: held[spec.with_name("d" + spec.name)] for spec in program.operands}
