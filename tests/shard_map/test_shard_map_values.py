"""What `shard_map` and its collectives would cut off, widen or write through to the caller: refused, or made right."""

import pytest
import torch
from refused import refused
from torch.func import vjp, vmap

from scaling.mesh import AbstractMesh
from scaling.shard_map import (
    all_gather,
    all_to_all,
    axis_index,
    dynamic_slice_in_dim,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    shard_map,
)
from scaling.spec import ShardingError

MESH = {"X": 2, "Y": 2}
WHOLE = torch.arange(16.0).view(4, 4)


def mapped(fn, *args, into="A[I_X, J_Y]", out="A[I_X, J_Y]", mesh=MESH):
    return shard_map(fn, mesh, into, out, in_process=True)(*(args or (WHOLE.clone(),)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64])
def test_a_sum_keeps_its_dtype(dtype):
    x = (WHOLE * 7).to(dtype)
    blocks = x.view(2, 2, 4)
    found = mapped(lambda v: psum(v, "X"), x, out="A[I, J_Y]")
    assert found.dtype == dtype
    assert torch.equal(found, blocks[0] + blocks[1]), "whole numbers wrap around, as on ranks"
    scattered = mapped(lambda v: psum_scatter(v, "X", tiled=True), x)
    assert torch.equal(scattered, blocks[0] + blocks[1])
    mean = mapped(lambda v: pmean(v, "X"), x, out="A[I, J_Y]")
    assert torch.equal(mean, (blocks.double().sum(0) / 2).to(mean.dtype)), "which does not wrap around"


def test_neither_the_program_nor_its_caller_writes_through():
    for into in ("A[I_X, J]", "A[I, J]"):
        given = WHOLE.clone()
        for change in (lambda v: v.add_(1), lambda v: v[:1].zero_(), lambda v: torch.add(v, 1, out=v)):
            with pytest.raises(ShardingError, match=r"arguments are not changed(.|\n)*fix:"):
                mapped(change, given, into=into, out=into)
        result = mapped(lambda v: v, given, into=into, out=into)
        result += 1
        assert torch.equal(given, WHOLE)
    assert torch.equal(mapped(lambda v: v.clone().add_(1)), WHOLE + 1)


NOT_DIMS = (5, -3, None, "0", 1.0)
GIVEN = {  # to a call, what it does not take
    "axis": (psum, ("Z", None, 3, True, ("X", "X"), ("X", 3), "")),
    "index of": (lambda v, axis: v + axis_index(axis), ("Q", None)),
    "gather": (lambda v, dim: all_gather(v, "X", axis=dim, tiled=True), NOT_DIMS),
    "scatter": (lambda v, dim: psum_scatter(v, "X", scatter_dimension=dim, tiled=True), NOT_DIMS),
    "split": (lambda v, dim: all_to_all(v, "X", dim, 0, tiled=True), NOT_DIMS),
    "slice": (lambda v, dim: dynamic_slice_in_dim(v, 0, 1, dim), NOT_DIMS),
    "size": (lambda v, size: dynamic_slice_in_dim(v, 0, size), (5, -1, None, "1", 1.0)),
    "start": (lambda v, start: dynamic_slice_in_dim(v, start, 1), (None, "0", 0.5, torch.ones(2).long())),
    "to": (lambda v, to: all_gather(v, "X", to=to), ("x", None)),
    "pairs": (lambda v, pairs: ppermute(v, "X", pairs), ([(0.5, 1)], [("0", "1")], [(0,)], 3, None, "01")),
}
WRONG = {
    f"{what} {given!r}": lambda v, call=call, given=given: call(v, given)
    for what, (call, some) in GIVEN.items()
    for given in some
}
WRONG |= {
    "the greatest of complex numbers": lambda v: pmax(torch.complex(v, v), "X").real,
    "the least of 8 bits": lambda v: pmin(v.to(torch.float8_e4m3fn), "X").float(),
    "a sum of 8 bits": lambda v: psum(v.to(torch.float8_e4m3fn), "X").float(),
    "a sum of a text": lambda v: psum("a", "X"),
    "a text": lambda v: "a",
}


def written_to(x):
    total = torch.zeros(6, dtype=torch.float64)
    total += x.sum(0)
    return total


