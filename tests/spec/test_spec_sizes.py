"""What a type says of sizes: local shapes, slices, bytes; and what is refused."""

import itertools
import math
import re
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refused import refused
from test_spec import FAST, MESH, specs

from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, dtype_bytes, parse


@pytest.mark.slow
@FAST
@given(specs(), st.lists(st.integers(1, 3), min_size=3, max_size=3))
def test_the_devices_slices_tile_the_array_once_per_replica_group(spec, blocks):
    """Every element lies on as many devices as there are replicas and partial sums; on one for each of their coords."""
    sizes = {dim: n * math.prod(MESH[axis] for axis in axes) for (dim, axes), n in zip(spec.dims, blocks, strict=False)}
    copies = [axis for axis in MESH if axis not in spec.axes]
    held: dict[tuple, Counter] = {}
    for coord in ({**dict(zip(MESH, at, strict=True))} for at in itertools.product(*map(range, MESH.values()))):
        slices = spec.slices(sizes, MESH, coord)
        assert tuple(s.stop - s.start for s in slices) == spec.local_shape(sizes, MESH)
        elements = itertools.product(*(range(s.start, s.stop) for s in slices))
        held.setdefault(tuple(coord[axis] for axis in copies), Counter()).update(elements)
    everything = Counter(itertools.product(*map(range, spec.global_shape(sizes))))
    assert len(held) == math.prod(MESH[axis] for axis in copies)
    assert all(one_copy == everything for one_copy in held.values())


@pytest.mark.slow
@FAST
@given(specs(), st.sampled_from(["bf16", "fp32", "int8", "int4"]))
def test_bytes_add_up(spec, dtype):
    sizes = dict.fromkeys(spec.dim_names, 16)
    copies = math.prod(n for axis, n in MESH.items() if axis not in spec.axes)
    whole = 16 ** len(spec.dims) * dtype_bytes(dtype)
    assert spec.total_nbytes(sizes, MESH, dtype) == whole * copies
    assert spec.nbytes(sizes, MESH, dtype) * math.prod(MESH.values()) == whole * copies


def test_the_first_axis_of_a_dim_is_the_major_one():
    mesh = {"X": 4, "Y": 2}
    for x, y in itertools.product(range(4), range(2)):
        coord = {"X": x, "Y": y}
        assert parse("A[I_XY]").slices((16,), mesh, coord) == (slice(2 * (2 * x + y), 2 * (2 * x + y) + 2),)
        assert parse("A[I_YX]").slices((16,), mesh, coord) == (slice(2 * (4 * y + x), 2 * (4 * y + x) + 2),)
    assert parse("W[D_X, F]").slices({"D": 8, "F": 16}, mesh, {"X": 3, "Y": 0}) == (slice(6, 8), slice(0, 16))


def test_part_3_pop_quizzes():
    """Part 3, "A unified notation for sharding": the two quizzes on what a device holds."""
    a, mesh = parse("A[I_XY, J]"), {"X": 8, "Y": 2}
    assert a.local_shape((1024, 4096), mesh) == (64, 4096)
    assert a.nbytes((1024, 4096), mesh, "fp32") == 2**20
    mesh = AbstractMesh({"X": 2, "Y": 8, "Z": 2})
    assert a.local_shape((128, 2048), mesh) == (8, 2048)
    assert a.nbytes((128, 2048), mesh, "int8") == 16_384
    assert a.total_nbytes((128, 2048), mesh, "int8") == 512 * 2**10
    assert a.replicated(mesh) == ("Z",)


def test_sizes_by_name_by_shape_and_by_the_dim_itself():
    spec = parse("KV[2, B_X, S]")
    assert spec.global_shape({"B": 8, "S": 3}) == spec.global_shape((2, 8, 3)) == (2, 8, 3)
    assert spec.local_shape(torch.empty(2, 8, 3).shape, {"X": 4}) == (2, 2, 3)
    assert parse("Loss[] {U_X}").local_shape({}, {"X": 4}) == ()
    assert parse("Loss[] {U_X}").nbytes((), {"X": 4}, torch.float32) == 4
    assert parse("A[I_X]").local_shape((0,), {"X": 4}) == (0,)


test_sizes_that_do_not_fit_are_refused = refused(
    {
        "does not divide": (
            lambda: parse("W[D_XY, F]").local_shape({"D": 12, "F": 3}, {"X": 4, "Y": 2}),
            "dim D of size 12 does not divide into 8 blocks (X=4 * Y=2)\n  fix: make D a multiple of 8",
        ),
        "axis": (lambda: parse("W[D_Z]").local_shape((12,), {"X": 4}), "unknown mesh axis Z: the mesh has X=4"),
        "axis in U": (lambda: parse("W[D] {U_Z}").replicated({}), "unknown mesh axis Z: the mesh has no axes"),
        "size missing": (lambda: parse("W[D, F]").global_shape({"D": 2}), "dim F needs a size, an int >= 0; got None"),
        "size negative": (lambda: parse("W[D]").global_shape({"D": -2}), "dim D needs a size, an int >= 0; got -2"),
        "number of dims": (lambda: parse("W[D]").global_shape((2, 3)), "has 1 dims, but the sizes given are (2, 3)"),
        "its own size": (
            lambda: parse("KV[2, B]").global_shape((3, 4)),
            "dim 2 says its own size, but the array has 3",
        ),
        "coordinate missing": (lambda: parse("W[D_X]").slices((8,), {"X": 4}, {}), "needs X in 0..3"),
        "coordinate too large": (lambda: parse("W[D_X]").slices((8,), {"X": 4}, {"X": 4}), "needs X in 0..3"),
        "dtype": (lambda: parse("W[D]").nbytes((8,), {}, "float33"), "unknown dtype 'float33'"),
        **{f"dtype {bad!r}": (lambda bad=bad: dtype_bytes(bad), "unknown dtype") for bad in (0, -1, None, "")},
    },
    ShardingError,
)
DTYPES = "bf16 fp16 f16 fp32 f32 fp64 f64 int8 uint8 int16 int32 int64 bool"


def test_dtypes_by_name_by_torch_and_by_bytes():
    given = ("bf16", "int4", "fp32", torch.float64, torch.bfloat16, 2, 0.5)
    assert [dtype_bytes(d) for d in given] == [2, 0.5, 4, 8, 2, 2, 0.5]
    for name in DTYPES.split():
        full = re.sub(r"^f(p?)(?=\d)", "float", name).replace("bf16", "bfloat16")
        assert dtype_bytes(name) == dtype_bytes(full) == getattr(torch, full).itemsize
    assert parse("W[D]").nbytes((3,), {}, "int4") == 1.5
    assert isinstance(parse("W[D]").nbytes((4,), {}, "int4"), int)
