"""Arrays on a mesh that is simulated in one process: types, every device's shard, and each step done as devices do it.

Not as the types of a step say: so a plan that is wrong gives wrong shards here. Shards are float64 tensors, by
coordinate.
"""

import itertools
import math

import torch
from hypothesis import settings

from scaling.algebra.layouts import arrangements
from scaling.algebra.steps import Step, permutation
from scaling.spec import Spec

SETTINGS = settings(deadline=None, derandomize=True, max_examples=40)
MATRICES = {"I": 4, "J": 8, "K": 12}


def types(axes: str, dims=("I", "J"), unreduced=True):
    """Every type of an array of these dims over these axes."""
    for split in arrangements(tuple(axes), len(dims)):
        idle = [axis for axis in axes if all(axis not in over for over in split)]
        for n in range(len(idle) + 1 if unreduced else 1):
            for partial in itertools.combinations(idle, n):
                yield Spec("A", tuple(zip(dims, split, strict=True)), partial)


def naive_bytes(spec: Spec, shape, mesh) -> float:
    """Bytes sent by the dumbest plan: reduce everything, gather everything; then slicing is free."""
    terms, blocks = (math.prod(mesh[axis] for axis in axes) for axes in (spec.unreduced, spec.axes))
    return 2 * spec.nbytes(shape, mesh, 1) * (terms - 1) / terms + math.prod(shape) * (blocks - 1) / blocks


def coordinates(mesh) -> list[tuple]:
    """Every device, as a tuple in the order of the mesh's axes."""
    return list(itertools.product(*(range(n) for n in mesh.values())))


def scatter(spec: Spec, whole: torch.Tensor, mesh) -> dict:
    """The shards of an array: its blocks, and where it is unreduced partial sums that add up to them."""
    seed, partial = torch.Generator().manual_seed(whole.numel()), [list(mesh).index(axis) for axis in spec.unreduced]
    terms, last = {}, tuple(mesh[axis] - 1 for axis in spec.unreduced)
    for part in itertools.product(*(range(mesh[axis]) for axis in spec.unreduced)):
        terms[part] = torch.randn(whole.shape, generator=seed, dtype=whole.dtype)
    terms[last] = whole - sum((term for part, term in terms.items() if part != last), torch.zeros_like(whole))
    return {
        at: terms[tuple(at[i] for i in partial)][
            spec.slices(whole.shape, mesh, dict(zip(mesh, at, strict=True)))
        ].clone()
        for at in coordinates(mesh)
    }


def gather(spec: Spec, shards: dict, shape, mesh) -> torch.Tensor:
    """The array that typed shards stand for; fails unless all replicas are equal."""
    whole = torch.full(shape, float("nan"), dtype=torch.float64)
    partial = [list(mesh).index(axis) for axis in spec.unreduced]
    for at in coordinates(mesh):
        place = spec.slices(shape, mesh, dict(zip(mesh, at, strict=True)))
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
    for base in itertools.product(*(range(n) if axis not in axes else (0,) for axis, n in mesh.items())):
        members = []
        for over in itertools.product(*(range(mesh[axis]) for axis in axes)):
            at = list(base)
            for axis, i in zip(axes, over, strict=True):
                at[names.index(axis)] = i
            members.append(tuple(at))
        yield members


def equation_of(*specs: Spec) -> str:
    """torch's equation of a product of two types that has the third."""
    letters: dict[str, str] = {}
    sides = ["".join(letters.setdefault(dim, chr(97 + len(letters))) for dim in spec.dim_names) for spec in specs]
    return f"{sides[0]},{sides[1]}->{sides[2]}"


def apply(step: Step, operands: list[dict], mesh) -> dict:
    """One step on every device's shards."""
    if step.op == "Einsum":
        equation = equation_of(*step.before, step.after)
        return {at: torch.einsum(equation, operands[0][at], operands[1][at]) for at in coordinates(mesh)}
    (shards,), result = operands, {}
    changed = [i for i, (a, b) in enumerate(zip(step.before.dims, step.after.dims, strict=True)) if a != b]
    for members in groups(mesh, step.axes):
        held, n = [shards[at] for at in members], len(members)
        if step.op == "AllGather":
            for dim in reversed(changed):  # the axes of the last dim are the fastest
                joined = step.before.dims[dim][1][len(step.after.dims[dim][1]) :]
                parts = math.prod(mesh[axis] for axis in joined)
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


def arrives(plan, src: Spec, dst: Spec, shape, mesh) -> None:
    """A resharding's plan, done by simulated devices, leaves the array as it was."""
    whole = torch.randn(shape, dtype=torch.float64)
    done = execute(plan.steps, {src: scatter(src, whole, mesh)}, mesh)
    assert (gather(dst, done[dst], shape, mesh) - whole).abs().max() < 1e-12, f"{src} -> {dst}\n{plan}"


def check(plan, a: Spec, b: Spec, out: Spec, sizes, mesh) -> None:
    """A product's plan, done by simulated devices, is the dense product."""
    arrays = [torch.randn(spec.global_shape(sizes), dtype=torch.float64) for spec in (a, b)]
    expected = torch.einsum(equation_of(a, b, out), *arrays)
    held = {spec: scatter(spec, array, mesh) for spec, array in zip((a, b), arrays, strict=True)}
    got = gather(out, execute(plan.steps, held, mesh)[out], expected.shape, mesh)
    assert (got - expected).abs().max() < 1e-11, f"{a} * {b} -> {out}\n{plan}"