# fmt: off
PROGRAMS = {  # on x[B_X, D]: (the program, the result's type, words of the error)
    "what is not invariant is claimed to be": (lambda x: x, "x[B, D]", "result is invariant"),
    "gathered, but typed varying": (lambda x: all_gather(x, "X", tiled=True), "x[B, D]", "psum or pmean over X"),
    "a sum over axes of two types": (lambda x: psum(x, ("X", "Y")), "x[B, D]", "one type over all the axes"),
    "Python decides by a varying value": (lambda x: x if x.sum() > 0 else -x, "x[B_X, D]", "decides nothing"),
    "random numbers": (lambda x: x + torch.rand(6), "x[B_X, D]", "draw the whole array outside"),
    "a shape by value": (lambda x: x[x > 0], "x[B_X]", "one shape"),
    "written to, and no longer invariant": (written_to, "x[D]", "x = x + y in place of"),
    "invariant terms of a sum": (lambda x: x, "x[B_X, D] {U_Y}", "terms of a sum"),
    "a product of partial sums": (lambda x: pcast(x, "X", to="unreduced") * 2, "x[B, D] {U_X}", "partial sums"),
    "partial sums and a value": (lambda x: pcast(x, "X", to="unreduced") + x, "x[B, D] {U_X}", "partial sums"),
    "partial sums, transformed": (
        lambda x: vmap(lambda row: row * row)(pcast(x, "X", to="unreduced")),
        "x[B, D] {U_X}",
        "partial sums",
    ),
    "reduced and invariant": (lambda x: pcast(x[:1], "Y", to="reduced") + x, "x[B_X, D]", "is reduced or varies"),
    "reduced, on its way out": (lambda x: pcast(x, "Y", to="reduced"), "x[B_X, D]", "which no out_spec says"),
    "a sum of what is reduced": (lambda x: psum(pcast(x, "Y", to="reduced"), "Y"), "x[B_X, D]", "one type over all"),
    "the greatest of partial sums": (lambda x: pmax(pcast(x, "X", to="unreduced"), "Y"), "x[B]", "reduced first"),
    "reduced, of what varies": (lambda x: pcast(x, "X", to="reduced"), "x[B_X, D]", "over all the axes"),
    "an invariant cotangent of partial sums": (
        lambda x: vjp(torch.neg, pcast(x, "X", to="unreduced"))[1](x)[0],
        "x[B_X, D]",
        "has a reduced one",
    ),
    "a cotangent of another type": (lambda x: vjp(torch.sin, axis_index("Y") * 0.0)[1](x[0, 0]), "x[]", "value's type"),
    "two sources for one device": (lambda x: ppermute(x, "X", [(0, 1), (2, 1)]), "x[B_X, D]", "from one at most"),
    "a dim that is not cut evenly": (lambda x: psum_scatter(x, "X", tiled=True), "x[B_X, D]", "cut into 4 blocks"),
    "an out_spec of other dims": (lambda x: x, "x[B_X]", "a type names each dim"),
    "a result without a spec": (lambda x: (x, x), ("x[B_X, D]",), "are a tree"),
}
# fmt: on
A, LARGE = torch.arange(48.0).view(8, 6), AbstractMesh({"X": 4, "Y": 2})


def large(program, into, out):
    return lambda: mapped(program, A, into=into, out=out, mesh=LARGE)


SPECS = {"A[B_X]": "dims", "A[B, D_X]": "does not divide", "A[B_Z, D]": "unknown mesh axis", "A[B, D] {U_X}": "U"}
CALLS = {what: lambda program=program: mapped(program) for what, program in WRONG.items()}
CALLS |= {f"mesh {mesh!r}": lambda mesh=mesh: mapped(lambda v: v, mesh=mesh) for mesh in (None, 4, "X=2")}
CALLS |= {
    "a text as operand": lambda: mapped(lambda v: v, "abc"),
    "sparse": lambda: mapped(lambda v: v, WHOLE.to_sparse()),
}
CALLS |= {what: (large(program, "x[B_X, D]", out), words) for what, (program, out, words) in PROGRAMS.items()}
CALLS |= {into: (large(lambda x: x, into, "A[B, D]"), words) for into, words in SPECS.items()}
test_refused = refused(CALLS, ShardingError)
