"""Products that are deferred and joined; their dtypes; what is differentiated. tests/algebra/test_execute.py has
their values, in a buffer too."""

import pytest
import torch
from call_lines import PRODUCT

from scaling.collectives import einsum, join_products
from scaling.spec import ShardingError
from scaling.trace import trace

LINE = "Act[B_X, F] * dOut[B_X, D] -> dW[F, D] {U_X}"


def operands(rows, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, n, generator=rng, dtype=torch.float64) for n in (6, 4))


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
    with pytest.raises(ShardingError, match="case 3"):
        einsum(LINE.replace(" {U_X}", ""), a, b, defer=True)
    with pytest.raises(ShardingError, match="size of dim B"):
        einsum(LINE, a, b[1:], defer=True)


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int16], ids=str)
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


def test_a_product_that_is_differentiated_is_torch_s():
    x, W = (torch.randn(shape, dtype=torch.float64) for shape in ((8, 16), (16, 32)))
    dx = torch.func.grad(lambda x: einsum(PRODUCT, x, W).sum())(x)
    torch.testing.assert_close(dx, W.sum(1).expand(8, 16))
    torch.testing.assert_close(torch.func.vmap(lambda x: einsum(PRODUCT, x, W))(x[None])[0], x @ W)
