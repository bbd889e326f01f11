"""Collectives over several axes and dims, in every dtype and layout, asynchronous or into a buffer.

The oracle: `parts` has what each device contributes to a sum; what a device holds of a type follows from the type. Most
lines run on {X: 2, Y: 2}; those of `turned` on meshes where the order of the blocks is not its own inverse.
"""

import itertools
from functools import partial

import pytest
import torch
from torch.func import vjp

from scaling import collectives as c
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import Spec, parse, parse_line

MESH = {"X": 2, "Y": 2}
I, J = 16, 8
ORDERS = [({"X": 2, "Y": 4}, "YX"), ({"P": 2, "X": 2, "Y": 2}, "YPX"), ({"P": 2, "X": 2, "Y": 2}, "XYP")]


def parts(sizes) -> torch.Tensor:
    """[*sizes, I, J], exact in bf16."""
    return torch.randint(-4, 5, (*sizes.values(), I, J), generator=torch.Generator().manual_seed(0))


LINES = {
    c.all_gather: [
        "A[I_X, J] -> A[I, J]",
        "A[I, J_Y] -> A[I, J]",
        "A[I_XY, J] -> A[I, J]",
        "A[I_YX, J] -> A[I, J]",
        "A[I, J_YX] -> A[I, J]",
        "A[I_XY, J] -> A[I_X, J]",
        "A[I_YX, J] -> A[I_Y, J]",
        "A[I_X, J_Y] -> A[I, J]",
        "A[I_Y, J] {U_X} -> A[I, J] {U_X}",
    ],
    c.reduce_scatter: [
        "A[I, J] {U_X} -> A[I_X, J]",
        "A[I, J] {U_Y} -> A[I, J_Y]",
        "A[I, J] {U_XY} -> A[I_XY, J]",
        "A[I, J] {U_XY} -> A[I_YX, J]",
        "A[I, J] {U_XY} -> A[I, J_YX]",
        "A[I, J] {U_XY} -> A[I_Y, J_X]",
        "A[I_Y, J] {U_X} -> A[I_YX, J]",
        "A[I, J] {U_XY} -> A[I_X, J] {U_Y}",
    ],
    c.all_reduce: [
        "A[I, J] {U_X} -> A[I, J]",
        "A[I, J] {U_XY} -> A[I, J]",
        "A[I, J_Y] {U_X} -> A[I, J_Y]",
        "A[I, J] {U_XY} -> A[I, J] {U_X}",
    ],
    c.all_to_all: [
        "A[I_X, J] -> A[I, J_X]",
        "A[I, J_Y] -> A[I_Y, J]",
        "A[I_XY, J] -> A[I, J_XY]",
        "A[I_YX, J] -> A[I, J_YX]",
        "A[I_YX, J] -> A[I_Y, J_X]",
        "A[I_X, J_Y] -> A[I, J_YX]",
        "A[I_X, J] {U_Y} -> A[I, J_X] {U_Y}",
    ],
    c.shard: [
        "A[I, J] -> A[I, J_X]",
        "A[I, J] -> A[I_XY, J]",
        "A[I, J] -> A[I_YX, J]",
        "A[I, J] -> A[I_X, J_Y]",
        "A[I_Y, J] {U_X} -> A[I_Y, J] {U_X}",
        "A[I_Y, J] -> A[I_YX, J]",
    ],
    c.reshard: [
        "A[I_XY, J] -> A[I_Y, J]",
        "A[I_XY, J] -> A[I_YX, J]",
        "A[I_X, J_Y] -> A[I_Y, J_X]",
        "A[I_X, J] {U_Y} -> A[I, J_YX]",
    ],
}
CASES = [(call.__name__, line) for call, lines in LINES.items() for line in lines]


