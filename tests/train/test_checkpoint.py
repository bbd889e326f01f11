"""Checkpoints: bitwise back on the same mesh and on any other; written once, complete or not there."""

import time
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIG, alone, saves, state_of

from scaling import tree
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.strategies.transformer.stages import slots_of
from scaling.train import checkpoint, dcp, durable

MESHES = [{"X": 4}, {"X": 2, "Y": 2}, {"P": 2, "Y": 2}, {"Z": 2, "X": 2}, {"C": 2, "Y": 2}]


class Counted:
    """A block of which every byte that is taken is counted."""

    def __init__(self, block, taken):
        self.block, self.taken = block, taken

    def __getitem__(self, at):
        self.taken.append(self.block[at].nbytes)
        return self.block[at]


def loads(mesh, folder):
    wanted, specs = state_of(mesh)
    taken, real = [], dcp.ShardReader.__call__
    dcp.ShardReader.__call__ = lambda self, *block: Counted(real(self, *block), taken)
    try:
        state, step = checkpoint.load(folder, specs, mesh)
    finally:
        dcp.ShardReader.__call__ = real
    values = state.pop("data")
    same = [torch.equal(a, b) for a, b in zip(tree.leaves(state), tree.leaves(wanted), strict=True)]
    return all(same), sum(taken) == tree.nbytes(wanted), step, values


@pytest.mark.slow
@pytest.mark.parametrize("source", MESHES, ids=str)
def test_from_each_mesh_to_each_other(ranks, tmp_path, source):
    ranks(saves, source, tmp_path)
    for target in [*MESHES, {"X": 1}]:
        for result in ranks(loads, target, tmp_path):
            assert result == (True, True, 5, {"position": 1234, "seed": "s"})


UNEVEN = CONFIG.with_(L=3)  # over two stages: two layers and one, and a place that stays empty


def saves_uneven(mesh, folder):
    params = transformer.shard(model.init(UNEVEN, 3, torch.float64), UNEVEN, mesh)
    places = {"L": slots_of(UNEVEN, mesh, None)}
    checkpoint.save(folder, params, transformer.specs(UNEVEN, mesh), mesh, 1, places=places)


def loads_uneven(mesh, folder):
    places = {"L": slots_of(UNEVEN, mesh, None)}
    params, _ = checkpoint.load(folder, transformer.specs(UNEVEN, mesh), mesh, places=places)
    wanted = transformer.shard(model.init(UNEVEN, 3, torch.float64), UNEVEN, mesh)
    return all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(wanted), strict=True))


def test_layers_of_uneven_stages_are_saved_without_their_padding(ranks, tmp_path):
    for source in ({"Z": 2, "Y": 2}, {"X": 2, "Y": 2}):
        ranks(saves_uneven, source, tmp_path)
        for target in ({"X": 4}, {"Z": 2, "X": 2}, {"X": 1}):
            assert all(ranks(loads_uneven, target, tmp_path))
    with pytest.raises(ValueError, match=r"shape \[3, 16, 2, 8\], but L is 2 here"):
        checkpoint.load(tmp_path, transformer.specs(UNEVEN, Mesh({"X": 1})), Mesh({"X": 1}), places={"L": [0, 1]})


def test_no_block_is_written_twice(ranks, tmp_path):
    ranks(saves, {"P": 2, "X": 2}, tmp_path)
    files = [*(tmp_path / "step-000005").glob("*.distcp")]
    whole = 2 * sum(W.numel() * 8 for W in tree.leaves(model.init(CONFIG, 0, torch.float64))) + 8
    assert sum(torch.load(file, mmap=True).nbytes for file in files) == whole
    assert sum(file.stat().st_size for file in files) < whole + 2000 * len(files)
    assert {file.name[2] for file in files} == {"0", "1"}  # of the second pod: nothing


def test_the_newest_are_kept(tmp_path):
    for step in range(1, 6):
        alone(step, tmp_path, keep=2)
    assert checkpoint.complete(tmp_path) == [4, 5]
    assert (tmp_path / "latest").read_text() == "5"
    state, step = checkpoint.load(tmp_path, {"W": "W[D]"}, Mesh({"X": 1}), step=4)
    assert (state["W"].tolist(), step) == ([4.0] * 3, 4)


