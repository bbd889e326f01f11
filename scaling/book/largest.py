"""The largest of some differences, for those who judge by it."""

from collections.abc import Iterable

import torch

from scaling.collectives import unshard
from scaling.spec import format_axes


def largest(numbers: Iterable[float], mesh=None) -> float:
    """The largest; NaN if one of them is: `max` keeps what stands before a NaN, which then goes unseen.

    On a mesh, on all of its ranks alike: the largest of every rank's, since a copy may be wrong on one rank alone.
    """
    own = max(numbers, key=lambda x: (x != x, x))
    if mesh is None:
        return own
    of_rank = torch.tensor([own], dtype=torch.float64, device=mesh.device)
    return largest(unshard(f"of_rank[R_{format_axes(mesh.sizes)}]", of_rank, mesh).tolist())
