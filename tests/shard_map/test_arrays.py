"""The arrays of shard_map: it takes whole ones, so one that is known to be a shard is refused, and so are arrays that
differ by rank; a write in place keeps the written array's type, or is refused."""

import pytest
import torch
from machine import on_ranks
from refused import named

from scaling import collectives as c
from scaling import tree
from scaling.check import judge, judged
from scaling.explicit import array
from scaling.mesh import AbstractMesh, Mesh
from scaling.shard_map import pcast, psum, shard_map
from scaling.shard_map.types import marks
from scaling.spec import ShardingError

W = torch.arange(8.0)
SHARDS = {
    "tree.shard": lambda mesh: tree.shard(W, "w[V_X]", mesh),
    "a view of it": lambda mesh: tree.shard(W, "w[V_X]", mesh).detach().view(2, -1).flatten(),
    "tree.init": lambda mesh: tree.init(tree.Normal(1.0), "w[V_X]", {"V": 8}, mesh),
    "explicit mode": lambda mesh: array(W, "[8_X]", mesh).local,
    "what explicit mode computes": lambda mesh: (array(W, "[8_X]", mesh) * 2).local,
}


def total(mesh, **options):
    return shard_map(lambda w: psum(w.sum(), "X"), mesh, "w[V_X]", "s[]", **options)


@on_ranks({"X": 2}, {"X": 1}, {"X": 1, "Y": 2})
def test_a_shard_is_refused_and_a_whole_array_is_not(mesh):
    f = total(mesh)
    for name, shard in SHARDS.items():
        x = shard(mesh)
        if mesh.sizes["X"] == 1:
            assert f(x) == x.sum(), name
            continue
        for of_shard in (f, torch.func.grad(f)):
            with pytest.raises(ShardingError, match=r"is a shard of .*\n  rule: shard_map takes whole arrays"):
                of_shard(x)
    assert f(W) == f(c.unshard("w[V_X]", tree.shard(W, "w[V_X]", mesh), mesh)) == f(tree.shard(W, "w[V]", mesh)) == 28


def test_shards_in_one_process_and_in_the_judge_are_refused():
    mesh = AbstractMesh({"X": 2})
    with pytest.raises(ShardingError, match="shard_map takes whole arrays"):
        total(mesh, in_process=True)(SHARDS["tree.shard"](mesh))
    assert total(mesh, in_process=True)(W) == 28
    for given, found in {"w[V_X]": 1, "w[V] {U_X}": 1, "w[V]": 0}.items():
        assert len(judge(total(mesh), given, mesh=mesh).findings) == found, given
        x = torch.empty(8, device="meta")
        with judged(mesh, {given: x}) as report:
            total(mesh)(x * 2)
        assert len(report.findings) == found, given


@on_ranks({"X": 2})
def test_ranks_of_a_checked_mesh_compare_the_arrays_at_the_first_call_with_their_shapes(mesh):
    checked = Mesh(mesh.sizes, checked=True)
    for x in (W, W.bfloat16(), torch.ones(8, dtype=torch.bool), W.to(torch.complex64)):
        f = total(checked)
        assert f(x) == f(x) == x.sum()
        if x.dtype == torch.float32:
            for call in (f, total(checked), torch.func.grad(total(checked))):
                with pytest.raises(ShardingError, match=r"rank 1: shard_map with arrays=\['float32\[4\] of checksum"):
                    call(x[:4] + mesh.rank)
            with pytest.raises(ShardingError, match="checksum"):
                total(checked)(x + mesh.rank)


def test_the_judge_is_given_an_abstract_mesh():
    mesh = Mesh({"X": 1})
    with pytest.raises(ShardingError, match=r"judged on Mesh\(X=1\)\n.*\n  rule: .*\n  fix: take AbstractMesh"):
        judged(mesh).__enter__()
    with pytest.raises(ShardingError, match="judge on Mesh"):
        judge(lambda x: x, "w[V]", mesh=mesh)
    with judged() as report:
        c.all_gather("w[V_X] -> w[V]", W, mesh)
    assert "the judge runs a program on an AbstractMesh" in str(report.findings[0])


