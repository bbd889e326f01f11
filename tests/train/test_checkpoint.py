"""Checkpoints: bitwise back on the same mesh and on any other; complete or not there; nothing in them is run."""

import io
import os
import pickle
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from scaling import launch, tree
from scaling.configs import Config
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.strategies.transformer.stages import slots_of
from scaling.train import checkpoint, dcp, durable, verify

CONFIG = Config("c", 2, 16, 24, 4, 2, 8, 32, tied=True)
MESHES = [{"X": 4}, {"X": 2, "Y": 2}, {"P": 2, "Y": 2}, {"Z": 2, "X": 2}, {"C": 2, "Y": 2}]


def state_of(mesh):
    types = transformer.specs(CONFIG, mesh)
    params = transformer.shard(model.init(CONFIG, 3, torch.float64), CONFIG, mesh)
    specs = {"params": types, "m": types, "count": "n[]"}
    return {"params": params, "m": tree.map(lambda W: W * 2, params), "count": torch.tensor(7)}, specs


def saves(mesh, folder):
    state, specs = state_of(mesh)
    checkpoint.save(folder, state | {"data": {"position": 1234, "seed": "s"}}, specs, mesh, 5)


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


def alone(step, folder, keep=None, **options):
    mesh = Mesh({"X": 1})
    return checkpoint.save(
        folder, {"W": torch.full((3,), float(step))}, {"W": "W[D]"}, mesh, step, keep=keep, **options
    )


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


def test_a_program_that_has_ended_does_not_wait_for_files_of_a_rank_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "AT_END", 0.05)
    monkeypatch.setattr(threading, "main_thread", threading.Thread)  # one that does not run
    mesh = AbstractMesh({"X": 2})
    pending = checkpoint.save(tmp_path, {"W": torch.ones(2)}, {"W": "W[D_X]"}, mesh, 1, async_op=True)
    with pytest.raises(TimeoutError, match=r"__1_0_0.distcp: not written within 0.05 s"):
        pending.result(60)
    assert checkpoint.complete(tmp_path) == []


def dies_while_saving(mesh, folder, after):
    for step in range(1, 100):
        if step == after and mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state = {"W": torch.full((1000,), float(step))}
        checkpoint.save(folder, state, {"W": "W[D_X]"}, mesh, step, keep=2)


def leftovers(mesh, folder):
    """A run on this mesh, after one on another mesh that was killed when one rank had written its file."""
    if mesh.rank == 0:
        (folder / ".step-000001").mkdir()
        torch.save(torch.zeros(7), folder / ".step-000001" / "__1_0_0.distcp")
    mesh_sum = tree.unshard({"n": torch.ones(1)}, {"n": "n[D_X]"}, mesh)  # all ranks see the leftovers
    checkpoint.save(folder, {"W": torch.ones(4)}, {"W": "W[D_X]"}, mesh, 1)
    return checkpoint.load(folder, {"W": "W[D]"}, mesh)[0]["W"].sum().item() + len(mesh_sum["n"])


def test_files_of_a_killed_run_are_not_taken_for_this_one_s(ranks, tmp_path):
    assert ranks(leftovers, {"X": 2}, tmp_path) == [10.0, 10.0]


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


@pytest.mark.parametrize("after", [2, 5])
def test_a_run_that_is_killed_leaves_the_last_good_one(tmp_path, after):
    with pytest.raises(launch.RankError):
        launch.run(dies_while_saving, {"X": 2}, tmp_path, after)
    state, step = checkpoint.load(tmp_path, {"W": "W[D]"}, Mesh({"X": 1}))
    assert step == after - 1
    assert state["W"].tolist() == [float(step)] * 2000


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


def test_a_full_disk_leaves_the_last_good_one_and_says_how_much_was_to_be_written(tmp_path):
    alone(1, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            OSError, match=r"__0_0_0.distcp: its 400,000 bytes could not be written(.|\n)*fix: make room"
        ):
            checkpoint.save(tmp_path, {"W": torch.ones(100_000)}, {"W": "W[D]"}, Mesh({"X": 1}), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.load(tmp_path, {"W": "W[D]"}, Mesh({"X": 1}))[1] == 1


class Malicious:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda good: good[:-10], "missing or cut short"),
        (lambda good: pickle.dumps(Malicious()).ljust(len(good), b"\0"), "not a file of tensors alone"),
        (lambda good: saved(Malicious(), len(good)), "not a file of tensors alone"),
        (lambda good: saved(torch.ones(2), len(good)), r"does not hold state\[\"W\"\], float32\[3\]"),
        (lambda good: good.replace(b"\0\0\x80?", b"\0\0\x81?", 1), "its bytes are not those that were written"),
    ],
)
def test_damaged_and_malicious_files_are_refused(tmp_path, content, words):
    alone(1, tmp_path)
    file = tmp_path / "step-000001" / "__0_0_0.distcp"
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(ValueError, match=f"__0_0_0.distcp: {words}"):
        checkpoint.load(tmp_path, {"W": "W[D]"}, Mesh({"X": 1}))
    assert not Path("/tmp/never").exists()


def test_a_bit_that_flipped_in_a_part_is_found_by_verify(ranks, tmp_path, capsys):
    ranks(saves, {"X": 1}, tmp_path)
    file = max((tmp_path / "step-000005").glob("*.distcp"), key=lambda path: path.stat().st_size)
    good = file.read_bytes()
    assert verify.main([str(tmp_path)]) == 0
    file.write_bytes(good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 16]) + good[len(good) // 2 + 1 :])
    assert verify.main([str(tmp_path), "--step", "5"]) == 1
    assert f"{file.name}: its bytes are not those that were written" in capsys.readouterr().out
    (tmp_path / "step-000005" / "index.json").write_text("{}")
    assert [verify.main([str(tmp_path)]), verify.main([str(tmp_path / "no run")])] == [1, 2]


def test_a_checksum_is_written_whatever_torch_is_set_to(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        alone(1, tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert checkpoint.load(tmp_path, {"W": "W[D]"}, Mesh({"X": 1}))[1] == 1


def saved(what, length: int) -> bytes:
    """A file as torch writes it, with zip's comment made longer."""
    torch.save(what, out := io.BytesIO())
    data = bytearray(out.getvalue())
    data[-2:] = (length - len(data)).to_bytes(2, "little")
    return bytes(data).ljust(length, b"\0")


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ({"W": "W[D]", "V": "V[D]"}, r'has no state\["V"\]'),
        ({}, r'holds state\["W"\]'),
        ({"W": "W[D, F]"}, r"was saved with shape \[3\]"),
    ],
)
def test_another_model_is_refused_by_its_leaf(tmp_path, specs, words):
    alone(1, tmp_path)
    with pytest.raises(ValueError, match=words):
        checkpoint.load(tmp_path, specs, Mesh({"X": 1}))


def test_what_cannot_be_saved(tmp_path):
    mesh = AbstractMesh({"X": 2})
    with pytest.raises(ValueError, match="needs a type"):
        checkpoint.save(tmp_path, {"W": torch.ones(2)}, {}, mesh, 1)
    with pytest.raises(ValueError, match="unreduced"):
        checkpoint.save(tmp_path, {"W": torch.ones(2)}, {"W": "W[D] {U_X}"}, mesh, 1)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load(tmp_path, {}, mesh)
