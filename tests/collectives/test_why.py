"""What this project exists for, said of torch: how its own collectives are differentiated. Where a test here fails,
torch has changed, and README, notation.md and the collectives' own Function are to be thought over."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from scaling import launch
from scaling.collectives import all_reduce

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own


def gradients(mesh):
    """The gradient of sum(w * y), y the sum over the ranks of x, as torch's raw collective has it, and as ours; what
    the functional one says."""
    w = torch.arange(3.0) + 10 * mesh.rank
    group = mesh.group(("X",)).pg

    def raw(x):
        y = x.clone()
        dist.all_reduce(y, group=group)
        return (y * w).sum()

    def ours(x):
        return (all_reduce("y[I] {U_X} -> y[I]", x, mesh) * w).sum()

    try:
        found = torch.func.grad(lambda x: (functional.all_reduce(x, "sum", group) * w).sum())(torch.ones(3))
    except RuntimeError as error:
        found = str(error)
    return torch.func.grad(raw)(torch.ones(3)), torch.func.grad(ours)(torch.ones(3)), found, w


@pytest.mark.slow
def test_torch_s_own_collectives_under_torch_func():
    results = launch.run(gradients, {"X": 2}, checked=False)
    right = sum(w for *_, w in results)  # each rank's x is in every rank's y
    for raw, ours, functional_says, w in results:
        assert torch.equal(raw, w), "a raw all_reduce has the gradient of the identity, without a word"
        assert torch.equal(ours, right)
        assert "setup_context" in functional_says, "the functional collectives refuse"
