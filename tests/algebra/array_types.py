"""Types drawn at random or one by one, and what the dumbest plan between two of them moves."""

import functools
import itertools

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
