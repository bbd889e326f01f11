"""A run that is killed while it saves, a full disk, a damaged file: the last good checkpoint stays."""

import io
import os
import pickle
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
from checkpoints import alone, saves

from scaling import launch, tree
from scaling.mesh import AbstractMesh, Mesh
from scaling.train import checkpoint, durable, verify


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


@pytest.mark.parametrize("after", [2, 5])
def test_a_run_that_is_killed_leaves_the_last_good_one(tmp_path, after):
    with pytest.raises(launch.RankError):
        launch.run(dies_while_saving, {"X": 2}, tmp_path, after)
    state, step = checkpoint.load(tmp_path, {"W": "W[D]"}, Mesh({"X": 1}))
    assert step == after - 1
    assert state["W"].tolist() == [float(step)] * 2000


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
        (lambda good: saved(torch.ones(2), len(good)), r"does not hold W, float32\[3\]"),
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


def saved(what, length: int) -> bytes:
    """A file as torch writes it, with zip's comment made longer."""
    torch.save(what, out := io.BytesIO())
    data = bytearray(out.getvalue())
    data[-2:] = (length - len(data)).to_bytes(2, "little")
    return bytes(data).ljust(length, b"\0")


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ({"W": "W[D]", "V": "V[D]"}, r"has no V; it has W, "),
        ({}, r"holds W, which"),
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
