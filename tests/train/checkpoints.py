"""One array saved by one rank, and loaded again; what a pickle of an evil hand runs."""

import os

import torch

from scaling.mesh import Mesh
from scaling.train import checkpoint

ONE, SPECS = Mesh({"X": 1}), {"W": "W[D]"}


def save(folder, step: int, W: "torch.Tensor | None" = None, **options):
    """By default three elements, which are the step's number."""
    given = torch.full((3,), float(step)) if W is None else W
    return checkpoint.save(folder, {"W": given}, SPECS, ONE, step, **options)


def load(folder, step: "int | None" = None) -> tuple[list[float], int]:
    state, found = checkpoint.load(folder, SPECS, ONE, step)
    return state["W"].tolist(), found


class Malicious:
    """Whoever unpickles it has a file `never` in the working folder."""

    def __reduce__(self):
        return os.system, ("touch never",)
