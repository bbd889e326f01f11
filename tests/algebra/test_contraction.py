"""einsum against torch.einsum: whatever the order of dims, with and without a buffer, and its derivatives."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

from scaling.collectives import einsum
from scaling.collectives.multiply import product_of
from scaling.spec import ShardingError

SIZES = {"A": 2, "B": 3, "C": 4, "D": 5, "E": 0, "F": 1}
FAST = settings(deadline=None, max_examples=250, derandomize=True)


@st.composite
def products(draw):
    """(line, torch's equation, operands, whether the buffer is a transposed view): one or two operands with dims in any
    order, strided or not; the result with some of them in any order."""
    sides = [draw(st.lists(st.sampled_from([*SIZES]), unique=True, max_size=4)) for _ in range(draw(st.integers(1, 2)))]
    both = [*dict.fromkeys(dim for dims in sides for dim in dims)]
    kept = draw(st.permutations(draw(st.lists(st.sampled_from(both), unique=True)) if both else []))
    names = [f"{name}[{', '.join(dims)}]" for name, dims in zip("XY", sides, strict=False)]
    g, strided = torch.Generator().manual_seed(draw(st.integers(0, 99))), draw(st.booleans())
    arrays = [torch.randn([SIZES[d] for d in dims], generator=g, dtype=torch.float64) for dims in sides]
    arrays = [t.repeat_interleave(2, -1)[..., ::2] if strided and t.dim() else t for t in arrays]
    equation = f"{','.join(map(''.join, sides))}->{''.join(kept)}"
    return f"{' * '.join(names)} -> Z[{', '.join(kept)}]", equation, arrays, draw(st.booleans())


@pytest.mark.slow
@FAST
@given(products())
@example(
    ("X[A, B, C, D] * Y[F, C, D] -> Z[F, A, B]", "ABCD,FCD->FAB", [torch.ones(2, 3, 4, 5), torch.ones(1, 4, 5)], True)
)
def test_equal_to_torchs_einsum(case):
    line, equation, arrays, turned = case
    wanted = torch.einsum(equation, *arrays)
    torch.testing.assert_close(einsum(line, *arrays), wanted, rtol=1e-12, atol=1e-12)
    out = torch.full_like(wanted, torch.nan, memory_format=torch.contiguous_format)
    out = (
        torch.full(wanted.shape[::-1], torch.nan, dtype=wanted.dtype).permute(tuple(range(out.dim()))[::-1])
        if turned
        else out
    )
    assert einsum(line, *arrays, out=out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    einsum(line, *arrays, out=out, add=True)
    torch.testing.assert_close(out, 2 * wanted, rtol=1e-12, atol=1e-12)
    assert einsum(line, *(x.to("meta") for x in arrays)).shape == wanted.shape


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
