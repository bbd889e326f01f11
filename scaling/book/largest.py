"""The largest of several differences, for judging by it."""

from collections.abc import Iterable

import torch

from scaling.collectives import unshard
from scaling.spec import format_axes


def largest(numbers: Iterable[float], mesh=None) -> float:
    """Return the largest number, or NaN if one of them is NaN, which `max` may hide.

    On a mesh it is the largest over all ranks, on every rank, since a copy may be wrong on one rank alone.
    """
    local = max(numbers, key=lambda x: (x != x, x))
    if mesh is None:
        return local
    of_rank = torch.tensor([local], dtype=torch.float64, device=mesh.device)
    return largest(unshard(f"of_rank[R_{format_axes(mesh.sizes)}]", of_rank, mesh).tolist())
