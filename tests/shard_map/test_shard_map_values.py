"""What `shard_map` and its collectives would cut off, widen or write through to the caller: refused, or made right."""

import pytest
import torch

from scaling.shard_map import (
    all_gather,
    all_to_all,
    axis_index,
    dynamic_slice_in_dim,
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
WRONG = {
    **{f"axis {axis!r}": lambda v, axis=axis: psum(v, axis) for axis in ("Z", None, 3, True, ("X", "X"), ("X", 3), "")},
    **{f"index of {axis!r}": lambda v, axis=axis: v + axis_index(axis) for axis in ("Q", None)},
    **{f"gather {dim!r}": lambda v, dim=dim: all_gather(v, "X", axis=dim, tiled=True) for dim in NOT_DIMS},
    **{f"scatter {d!r}": lambda v, d=d: psum_scatter(v, "X", scatter_dimension=d, tiled=True) for d in NOT_DIMS},
    **{f"split {dim!r}": lambda v, dim=dim: all_to_all(v, "X", dim, 0, tiled=True) for dim in NOT_DIMS},
    **{f"slice {dim!r}": lambda v, dim=dim: dynamic_slice_in_dim(v, 0, 1, dim) for dim in NOT_DIMS},
    **{f"size {n!r}": lambda v, n=n: dynamic_slice_in_dim(v, 0, n) for n in (5, -1, None, "1", 1.0)},
    **{f"start {n!r}": lambda v, n=n: dynamic_slice_in_dim(v, n, 1) for n in (None, "0", 0.5, torch.ones(2).long())},
    **{f"to {to!r}": lambda v, to=to: all_gather(v, "X", to=to) for to in ("x", None)},
    **{f"pairs {p!r}": lambda v, p=p: ppermute(v, "X", p) for p in ([(0.5, 1)], [("0", "1")], [(0,)], 3, None, "01")},
    "the greatest of complex numbers": lambda v: pmax(torch.complex(v, v), "X").real,
    "the least of 8 bits": lambda v: pmin(v.to(torch.float8_e4m3fn), "X").float(),
    "a sum of 8 bits": lambda v: psum(v.to(torch.float8_e4m3fn), "X").float(),
    "a sum of a text": lambda v: psum("a", "X"),
    "a text": lambda v: "a",
}


@pytest.mark.parametrize("program", WRONG.values(), ids=WRONG)
def test_arguments_that_are_no_axes_dims_or_numbers_are_refused(program):
    with pytest.raises(ShardingError, match="fix:"):
        mapped(program, out="A[I_X, J_Y]")


@pytest.mark.parametrize("mesh", [None, 4, "X=2"])
def test_a_mesh_is_a_mesh(mesh):
    with pytest.raises(ShardingError, match="fix:"):
        mapped(lambda v: v, mesh=mesh)


@pytest.mark.parametrize("x", ["abc", WHOLE.to_sparse()])
def test_operands_are_dense_tensors(x):
    with pytest.raises(ShardingError, match="fix:"):
        mapped(lambda v: v, x)
