"""Arrays on a mesh that is simulated in one process: types, every device's shard, and each step done as devices do it.

Not as the types of a step say: so a plan that is wrong gives wrong shards here. All devices' shards are
one float64 tensor, [size of each axis of the mesh..., shape of a shard...].
"""

import itertools
import math
from functools import partial

import torch
from hypothesis import settings

from scaling.algebra.layouts import arrangements
from scaling.algebra.steps import Step, permutation
from scaling.spec import Spec

SETTINGS = settings(deadline=None, derandomize=True, max_examples=40)
MATRICES = {"I": 4, "J": 8, "K": 12}
meta = partial(torch.empty, device="meta")  # shapes and dtypes alone


def types(axes: str, dims=("I", "J"), unreduced=True):
    """Every type of an array of these dims over these axes."""
    for split in arrangements(tuple(axes), len(dims)):
        idle = [axis for axis in axes if all(axis not in over for over in split)]
        for n in range(len(idle) + 1 if unreduced else 1):
            for over in itertools.combinations(idle, n):
                yield Spec("A", tuple(zip(dims, split, strict=True)), over)


def naive_bytes(spec: Spec, shape, mesh) -> float:
    """Bytes sent by the dumbest plan: reduce everything, gather everything; then slicing is free."""
    terms, blocks = (math.prod(mesh[axis] for axis in axes) for axes in (spec.unreduced, spec.axes))
    return 2 * spec.nbytes(shape, mesh, 1) * (terms - 1) / terms + math.prod(shape) * (blocks - 1) / blocks


def scatter(spec: Spec, whole: torch.Tensor, mesh) -> torch.Tensor:
    """The shards of an array: its blocks, and where it is unreduced partial sums that add up to them."""
    for i, (_, axes) in reversed([*enumerate(spec.dims)]):
        whole = whole.unflatten(i, (*(mesh[axis] for axis in axes), -1))
    idle = [axis for axis in mesh if axis not in spec.axes]
    labels = [*idle, *blocked(spec)]
    shards = whole[(None,) * len(idle)].permute([labels.index(label) for label in (*mesh, *spec.dim_names)])
    generator = torch.Generator().manual_seed(whole.numel())
    for i in map([*mesh].index, spec.unreduced):
        shape = (*shards.shape[:i], [*mesh.values()][i] - 1, *shards.shape[i + 1 :])
        terms = torch.randn(shape, generator=generator, dtype=whole.dtype)
        shards = torch.cat([terms, shards - terms.sum(i, keepdim=True)], i)
    return shards.expand(*mesh.values(), *shards.shape[len(mesh) :]).contiguous()


def blocked(spec: Spec) -> list[str]:
    """The dims of an array that is cut: of each of its own the axes, then the block."""
    return [label for dim, axes in spec.dims for label in (*axes, dim)]


def gather(spec: Spec, shards: torch.Tensor | dict, shape, mesh) -> torch.Tensor:
    """The array that typed shards, or those of ranks by coordinate, stand for; fails unless all replicas are equal."""
    if isinstance(shards, dict):
        shards = torch.stack([shards[at] for at in sorted(shards)]).unflatten(0, [*mesh.values()])
    for i in map([*mesh].index, spec.unreduced):
        shards = shards.sum(i, keepdim=True)
    for i in (i for i, axis in enumerate(mesh) if axis not in spec.axes):
        first = shards.narrow(i, 0, 1)
        assert (shards - first).abs().max() < 1e-12, f"{spec}: replicas differ"
        shards = first
    labels, order = [*mesh, *spec.dim_names], blocked(spec)
    idle = [label for label in labels if label not in order]
    return shards.permute([labels.index(label) for label in (*idle, *order)]).reshape(shape)


def equation_of(*specs: Spec) -> str:
    """torch's equation of a product of two types that has the third."""
    letters: dict[str, str] = {}
    sides = ["".join(letters.setdefault(dim, chr(97 + len(letters))) for dim in spec.dim_names) for spec in specs]
    return "...{},...{}->...{}".format(*sides)


def apply(step: Step, operands: list[torch.Tensor], mesh) -> torch.Tensor:
    """One step on every device's shards."""
    if step.op == "Einsum":
        return torch.einsum(equation_of(*step.before, step.after), *operands)
    places, sizes = [[*mesh].index(axis) for axis in step.axes], [mesh[axis] for axis in step.axes]
    front, n = [*range(len(places))], math.prod(sizes)
    (shards,) = operands
    held = shards.movedim(places, front).flatten(0, len(places) - 1)  # [device of the group, ...]
    dims = [*zip(step.before.dims, step.after.dims, strict=True)]
    changed = [i - len(dims) for i, (a, b) in enumerate(dims) if a != b]  # counted from the end
    match step.op:
        case "AllGather":
            for dim in reversed(changed):  # the axes of the last dim are the fastest
                before, after = dims[dim]
                parts = math.prod(mesh[axis] for axis in before[1][len(after[1]) :])
                held = joined(held.unflatten(0, (-1, parts)), dim)
            held = held.expand(n, *held.shape[1:])
        case "AllReduce":
            held = held.sum(0, keepdim=True).expand(held.shape)
        case "ReduceScatter":
            held = torch.stack(held.sum(0).chunk(n, changed[0]))
        case "AllToAll":
            target, source = sorted(changed, key=lambda i: len(dims[i][1][1]) < len(dims[i][0][1]))
            held = joined(torch.stack(held.chunk(n, target)), source)
        case "CollectivePermute":
            sources, targets = map(list, zip(*permutation(step, mesh), strict=True))
            held = torch.full_like(held, math.nan).index_copy(0, torch.tensor(targets), held[sources])
        case "Slice":
            held = torch.stack([x.chunk(n, changed[0])[i] for i, x in enumerate(held)])
        case "Pad":
            alone = torch.zeros(n, *held.shape, dtype=held.dtype)
            alone[range(n), range(n)] = held
            held = joined(alone, changed[0])
        case "Mask":
            held = torch.cat([held[:1], torch.zeros_like(held[1:])])
        case _:
            raise ValueError(f"no step {step.op}")
    return held.unflatten(0, sizes).movedim(front, places)


def joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """[devices, parts, ...]: each device's parts, one after another in a dim that is counted from the end."""
    return parts.movedim(1, dim - 1).flatten(dim - 1, dim)


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
