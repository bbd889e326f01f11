"""Products in parts: the same numbers as torch's product, whatever the sizes, layouts and buffers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling.collectives import einsum
from scaling.collectives import mkl as m

SIZES = st.sampled_from([1, 3, 16, 33, 48, 49, 128, 129, 160, 300, 520])


def matrix(rows: int, columns: int, turned: bool, seed: int) -> torch.Tensor:
    x = torch.randn(rows * columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.view(columns, rows).t() if turned else x.view(rows, columns)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(SIZES, SIZES, SIZES, st.tuples(*[st.booleans()] * 4))
def test_parts_make_the_product(M, K, N, flags):
    a, b, out = (matrix(*s, turned, i) for i, (s, turned) in enumerate(zip([(M, K), (K, N), (M, N)], flags[:3])))  # noqa: B905
    product = a @ b
    wanted = product + (out if flags[3] else 0)
    into = out.clone()
    got = m.matmul_into(a, b, into, add=flags[3])
    assert (got.data_ptr(), got.shape) == (into.data_ptr(), (M, N))
    torch.testing.assert_close(into, wanted, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(m.mkl_matmul(a, b), product, rtol=1e-12, atol=1e-11)


@pytest.mark.skipif(not m.MKL, reason="MKL's products only")
@pytest.mark.parametrize(
    ("M", "K", "N", "how"),
    [
        (512, 64, 2048, "rows"),
        (512, 40, 2048, ""),
        (512, 129, 2048, ""),
        (128, 64, 512, ""),
        (64, 512, 2048, "terms"),
        (64, 2048, 512, ""),
        (129, 512, 2048, ""),
        (3, 512, 2048, ""),
        (64, 128, 2048, ""),
    ],
)
def test_which_products_are_made_in_parts(M, K, N, how, monkeypatch):
    a, b = torch.empty(M, K), torch.empty(K, N)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert m.in_parts(a, b) == how.replace("terms", ""), "threads wait for each other after each part of a sum"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert m.in_parts(a, b) == how
    assert not m.in_parts(a.bfloat16(), b.bfloat16())
    assert not m.in_parts(a.to("meta"), b.to("meta"))
    if how == "terms":
        assert not m.in_parts(a, torch.empty(N, K).t()), "rows of the weight must lie together"


def test_a_product_that_is_differentiated_is_torch_s():
    x = torch.randn(64, 512, dtype=torch.float64, requires_grad=True)
    W = torch.randn(512, 1024, dtype=torch.float64)
    line = "In[B, D] * W[D, F] -> Out[B, F]"
    Out = einsum(line, x, W)
    assert m.in_parts(x, W) == ("terms" if m.MKL else "")
    assert Out.grad_fn is not None
    dx = torch.func.grad(lambda x: einsum(line, x, W).sum())(x.detach())
    torch.testing.assert_close(dx, W.sum(1).expand(64, 512))
    many = torch.func.vmap(lambda x: einsum(line, x, W))(x.detach()[None])
    torch.testing.assert_close(many[0], Out.detach())
