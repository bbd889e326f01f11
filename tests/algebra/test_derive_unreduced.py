"""Derived algorithms with partial sums: the cotangent of an output, and a hidden array that stays unreduced."""

import pytest
import torch
from lines import LINES, SIZES, UNREDUCED

from scaling.algebra import derive
from scaling.book.largest import largest
from scaling.collectives import run_program
from scaling.spec import Spec, parse


@pytest.mark.parametrize("line", UNREDUCED)
def test_the_cotangent_of_a_partial_sum_is_replicated(line):
    """The law of cotangents: each term of a sum has the gradient of the sum, so nothing is reduced over its axis."""
    program = derive(line)
    assert program.backward[0].after == Spec("dOut", parse(line.split(" -> ")[1]).dims)
    assert program.backward[-1].after == Spec("dIn", program.operands[0].dims)
    assert "dOut[B, F] {U" not in str(program)


def run_unreduced(mesh, line):
    """Gradients on ranks, beside one device's: the largest differences."""
    from scaling.collectives import shard

    program, rng = derive(line), torch.Generator().manual_seed(0)
    whole = {s.name: torch.randn(s.global_shape(SIZES), generator=rng, dtype=torch.float64) for s in program.operands}
    local = {}
    for spec in program.operands:  # the first rank of an axis holds the whole sum, the others zeros
        first = all(mesh.coord[axis] == 0 for axis in spec.unreduced)
        local[spec.name] = shard(str(spec.with_unreduced(())), whole[spec.name], mesh) * first
    shape = program.out.global_shape(SIZES)
    dOut = torch.randn(shape, generator=rng, dtype=torch.float64)
    given = shard(str(program.backward[0].after), dOut, mesh)
    _, grads = run_program(program, local, given, mesh)
    wanted = {"In": dOut @ whole["W"].t(), "W": whole["In"].t() @ dOut}
    return largest(
        (grads[spec.name] - shard(f"{spec.with_unreduced(())}", wanted[spec.name], mesh)).abs().max().item()
        for spec in program.operands
    )


@pytest.mark.parametrize("line", [line for line in UNREDUCED if "W_in" not in line])
def test_the_cotangent_of_a_partial_sum_on_ranks(ranks, line):
    assert largest(ranks(run_unreduced, {"X": 2, "Y": 2}, line)) < 1e-12


def test_an_unreduced_hidden_array_is_scattered_where_the_next_weight_is_split():
    program = derive(LINES[7][0])
    assert [(step.op, str(step.after)) for step in program.forward[:4]] == [
        ("Einsum", "Tmp[B, F] {U_X}"),
        ("ReduceScatter", "Tmp[B, F_X]"),
        ("Einsum", "Out[B, D] {U_X}"),
        ("AllReduce", "Out[B, D]"),
    ]
