"""Sums over many tokens or large leaves do not show the mesh: within 1e-6 of float64, however they are split."""

import pytest
import torch
import torch.nn.functional as F

from scaling.configs import get
from scaling.launch import run
from scaling.mesh import Mesh
from scaling.models import moe
from scaling.strategies.axes import all_reduce
from scaling.strategies.transformer.ends import loss

pytestmark = pytest.mark.slow
B, T, D, V = 4, 1 << 17, 2, 4
MESHES = [{}, {"X": 4}, {"C": 2, "Y": 2}]
E8 = get("mixtral-8x7b")  # 8 experts, of each token 2


def problem():
    """Tokens of which a few weigh a thousand times as much as the others."""
    seed = torch.Generator().manual_seed(0)
    x, U, w = torch.randn(B, T, D, generator=seed), torch.randn(D, V, generator=seed), torch.rand(B, T, generator=seed)
    w[0, :200] = 1000
    return x, U, torch.randint(V, (B, T), generator=seed), w


def own(x, mesh):
    """x[B_X, T_C] of x[B, T]."""
    for dim, axis in enumerate("XC"):
        x = x.chunk(mesh.sizes.get(axis, 1), dim)[mesh.coord.get(axis, 0)]
    return x


def long_loss(mesh):
    x, U, targets, w = problem()
    part = U.chunk(mesh.sizes.get("Y", 1), 1)[mesh.coord.get("Y", 0)]
    term = loss(own(x, mesh), part, own(targets, mesh), mesh, weights=own(w, mesh), chunk_bytes=1 << 13)
    return all_reduce("Loss[] {U_PXECY} -> Loss[]", term, mesh).item()


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_loss_over_half_a_million_tokens_in_chunks(sizes):
    x, U, targets, w = problem()
    ce = F.cross_entropy((x.double() @ U.double()).flatten(0, 1), targets.flatten(), reduction="none")
    true = ((w.double().flatten() * ce).sum() / w.double().sum()).item()
    for found in run(long_loss, sizes) if sizes else [long_loss(Mesh({}))]:
        assert found == pytest.approx(true, rel=3e-7)


def test_the_experts_losses_over_two_million_tokens():
    logits = 3 * torch.randn(1 << 21, 8, generator=torch.Generator().manual_seed(0))
    load = moe.load_of(logits.topk(2).indices, 8)
    true = moe.balance_loss(logits.double(), load, E8, len(logits)), moe.z_loss(logits.double(), len(logits))
    for parts in (1, 2, 4, 64):
        some = logits.chunk(parts)
        balance = torch.stack([moe.balance_loss(part, load, E8, len(logits)) for part in some]).sum()
        z = torch.stack([moe.z_loss(part, len(logits)) for part in some]).sum()
        assert (balance.item(), z.item()) == pytest.approx([one.item() for one in true], rel=3e-7)


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_the_unembedding_does_not_show_the_chunks(tied):
    """In bfloat16, 256 chunks: their sum is rounded once, as that of one chunk is."""
    seed = torch.Generator().manual_seed(0)
    x = (1 + torch.randn(1, 1 << 14, 4, generator=seed)).bfloat16()
    U = torch.randn(4, 8, generator=seed).bfloat16()
    targets = torch.randint(8, x.shape[:2], generator=seed)
    found = []
    for chunk_bytes in (1 << 30, 1 << 11):
        table = (U.T if tied else U).contiguous().requires_grad_()
        term = loss(x, table, targets, Mesh({}), tied=tied, chunk_bytes=chunk_bytes)
        (dU,) = torch.autograd.grad(term, table)
        assert dU.dtype == torch.bfloat16
        found.append(dU.float())
    assert (found[1] - found[0]).abs().max() <= 2**-7 * found[0].abs().max()
