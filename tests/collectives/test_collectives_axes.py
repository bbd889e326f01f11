"""Collectives over several axes and dims, in every dtype and layout, asynchronous or into a buffer, on {X: 2, Y: 2}.

The oracle: PARTS holds what each device contributes to a sum; what a device holds of a type follows from the type.
"""

import itertools
from functools import partial

import pytest
import torch
from torch.func import vjp

from scaling import collectives as c
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError, Spec, parse, parse_line

MESH = {"X": 2, "Y": 2}
I, J = 8, 4
PARTS = torch.randint(-4, 5, (2, 2, I, J), generator=torch.Generator().manual_seed(0))  # [x, y, I, J], exact in bf16

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
ASYNCHRONOUS = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]
FEW = DTYPES[0], DTYPES[2], DTYPES[4]  # of each kind one: the others are a sweep


def held(spec: Spec, coord, start: Spec | None = None) -> torch.Tensor:
    """What the device at coord holds of A typed `spec`, where axes that `start` is unreduced over have been summed."""
    x = PARTS
    for axis in MESH:  # each takes the leading dim away
        if axis in spec.unreduced:
            x = x[coord[axis]]
        else:
            x = x.sum(0) if start is not None and axis in start.unreduced else x[0]
    return x[spec.slices((I, J), MESH, coord)]


def layouts(x: torch.Tensor):
    """The same values, laid out in memory by rows, by columns, and with gaps."""
    return {
        "by rows": x.contiguous(),
        "by columns": x.t().contiguous().t(),
        "with gaps": torch.stack([x, x + 1], -1)[..., 0],
    }


def run_lines(mesh, dtype):
    for name, line in CASES:
        call, before, after = getattr(c, name), parse_line(line).operands[0], parse_line(line).result
        wanted = held(after, mesh.coord, before).to(dtype)
        for layout, x in layouts(held(before, mesh.coord).to(dtype)).items():
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
    ranks(run_lines, MESH, dtype)


def run_transposes(mesh):
    """<w, f(x)> - <f'(w), x>, summed over this rank's elements: 0 in all, if the vjp is the transpose of the map."""
    g, rest = torch.Generator().manual_seed(mesh.rank), []
    for name, line in CASES:
        before, after = parse_line(line).operands[0], parse_line(line).result
        x, w = (torch.randint(-9, 9, s.local_shape((I, J), MESH), generator=g).double() for s in (before, after))
        y, pull = vjp(partial(getattr(c, name), line, mesh=mesh), x)
        rest.append((w * y).sum() - (pull(w)[0] * x).sum())
    return torch.stack(rest)


def test_cotangents_go_the_transposed_way_over_several_axes(ranks):
    for case, rest in zip(CASES, sum(ranks(run_transposes, MESH)), strict=True):
        assert rest == 0, case


def run_buffers(mesh, dtype):
    for call, line in [(fn, line) for fn in (c.reduce_scatter, c.all_gather) for line in LINES[fn]]:
        before, after = parse_line(line).operands[0], parse_line(line).result
        wanted = held(after, mesh.coord, before).to(dtype)
        for layout, x in layouts(held(before, mesh.coord).to(dtype)).items():
            for async_op, into in itertools.product((False, True), layouts(x)):
                out = layouts(torch.zeros_like(wanted))[into]
                kept, what = x.clone(), f"{line} {dtype} {layout} into {into}"
                y = c.wait(call(line, x, mesh, async_op=async_op, out=out))
                assert torch.equal(y, wanted), what
                assert torch.equal(out, wanted), what
                assert torch.equal(x, kept), what
    for line in LINES[c.all_reduce]:
        before, after = parse_line(line).operands[0], parse_line(line).result
        wanted = held(after, mesh.coord, before).to(dtype)
        for async_op, layout in itertools.product((False, True), layouts(wanted)):
            x = layouts(held(before, mesh.coord).to(dtype))[layout]
            y = c.wait(c.all_reduce(line, x, mesh, async_op=async_op, donate=True))
            assert torch.equal(y, wanted), f"{line} {dtype} {layout}"
            assert torch.equal(x, wanted), f"{line} {dtype} {layout}: the sum is not written over the operand"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.int32, marks=pytest.mark.sweep)], ids=str)
def test_preallocated_outputs(ranks, dtype):
    ranks(run_buffers, MESH, dtype)


