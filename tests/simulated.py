"""A mesh simulated in one process: every device's shard, and each step done as the devices do it, not as its types say.

So a plan that is wrong gives wrong shards here. Shards are float64 tensors, by coordinate.
"""

import itertools

import torch

from scaling.algebra.steps import Step, permutation
from scaling.spec import Spec


def devices(mesh):
    """Every coordinate of the mesh, as a tuple in the order of its axes."""
    return list(itertools.product(*(range(n) for n in mesh.values())))


def scatter(spec: Spec, whole: torch.Tensor, mesh) -> dict:
    """The shards of an array: its blocks, and where it is unreduced partial sums that add up to them."""
    shards, seed = {}, torch.Generator().manual_seed(whole.numel())
    partial = [list(mesh).index(axis) for axis in spec.unreduced]
    terms, last = {}, tuple(mesh[axis] - 1 for axis in spec.unreduced)
    for part in itertools.product(*(range(mesh[axis]) for axis in spec.unreduced)):
        terms[part] = torch.randn(whole.shape, generator=seed, dtype=whole.dtype)
    terms[last] = whole - sum((term for part, term in terms.items() if part != last), torch.zeros_like(whole))
    for at in devices(mesh):
        coord = dict(zip(mesh, at, strict=True))
        shards[at] = terms[tuple(at[i] for i in partial)][spec.slices(whole.shape, mesh, coord)].clone()
    return shards


def gather(spec: Spec, shards: dict, shape, mesh) -> torch.Tensor:
    """The array that typed shards stand for; fails unless all replicas are equal."""
    whole = torch.full(shape, float("nan"), dtype=torch.float64)
    partial = [list(mesh).index(axis) for axis in spec.unreduced]
    for at in devices(mesh):
        coord = dict(zip(mesh, at, strict=True))
        place = spec.slices(shape, mesh, coord)
        siblings = itertools.product(*(range(n) if i in partial else (at[i],) for i, n in enumerate(mesh.values())))
        block = sum(shards[other] for other in siblings)
        assert block.shape == whole[place].shape, f"{spec}: shard of {tuple(shards[at].shape)} at {at}"
        same = whole[place].isnan().all() or (whole[place] - block).abs().max() < 1e-12
        assert same, f"{spec}: the replica at {at} differs"
        whole[place] = block
    assert not whole.isnan().any()
    return whole


def groups(mesh, axes):
    """The groups over `axes`: each a list of coordinates, row-major in the axes' own order."""
    names = list(mesh)
    rest = [range(n) if axis not in axes else (0,) for axis, n in mesh.items()]
    for base in itertools.product(*rest):
        members = []
        for over in itertools.product(*(range(mesh[axis]) for axis in axes)):
            at = list(base)
            for axis, i in zip(axes, over, strict=True):
                at[names.index(axis)] = i
            members.append(tuple(at))
        yield members


def held_over(step: Step, dim: int, mesh) -> int:
    """How many blocks of a dim an AllGather joins."""
    parts = 1
    for axis in step.before.dims[dim][1][len(step.after.dims[dim][1]) :]:
        parts *= mesh[axis]
    return parts


def apply(step: Step, operands: list[dict], mesh) -> dict:
    """One step on every device's shards."""
    if step.op == "Einsum":
        letters = {}
        for spec in (*step.before, step.after):
            for dim in spec.dim_names:
                letters.setdefault(dim, chr(97 + len(letters)))
        sides = ["".join(letters[dim] for dim in spec.dim_names) for spec in (*step.before, step.after)]
        equation = f"{sides[0]},{sides[1]}->{sides[2]}"
        return {at: torch.einsum(equation, operands[0][at], operands[1][at]) for at in devices(mesh)}
    (shards,), result = operands, {}
    changed = [i for i, (a, b) in enumerate(zip(step.before.dims, step.after.dims, strict=True)) if a != b]
    for members in groups(mesh, step.axes):
        held, n = [shards[at] for at in members], len(members)
        if step.op == "AllGather":
            for dim in reversed(changed):  # the axes of the last dim are the fastest
                parts = held_over(step, dim, mesh)
                held = [torch.cat(held[i : i + parts], dim) for i in range(0, len(held), parts)]
            new = held * n
        elif step.op == "AllReduce":
            new = [sum(held)] * n
        elif step.op == "ReduceScatter":
            new = sum(held).chunk(n, changed[0])
        elif step.op == "AllToAll":
            target, source = sorted(changed, key=lambda i: len(step.after.dims[i][1]) < len(step.before.dims[i][1]))
            blocks = [x.chunk(n, target) for x in held]
            new = [torch.cat([blocks[j][i] for j in range(n)], source) for i in range(n)]
        elif step.op == "CollectivePermute":
            new = [None] * n
            for source, target in permutation(step, mesh):
                new[target] = held[source]
        elif step.op == "Slice":
            new = [x.chunk(n, changed[0])[i] for i, x in enumerate(held)]
        elif step.op == "Pad":
            zero = torch.zeros_like(held[0])
            new = [torch.cat([x if j == i else zero for j in range(n)], changed[0]) for i, x in enumerate(held)]
        elif step.op == "Mask":
            new = [held[0]] + [torch.zeros_like(x) for x in held[1:]]
        else:
            raise ValueError(f"no step {step.op}")
        result |= dict(zip(members, new, strict=True))
    return result


def execute(steps, arrays: dict, mesh) -> dict:
    """Run steps on arrays given as {type: shards}; returns all of them with the new ones."""
    arrays = dict(arrays)
    for step in steps:
        arrays[step.after] = apply(step, [arrays[spec] for spec in step.operands], mesh)
    return arrays
