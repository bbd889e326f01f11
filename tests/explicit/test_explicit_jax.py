"""The rules beside what JAX's explicit mode says of 3,045 cases (tests/oracles/jax_answers.py): types alone."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from beside_jax import Case, called, cases, written
from torch.distributed.tensor import Partial, Replicate, Shard

from scaling import explicit
from scaling.algebra.law import Illegal
from scaling.algebra.layouts import DimAxes, layout
from scaling.explicit import functions
from scaling.explicit.beside import jax_layout, spmd_names
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, parse

SAME = "the same"
UNREDUCED = "JAX calls it ambiguous: here the result is {U}"
SILENT_SUM = "JAX reduces without a word: here the result is {U}"
SILENT_MAX = "JAX reduces a maximum without a word: here a reshard is asked for"
CASE_2 = "JAX communicates without a word where one operand of a contraction is split: here case 2 is refused"
BATCH = "JAX takes the left operand's batch dim, and gathers the right one's: here the left one is sliced"
MERGED = "JAX moves data to merge dims whose blocks are interleaved: here a reshape sends nothing"
RESPLIT = "JAX knows one split or merge at a time: here any that keeps the order of each device's elements"


def ours(op, case: Case) -> tuple[str, tuple[str, ...]]:
    """The result's dims, or a refusal; and what it is unreduced over."""
    try:
        _, result = op.infer([DimAxes(dims) for dims in case.typing], case.shapes, case.mesh)
    except Illegal:
        return "!", ()
    return written(result.dims), result.unreduced


def by_letter(case: Case) -> list[tuple[str, tuple, tuple]]:
    """(letter, its axes in the first operand, in the second) of the letters that both terms of an einsum have."""
    left, right = case.detail[0].split("->")[0].split(",")
    return [(d, case.typing[0][left.index(d)], case.typing[1][right.index(d)]) for d in left if d in right]


def reason(case: Case, got: str, unreduced: tuple, theirs: str) -> str:
    """The difference that is to be expected of a case, from its typing alone."""
    if got == theirs and not unreduced:
        return SAME
    split = {axis for dims in case.typing for axes in dims for axis in axes}
    if case.kind == "einsum":
        kept = case.detail[0].split("->")[1]
        summed = [(a, b) for d, a, b in by_letter(case) if d not in kept]
        batch = [(a, b) for d, a, b in by_letter(case) if d in kept]
        if any(a != b for a, b in summed):
            assert (got, "!" in theirs) == ("!", False)
            return CASE_2
        if any(not a and b for a, b in batch) and theirs != "!":
            assert got == "!" or got.split(",")[0] == written([case.typing[1][0]]) != theirs.split(",")[0]
            return BATCH
        assert theirs == "!"
        assert {*unreduced} == {axis for a, _ in summed for axis in a} != set()
        return UNREDUCED
    if case.kind in ("sum", "amax"):
        over = {axis for i in case.detail for axis in case.typing[0][i]}
        assert theirs == written([axes for i, axes in enumerate(case.typing[0]) if i not in case.detail])
        assert over
        assert (got, {*unreduced}) == ((theirs, over) if case.kind == "sum" else ("!", set()))
        return SILENT_SUM if case.kind == "sum" else SILENT_MAX
    assert case.kind == "reshape"
    assert split
    assert (got == "!") != (theirs == "!")
    return MERGED if got == "!" else RESPLIT


COUNTS = {SAME: 1768, CASE_2: 942, SILENT_SUM: 96, SILENT_MAX: 96, UNREDUCED: 91, BATCH: 26, RESPLIT: 17, MERGED: 9}


def test_equal_or_different_for_a_reason():
    """And what `beside_jax` says of JAX is what JAX said."""
    found = Counter()
    for _, some, answers in cases():
        func, args = called(some[0], torch, [torch.empty(shape, device="meta") for shape in some[0].shapes])
        op = functions.read_call(func, args, {}, lambda x: isinstance(x, torch.Tensor)).op
        for case, theirs in zip(some, answers, strict=True):
            found[reason(case, *ours(op, case), theirs)] += 1
            answer = jax_layout(op, [DimAxes(dims) for dims in case.typing], case.shapes, case.mesh)
            assert ("!" if isinstance(answer, str) else written(answer)) == theirs, case
    assert found == COUNTS


def test_a_program_beside_jaxs():
    mesh = AbstractMesh({"X": 4, "Y": 2})
    types = "In[8_X, 32_Y]", "W[32_Y, 64]", "V[64_Y, 16]"
    arrays = [explicit.array(torch.empty([int(n) for n in re.findall(r"\d+", t)]), t, mesh) for t in types]

    def program(In, W, V):
        T = explicit.reshard(torch.einsum("bd,df->bf", In, W), "[8_X, 64]")
        return torch.cat([T, explicit.reshard(T, "[8, 64]")], 1) @ torch.cat([V, V], 0)

    lines = explicit.beside_jax(program, *arrays).splitlines()
    assert lines[:6] == [
        "1. float32[8_X, 64] {U_Y} = einsum bd,df->bf(float32[8_X, 32_Y], float32[32_Y, 64])",
        "     here: X: S(0), Y: P",
        "     JAX:  refused: ambiguous, asks for out_sharding",
        "2. float32[8_X, 64] = reshard(float32[8_X, 64] {U_Y})",
        "     here: X: S(0), Y: R",
        "     JAX:  the same",
    ]
    text = "\n".join(lines)
    assert "cat(float32[8_X, 64], float32[8, 64])\n     here: X: S(0), Y: R\n     JAX:  refused: what is joined" in text
    assert "here: refused, cat runs along a dim that is split over Y; so with operands resharded" in text
    with pytest.raises(ShardingError, match="arguments are Arrays"):
        explicit.beside_jax(program, torch.ones(2))


def test_the_names_of_spmd_types_in_the_notation():
    """Its table of cotangents: the type's placement has the name that stands beside it, and so has its cotangent's."""
    lines = (Path(__file__).parents[2] / "notation.md").read_text().split("`spmd_types` |")[1].splitlines()[2:5]
    placed = {Shard(0): "S(0)", Replicate(): "R", Partial(): "P"}
    for line in lines:
        text, name, cotangent, dual = re.findall(r"`([^`]*)`", line)
        spec, mesh = parse(text), {"X": 4}
        assert spec.cotangent(mesh) == parse(cotangent)
        for each, of in ((spec, name), (spec.cotangent(mesh), dual)):
            assert placed[each.placements(mesh)[0]] == of
            assert spmd_names(layout(each), mesh) == f"X: {of}"
