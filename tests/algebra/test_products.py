"""Products of sharded matrices: planned, done by simulated devices, compared with the dense one; and how soon a plan is
found."""

import contextlib
import itertools
import re
import time

import pytest
from array_types import MATRICES, SETTINGS, check, naive_bytes, types
from hypothesis import given
from hypothesis import strategies as st
from refused import evaluated, named, refused

from scaling.algebra import derive, matmul, matmul_via, reshard
from scaling.cost.collectives import seconds_on
from scaling.hardware import chip
from scaling.spec import ShardingError, parse

REFUSED = """
call                                                       words of its error
matmul('A[I, J]', 'B[J, K]', 'C[I, L]')                    is in no operand
matmul('A[I, J]', 'B[J, K]', 'C[I, K]', {'I': 2, 'J': 2})  has no size
matmul('A[I_X, J]', 'B[J, K]', 'C[I, K]', {'I': 3, 'J': 2, 'K': 2}, {'X': 2})  does not divide
"""
test_refused = refused(evaluated(REFUSED, globals()), ShardingError)


def split(line: str) -> list[str]:
    """A product's types."""
    return re.split(r" \* | -> ", line)


def test_no_other_choice_of_local_types_is_cheaper():
    """Against brute force: every pair of local types, each with its own cheapest reshardings, on the axes named."""
    for line in (
        "A[I_X, J] * B[J, K_X] -> C[I, K]",
        "A[I, J_X] * B[J, K] -> C[I, K]",
        "A[I, J] * B[J_X, K] -> C[I, K]",  # Part 3, Question 4: gather the weights, or reduce the result
        "A[I_X, J_Y] * B[J_Y, K_X] -> C[I_X, K_Y]",
        "A[I, J_XY] * B[J_X, K_Y] -> C[I_Y, K]",
        "A[I, J] {U_X} * B[J_X, K] -> C[I, K_X]",
    ):
        a, b, out = split(line)
        mesh = {axis: 2 for axis in "XY" if axis in a + b + out}
        plans = [matmul(a, b, out, MATRICES, mesh)]
        for local_a, local_b in itertools.product(*(types(mesh, dims, unreduced=False) for dims in ("IJ", "JK"))):
            with contextlib.suppress(ShardingError):
                plans.append(matmul_via(a, b, out, local_a, local_b.with_name("B"), MATRICES, mesh))
        prices = [(p.wire_bytes(MATRICES, mesh, 1), p.flops(MATRICES, mesh), len(p.steps)) for p in plans]
        assert prices[0] == min(prices[1:])


# a product: the cases that it is, the steps, and its type
CASES = named("""
product                                 cases, steps, type
A[I_X, J] * B[J, K_Y]                   1: Einsum: C[I_X, K_Y]
A[I, J_X] * B[J, K]                     2: AllGather, Einsum: C[I, K]
A[I, J] * B[J_X, K] -> C[I, K]          2: AllGather, Einsum: C[I, K]
A[I, J_X] * B[J_X, K]                   3: Einsum: C[I, K] {U_X}
A[I, J_X] * B[J_X, K] -> C[I, K]        3: Einsum, AllReduce: C[I, K]
A[I, J_X] * B[J_X, K] -> C[I, K_X]      3: Einsum, ReduceScatter: C[I, K_X]
A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}  3: Einsum: C[I, K] {U_X}
A[I_X, J] * B[J, K_X]                   4: AllGather, Einsum: C[I_X, K]
A[I_X, J] * B[J, K_X] -> C[I, K_X]      4: AllGather, Einsum: C[I, K_X]
A[I_X, J_Y] * B[J_Y, K_X]               3, 4: AllGather, Einsum: C[I_X, K] {U_Y}
A[I_X, J] * B[J_X, K_Y] -> C[I_X, K_Y]  2: AllGather, Einsum: C[I_X, K_Y]
A[I, J_XY] * B[J_X, K]                  2, 3: AllGather, Einsum: C[I, K] {U_X}
A[I, J] * B[J, K] -> C[I_X, K]          1: Slice, Einsum: C[I_X, K]
""")


@pytest.mark.parametrize("product", CASES)
def test_the_books_cases(product):
    plan = matmul(*split(product))
    assert matmul(*split(product)) is plan, "a plan made once is kept"
    found = [plan.cases, [step.op for step in plan.steps]]
    assert ": ".join([*(", ".join(map(str, each)) for each in found), str(plan.result)]) == CASES[product]
    assert plan.case == plan.cases[0]


def test_case_4_gathers_the_smaller_operand_and_a_plan_is_printed_as_the_book_numbers_it():
    plan = matmul("A[I, J]", "B[J_X, K]", "C[I, K]")
    assert str(plan) == "1. B[J, K] = AllGather_X(B[J_X, K])\n2. C[I, K] = A[I, J] *_J B[J, K]"
    for I, K, gathered in ((64, 8, "B"), (8, 64, "A")):
        for out in (None, "C[I, K]"):
            first = matmul("A[I_X, J]", "B[J, K_X]", out, {"I": I, "J": 8, "K": K}, {"X": 4}).steps[0]
            assert (first.op, first.after.name) == ("AllGather", gathered)


