"""Meshes: coordinates, how groups are made, what cannot be a mesh, and torch's own view of one. The page that ranks
share: who waits for whom in a circle, and that each place is one group's."""

import itertools
import mmap
import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from machine import on_ranks
from refused import evaluated, refused
from torch.distributed.tensor import DTensor, Replicate, Shard

from scaling import collectives as c
from scaling.launch import run
from scaling.mesh import AbstractMesh, Mesh
from scaling.mesh.meeting import Intent, Meeting, meeting, message_in
from scaling.mesh.meshes import LONGER
from scaling.mesh.page import DIGEST, LENGTH, PLACES, ROW, WORD, SharedPage, Wait
from scaling.spec import ShardingError, parse

MESH = {"X": 2, "Y": 2}


def test_an_abstract_mesh_is_only_numbers():
    sizes = {"X": 2, "Y": 3, "Z": 4}
    for rank, at in enumerate(itertools.product(range(2), range(3), range(4))):  # row-major
        assert AbstractMesh(sizes, dict(zip(sizes, at, strict=True))).rank == rank
    mesh = AbstractMesh({"X": 4, "data": 3})
    assert (mesh.size(), mesh.size(("X",)), mesh.size(("data", "X")), mesh.size(())) == (12, 4, 12, 1)
    assert (repr(mesh), mesh.coord) == ("AbstractMesh(X=4, data=3)", {"X": 0, "data": 0})
    assert AbstractMesh({}).size() == 1
    mesh = AbstractMesh({"X": 4, "Y": 2}, {"X": 1, "Y": 1})
    index = {axes: mesh.group(tuple(axes)).index for axes in ("X", "Y", "XY", "YX")}
    assert index == {"X": 1, "Y": 1, "XY": 3, "YX": 5}, "the first axis is the major one"
    assert mesh.group(("X", "Y")).backend == "abstract"
    assert AbstractMesh({"X": 1}).group(("X",)).backend == "single"


def test_one_device_needs_no_process_group():
    mesh = Mesh({"X": 1, "Y": 1})
    assert (mesh.rank, mesh.coord, mesh.device.type) == (0, {"X": 0, "Y": 0}, "cpu")
    group = mesh.group(("X", "Y"))
    assert (group.size, group.index, group.backend, group.pg) == (1, 0, "single", None)
    assert not dist.is_initialized()


NO_MESH = {  # sizes: words of the error
    "{'X': 0}": "axis X has size 0\n  fix: give an int of at least 1", "{'d_x': 2}": "'d_x' cannot name a mesh axis",
    "{'X': 2.0}": "axis X has size 2.0\n  fix: give an int", "{'': 2}": "'' cannot name a mesh axis",
    "{'XY': 2}": "'XY' cannot name a mesh axis\n  fix: use one capital letter, or a word",
    "{'X,Y': 2}": "'X,Y' cannot name a mesh axis", "{3: 2}": "3 cannot name a mesh axis",
}  # fmt: skip
FOUR = {"X": 4, "Y": 2}
REFUSED = {f"{kind}({sizes})": words for sizes, words in NO_MESH.items() for kind in ("AbstractMesh", "Mesh")}
REFUSED |= {f"AbstractMesh(FOUR, {at})": "is not on the mesh X=4, Y=2" for at in ({"X": 4}, {"X": -1}, {"Z": 0})}
REFUSED |= {
    "AbstractMesh({'X': 4}).group(('Z',))": "unknown mesh axis Z: the mesh has X=4",
    "Mesh(FOUR)": "the mesh X=4, Y=2 has 8 devices, but 1 rank is running\n  fix: start 8 ranks",
}
test_what_makes_no_mesh = refused(evaluated(REFUSED, globals()), ShardingError)


@on_ranks(MESH)
def test_a_line_that_sends_nothing_needs_no_other_rank(mesh):
    """Also when it is the first use of its axes; nor does a mesh of one rank, or one that nobody can make."""
    for checked in (False, True):
        fresh = Mesh(mesh.sizes, checked=checked, timeout=60)
        if mesh.rank == 1:
            assert fresh.group(("Y", "X")).index == 2
            assert c.shard("A[I] -> A[I_X]", torch.arange(4.0), fresh).tolist() == [0.0, 1.0]
    if mesh.rank:
        assert Mesh({"X": 1}, ranks=[mesh.rank]).group(("X",)).backend == "single"
    with pytest.raises(ShardingError, match="the mesh X=5 has 5 devices, but 4 ranks are running"):
        Mesh({"X": 5})


@on_ranks(MESH)
def test_groups_made_in_another_order(mesh):
    """Rank 0 uses X first, 1 uses Y first, and so on: a circle of ranks that would wait for each other."""
    fresh, one = Mesh(mesh.sizes, timeout=60), torch.ones(())
    order = "XY" if mesh.rank in (0, 3) else "YX"
    pending = [c.all_reduce(f"A[] {{U_{axis}}} -> A[]", one, fresh, async_op=True) for axis in order]
    assert [each.wait().item() for each in pending] == [2.0, 2.0]


@on_ranks(MESH)
def test_axes_of_size_one_make_no_other_group(mesh):
    fresh = Mesh({"X": 2, "Y": 2, "Z": 1})
    assert len({fresh.group(axes).name for axes in (("X",), ("X", "Z"), ("Z", "X"))}) == 1
    assert fresh.group(("X", "Y", "Z")).name == dist.group.WORLD.group_name


@on_ranks(MESH)
def test_every_group_has_its_mesh_s_timeout_and_a_longer_one_where_ranks_wait_before_a_call(mesh):
    groups = [each.group(axes).pg for each in (mesh, Mesh(mesh.sizes, timeout=7)) for axes in (("X",), ("Y",))]
    seconds = [pg._get_backend(torch.device("cpu")).options._timeout.total_seconds() for pg in groups]
    assert seconds == [LONGER * 60.0, LONGER * 60.0, 7.0, 7.0]