def test_the_step_that_is_saved_is_never_cleaned_up(tmp_path):
    for step in (7, 9, 3):  # the last one after going back
        alone(step, tmp_path, keep=2)
    assert (checkpoint.complete(tmp_path), checkpoint.latest(tmp_path)) == ([3, 9], 3)


def test_a_step_saved_again_replaces_the_other_and_what_was_left_lying_is_removed(tmp_path):
    (tmp_path / ".step-000001").mkdir()
    (tmp_path / ".step-000007-old").mkdir()  # half removed
    (tmp_path / ".step-000009").mkdir()  # might be one that is being written
    alone(2, tmp_path)
    checkpoint.save(tmp_path, {"W": torch.zeros(3)}, {"W": "W[D]"}, Mesh({"X": 1}), 2)
    assert checkpoint.load(tmp_path, {"W": "W[D]"}, Mesh({"X": 1}))[0]["W"].tolist() == [0.0] * 3
    assert {path.name for path in tmp_path.iterdir()} == {".step-000009", "step-000002", "latest"}


def test_of_a_view_its_own_elements_are_written(tmp_path):
    flat = torch.arange(1000.0)
    checkpoint.save(tmp_path, {"W": flat[10:20].view(2, 5)}, {"W": "W[D, F]"}, Mesh({"X": 1}), 1)
    assert (tmp_path / "step-000001" / "__0_0_0.distcp").stat().st_size < 2000
    found = checkpoint.load(tmp_path, {"W": "W[D, F]"}, Mesh({"X": 1}))[0]["W"]
    assert torch.equal(found, flat[10:20].view(2, 5))


def test_asynchronous(tmp_path):
    W = torch.ones(1000)
    pending = checkpoint.save(tmp_path, {"W": W}, {"W": "W[D]"}, Mesh({"X": 1}), 1, async_op=True)
    W.zero_()  # what was handed over is what is written
    pending.result()
    assert checkpoint.load(tmp_path, {"W": "W[D]"}, Mesh({"X": 1}))[0]["W"].sum() == 1000


def test_steps_are_completed_in_the_order_in_which_they_were_asked_for(tmp_path):
    large, small = {"W": torch.ones(1 << 20)}, {"W": torch.ones(2)}
    for step, state in enumerate((large, small, small), 1):
        last = checkpoint.save(tmp_path, state, {"W": "W[D]"}, Mesh({"X": 1}), step, async_op=True, keep=1)
    last.result()
    assert checkpoint.complete(tmp_path) == [3]


def writes_late(mesh, folder):
    """The rank that holds a replica alone comes when rank 0 has completed the step."""
    real, wait = checkpoint.write_step, durable.WAIT

    def write(*given):
        time.sleep(0.3 * mesh.rank)
        real(*given)

    checkpoint.write_step, durable.WAIT = write, 5.0
    try:
        checkpoint.save(folder, {"W": torch.ones(2)}, {"W": "W[D]"}, mesh, 1)
    finally:
        checkpoint.write_step, durable.WAIT = real, wait
    return sorted(path.name for path in folder.iterdir())


def test_a_rank_with_nothing_to_write_may_be_late(ranks, tmp_path):
    assert ranks(writes_late, {"P": 2}, tmp_path) == [["latest", "step-000001"]] * 2


def test_a_step_counts_from_the_moment_at_which_it_has_its_name(tmp_path, monkeypatch):
    """Ranks other than 0 go on then, and may die, or be ended, before rank 0 does anything else."""
    for step in (1, 2):
        alone(step, tmp_path)
    real, seen = Path.rename, []

    def rename(self, to):
        seen.append((to.name, checkpoint.latest(tmp_path)))
        real(self, to)
        seen.append((to.name, checkpoint.latest(tmp_path)))

    monkeypatch.setattr(Path, "rename", rename)
    alone(3, tmp_path)
    assert [step for to, step in seen if to != "step-000003"] == [2] * (len(seen) - 2)
    assert seen[-2:] == [("step-000003", 2), ("step-000003", 3)]


def test_a_checksum_is_written_whatever_torch_is_set_to(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        alone(1, tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert checkpoint.load(tmp_path, {"W": "W[D]"}, Mesh({"X": 1}))[1] == 1
