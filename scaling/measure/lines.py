"""The collectives that are timed, each by one line over an axis X, and the barrier before each time."""

import torch

from scaling import collectives
from scaling.spec import format_axes

LINES = {
    "AllGather": ("A[I_X, J] -> A[I, J]", collectives.all_gather),
    "ReduceScatter": ("A[I, J] {U_X} -> A[I_X, J]", collectives.reduce_scatter),
    "AllReduce": ("A[I, J] {U_X} -> A[I, J]", collectives.all_reduce),
    "AllToAll": ("A[I_X, J] -> A[I, J_X]", collectives.all_to_all),
}


def barrier(mesh) -> None:
    """Return when every rank of the mesh has come."""
    if axes := [axis for axis, size in mesh.sizes.items() if size > 1]:
        collectives.all_reduce(f"N[] {{U_{format_axes(axes)}}} -> N[]", torch.zeros((), device=mesh.device), mesh)