def turned(axes: str) -> list[tuple[str, str]]:
    whole, rows, partial_sums = "A[I, J]", f"A[I_{axes}, J]", f"A[I, J] {{U_{''.join(sorted(axes))}}}"
    lines = {"all_gather": f"{rows} -> {whole}", "reduce_scatter": f"{partial_sums} -> {rows}"}
    lines |= {"all_to_all": f"{rows} -> A[I, J_{axes}]", "shard": f"{whole} -> {rows}"}
    return [*lines.items()]


ASYNCHRONOUS = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]
FEW = DTYPES[0], DTYPES[2], DTYPES[4]  # of each kind one: the others are a sweep


def held(spec: Spec, mesh, start: Spec | None = None) -> torch.Tensor:
    """What this device holds of A typed `spec`, where axes that `start` is unreduced over have been summed."""
    x, coord = parts(mesh.sizes), mesh.coord
    for axis in mesh.sizes:  # each takes the leading dim away
        if axis in spec.unreduced:
            x = x[coord[axis]]
        else:
            x = x.sum(0) if start is not None and axis in start.unreduced else x[0]
    return x[spec.slices((I, J), mesh, coord)]


def layouts(x: torch.Tensor):
    """The same values, laid out in memory by rows, by columns, and with gaps."""
    return {
        "by rows": x.contiguous(),
        "by columns": x.t().contiguous().t(),
        "with gaps": torch.stack([x, x + 1], -1)[..., 0],
    }


def run_lines(mesh, dtype, cases):
    for name, line in cases:
        call, before, after = getattr(c, name), parse_line(line).operands[0], parse_line(line).result
        wanted = held(after, mesh, before).to(dtype)
        for layout, x in layouts(held(before, mesh).to(dtype)).items():
            kept, what = x.clone(), f"{name} {line} {dtype} {layout}"
            got = {"at once": call(line, x, mesh)}
            if name in ASYNCHRONOUS:
                pending = call(line, x, mesh, async_op=True)
                assert isinstance(pending, c.Pending), what
                got["later"] = pending.wait()
                assert pending.wait() is got["later"], what
            if dtype.is_floating_point:
                got["differentiated"] = call(line, x.clone().requires_grad_(), mesh).detach()
            for how, y in got.items():
                assert y.dtype == dtype, f"{what} {how}"
                assert torch.equal(y, wanted), f"{what} {how}:\n{y}\n{wanted}"
                if not before.same_sharding(after):
                    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), f"{what} {how}"
            assert torch.equal(x, kept), f"{what} changed its operand"


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [dtype if dtype in FEW else pytest.param(dtype, marks=pytest.mark.sweep) for dtype in DTYPES],
    ids=str,
)
def test_values_over_several_axes(ranks, dtype):
    ranks(run_lines, MESH, dtype, CASES)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "axes"), ORDERS, ids=str)
def test_values_where_the_order_of_blocks_is_not_its_own_inverse(ranks, sizes, axes):
    ranks(run_lines, sizes, torch.float32, turned(axes))


def run_transposes(mesh, cases, axes):
    """<w, f(x)> - <f'(w), x>, summed over this rank's elements: 0 in all, if the vjp is the transpose of the map."""
    g, rest = torch.Generator().manual_seed(mesh.rank), []
    maps = [(partial(getattr(c, name), line, mesh=mesh), line) for name, line in cases] + rooted(mesh, axes, 1)
    for call, line in maps:
        before, after = parse_line(line).operands[0], parse_line(line).result
        x, w = (torch.randint(-9, 9, s.local_shape((I, J), mesh), generator=g).double() for s in (before, after))
        y, pull = vjp(call, x)
        rest.append((w * y).sum() - (pull(w)[0] * x).sum())
    return torch.stack(rest)


@pytest.mark.parametrize(
    ("sizes", "axes", "cases"),
    [(MESH, "X", CASES), *(pytest.param(*order, turned(order[1]), marks=pytest.mark.slow) for order in ORDERS)],
    ids=["several axes", *map(str, ORDERS)],
)
def test_cotangents_go_the_transposed_way(ranks, sizes, axes, cases):
    assert not sum(ranks(run_transposes, sizes, cases, axes)).any()