WHOLE = torch.arange(16.0).view(4, 4)
# into r, reduced, s, partial sums, w, which varies as v does, or i, invariant: what is there afterwards
WRITES = named(
    """
line                                                          what is there afterwards
r.add_(r)                                                     6
r.mul_(2)                                                     6
r.copy_(r * 2)                                                6
torch.add(r, r, out=r)                                        6
i.add_(1)                                                     2
s.add_(s)                                                     2 * WHOLE
s.neg_()                                                      -WHOLE
s.copy_(s + s)                                                2 * WHOLE
s.mul_(r)                                                     3 * WHOLE
s.__iadd__(s)                                                 2 * WHOLE
s.mul_(2)                                                     2 * WHOLE
s.copy_(s / r)                                                WHOLE / 3
s.__setitem__(0, s[0])                                        WHOLE
s.copy_(s @ pcast(torch.eye(4), 'X', to='reduced'))           WHOLE
s.copy_(s.cumsum(1))                                          WHOLE.cumsum(1)
s.copy_(torch.addmm(s, s, pcast(torch.eye(4), 'X', to='reduced')))  2 * WHOLE
s.copy_(s.mean().expand(2, 4))                                WHOLE.view(2, 8).mean(1).repeat_interleave(8).view(4, 4)
torch.add(s, s, out=s)                                        2 * WHOLE
w.add_(v)                                                     2 * WHOLE
w.add_(r)                                                     WHOLE + 3
torch.add(v, v, out=w)                                        2 * WHOLE
torch.add(r, r, out=w)                                        6
""",
    globals(),
)
CHANGES_THE_TYPE = (
    "r.add_(v)", "r.__iadd__(v)", "r[0].add_(v[0])", "r.copy_(v)", "r.lerp_(v, 0.5)", "r.masked_fill_(v > 3, 0.0)",
    "r.clamp_(max=v)", "r.__setitem__(0, v[0])", "r.mul_(v)", "r.sub_(v)", "torch.add(r, v, out=r)", "i.add_(v)",
    "torch.add(v, v, out=i)", "w.copy_(s)", "s.copy_(v)", "s.add_(1)", "s.add_(v)", "s.mul_(s)",
    "s.__setitem__(0, 1.0)", "r.add_(s)", "s.add_(r)",
)  # fmt: skip


def written(line: str) -> torch.Tensor:
    """Return what the array that a line writes to holds afterwards; of partial sums their sum over X."""

    def program(v):
        arrays = {"pcast": pcast, "v": v, "w": v.clone(), "i": torch.ones(2, 4), "torch": torch}
        arrays |= {"r": pcast(torch.full((2, 4), 3.0), "X", to="reduced"), "s": pcast(v, "X", to="unreduced").clone()}
        eval(line, arrays)
        found = arrays[name]
        if marks(found).unreduced:
            return psum(found, "X")
        return pcast(found, "X", to="varying") if marks(found) else found

    name = line.partition("out=")[2][:1] or line[0]
    out = "A[I, J]" if name in "si" else "A[I_X, J]"
    return shard_map(program, {"X": 2}, "A[I_X, J]", out, in_process=True)(WHOLE.clone())


@pytest.mark.parametrize("line", WRITES)
def test_what_is_written_in_place_keeps_its_type(line):
    wanted, found = WRITES[line], written(line)
    if found.shape == (2, 4) and torch.is_tensor(wanted):
        wanted = wanted[:2] + wanted[2:]
    torch.testing.assert_close(found, wanted + torch.zeros_like(found))


@pytest.mark.parametrize("line", CHANGES_THE_TYPE)
def test_a_write_that_would_change_a_type_is_refused(line):
    with pytest.raises(ShardingError, match=r"keeps its type|once for each device|product of sums|may only meet"):
        written(line)
