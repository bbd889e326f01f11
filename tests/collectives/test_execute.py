"""Running lines and plans: products as matrices', plans on ranks, their derivatives, and the law of cotangents through
every kind of step. Products that are deferred and joined, and their dtypes. test_drawn.py holds einsum beside torch's,
whatever the order of dims."""

import itertools

import pytest
import torch
from array_types import gather, scatter, types
from refused import refused
from test_buffers import PRODUCT

from scaling.algebra import matmul, reshard
from scaling.collectives import einsum, join_products, run
from scaling.collectives import reshard as run_reshard
from scaling.collectives.multiply import product_of
from scaling.collectives.plans import run_steps
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, Spec, parse
from scaling.trace import trace

MESH = {"X": 2, "Y": 2}


ONE_PRODUCT = {  # of matrices or their transposes: whether it is one
    "A[I, J] * B[J, K] -> C[I, K]": True,
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


def dual(spec: Spec, mesh) -> Spec:
    """The type of the cotangent: unreduced where the array is replicated, and the other way round."""
    return Spec("d" + spec.name, spec.dims, tuple(sorted(spec.replicated(mesh))))


def pull_back(mesh, cases, at_once):
    """Of each case the coordinate, the result, what is pulled back, and whether events are the plan's."""
    at, found = tuple(mesh.coord.values()), []
    for src, dst, shape, shards, cotangents in cases:
        plan = reshard(src, dst, shape, mesh, cost=(lambda step: 1.0) if at_once else None)
        assert [step.op for step in plan.steps] == ["AllGather"] or not at_once
        with trace() as log:
            result, back = torch.func.vjp(lambda x, plan=plan: run(plan, x, mesh), shards[at])
        moved = [(e.op, e.axes, str(e.before), str(e.after)) for e in log.collectives()]
        planned = [(s.op, s.axes, str(s.before), str(s.after)) for s in plan.collectives]
        same = len(moved) == 1 if at_once else moved == planned
        found.append((at, result.detach(), back(cotangents[at])[0], same))
    return found


PAIRS = [(str(src), str(dst)) for src, dst in itertools.product(types("XY"), repeat=2)][::7]  # in which all ops occur
AT_ONCE = [  # axes of several dims, by one call
    ("A[I_X, J_Y]", "A[I, J]"),
    ("A[I_Y, J_X]", "A[I, J]"),
    ("A[J_Y, K, I_X]", "A[J, K, I]"),
    ("A[I, K, J_XY]", "A[I, K, J]"),
    ("A[I, K, J_YX]", "A[I, K, J]"),
]


@pytest.mark.parametrize(("pairs", "at_once"), [(PAIRS, False), (AT_ONCE, True)], ids=["pairs", "at once"])
def test_a_resharding_is_the_identity_and_so_is_its_transpose(ranks, pairs, at_once):
    """What is pulled back stands for the same cotangent, in the dual type of the operand; events are the plan's."""
    wanted, cases = [], []
    for src, dst in (map(parse, pair) for pair in pairs):
        shape = (8, 4, 12)[: len(src.dims)]
        whole, g = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
        cases.append((src, dst, shape, scatter(src, whole, MESH), scatter(dual(dst, MESH), g, MESH)))
        wanted.append((whole, g))
    answers = ranks(pull_back, MESH, cases, at_once)
    for (src, dst, shape, *_), (whole, g), *case in zip(cases, wanted, *answers, strict=True):
        results, back = ({at: each[i] for at, *each in case} for i in (0, 1))
        assert (gather(dst, results, shape, MESH) - whole).abs().max() < 1e-12, (src, dst)
        assert (gather(dual(src, MESH), back, shape, MESH) - g).abs().max() < 1e-12, (src, dst)
        assert all(same for *_, same in case), (src, dst)


TWO, X = AbstractMesh({"X": 2}), torch.empty(3, 4, device="meta")
BUFFER = torch.zeros(3, 3)


def multiplied(line="A[I, J] * B[J, K] -> C[I, K]", **options):
    return lambda: einsum(line, torch.ones(3, 3, requires_grad=True), torch.ones(3, 3), **options)


test_refused = refused(
    {
        "a shard too few": (lambda: run(matmul("A[I, J]", "B[J, K]"), X, TWO), "1 shards for 2 operands"),
        "a dim that does not divide": (lambda: run_reshard("A[I, J] -> A[I_X, J]", X, TWO), "does not divide"),
        "a dim too many": (lambda: run_reshard("A[I] -> A[I_X]", X, TWO), "its type has 1 dims"),
        "two operands": (lambda: run_reshard("A[I] * B[I] -> A[I]", X, TWO), "has one operand"),
        "a buffer, differentiated": (multiplied(out=BUFFER), "what is written to a buffer is not differentiated"),
        "an illegal line": (multiplied("A[I, J_X] * B[J, K] -> C[I, K]"), "case 2"),
    },
    ShardingError,
)


@pytest.mark.parametrize("keep", [(), ("A[I_X, J]",)])
def test_an_array_goes_after_its_last_use(keep):
    mesh, source = AbstractMesh({"X": 2}), parse("A[I_X, J]")
    steps, keep = reshard(source, "A[I, J_X]").steps, tuple(map(parse, keep))
    held = run_steps(steps, {source: torch.empty(2, 8, device="meta")}, mesh, keep)
    assert set(held) == {*keep, steps[-1].after}


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
