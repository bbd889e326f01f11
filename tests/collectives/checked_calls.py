"""A mesh and a call that the tests of checked meshes share."""

import torch

from scaling import collectives as c

MESH = {"X": 2, "Y": 2}
GATHER, SCATTER = "A[I_X, J] -> A[I, J]", "A[I, J] {U_X} -> A[I_X, J]"


def gather(mesh, shape=(4, 2), dtype=torch.float32, line=GATHER):
    c.all_gather(line, torch.zeros(shape, dtype=dtype), mesh)