def run_unshard(mesh):
    for text in ["A[I_X, J]", "A[I_YX, J]", "A[I_Y, J_X]", "A[I_X, J] {U_Y}", "A[I, J] {U_XY}", "A[I, J]"]:
        whole = c.unshard(text, held(parse(text), mesh.coord), mesh)
        assert torch.equal(whole, held(parse("A[I, J]"), mesh.coord, parse(text))), text
        assert torch.equal(
            c.shard(text.split(" {")[0], whole, mesh), held(parse(text.split(" {")[0]), mesh.coord, parse(text))
        )


def test_unshard_is_the_whole_array_on_every_rank_and_shard_the_way_back(ranks):
    ranks(run_unshard, MESH)


def run_rooted(mesh, axes, root):
    mine = PARTS[mesh.coord["X"], mesh.coord["Y"]]
    row, canonical = mine[: I // mesh.size(axes)], parse(f"A[] {{U_{axes}}}").unreduced == tuple(axes)
    return {
        # {U_YX} and {U_XY} are one type: a root of these two counts as in {U_XY}
        "broadcast": c.broadcast(f"A[I, J] {{U_{axes}}} -> A[I, J]", mine, mesh, root=root) if canonical else None,
        "reduce": c.reduce(f"A[I, J] {{U_{axes}}} -> A[I, J] {{U_{axes}}}", mine, mesh, root=root)
        if canonical
        else None,
        "scatter": c.scatter(f"A[I, J] {{U_{axes}}} -> A[I_{axes}, J]", mine, mesh, root=root),
        "gather": c.gather(f"A[I_{axes}, J] -> A[I, J] {{U_{axes}}}", row, mesh, root=root),
        "ppermute": c.ppermute(f"A[I_{axes}, J]", row, mesh, axes, [(0, root), (root, 0), (1, 1)][: 2 + (root > 1)]),
    }


@pytest.mark.parametrize(("axes", "root"), [("X", 1), ("XY", 2), ("YX", 1)])
def test_roots_and_permutations_count_blocks_by_the_first_axis_as_the_major_one(ranks, axes, root):
    zeros = torch.zeros(I, J, dtype=PARTS.dtype)
    for r, got in enumerate(ranks(run_rooted, MESH, axes, root)):
        coord = dict(zip("XY", divmod(r, 2), strict=True))
        members = [coord | dict(zip(axes, at, strict=True)) for at in itertools.product((0, 1), repeat=len(axes))]
        parts, index, n = [PARTS[m["X"], m["Y"]] for m in members], members.index(coord), len(members)
        rows = [part[: I // n] for part in parts]
        sent = {0: rows[root], root: rows[0]} | ({1: rows[1]} if root > 1 else {})
        wanted = {
            "broadcast": parts[root],
            "reduce": sum(parts) if index == root else zeros,
            "scatter": parts[root].view(n, I // n, J)[index],
            "gather": torch.cat(rows) if index == root else zeros,
            "ppermute": sent.get(index, zeros[: I // n]),
        }
        for name, y in got.items():
            assert y is None or torch.equal(y, wanted[name]), name


def run_send_and_receive(mesh):
    """Rank 1 along Y sends to rank 0, in every dtype; then both ways at once, all started before any is waited for."""
    y = mesh.coord["Y"]
    for dtype in DTYPES:
        for x in layouts(PARTS[mesh.coord["X"], 1].to(dtype)).values():
            if y == 1:
                assert c.send("A[I, J]", x, mesh, "Y", 0) is not None
            else:
                got = c.recv("A[I, J]", torch.empty_like(x), mesh, "Y", 1)
                assert got.dtype == dtype
                assert torch.equal(got, x)
    mine, theirs = PARTS[mesh.coord["X"], y], PARTS[mesh.coord["X"], 1 - y]
    receiving = c.recv("A[I, J]", mine, mesh, "Y", 1 - y, async_op=True)
    sending = c.send("A[I, J]", mine, mesh, "Y", 1 - y, async_op=True)
    assert torch.equal(receiving.wait(), theirs)
    assert torch.equal(sending.wait(), mine)
    with pytest.raises(ShardingError, match="not differentiable"):
        c.send("A[I]", torch.ones(2, requires_grad=True), mesh, "Y", 1 - y)


def test_send_and_receive(ranks):
    ranks(run_send_and_receive, MESH)


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
