"""The loss in chunks of tokens is torch's of all logits, with its gradients, for any split of V."""

import pytest
import torch
import torch.nn.functional as F

from scaling.book.largest import largest
from scaling.mesh import AbstractMesh, Mesh
from scaling.strategies.axes import all_reduce
from scaling.strategies.transformer.ends import loss
from scaling.trace import trace
from scaling.trace.peak import peak_memory

B, T, D = 2, 6, 5


def problem(V):
    seed = torch.Generator().manual_seed(V)
    x, U, w = (torch.randn(shape, generator=seed, dtype=torch.float64) for shape in ((B, T, D), (D, V), (B, T)))
    targets = torch.randint(V, (B, T), generator=seed)
    targets[0, 1], targets[1, 4] = -100, V - 1
    return x, U, targets, w.square()


def by_torch(x, U, targets, w, smoothing, z):
    x, U = x.clone().requires_grad_(), U.clone().requires_grad_()
    logits = (x @ U).flatten(0, 1)
    ce = F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=-100, label_smoothing=smoothing)
    w = torch.where(targets == -100, 0, w).flatten()
    value = (w * (ce + z * logits.logsumexp(-1).square())).sum() / w.sum()
    return value.detach(), *torch.autograd.grad(value, (x, U))


def largest_error(mesh, V, chunk_bytes, tied, smoothing, z):
    x, U, targets, w = problem(V)
    Y, y = mesh.sizes.get("Y", 1), mesh.coord.get("Y", 0)
    part = -(-V // Y)
    padded = torch.cat([U, U.new_full((D, Y * part - V), 50.0)], 1)  # what stands in the padding is in no sum
    own = padded[:, y * part : (y + 1) * part]
    own = (own.T if tied else own).clone().requires_grad_()
    h = x.clone().requires_grad_()
    options = {"weights": w, "tied": tied, "V": V, "label_smoothing": smoothing, "z_loss": z}
    term = loss(h, own, targets, mesh, **options, chunk_bytes=chunk_bytes)
    dh, dU = torch.autograd.grad(3 * term, (h, own))
    with torch.no_grad():
        again = loss(h, own, targets, mesh, **options, chunk_bytes=chunk_bytes)
    value, dx, whole = by_torch(x, U, targets, w, smoothing, z)
    whole = torch.cat([whole, whole.new_zeros(D, Y * part - V)], 1)[:, y * part : (y + 1) * part]
    value_here = all_reduce("Loss[] {U_Y} -> Loss[]", term.detach(), mesh)
    dh = all_reduce("dx[B, T, D] {U_Y} -> dx[B, T, D]", dh, mesh)
    found = (value_here, value), (again, term), (dh, 3 * dx), (dU.T if tied else dU, 3 * whole)
    return float(largest((a - b).detach().abs().max() for a, b in found))


CASES = [(V, chunk, tied, 0.1, 0.01) for V in (8, 9, 5) for chunk in (150, 1 << 20) for tied in (False, True)]
CASES += [(8, chunk, tied, 0.0, 0.0) for chunk in (1, 150) for tied in (False, True)]


def every_error(mesh):
    return max(largest_error(mesh, *case) for case in CASES)


@pytest.mark.parametrize("Y", [1, 2, 4])
def test_chunks_of_tokens_and_parts_of_the_vocabulary_are_the_whole(ranks, Y):
    """V = 9 and 5 over Y = 4: a rank has padding alone."""
    assert max(ranks(every_error, {"Y": Y})) < 1e-12


def test_by_torch_func_as_by_autograd():
    x, U, targets, _ = problem(8)
    targets = targets.clamp(min=0)  # a value that torch.func has wrapped is not looked at
    found = torch.func.grad(lambda x, U: loss(x, U, targets, Mesh({}), chunk_bytes=100), argnums=(0, 1))(x, U)
    _, *wanted = by_torch(x, U, targets, torch.ones(B, T, dtype=x.dtype), 0.0, 0.0)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(found, wanted, strict=True))


def on_an_abstract_mesh(chunk_bytes):
    x, U = torch.empty(4, 256, 8, device="meta"), torch.empty(8, 1024, device="meta")
    targets = torch.empty(4, 256, dtype=torch.int64, device="meta")
    with peak_memory() as memory, trace() as log:
        loss(x.requires_grad_(), U.requires_grad_(), targets, AbstractMesh({"Y": 4}), chunk_bytes=chunk_bytes)
    return memory.peak, log


def test_memory_and_messages_by_the_size_of_a_chunk():
    """Of 1,024 x 1,024 logits no more than a chunk is there; each chunk sends four numbers a token."""
    (whole, one), (parts, eight) = on_an_abstract_mesh(1 << 22), on_an_abstract_mesh(1 << 19)
    assert whole > 1 << 20 > parts
    sent = [
        [event.nbytes for event in log.collectives() if event.op != "AllReduce" or event.axes] for log in (one, eight)
    ]
    assert sent == [[4 * 1024, 3 * 4 * 1024], [512, 3 * 512] * 8]
    flops = [sum(event.flops for event in log.events) for log in (one, eight)]
    assert flops == [3 * 2 * 1024 * 8 * 1024] * 2  # no logit twice


def test_the_backward_runs_once():
    x, U, targets, _ = problem(8)
    value = loss(x.requires_grad_(), U, targets, Mesh({}))
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        value.backward()