def run_buffers(mesh, dtype):
    for call, line in [(fn, line) for fn in (c.reduce_scatter, c.all_gather) for line in LINES[fn]]:
        before, after = parse_line(line).operands[0], parse_line(line).result
        wanted = held(after, mesh, before).to(dtype)
        for layout, x in layouts(held(before, mesh).to(dtype)).items():
            for async_op, into in itertools.product((False, True), layouts(x)):
                out = layouts(torch.zeros_like(wanted))[into]
                kept, what = x.clone(), f"{line} {dtype} {layout} into {into}"
                y = c.wait(call(line, x, mesh, async_op=async_op, out=out))
                assert torch.equal(y, wanted), what
                assert torch.equal(out, wanted), what
                assert torch.equal(x, kept), what
    for line in LINES[c.all_reduce]:
        before, after = parse_line(line).operands[0], parse_line(line).result
        wanted = held(after, mesh, before).to(dtype)
        for async_op, layout in itertools.product((False, True), layouts(wanted)):
            x = layouts(held(before, mesh).to(dtype))[layout]
            y = c.wait(c.all_reduce(line, x, mesh, async_op=async_op, donate=True))
            assert torch.equal(y, wanted), f"{line} {dtype} {layout}"
            assert torch.equal(x, wanted), f"{line} {dtype} {layout}: the sum is not written over the operand"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.int32, marks=pytest.mark.sweep)], ids=str)
def test_preallocated_outputs(ranks, dtype):
    ranks(run_buffers, MESH, dtype)


def run_unshard(mesh):
    for text in ["A[I_X, J]", "A[I_YX, J]", "A[I_Y, J_X]", "A[I_X, J] {U_Y}", "A[I, J] {U_XY}", "A[I, J]"]:
        whole = c.unshard(text, held(parse(text), mesh), mesh)
        assert torch.equal(whole, held(parse("A[I, J]"), mesh, parse(text))), text
        assert torch.equal(
            c.shard(text.split(" {")[0], whole, mesh), held(parse(text.split(" {")[0]), mesh, parse(text))
        )


def test_unshard_is_the_whole_array_on_every_rank_and_shard_the_way_back(ranks):
    ranks(run_unshard, MESH)


def rooted(mesh, axes, root):
    """(call, line) of each collective with a root, and of a permutation that leaves one out."""
    n, rows, sums = mesh.size(axes), f"A[I_{axes}, J]", f"A[I, J] {{U_{axes}}}"
    lines = {c.scatter: f"{sums} -> {rows}", c.gather: f"{rows} -> {sums}"}
    if parse(sums).unreduced == tuple(axes):  # {U_YX} and {U_XY} are one type: a root of these two counts as in {U_XY}
        lines |= {c.broadcast: f"{sums} -> A[I, J]", c.reduce: f"{sums} -> {sums}"}
    found = [(partial(call, line, mesh=mesh, root=root), line) for call, line in lines.items()]
    pairs = [(block, (3 * block + 1) % n) for block in range(1, n)]
    return [*found, (partial(c.ppermute, rows, mesh=mesh, axis=axes, perm=pairs), f"{rows} -> {rows}")]


