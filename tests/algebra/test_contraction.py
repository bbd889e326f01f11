"""einsum against torch.einsum: whatever the order of dims, with and without a buffer, and its derivatives."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

from scaling.collectives import einsum
from scaling.collectives.multiply import product_of
from scaling.spec import ShardingError

SIZES = {"A": 2, "B": 3, "C": 4, "D": 5, "E": 0}
FAST = settings(deadline=None, max_examples=150, derandomize=True)


@st.composite
def products(draw):
    """(line, operands): two operands with dims in any order, the result with some of them in any order."""
    a, b = (draw(st.lists(st.sampled_from([*SIZES]), unique=True, max_size=3)) for _ in range(2))
    both = [*dict.fromkeys(a + b)]
    kept = draw(st.permutations(draw(st.lists(st.sampled_from(both), unique=True)) if both else []))
    line = f"A[{', '.join(a)}] * B[{', '.join(b)}] -> C[{', '.join(kept)}]"
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x, y = (torch.randn([SIZES[d] for d in dims], generator=g, dtype=torch.float64) for dims in (a, b))
    if draw(st.booleans()):  # strided operands
        x, y = (t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t for t in (x, y))
    return line, f"{''.join(a)},{''.join(b)}->{''.join(kept)}", x, y


@pytest.mark.slow
@FAST
@given(products())
def test_equal_to_torchs_einsum(case):
    line, equation, x, y = case
    wanted = torch.einsum(equation, x, y)
    got = einsum(line, x, y)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    out = torch.full_like(wanted, torch.nan)
    assert einsum(line, x, y, out=out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    einsum(line, x, y, out=out, add=True)
    torch.testing.assert_close(out, 2 * wanted, rtol=1e-12, atol=1e-12)
    assert einsum(line, x.to("meta"), y.to("meta")).shape == wanted.shape


@pytest.mark.parametrize("a", ["I, J, K, L", "K, L, I, J", "I, K, L, J"])
@pytest.mark.parametrize("b", ["K, L, M", "M, K, L", "K, M, L"])
@pytest.mark.parametrize("c", ["I, J, M", "M, I, J", "J, M, I"])
def test_products_of_several_dims(a, b, c):
    """One matrix product where the dims stand so, into a buffer too."""
    sizes = dict(zip("IJKLM", range(2, 7), strict=True))
    x, y = (torch.randn([sizes[d] for d in dims.split(", ")], dtype=torch.float64) for dims in (a, b))
    wanted = torch.einsum(f"{a},{b}->{c}".replace(", ", ""), x, y)
    line = f"A[{a}] * B[{b}] -> C[{c}]"
    torch.testing.assert_close(einsum(line, x, y), wanted, rtol=1e-12, atol=1e-12)
    out = torch.full_like(wanted, torch.nan, memory_format=torch.contiguous_format)
    torch.testing.assert_close(einsum(line, x, y, out=out), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(einsum(line, x, y, out=out, add=True), 2 * wanted, rtol=1e-12, atol=1e-12)


def is_one_matrix_product(a: str, b: str, c: str) -> bool:
    """Whether the dims can be grouped so that both operands and the result are matrices or transposes of such."""
    summed = {*a} & {*b} - {*c}
    groups = [({*a} - summed, a), (summed, a), ({*b} - summed, b)]
    rows, terms, columns = (
        [of[i:j] for i in range(4) for j in range(i, 5) if {*of[i:j]} == dims] for dims, of in groups
    )
    stand = [
        a in (m + k, k + m) and b in (k + n, n + k) for m in rows for k in terms for n in columns if c in (m + n, n + m)
    ]
    return bool(summed) and any(stand)


def test_a_product_is_one_of_matrices_where_its_dims_allow():
    found = []
    for a, b in itertools.product(["IJ", "JI", "IJK", "KIJ", "J"], ["JK", "KJL", "LKJ", "IJL", "L"]):
        for n in range(4):
            for c in itertools.permutations(dict.fromkeys(a + b), n):
                types = [f"{name}[{', '.join(dims)}]" for name, dims in zip("ABC", (a, b, c), strict=True)]
                summed = product_of("{} * {} -> {}".format(*types)).summed
                assert (summed > 0) is is_one_matrix_product(a, b, "".join(c)), types
                found.append(summed > 0)
    assert 0 < sum(found) < len(found)


@pytest.mark.parametrize("line", ["A[I, J] -> C[J, I]", "A[I, J] -> C[I]", "A[I, J] -> C[]"])
def test_one_operand_is_summed_and_transposed(line):
    x = torch.arange(6.0).view(2, 3)
    wanted = {"C[J, I]": x.t(), "C[I]": x.sum(1), "C[]": x.sum()}[line.split(" -> ")[1]]
    assert torch.equal(einsum(line, x), wanted)
    assert torch.equal(einsum(line, x, out=torch.zeros_like(wanted)), wanted)


def test_a_buffer_that_is_a_transposed_view():
    x, y, out = torch.randn(3, 4), torch.randn(4, 5), torch.zeros(5, 3).t()
    einsum("A[I, J] * B[J, K] -> C[I, K]", x, y, out=out)
    torch.testing.assert_close(out, x @ y)
    einsum("A[I, J] * B[J, K] -> C[K, I]", x, y, out=out.t(), add=True)
    torch.testing.assert_close(out, 2 * x @ y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of torch's own, in jvp
@pytest.mark.parametrize("line", ["A[I, J] * B[J, K] -> C[I, K]", "A[I, J] * B[J, K] -> C[K, I]"])
def test_derivatives(line):
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, y: einsum(line, x, y), (x.requires_grad_(), y.requires_grad_()))
    x, y = x.detach(), y.detach()
    torch.testing.assert_close(grad(lambda x: einsum(line, x, y).sum())(x), y.sum(1).expand(3, 4))
    torch.testing.assert_close(jvp(lambda x: einsum(line, x, y), (x,), (x,))[1], einsum(line, x, y))
    stack = vmap(lambda x: einsum(line, x, y))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(stack[1], 2 * einsum(line, x, y))


def test_a_buffer_under_differentiation_is_refused():
    x = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(ShardingError, match="what is written to a buffer is not differentiated"):
        einsum("A[I, J] * B[J, K] -> C[I, K]", x, torch.ones(3, 3), out=torch.zeros(3, 3))


def test_an_illegal_line_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(ShardingError, match="case 2"):
            einsum("A[I, J_X] * B[J, K] -> C[I, K]", torch.ones(2, 2), torch.ones(2, 2))
