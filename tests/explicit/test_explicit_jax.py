"""The rules beside what JAX's explicit mode says (tests/oracles/explicit_jax.py): of 3,045 cases, types alone; and its
gradients, in types and, on ranks, in values."""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from random_programs import MESH, SIZES, function
from torch.distributed.tensor import Partial, Replicate, Shard
from typings import Case, cases, digest, numbers, typed_programs, written

from scaling import explicit
from scaling.algebra.law import Illegal
from scaling.algebra.layouts import DimAxes, layout
from scaling.explicit import functions
from scaling.explicit.beside import jax_layout, spmd_names
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, parse

TABLE = Path(__file__).with_name("jax_types.txt")
ANSWERS = [a for line in TABLE.read_text().splitlines() if line[0] != "#" for a in line.split(" ")]
GRADIENTS = json.loads(Path(__file__).with_name("jax_gradients.json").read_text())["programs"]
CALLS = {
    "einsum": lambda detail, xs: (torch.einsum, (*detail, *xs)),
    "add": lambda detail, xs: (torch.add, tuple(xs)),
    "sum": lambda detail, xs: (torch.Tensor.sum, (*xs, detail)),
    "amax": lambda detail, xs: (torch.Tensor.amax, (*xs, detail)),
    "permute": lambda detail, xs: (torch.permute, (*xs, detail)),
    "reshape": lambda detail, xs: (torch.reshape, (*xs, detail)),
}
SAME = "the same"
UNREDUCED = "JAX calls it ambiguous: here the result is {U}"
SILENT_SUM = "JAX reduces without a word: here the result is {U}"
SILENT_MAX = "JAX reduces a maximum without a word: here a reshard is asked for"
CASE_2 = "JAX communicates without a word where one operand of a contraction is split: here case 2 is refused"
BATCH = "JAX takes the left operand's batch dim, and gathers the right one's: here the left one is sliced"
MERGED = "JAX moves data to merge dims whose blocks are interleaved: here a reshape sends nothing"
RESPLIT = "JAX knows one split or merge at a time: here any that keeps the order of each device's elements"


@cache
def called(kind, detail, shapes) -> functions.TypedCall:
    func, args = CALLS[kind](detail, [torch.empty(s, device="meta") for s in shapes])
    return functions.read_call(func, args, {}, lambda x: isinstance(x, torch.Tensor))


def ours(case: Case) -> tuple[str, tuple[str, ...]]:
    """The result's dims, or a refusal; and what it is unreduced over."""
    try:
        call = called(case.kind, case.detail, case.shapes)
        _, result = call.op.infer([DimAxes(dims) for dims in case.typing], case.shapes, case.mesh)
    except Illegal:
        return "!", ()
    return written(result.dims), result.unreduced


def by_letter(case: Case) -> list[tuple[str, tuple, tuple]]:
    """(letter, its axes in the first operand, in the second) of the letters that both terms of an einsum have."""
    left, right = case.detail[0].split("->")[0].split(",")
    return [(d, case.typing[0][left.index(d)], case.typing[1][right.index(d)]) for d in left if d in right]


def reason(case: Case, theirs: str) -> str:
    """The difference that is to be expected of a case, from its typing alone."""
    got, unreduced = ours(case)
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
    for case, theirs in zip(cases(), ANSWERS, strict=True):
        found[reason(case, theirs)] += 1
        op, at = called(case.kind, case.detail, case.shapes).op, [DimAxes(dims) for dims in case.typing]
        answer = jax_layout(op, at, case.shapes, case.mesh)
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


def array(shape, seed: int, type: str, mesh):
    values = numbers(torch.Size(shape).numel(), seed)
    return explicit.array(torch.tensor(values, dtype=torch.float64).view(shape), type, mesh)


def derivatives(program, types, mesh) -> list[explicit.Array]:
    """The result and the gradients of all arguments."""
    run = function(program, explicit.einsum, torch.tanh, types, explicit.reshard)
    given = zip(program.shapes, program.in_types, strict=True)
    y, pull = explicit.vjp(run, *(array(shape, i, type, mesh) for i, (shape, type) in enumerate(given)))
    shape = [SIZES[d] for d in parse(program.out_type).dim_names]
    return [y, *pull(array(shape, 50, program.out_type, mesh))]


def on_ranks(mesh, part: slice) -> list[list[list[float]]]:
    found = [derivatives(program, types, mesh) for program, types in typed_programs(part.stop)[part]]
    return [[digest(x.whole().flatten().tolist()) for x in arrays] for arrays in found]


@pytest.mark.parametrize("part", [slice(12), pytest.param(slice(12, 50), marks=pytest.mark.sweep)], ids=str)
def test_gradients_are_jaxs_with_the_reduction_left_to_the_caller(ranks, part):
    """In values; and in types, where dims are split as JAX says: over the other axes JAX has reduced the gradient, and
    here it is still unreduced."""
    mesh, digests = AbstractMesh(MESH), ranks(on_ranks, {"X": 2, "Y": 2}, part)[0]
    for (program, types), found, theirs in zip(typed_programs(part.stop)[part], digests, GRADIENTS[part], strict=True):
        y, *grads = derivatives(program, types, mesh)
        assert [written(x.layout.dims) for x in (y, *grads)] == [dims for dims, _ in theirs]
        assert (y.layout.unreduced, {frozenset(x.layout.used) for x in grads}) == ((), {frozenset(MESH)})
        for ours, (_, wanted) in zip(torch.tensor(found, dtype=torch.float64), theirs, strict=True):
            assert wanted[2] > 0
            wanted = torch.tensor(wanted, dtype=torch.float64)
            torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12 * float(wanted[2]))
