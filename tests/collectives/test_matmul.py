"""Products in parts: the same numbers as torch's product, whatever the sizes, layouts and buffers."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling.collectives import einsum
from scaling.collectives import mkl as m

SIZES = st.sampled_from([1, 3, 16, 33, 48, 49, 128, 129, 160, 300, 520])


@pytest.fixture(scope="module", autouse=True)
def on_intel():
    """Whatever the processor is: products in parts are right on each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m, "AMD", False)
        yield


def matrix(rows: int, columns: int, turned: bool, seed: int, dtype=torch.float64) -> torch.Tensor:
    x = torch.randn(rows * columns, dtype=dtype, generator=torch.Generator().manual_seed(seed))
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
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("M", "N", "parts"), [(1, 768, 3), (2, 768, 6), (7, 1536, 12), (128, 516, 3), (2, 3072, 24)])
def test_columns_make_the_product(M, N, parts, turned, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(m, "AMD", True)
    a, b, out = (
        matrix(*s, i, j, torch.float32) for j, (s, i) in enumerate([((M, 400), 0), ((400, N), turned), ((M, N), 0)])
    )
    product = a @ b
    assert m.in_parts(a, b) == "columns"
    assert m.by_columns(a, b).shape == (M, parts, N // parts)
    for got in (m.mkl_matmul(a, b), m.matmul_into(a, b, torch.empty(M, N), False)):
        assert got.is_contiguous()
        torch.testing.assert_close(got, product, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(m.matmul_into(a, b, out.clone(), True), product + out, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(
        m.matmul_into(b.t(), a.t(), torch.empty(M, N).t(), False), product.t(), rtol=1e-5, atol=1e-3
    )


def test_one_column_is_one_row():
    a, b = matrix(3000, 200, False, 0, torch.float32), matrix(200, 1, False, 1, torch.float32)
    torch.testing.assert_close(m.mkl_matmul(a, b), a @ b, rtol=1e-5, atol=1e-3)
    assert m.mkl_matmul(a, b).is_contiguous()


@pytest.mark.skipif(not m.MKL, reason="MKL's products only")
@pytest.mark.parametrize(
    ("M", "K", "N", "intel", "amd"),
    [
        (512, 64, 2048, "rows", ""),
        (512, 40, 2048, "", ""),
        (512, 129, 2048, "", ""),
        (128, 64, 512, "", ""),
        (64, 512, 2048, "terms", "columns"),
        (64, 2048, 512, "", "columns"),
        (64, 512, 255, "", ""),
        (64, 512, 257, "", ""),
        (64, 511, 256, "", ""),
        (64, 512, 256, "", "columns"),
        (64, 4096, 254, "", ""),
        (129, 512, 2048, "", ""),
        (3, 512, 2048, "", "columns"),
        (1, 512, 2048, "", "columns"),
        (64, 128, 2048, "", "columns"),
    ],
)
def test_which_products_are_made_in_parts(M, K, N, intel, amd, monkeypatch):
    a, b = torch.empty(M, K), torch.empty(K, N)
    for maker, threads, how in (
        ("Intel", 1, intel),
        ("Intel", 2, intel.replace("terms", "")),
        ("AMD", 1, ""),
        ("AMD", 2, amd),
    ):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(m, "AMD", maker == "AMD")
        assert m.in_parts(a, b) == how
        assert m.in_parts(a.double(), b.double()) == how.replace("columns", "")
        assert not m.in_parts(a.bfloat16(), b.bfloat16())
        assert not m.in_parts(a.to("meta"), b.to("meta"))
        if how == "terms":
            assert not m.in_parts(a, torch.empty(N, K).t()), "rows of the weight must lie together"
        if how == "columns":
            assert not m.in_parts(a, torch.empty(K, 2 * N)[:, ::2]), "a product of such a weight is one of its copy"


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux says so there")
def test_the_processor_s_maker_is_known():
    assert "vendor_id" in m.processor() or "implementer" in Path("/proc/cpuinfo").read_text()


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
