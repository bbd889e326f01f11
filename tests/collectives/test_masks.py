"""`masked`: rows looked up in a table that is split, against one device; masks that overlap are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vjp

from scaling import tree
from scaling.collectives import all_reduce, masked
from scaling.mesh import Mesh
from scaling.spec import ShardingError
from scaling.strategies import axes

V, D = 8, 3
TABLE = torch.arange(V * D, dtype=torch.float64).view(V, D).sin()
IDS = torch.tensor([[0, 7, 3], [5, 3, 9]])  # 9 is in no part
WHOLE = torch.where((IDS < V)[..., None], TABLE[IDS.clamp(max=V - 1)], 0)


def lookup(table, ids, mesh, call=masked):
    local = ids - mesh.coord["X"] * len(table)
    here = (local >= 0) & (local < len(table))
    return call("x[B, T, D] {U_X}", F.embedding(torch.where(here, local, 0), table), here, mesh)


def of_rank(mesh):
    table = tree.shard(TABLE, "E[V_X, D]", mesh)
    x = lookup(table, IDS, mesh)
    whole = all_reduce("x[B, T, D] {U_X} -> x[B, T, D]", x, mesh)
    given = vjp(lambda t: lookup(t, IDS, mesh), table)[1](WHOLE.cos())[0]  # of a partial sum it is replicated
    refused = []
    for mask in (torch.ones(2, 3, dtype=torch.bool), IDS > 4):
        try:
            masked("x[B, T, D] {U_X}", x, mask, mesh)
        except ShardingError as error:
            refused.append(str(error))
    alone = masked("x[B] {U_X}", torch.full((2,), torch.nan), torch.full((2,), mesh.rank == 1), mesh)
    return whole, given, refused, alone


def test_rows_of_a_split_table(ranks):
    wanted = grad(lambda t: (torch.where((IDS < V)[..., None], t[IDS.clamp(max=V - 1)], 0) * WHOLE.cos()).sum())(TABLE)
    found = ranks(of_rank, {"X": 4})
    for rank, (whole, given, refused, alone) in enumerate(found):
        assert torch.equal(whole, WHOLE)
        assert torch.equal(given, wanted[2 * rank : 2 * rank + 2])
        assert len(refused) == 2
        assert "6 of 6 elements are held by several devices along X" in refused[0]
        assert "3 of 6 elements" in refused[1]
        assert bool(alone.isnan().all()) is (rank == 1)
    assert sum(float(x[3].nan_to_num(9).sum()) for x in found) == 18


def along_one(mesh):
    """The mask of a device is no other's, if it is alone along the axis: whatever masks lie beside it."""
    return masked("x[B] {U_X}", torch.ones(2), torch.ones(2, dtype=torch.bool), mesh).tolist()


def test_masks_along_an_axis_of_one_device(ranks):
    assert ranks(along_one, {"X": 1, "Y": 2}) == [[1.0, 1.0]] * 2


def test_on_a_mesh_without_the_axis_the_mask_alone_is_left():
    mesh = Mesh({"Y": 1})
    here = IDS < V
    x = axes.masked("x[B, T, D] {U_X}", F.embedding(IDS.clamp(max=V - 1), TABLE), here, mesh)
    assert torch.equal(x, WHOLE)


def test_of_several_layers_at_once():
    mesh = Mesh({"X": 1})
    x, mask = torch.ones(5, 2, 3), torch.tensor([[True, False]] * 5)
    wanted = torch.where(mask[..., None], x, 0)
    assert torch.equal(masked("x[B, 3] {U_X}", x, mask, mesh.stacked("L")), wanted)
    for line, stacked in (("x[B, 3] {U_X}", mesh), ("x[B, 2] {U_X}", mesh.stacked("L"))):
        with pytest.raises(ShardingError, match="fix:"):
            masked(line, x, mask, stacked)
