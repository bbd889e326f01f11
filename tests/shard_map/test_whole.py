"""shard_map takes whole arrays: one that is known to be a shard is refused, and so are arrays that differ by rank."""

import pytest
import torch
from machine import on_ranks

from scaling import collectives as c
from scaling import tree
from scaling.check import judge, judged
from scaling.explicit import array
from scaling.mesh import AbstractMesh, Mesh
from scaling.shard_map import psum, shard_map
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
