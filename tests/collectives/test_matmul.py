"""Products in a buffer, and differentiated."""

import pytest
import torch

from scaling.collectives import einsum


def test_a_product_that_is_differentiated_is_torch_s():
    x = torch.randn(64, 512, dtype=torch.float64, requires_grad=True)
    W = torch.randn(512, 1024, dtype=torch.float64)
    line = "In[B, D] * W[D, F] -> Out[B, F]"
    Out = einsum(line, x, W)
    assert Out.grad_fn is not None
    dx = torch.func.grad(lambda x: einsum(line, x, W).sum())(x.detach())
    torch.testing.assert_close(dx, W.sum(1).expand(64, 512))
    many = torch.func.vmap(lambda x: einsum(line, x, W))(x.detach()[None])
    torch.testing.assert_close(many[0], Out.detach())


@pytest.mark.parametrize("line", ["A[I, J, K] * B[K, L] -> C[I, J, L]", "A[I, J, K] * B[K, L] -> C[L, I, J]"])
def test_products_of_more_dims_in_a_buffer(line):
    a, b = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    wanted = torch.einsum("ijk,kl->ijl", a, b)
    wanted = wanted if line.endswith("L]") else wanted.movedim(2, 0)
    out = torch.empty(wanted.shape, dtype=torch.float64)
    assert einsum(line, a, b, out=out) is out
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(einsum(line, a, b, out=out, add=True), 2 * wanted)
    strided = torch.empty(wanted.shape[::-1], dtype=torch.float64).permute(2, 1, 0)
    torch.testing.assert_close(einsum(line, a, b, out=strided).clone(), wanted)
    torch.testing.assert_close(einsum(line, a, b, out=strided, add=True), 2 * wanted)
