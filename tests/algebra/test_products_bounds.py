"""Where the search for the best plan of a product ends, how soon, and what it gives there."""

import itertools
import time

import pytest
from matrices import SIZES, check

from scaling.algebra import matmul
from scaling.algebra.layouts import arrangements
from scaling.algebra.products import WAYS, few_ways
from scaling.spec import parse


def test_planning_is_quick():
    a, b, out = parse("A[I_X, J_Y]"), parse("B[J_Y, K_X]"), parse("C[I, K]")
    matmul(a, b, out, SIZES, {"X": 2, "Y": 2})
    times = []
    for _ in range(100):
        start = time.perf_counter()
        matmul(a, b, out, SIZES, {"X": 2, "Y": 2})
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ("A[I_ABC, J]", "B[J, K_DEF]", "C[I_ABC, K_DEF]"),
        ("A[I, J_ABCDEF]", "B[J_ABCDEF, K]", "C[I, K]"),
        ("A[I_AB, J_C]", "B[J_CD, K_EF]", "C[I_F, K_AB]"),
        ("A[I_ABC, J]", "B[J_DEF]", "C[I_ABC]"),
        ("A[I_ABC, J]", "B[J_DE]", "C[I_ABC]"),
    ],
)
def test_beyond_the_bound_the_rules_decide(a, b, out):
    """Six axes are too many ways: a plan by the four cases, at once, right on 64 devices, which says so."""
    mesh, sizes = dict.fromkeys("ABCDEF", 2), dict.fromkeys("IJK", 64)
    began = time.process_time()
    plan = matmul(a, b, out, sizes, mesh)
    assert time.process_time() - began < 1
    assert plan.note in str(plan).splitlines()[-1]
    assert plan.note
    assert plan == matmul(a, b, out, mesh=mesh)
    check(plan, parse(a), parse(b), parse(out), sizes, mesh)


@pytest.mark.parametrize("axes", range(6))
@pytest.mark.parametrize(("a", "b"), [("A[I, J]", "B[J]"), ("A[I, J]", "B[J, K]"), ("A[I, J, K]", "B[K, L, M]")])
def test_the_bound_is_of_all_ways_to_split_a_product(a, b, axes):
    a, b = parse(a), parse(b)
    ways = arrangements(tuple("PQRST"[:axes]), len({*a.dim_names, *b.dim_names}))
    few = len(list(itertools.islice(ways, WAYS + 1))) <= WAYS
    assert few_ways(a, b, axes) is few
