"""The ways that data takes on NCCL, taken over gloo, which has the same calls: whole-tensor gathers, ReduceScatter."""

from dataclasses import replace

import pytest
import torch

from scaling import collectives as c
from scaling import tree
from scaling.mesh import Mesh
from scaling.strategies import data_parallel, fsdp, fsdp_tp, pods, tensor_parallel

SIZES = {"X": 2, "Y": 2}
STRATEGIES = {
    "dp": (data_parallel, {"X": 4}),
    "fsdp": (fsdp, {"X": 4}),
    "tp": (tensor_parallel, {"Y": 4}),
    "fsdp_tp": (fsdp_tp, SIZES),
    "pods": (pods, {"P": 2, "X": 2, "Y": 2}),
}
LINES = [
    (c.all_gather, "A[I_X, J] -> A[I, J]"),
    (c.all_gather, "A[I, J_Y] -> A[I, J]"),
    (c.all_gather, "A[I_YX, J] -> A[I, J]"),
    (c.all_gather, "A[I, J_XY] -> A[I, J]"),
    (c.all_reduce, "A[I, J] {U_X} -> A[I, J]"),
    (c.all_reduce, "A[I, J] {U_XY} -> A[I, J]"),
    (c.reduce_scatter, "A[I, J] {U_X} -> A[I_X, J]"),
    (c.reduce_scatter, "A[I, J] {U_Y} -> A[I, J_Y]"),
    (c.reduce_scatter, "A[I, J] {U_YX} -> A[I_YX, J]"),
    (c.reduce_scatter, "A[I, J] {U_YX} -> A[I, J_YX]"),
    (c.all_to_all, "A[I_X, J] -> A[I, J_X]"),
    (c.all_to_all, "A[I, J_YX] -> A[I_YX, J]"),
]


def as_on_nccl(mesh):
    """The same mesh, whose groups say that they are NCCL's; unchecked, since to compare calls NCCL needs a GPU."""
    other = Mesh(mesh.sizes, checked=False)
    for axes in (("X",), ("Y",), ("X", "Y"), ("Y", "X"), ("P",), ("P", "X")):
        if all(axis in mesh.sizes for axis in axes):
            other._groups[axes] = replace(other.group(axes), backend="nccl")
    return other


def run_lines(mesh):
    other, g = as_on_nccl(mesh), torch.Generator().manual_seed(mesh.rank)
    x = torch.randint(-99, 99, (8, 12), generator=g).double()  # sums of integers: exact in any order
    for call, line in LINES:
        wanted = call(line, x, mesh)
        for async_op in (False, True):
            assert torch.equal(c.wait(call(line, x, other, async_op=async_op)), wanted), line
        if call in (c.all_gather, c.reduce_scatter):
            assert torch.equal(call(line, x, other, out=torch.empty_like(wanted)), wanted), line
        weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).double()
        grads = [torch.func.grad(lambda x, m=m: (call(line, x, m) * weight).sum())(x) for m in (mesh, other)]  # noqa: B023
        torch.testing.assert_close(*grads, rtol=1e-14, atol=1e-12)
    for axes, perm in (("X", [(0, 1), (1, 0)]), ("YX", [(0, 3), (3, 1), (2, 2)]), ("XY", [(2, 2)])):
        line = f"A[I_{axes}, J]"
        wanted = [c.ppermute(line, each.requires_grad_(), mesh, axes, perm).detach() for each in (x.clone(), -x.T)]
        for way in (mesh, other):  # two under way at once
            late = [c.ppermute(line, each, way, axes, perm, async_op=True) for each in (x, -x.T)]
            assert all(torch.equal(pending.wait(), want) for pending, want in zip(late, wanted, strict=True)), line


def run_strategy(mesh, name):
    strategy = STRATEGIES[name][0]
    g = torch.Generator().manual_seed(0)
    L, B, D, F = 3, 16, 8, 16
    params = {"W_in": torch.randn(L, D, F, generator=g).double(), "W_out": torch.randn(L, F, D, generator=g).double()}
    types, results = strategy.SPECS, []
    params = tree.shard(params, {k: types[k].replace("[", "[L, ") for k in params}, mesh)
    In = tree.shard(torch.randn(B, D, generator=g).double(), types["In"], mesh)
    for each in (mesh, as_on_nccl(mesh)):
        Out, saved = strategy.forward(params, In, each, norm=True)
        results.append((Out, *strategy.backward(Out, saved, params, each)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_collectives(ranks):
    ranks(run_lines, SIZES)


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies(ranks, name):
    ranks(run_strategy, STRATEGIES[name][1], name)