def run_rooted(mesh, axes, root):
    mine = parts(mesh.sizes)[tuple(mesh.coord.values())]
    calls = [(call, line.startswith("A[I_")) for call, line in rooted(mesh, axes, root)]
    return {call.func.__name__: call(x=mine[: I // mesh.size(axes)] if rows else mine) for call, rows in calls}


@pytest.mark.parametrize(
    ("sizes", "axes", "root"),
    [(MESH, "X", 1), (MESH, "XY", 2), (MESH, "YX", 1)]
    + [pytest.param(*order, root, marks=pytest.mark.slow) for order in ORDERS for root in (0, 6)],
)
def test_roots_and_permutations_count_blocks_by_the_first_axis_as_the_major_one(ranks, sizes, axes, root):
    every = parts(sizes)
    zeros = torch.zeros(I, J, dtype=every.dtype)
    coords = [dict(zip(sizes, at, strict=True)) for at in itertools.product(*map(range, sizes.values()))]
    for coord, got in zip(coords, ranks(run_rooted, sizes, axes, root), strict=True):
        places = itertools.product(*(range(sizes[axis]) for axis in axes))
        members = [coord | dict(zip(axes, at, strict=True)) for at in places]
        mine, index, n = [every[tuple(m.values())] for m in members], members.index(coord), len(members)
        rows = [part[: I // n] for part in mine]
        sent = {(3 * block + 1) % n: rows[block] for block in range(1, n)}
        wanted = {
            "broadcast": mine[root],
            "reduce": sum(mine) if index == root else zeros,
            "scatter": mine[root].view(n, I // n, J)[index],
            "gather": torch.cat(rows) if index == root else zeros,
            "ppermute": sent.get(index, zeros[: I // n]),
        }
        assert got.keys() >= {"scatter", "gather", "ppermute"}
        for name, y in got.items():
            assert torch.equal(y, wanted[name]), name


@pytest.mark.parametrize(("name", "line"), CASES)
def test_on_one_device_a_collective_is_the_identity(name, line):
    mesh, x = Mesh({"X": 1, "Y": 1}, checked=True), torch.randn(I, J, requires_grad=True)
    call = getattr(c, name)
    assert torch.equal(call(line, x.detach(), mesh), x)
    y, pull = vjp(lambda x: call(line, x, mesh), x.detach())
    assert torch.equal(y, x)
    assert torch.equal(pull(y)[0], y)
    call(line, x, mesh).sum().backward()
    assert torch.equal(x.grad, torch.ones(I, J))
    if name in ASYNCHRONOUS:
        assert torch.equal(call(line, x.detach(), mesh, async_op=True).wait(), x)


ROOTED = [("broadcast", "A[I, J] {U_X} -> A[I, J]"), ("reduce", "A[I, J] {U_X} -> A[I, J] {U_X}")]
ROOTED += [("scatter", "A[I, J] {U_X} -> A[I_X, J]"), ("gather", "A[I_X, J] -> A[I, J] {U_X}")]


@pytest.mark.parametrize(("name", "line"), ROOTED)
def test_on_one_device_a_collective_with_a_root_is_the_identity(name, line):
    x = torch.randn(I, J)
    assert torch.equal(getattr(c, name)(line, x, Mesh({"X": 1})), x)


def test_on_one_device_a_permutation_sends_to_itself_or_gives_zeros():
    x, mesh = torch.randn(I, J), Mesh({"X": 1})
    assert torch.equal(c.ppermute("A[I_X, J]", x, mesh, "X", [(0, 0)]), x)
    assert torch.equal(c.ppermute("A[I_X, J]", x, mesh, "X", []), torch.zeros(I, J))


@pytest.mark.parametrize(("name", "line"), [*CASES, *ROOTED])
def test_on_an_abstract_mesh_a_collective_has_the_shape_of_its_type(name, line):
    mesh, sizes = AbstractMesh({"X": 32, "Y": 16}, {"X": 31, "Y": 3}), {"I": 4096, "J": 8192}
    before, after = parse_line(line).operands[0], parse_line(line).result
    x = torch.empty(before.local_shape(sizes, mesh), device="meta", dtype=torch.bfloat16)
    call = partial(getattr(c, name), line, mesh=mesh)
    traced, pull = vjp(call, x)
    for y in (traced, call(x)):
        assert (y.device.type, y.dtype, y.shape) == ("meta", x.dtype, after.local_shape(sizes, mesh))
    assert pull(y)[0].shape == x.shape
    if name in ASYNCHRONOUS:
        assert getattr(c, name)(line, x, mesh, async_op=True).wait().shape == y.shape
