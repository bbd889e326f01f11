"""The dtype of a product: under autocast, and of whole numbers."""

import pytest
import torch
from call_lines import PRODUCT

from scaling import collectives as c


@pytest.mark.parametrize("M", [8, 64])
def test_autocast_gives_products_large_and_small_one_dtype(M):
    a, b = torch.randn(M, 512), torch.randn(512, 1024)
    with torch.autocast("cpu", torch.bfloat16):
        y = c.einsum(PRODUCT, a, b)
        into = c.einsum(PRODUCT, a, b, out=torch.empty(M, 1024))
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
        ("A[I, J] * B[J, K] -> C[I, K]", (x, x.t()), x.long() @ x.t().long()),
    ]:
        y = c.einsum(line, *operands)
        assert y.dtype == dtype
        assert torch.equal(y, wanted.to(dtype))
