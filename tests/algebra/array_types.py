"""What the tests of algebra share: types of an array, the dumbest plan between two, a product beside the dense one."""

import functools
import itertools

import simulated
import torch
from hypothesis import settings

from scaling.algebra.layouts import arrangements
from scaling.spec import Spec

SETTINGS = settings(deadline=None, derandomize=True, max_examples=40)


def types(axes: str, dims=("I", "J"), unreduced=True):
    """Every type of an array of these dims over these axes."""
    for split in arrangements(tuple(axes), len(dims)):
        idle = [axis for axis in axes if all(axis not in over for over in split)]
        for n in range(len(idle) + 1 if unreduced else 1):
            for partial in itertools.combinations(idle, n):
                yield Spec("A", tuple(zip(dims, split, strict=True)), partial)


def naive_bytes(src, dst, shape, mesh):
    """Reduce everything, gather everything; then slicing is free."""
    whole = src.with_unreduced(())
    sent = 0.0
    if src.unreduced:
        n = functools.reduce(lambda x, y: x * y, (mesh[a] for a in src.unreduced))
        sent += 2 * src.nbytes(shape, mesh, 1) * (n - 1) / n
    n = 1
    for axis in whole.axes:
        n *= mesh[axis]
    total = whole.nbytes(shape, mesh, 1) * n
    return sent + total * (n - 1) / n


MATRICES = {"I": 4, "J": 8, "K": 12}


def check(plan, a, b, out, sizes, mesh):
    """A product's plan, done by simulated devices, is the dense product."""
    letters = {dim: chr(97 + i) for i, dim in enumerate(dict.fromkeys(a.dim_names + b.dim_names))}
    sides = ["".join(letters[dim] for dim in spec.dim_names) for spec in (a, b, out)]
    arrays = [torch.randn(spec.global_shape(sizes), dtype=torch.float64) for spec in (a, b)]
    expected = torch.einsum(f"{sides[0]},{sides[1]}->{sides[2]}", *arrays)
    held = {spec: simulated.scatter(spec, array, mesh) for spec, array in zip((a, b), arrays, strict=True)}
    held = simulated.execute(plan.steps, held, mesh)
    got = simulated.gather(out, held[out], expected.shape, mesh)
    assert (got - expected).abs().max() < 1e-11, f"{a} * {b} -> {out}\n{plan}"
