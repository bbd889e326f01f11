"""Products that are stated in one place and computed in another."""

import pytest
import torch

from scaling.collectives import einsum, join_products
from scaling.spec import ShardingError
from scaling.trace import trace

LINE = "Act[B_X, F] * dOut[B_X, D] -> dW[F, D] {U_X}"


def operands(rows, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, n, generator=rng, dtype=torch.float64) for n in (6, 4))


def test_a_deferred_product_is_computed_when_it_is_waited_for():
    a, b = operands(5)
    with trace() as log:
        product = einsum(LINE, a, b, defer=True)
    assert log.events == []
    assert (str(product.type), product.shape) == ("dW[F, D] {U_X}", (6, 4))
    assert torch.equal(product.wait(), a.t() @ b)
    out = torch.ones(6, 4, dtype=torch.float64)
    assert product.wait(out, add=True) is out
    assert torch.allclose(out, 1 + a.t() @ b, rtol=1e-14)


def test_its_line_and_shapes_are_checked_at_once():
    a, b = operands(5)
    with pytest.raises(ShardingError, match="case 3"):
        einsum(LINE.replace(" {U_X}", ""), a, b, defer=True)
    with pytest.raises(ShardingError, match="size of dim B"):
        einsum(LINE, a, b[1:], defer=True)


def test_joined_products_are_their_sum():
    some = [einsum(LINE, *operands(rows, seed), defer=True) for seed, rows in enumerate((3, 1, 4))]
    wanted = sum(product.wait() for product in some)
    assert torch.allclose(join_products(some).wait(), wanted, rtol=1e-13)
    other = einsum("A[B, F] * C[B, D] -> dW[F, D]", *operands(3), defer=True)
    with pytest.raises(ValueError, match="one line"):
        join_products([some[0], other])
