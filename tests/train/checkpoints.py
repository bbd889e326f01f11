"""States that the tests of checkpoints save."""

import torch

from scaling import tree
from scaling.configs import Config
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.train import checkpoint

CONFIG = Config("c", 2, 16, 24, 4, 2, 8, 32, tied=True)


def state_of(mesh):
    types = transformer.specs(CONFIG, mesh)
    params = transformer.shard(model.init(CONFIG, 3, torch.float64), CONFIG, mesh)
    specs = {"params": types, "m": types, "count": "n[]"}
    return {"params": params, "m": tree.map(lambda W: W * 2, params), "count": torch.tensor(7)}, specs


def saves(mesh, folder):
    state, specs = state_of(mesh)
    checkpoint.save(folder, state | {"data": {"position": 1234, "seed": "s"}}, specs, mesh, 5)


def alone(step, folder, keep=None, **options):
    mesh = Mesh({"X": 1})
    return checkpoint.save(
        folder, {"W": torch.full((3,), float(step))}, {"W": "W[D]"}, mesh, step, keep=keep, **options
    )