@on_ranks({"X": 2})
def test_shared_memory_leaves_no_file(mesh):
    if sys.platform != "linux":  # elsewhere the file has a name while the mesh is made
        return
    for _ in range(5):
        held = Mesh(mesh.sizes, checked=True)
        dist.barrier()
        for folder in (tempfile.gettempdir(), "/dev/shm"):
            assert [*Path(folder).glob(f"ranks-{os.getpid()}-*")] == []
        assert isinstance(meeting(held.group(("X",)).pg), Meeting)  # not by messages
        dist.barrier()


@on_ranks({"X": 2}, MESH, {"X": 2, "Y": 1})
def test_torch_s_own_strategies_have_the_same_mesh(mesh):
    other, whole = mesh.device_mesh, torch.arange(16.0).view(4, 4)
    assert other.mesh_dim_names == tuple(mesh.sizes)
    assert [*other.get_coordinate()] == [*mesh.coord.values()]
    rows = whole[parse("A[I_X, J]").slices((4, 4), mesh, mesh.coord)]
    placements = [Shard(0) if axis == "X" else Replicate() for axis in mesh.sizes]
    assert torch.equal(DTensor.from_local(rows, other, placements).full_tensor(), whole)


@pytest.mark.slow
@pytest.mark.parametrize("checked", [True, False])  # of the mesh that the ranks have already
def test_ranks_that_make_different_meshes_are_told_at_once_and_the_group_can_still_be_used(checked):
    over, two = (", over the ranks [0, 1, 2, 3]", "ranks [0, 2]") if checked else ("", "rank 0")

    def on_rank(mesh):
        x = torch.ones(4)
        with pytest.raises(ShardingError) as error:
            Mesh({"X": 4} if mesh.rank == 3 else MESH, checked=mesh.rank != 1)
        assert f"  {two}: Mesh(X=2, Y=2), checked, on cpu{over}\n" in str(error.value)
        assert f"  rank 1: Mesh(X=2, Y=2), unchecked, on cpu{over}\n" in str(error.value)
        assert f"  rank 3: Mesh(X=4), checked, on cpu{over}\n" in str(error.value)
        if checked:  # one rank alone makes another mesh
            with pytest.raises(ShardingError) as error:
                Mesh({"X": 4}) if mesh.rank == 0 else c.all_gather("A[I_XY] -> A[I]", x, mesh)
            assert "rank 0: Mesh(X=4), unchecked, on cpu, over the ranks [0, 1, 2, 3]\n" in str(error.value)
            assert "ranks [1, 2, 3]: AllGather A[I_XY] -> A[I] of (4,) float32\n" in str(error.value)
        assert c.all_gather("A[I_XY] -> A[I]", x, mesh).tolist() == [1.0] * 16

    run(on_rank, MESH, checked=checked)


def test_a_long_call_is_shown_by_its_beginning():
    for length in (0, LENGTH - 4, LENGTH - 3, LENGTH - 2, 2 * LENGTH):
        call = Intent.of("x" * length)
        assert message_in(call.text) == "\n" + "x" * min(length, LENGTH - 3)
        assert len(call.text) <= LENGTH  # its place on the page


SIZE = 4
SETS = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1, 2, 3)]]


def pages(sets) -> list[SharedPage]:
    memory = mmap.mmap(-1, SharedPage.nbytes(SIZE, len(sets)))
    return [SharedPage(memory, SIZE, rank, sets) for rank in range(SIZE)]


def test_rows_words_and_texts_do_not_overlap_on_the_page():
    page = pages(SETS)[0]
    taken = [range(rank * ROW, (rank + 1) * ROW) for rank in range(SIZE)]
    for of_set, groups in enumerate(SETS):
        for group, ranks in enumerate(groups):
            places = page.places(of_set, group)
            assert len(places) == PLACES
            for words, texts in places:
                assert page.meetings[words] == (ranks, texts)
                taken += [range(words, words + len(ranks) * WORD), range(texts, texts + len(ranks) * LENGTH)]
    assert sorted(itertools.chain(*taken)) == [*range(len(page.memory))]


@pytest.mark.parametrize("seed", range(40))
def test_a_circle_of_waiting_ranks_is_found(seed):
    """Against walks along who waits for whom: those of which there is one as long as there are ranks never end."""
    each, dice, number = pages([[(0, 1, 2, 3)]] * SIZE), random.Random(seed), b"\x07\x01"
    for_whom = {rank: dice.sample(range(SIZE), dice.randint(0, 2)) for rank in range(SIZE) if dice.random() < 0.8}
    waits = {}
    for rank, missing in for_whom.items():
        (first, _), *_ = each[0].places(rank, 0)
        for other in {*range(SIZE)} - {*missing}:
            at = first + other * WORD
            each[rank].memory[at : at + WORD] = bytes(DIGEST) + number
        waits[rank] = Wait(first, number)
        assert each[0].missing(waits[rank]) == sorted(missing)
        each[rank].set_wait(waits[rank])
    edges = np.array([[other in for_whom.get(rank, ()) for other in range(SIZE)] for rank in range(SIZE)], int)
    endless = [rank for rank in range(SIZE) if np.linalg.matrix_power(edges, SIZE)[rank].any()]
    assert each[1].stuck() == {rank: waits[rank] for rank in endless}
    for rank, wait in waits.items():
        each[rank].set_wait(wait, found=rank in endless)
    assert [rank for rank in range(SIZE) if each[0].has_found(rank)] == endless
    assert each[0].waits() == waits
