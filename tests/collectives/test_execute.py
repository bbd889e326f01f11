"""Running lines and plans: products as matrices', plans on ranks, their derivatives, and the law of cotangents through
every kind of step. Products that are deferred and joined, and their dtypes; stacks of layers that are masked.
test_drawn.py holds einsum beside torch's, whatever the order of dims."""

import itertools

import pytest
import torch
from array_types import types
from problems import drawn

from scaling.algebra import reshard
from scaling.collectives import einsum, join_products, masked, run
from scaling.collectives.multiply import product_of
from scaling.collectives.plans import run_steps
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError, parse
from scaling.trace import trace

PRODUCT = "A[I, J] * B[J, K] -> C[I, K]"
ONE_PRODUCT = {  # of matrices or their transposes: whether it is one
    PRODUCT: True,
    "A[J, I] * B[J, K] -> C[K, I]": True,
    "A[K, I, J] * B[I, J, L] -> C[L, K]": True,
    "A[J] * B[K, J, L] -> C[K, L]": False,  # what is summed is in the middle
    "A[I, J, K] * B[K, J, L] -> C[I, L]": False,  # in another order
    "A[I, J, K] * B[J, L] -> C[I, K, L]": False,
    "A[I, J] * B[J, K, L] -> C[K, I, L]": False,  # between the dims of the other one
    "A[K, I, J] * B[J, K] -> C[K, I]": False,  # a dim of both stays
    "A[I] * B[L] -> C[I, L]": False,  # nothing is summed
}


@pytest.mark.parametrize("line", ONE_PRODUCT)
def test_a_product_is_one_of_matrices_where_its_dims_allow(line):
    assert (product_of(line).summed > 0) is ONE_PRODUCT[line]


def test_derivatives_of_a_product_and_of_its_transpose():
    x, y = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (4, 5)))
    for line in (PRODUCT, "A[I, J] * B[J, K] -> C[K, I]"):
        assert torch.autograd.gradcheck(lambda x, y: einsum(line, x, y), (x, y))  # noqa: B023


def test_a_resharding_runs_the_steps_of_its_plan_and_goes_back():
    """Its numbers are held where calls are drawn."""
    mesh, shape = AbstractMesh({"X": 2, "Y": 2}), (8, 4)
    for before, after in [*itertools.product(types("XY"), repeat=2)][::7]:  # in which all ops occur
        plan, x = reshard(before, after, shape, mesh), torch.empty(before.local_shape(shape, mesh), device="meta")
        with trace() as log:
            y, pull = torch.func.vjp(lambda x: run(plan, x, mesh), x)  # noqa: B023
        moved = [(e.op, e.axes, str(e.before), str(e.after)) for e in log.collectives()]
        assert moved == [(s.op, s.axes, str(s.before), str(s.after)) for s in plan.collectives], (before, after)
        assert y.shape == after.local_shape(shape, mesh)
        assert pull(y)[0].shape == x.shape


def test_an_array_is_dropped_after_its_last_use():
    source, (step,) = parse("A[I_X, J]"), reshard("A[I_X, J]", "A[I, J_X]").steps
    for keep in ((), (source,)):
        held = run_steps([step], {source: torch.empty(2, 8, device="meta")}, AbstractMesh({"X": 2}), keep)
        assert set(held) == {*keep, step.after}


LINE = "Act[B_X, F] * dOut[B_X, D] -> dW[F, D] {U_X}"


def operands(rows, seed=0):
    return drawn((rows, 6), (rows, 4), seed=seed)


def test_a_deferred_product_is_checked_at_once_and_computed_when_it_is_waited_for():
    a, b = operands(5)
    with trace() as log:
        product = einsum(LINE, a, b, defer=True)
    assert log.events == []
    assert (str(product.type), product.shape) == ("dW[F, D] {U_X}", (6, 4))
    assert torch.equal(product.wait(), a.t() @ b)
    out = torch.ones(6, 4, dtype=torch.float64)
    assert product.wait(out, add=True) is out
    torch.testing.assert_close(out, 1 + a.t() @ b, rtol=1e-14, atol=0)


def test_joined_products_are_their_sum():
    some = [einsum(LINE, *operands(rows, seed), defer=True) for seed, rows in enumerate((3, 1, 4))]
    wanted = sum(product.wait() for product in some)
    torch.testing.assert_close(join_products(some).wait(), wanted, rtol=1e-13, atol=1e-13)
    other = einsum("A[B, F] * C[B, D] -> dW[F, D]", *operands(3), defer=True)
    with pytest.raises(ValueError, match="one line"):
        join_products([some[0], other])


@pytest.mark.parametrize("M", [8, 64])
def test_autocast_gives_products_large_and_small_one_dtype(M):
    a, b = torch.randn(M, 512), torch.randn(512, 1024)
    with torch.autocast("cpu", torch.bfloat16):
        y = einsum(PRODUCT, a, b)
        into = einsum(PRODUCT, a, b, out=torch.empty(M, 1024))
        assert torch.equal(y, a @ b)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(into, a @ b, rtol=1e-2, atol=0.5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16], ids=str)
def test_products_of_whole_numbers_keep_their_dtype(dtype):
    """torch.einsum makes some of these int64, and refuses others."""
    x = torch.arange(6).view(2, 3).to(dtype)
    for line, operands, wanted in [
        ("A[I, J] -> C[I]", (x,), x.sum(1)),
        ("A[I] * B[K, I] -> C[I]", (x[:, 0], x.t()), x[:, 0] * x.t().sum(0)),
        (PRODUCT, (x, x.t()), x.long() @ x.t().long()),
    ]:
        y = einsum(line, *operands)
        assert y.dtype == dtype
        assert torch.equal(y, wanted.to(dtype))


def test_a_number_may_be_split():
    for x in (torch.ones(3, 2), torch.ones(3, 4)):  # a part of 4 divides it
        assert torch.equal(einsum("A[I, 4_X] -> C[I] {U_X}", x), x.sum(1))


def test_a_mask_of_several_layers_and_on_a_mesh_without_the_axis():
    mesh, x, mask = Mesh({"X": 1}), torch.ones(5, 2, 3), torch.tensor([[True, False]] * 5)
    wanted = torch.where(mask[..., None], x, 0)
    assert torch.equal(masked("x[B, 3] {U_X}", x, mask, mesh.stacked("L")), wanted)
    assert torch.equal(masked("x[B, T, 3] {U_YZ}", x, mask, mesh.optional), wanted)
    for line, stacked in (("x[B, 3] {U_X}", mesh), ("x[B, 2] {U_X}", mesh.stacked("L"))):
        with pytest.raises(ShardingError, match="says those that are numbers"):
            masked(line, x, mask, stacked)
