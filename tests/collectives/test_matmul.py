"""Products in parts or by oneDNN: the same numbers as torch's, whatever the sizes, layouts and buffers."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling.collectives import einsum
from scaling.collectives import matrices as m
from scaling.spec import ShardingError

SIZES = st.sampled_from([1, 3, 16, 33, 48, 49, 128, 129, 160, 300, 520])


@pytest.fixture(scope="module", autouse=True)
def on_intel():
    """Whatever the processor is: products are right on each."""
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
    torch.testing.assert_close(m.matmul(a, b), product, rtol=1e-12, atol=1e-11)


FLOATS = {"rtol": 1e-5, "atol": 1e-3}


@pytest.mark.skipif(not m.MKL, reason="MKL's products only")
@pytest.mark.parametrize("N", [768, 1536, 1002])
def test_columns_make_the_product(N, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(m, "AMD", True)
    monkeypatch.setattr(m, "ONEDNN", True)
    a, b, out = matrix(1, 400, False, 0, torch.float32), matrix(400, N, False, 1, torch.float32), torch.ones(1, N)
    assert m.way(a, b) == "columns"
    for got in (m.matmul(a, b), m.matmul_into(a, b, torch.empty(1, N), False)):
        assert got.is_contiguous()
        torch.testing.assert_close(got, a @ b, **FLOATS)
    torch.testing.assert_close(m.matmul_into(a, b, out.clone(), True), a @ b + out, **FLOATS)


@pytest.mark.skipif(not m.MKL, reason="MKL's products only")
@pytest.mark.parametrize("rows", [1, 3])
def test_nothing_differentiated_is_written_to_a_buffer(rows, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(m, "AMD", True)
    monkeypatch.setattr(m, "ONEDNN", True)
    a, b, out = torch.randn(rows, 512), torch.randn(512, 512), torch.zeros(rows, 512)
    assert m.way(a, b) == ("columns" if rows == 1 else "oneDNN")
    for x, y in ((a.clone().requires_grad_(), b), (a, b.clone().requires_grad_())):
        with pytest.raises(ShardingError, match="not differentiated"):
            einsum("A[I, J] * B[J, K] -> C[I, K]", x, y, out=out)
    assert not out.requires_grad
    assert not out.any()


@pytest.mark.skipif(not m.MKL, reason="MKL's products only")
def test_a_lazy_weight_is_copied_for_many_rows_only(monkeypatch):
    monkeypatch.setattr(m, "AMD", True)
    monkeypatch.setattr(m, "ONEDNN", True)
    W = einsum("W[D, F] -> W[D, F]", torch.randn(512, 512))
    assert [m.way(torch.ones(rows, 512), W) for rows in (8, 128, 129)] == ["", "", "oneDNN"]
    assert m.way(torch.ones(8, 512), W.clone()) == "oneDNN"


def strided(rows: int, columns: int, layout: str, seed: int) -> torch.Tensor:
    """A matrix of random numbers, in another order or with gaps in memory."""
    g = torch.Generator().manual_seed(seed)
    if layout == "turned":
        return torch.randn(columns, rows, generator=g).t()
    if layout == "alike":
        return torch.randn(1, columns, generator=g).expand(rows, columns)
    if layout == "gaps":
        return torch.randn(2 * rows, columns + 3, generator=g)[::2, 1 : columns + 1]
    return torch.randn(rows, columns, generator=g)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN's products only")
@settings(deadline=None, max_examples=60)
@given(
    st.tuples(*[st.sampled_from([1, 2, 3, 8, 17, 33, 64])] * 3),
    st.tuples(*[st.sampled_from(["plain", "turned", "alike", "gaps"])] * 2),
    st.booleans(),
    st.booleans(),
)
def test_onednn_makes_the_product(sizes, layouts, turned, add):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m, "way", lambda a, b: "oneDNN")
        patch.setattr(m, "BLOCK", 4 * 33 * 5)  # of some products five rows or fewer
        M, K, N = sizes
        a, b = strided(M, K, layouts[0], 0), strided(K, N, layouts[1], 1)
        out = strided(M, N, "turned" if turned else "plain", 2).clone()
        wanted = (a.double() @ b.double()).float()
        torch.testing.assert_close(m.matmul(a, b), wanted, rtol=1e-4, atol=1e-4)
        total = wanted + out if add else wanted
        assert m.matmul_into(a, b, out, add).data_ptr() == out.data_ptr()
        torch.testing.assert_close(out, total, rtol=1e-4, atol=1e-4)
        a = a.clone()
        a[0, K - 1] = torch.nan
        assert m.matmul(a, b)[0].isnan().all()
        assert not m.matmul(a, b)[1:].isnan().any()


def test_one_column_is_one_row():
    a, b = matrix(3000, 200, False, 0, torch.float32), matrix(200, 1, False, 1, torch.float32)
    torch.testing.assert_close(m.matmul(a, b), a @ b, rtol=1e-5, atol=1e-3)
    assert m.matmul(a, b).is_contiguous()


@pytest.mark.skipif(not m.MKL, reason="MKL's products only")
@pytest.mark.parametrize(
    ("M", "K", "N", "intel", "one", "two", "turned"),  # AMD's on one thread, on two, and of a weight stored by columns
    [
        (512, 64, 2048, "rows", *["oneDNN"] * 3),
        (512, 40, 2048, "", *["oneDNN"] * 3),
        (512, 129, 2048, "", *["oneDNN"] * 3),
        (512, 64, 64, "rows", *["oneDNN"] * 3),
        (511, 64, 64, "rows", "", "", ""),
        (64, 512, 2048, "terms", *["oneDNN"] * 3),
        (64, 2048, 512, "", *["oneDNN"] * 3),
        (4, 512, 2048, "terms", *["oneDNN"] * 3),
        (3, 512, 2048, "", *["oneDNN"] * 3),
        (2, 512, 255, "", "", "", ""),
        (2, 512, 256, "", *["oneDNN"] * 3),
        (1, 512, 2048, "", "", "columns", "oneDNN"),
        (1, 512, 256, "", "", "columns", "oneDNN"),
        (1, 1024, 255, "", "", "", "oneDNN"),
        (1, 1024, 254, "", "", "", "oneDNN"),
        (1, 511, 256, "", "", "", ""),
        (0, 512, 2048, "", "", "", ""),
        (64, 0, 2048, "", "", "", ""),
    ],
)
def test_how_a_product_is_made(M, K, N, intel, one, two, turned, monkeypatch):
    a, b, columns = torch.empty(M, K), torch.empty(K, N), torch.empty(N, K).t()
    for maker, threads, how, by_columns in (
        ("Intel", 1, intel, intel.replace("terms", "")),
        ("Intel", 2, intel.replace("terms", ""), intel.replace("terms", "")),
        ("AMD", 1, one, turned),
        ("AMD", 2, two, turned),
        ("AMD without AVX-512", 2, "", ""),
    ):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(m, "AMD", maker != "Intel")
        monkeypatch.setattr(m, "ONEDNN", maker == "AMD")
        assert (m.way(a, b), m.way(a, columns)) == (how, by_columns)
        assert m.way(a.double(), b.double()) == ("" if maker == "AMD" else how)
        assert not m.way(a.bfloat16(), b.bfloat16())
        assert not m.way(a.to("meta"), b.to("meta"))


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux says so there")
def test_the_processor_s_maker_is_known():
    assert "vendor_id" in m.processor() or "implementer" in Path("/proc/cpuinfo").read_text()


def test_a_product_that_is_differentiated_is_torch_s():
    x = torch.randn(64, 512, dtype=torch.float64, requires_grad=True)
    W = torch.randn(512, 1024, dtype=torch.float64)
    line = "In[B, D] * W[D, F] -> Out[B, F]"
    Out = einsum(line, x, W)
    assert m.way(x, W) == ("terms" if m.MKL else "")
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