def test_plans_by_time_on_a_chip():
    """Question 4 by time: no slower than either strategy, nor than the plan by bytes."""
    line, mesh, v5p, plans = ("X[B, D]", "Y[D_X, F]", "Z[B, F]"), {"X": 4}, chip("v5p"), []
    for tokens in (64, 65536):
        sizes = {"B": tokens, "D": 8192, "F": 1024}
        seconds = seconds_on(v5p, sizes, mesh)
        assert seconds is seconds_on(v5p, sizes, mesh)
        plans.append(matmul(*line, sizes, mesh, seconds))
        others = [matmul(*line, sizes, mesh)]
        others += [matmul_via(*line, *local) for local in (("X[B, D]", "Y[D, F]"), ("X[B, D_X]", "Y[D_X, F]"))]
        for other in others:
            assert sum(map(seconds, plans[-1].steps)) <= sum(map(seconds, other.steps)) * (1 + 1e-12)
    assert plans[0] != plans[1]


ATTENTION = {"B": 4, "T": 4, "S": 8, "N": 4, "H": 2}
CHECKED = {  # a product: sizes with which its plan is the dense product
    # attention has batch dims
    "Q[B_X, T, N_Y, H] * K[B, S, N_Y, H] -> S[B_X, N_Y, T, S]": ATTENTION,
    "Q[B, T_X, N, H_Y] * K[B, S_X, N, H_Y] -> S[B, N_Y, T_X, S]": ATTENTION,
    "Q[B_X, T, N, H] * K[B_Y, S, N, H] -> S[B_XY, N, T, S]": ATTENTION,
    # each has a plan that sends less, were it not that a dim does not divide
    "A[I, J] * B[J, K] {U_X} -> C[I, K]": {"I": 2, "J": 2, "K": 3},
    "A[I_X, J] * B[J_Y, K] {U_X} -> C[I_X, K]": {"I": 2, "J": 2, "K": 2},
    "A[I_Y, J] {U_X} * B[J, K] -> C[I_X, K]": {"I": 6, "J": 3, "K": 3},
}


@pytest.mark.parametrize("line", CHECKED)
def test_every_array_on_the_way_divides(line):
    mesh, sizes, specs = {"X": 2, "Y": 2}, CHECKED[line], [*map(parse, split(line))]
    plan = matmul(*specs, sizes, mesh)
    check(plan, *specs, sizes, mesh)
    if sizes is ATTENTION:
        check(matmul(*specs, mesh=mesh), *specs, sizes, mesh)
    for spec in (spec for step in plan.steps for spec in (*step.operands, step.after)):
        spec.local_shape({dim: sizes[dim] for dim in spec.dim_names}, mesh)


@pytest.mark.slow
@SETTINGS
@given(st.data())
def test_a_product_of_any_types(data):
    """Any types at all, unreduced ones too, on two and three axes."""
    mesh = data.draw(st.sampled_from([{"X": 2, "Y": 2}, {"X": 2, "Y": 3}, {"X": 2, "Y": 2, "Z": 2}]))
    sizes = {"I": 24, "J": 24, "K": 24}
    sides = (("A", "IJ"), ("B", "JK"), ("C", "IK"))
    a, b, out = (data.draw(st.sampled_from(list(types(mesh, dims)))).with_name(name) for name, dims in sides)
    plan, default = matmul(a, b, out, sizes, mesh), matmul(a, b, out, mesh=mesh)
    assert plan.note == "", "on so few axes all ways are looked at"
    check(plan, a, b, out, sizes, mesh)
    check(default, a, b, out, sizes, mesh)
    sent = plan.wire_bytes(sizes, mesh, 1)
    assert sent <= default.wire_bytes(sizes, mesh, 1) + 1e-9
    if not out.unreduced:  # to reduce and gather both everywhere, multiply and slice
        assert sent <= sum(naive_bytes(spec, (24, 24), mesh) for spec in (a, b)) + 1e-9, f"{a} * {b} -> {out}\n{plan}"
    natural = matmul(a, b, mesh=mesh)
    check(natural, a, b, natural.result, sizes, mesh)
    assert reshard(natural.result, out.with_name("C"), mesh=mesh).result == out


def test_a_product_that_sums_nothing_has_one_flop_an_element():
    sizes = {"I": 4, "J": 6, "K": 5}
    for line, flops in (
        ("A[I, J] * B[I, J] -> C[I, J]", 24),
        ("A[I] * B[J] -> C[I, J]", 24),
        ("A[I, K] * B[K] -> C[I]", 40),
    ):
        (step,) = (step for step in derive(line, sizes=sizes, mesh={"X": 2}).forward if step.op == "Einsum")
        assert step.flops(sizes, {"X": 2}) == flops


BEYOND = (
    "A[I_ABC, J] * B[J, K_DEF] -> C[I_ABC, K_DEF]",
    "A[I, J_ABCDEF] * B[J_ABCDEF, K] -> C[I, K]",
    "A[I_AB, J_C] * B[J_CD, K_EF] -> C[I_F, K_AB]",
    "A[I_ABC, J] * B[J_DE] -> C[I_ABC]",
)


@pytest.mark.parametrize("line", BEYOND)
def test_beyond_the_bound_the_rules_decide(line):
    """Six axes are too many ways: a plan by the four cases, at once, right on 64 devices, which says so."""
    mesh, sizes, specs = dict.fromkeys("ABCDEF", 2), dict.fromkeys("IJK", 64), [*map(parse, split(line))]
    began = time.process_time()
    plan = matmul(*specs, sizes, mesh)
    assert time.process_time() - began < 1
    assert plan.note in str(plan).splitlines()[-1]
    assert plan.note
    assert plan == matmul(*specs, mesh=mesh)
    check(plan, *specs, sizes, mesh)
