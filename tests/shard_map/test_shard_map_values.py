"""What `shard_map` and its collectives would cut off, widen or write through to the caller: refused, or made right."""

from functools import partial

import pytest
import torch
from refused import refused
from test_shard_map import MESH, A

from scaling import shard_map as manual
from scaling.shard_map import pmean, psum, psum_scatter, shard_map
from scaling.spec import ShardingError

SQUARE, WHOLE = {"X": 2, "Y": 2}, torch.arange(16.0).view(4, 4)


def mapped(fn, *args, into="A[I_X, J_Y]", out="A[I_X, J_Y]", mesh=SQUARE):
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
    "psum(x, given)": ("Z", None, 3, True, ("X", "X"), ("X", 3), ""),
    "x + axis_index(given)": ("Q", None),
    "all_gather(x, 'X', axis=given, tiled=True)": NOT_DIMS,
    "psum_scatter(x, 'X', scatter_dimension=given, tiled=True)": NOT_DIMS,
    "all_to_all(x, 'X', given, 0, tiled=True)": NOT_DIMS,
    "dynamic_slice_in_dim(x, 0, 1, given)": NOT_DIMS,
    "dynamic_slice_in_dim(x, 0, given)": (5, -1, None, "1", 1.0),
    "dynamic_slice_in_dim(x, given, 1)": (None, "0", 0.5, torch.ones(2).long()),
    "all_gather(x, 'X', to=given)": ("x", None),
    "ppermute(x, 'X', given)": ([(0.5, 1)], [("0", "1")], [(0,)], 3, None, "01"),
    "pmax(torch.complex(x, x), given).real": ("X",),
    "pmin(x.to(torch.float8_e4m3fn), given).float()": ("X",),
    "psum(x.to(torch.float8_e4m3fn), given).float()": ("X",),
    "psum(given, 'X')": ("a",),
    "given": ("a",),
}


def program(text: str, **given):
    return eval(f"lambda x: {text}", vars(manual) | vars(torch.func) | globals() | given)


def written_to(x):
    total = torch.zeros(6, dtype=torch.float64)
    total += x.sum(0)
    return total


PROGRAMS = {  # of x[B_X, D] -> the result's type: words of the error
    "x -> x[B, D]": "result is invariant",
    "all_gather(x, 'X', tiled=True) -> x[B, D]": "psum or pmean over X",
    "psum(x, ('X', 'Y')) -> x[B, D]": "one type over all the axes",
    "(x if x.sum() > 0 else -x) -> x[B_X, D]": "decides nothing",
    "x + torch.rand(6) -> x[B_X, D]": "draw the whole array outside",
    "x[x > 0] -> x[B_X]": "one shape",
    "written_to(x) -> x[D]": "x = x + y in place of",  # and no longer invariant
    "x -> x[B_X, D] {U_Y}": "terms of a sum",
    "pcast(x, 'X', to='unreduced') * 2 -> x[B, D] {U_X}": "partial sums",
    "pcast(x, 'X', to='unreduced') + x -> x[B, D] {U_X}": "partial sums",
    "vmap(lambda row: row * row)(pcast(x, 'X', to='unreduced')) -> x[B, D] {U_X}": "partial sums",
    "pcast(x[:1], 'Y', to='reduced') + x -> x[B_X, D]": "is reduced or varies",
    "pcast(x, 'Y', to='reduced') -> x[B_X, D]": "which no out_spec says",
    "psum(pcast(x, 'Y', to='reduced'), 'Y') -> x[B_X, D]": "one type over all",
    "pmax(pcast(x, 'X', to='unreduced'), 'Y') -> x[B]": "reduced first",
    "pcast(x, 'X', to='reduced') -> x[B_X, D]": "over all the axes",
    "vjp(torch.neg, pcast(x, 'X', to='unreduced'))[1](x)[0] -> x[B_X, D]": "has a reduced one",
    "vjp(torch.sin, axis_index('Y') * 0.0)[1](x[0, 0]) -> x[]": "value's type",
    "ppermute(x, 'X', [(0, 1), (2, 1)]) -> x[B_X, D]": "from one at most",
    "psum_scatter(x, 'X', tiled=True) -> x[B_X, D]": "cut into 4 blocks",
    "x -> x[B_X]": "a type names each dim",
}


LARGE = {"into": "x[B_X, D]", "mesh": MESH}
SPECS = {"A[B_X]": "dims", "A[B, D_X]": "does not divide", "A[B_Z, D]": "unknown mesh axis", "A[B, D] {U_X}": "U"}
CALLS = {
    f"{call}, given {given!r}": lambda call=call, given=given: mapped(program(call, given=given))
    for call, some in GIVEN.items()
    for given in some
}
CALLS |= {f"mesh {mesh!r}": lambda mesh=mesh: mapped(lambda v: v, mesh=mesh) for mesh in (None, 4, "X=2")}
CALLS |= {
    "outside": (lambda: psum(A, "X"), "outside of shard_map"),
    "numbers on a planned mesh": (lambda: shard_map(lambda x: x, MESH, "x[B]", "x[B]")(A[0]), "in_process=True"),
    "a text as operand": lambda: mapped(lambda v: v, "abc"),
    "sparse": lambda: mapped(lambda v: v, WHOLE.to_sparse()),
    "a result without a spec": (partial(mapped, lambda x: (x, x), A, out=("x[B_X, D]",), **LARGE), "are a tree"),
}
for line, words in PROGRAMS.items():
    text, _, out = line.rpartition(" -> ")
    CALLS[line] = partial(mapped, program(text), A, out=out, **LARGE), words
CALLS |= {
    into: (partial(mapped, lambda x: x, A, into=into, out="A[B, D]", mesh=MESH), words) for into, words in SPECS.items()
}
test_refused = refused(CALLS, ShardingError)
