"""Checkpoints: bitwise back on the same mesh and on any other, beside torch.distributed.checkpoint's own save and load;
written once, complete or not there."""

import os
import time
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from machine import on_ranks
from runs import ONE, SPECS, load, records, save, write_text
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import pad

from scaling import tree
from scaling.configs import Config
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import parse
from scaling.strategies.transformer.api import arranged_layers
from scaling.strategies.transformer.types import padded_sizes, slots_of
from scaling.train import checkpoint, dcp, durable
from scaling.train.blocks import first_replica, own_blocks, writers
from scaling.train.loop import load_or_init, run, state_specs
from scaling.train.record import record_of
from scaling.train.settings import Settings, optimizer_of
from scaling.train.shard_file import ShardReader

MODEL = Config("c", 7, 16, 24, 4, 2, 8, 257, tied=True)  # whose layers and vocabulary do not divide evenly
MOVES = [[{"X": 2, "Y": 2}, {"Z": 2, "X": 2}, {"P": 2, "Y": 2}], [{"Z": 2}, {"X": 2}, {"X": 1}]]  # from the first
ZERO = 1, 2, 3  # of each of three meshes
STEPS = 2


class Counted:
    """A block of which every element that is taken is counted."""

    def __init__(self, block: torch.Tensor, taken: list[int]):
        self.block, self.taken = block, taken

    def __getitem__(self, at):
        found = self.block[at]
        self.taken.append(found.nbytes)
        return found


def resumed(mesh, settings, whole) -> float:
    """The bytes taken of blocks over those held, of a state that is the one saved."""
    taken, real = [], ShardReader.__call__
    specs = state_specs(settings, mesh, optimizer_of(settings))
    with patch.object(ShardReader, "__call__", lambda self, *block: Counted(real(self, *block), taken)):
        state, step, _ = load_or_init(settings, mesh, optimizer_of(settings), specs, record_of(settings))
    slots, V, data = (
        slots_of(MODEL, mesh, settings.pipeline_on(mesh.sizes)),
        padded_sizes(MODEL, mesh)["V"],
        state.pop("data"),
    )
    padded = [
        arranged_layers(W, slots) if "layers" in where else pad(W, (0, 0, 0, V - len(W))) if "embed" in where else W
        for where, W in tree.named_leaves(whole).items()
    ]
    wanted = tree.shard(tree.unflatten(whole, padded), specs, mesh)
    torch.testing.assert_close(state, wanted, rtol=0, atol=0)
    assert (step, data) == (STEPS, {"sequences": STEPS * settings.batch, "begun": 0, "seed": 7})
    return sum(taken) / tree.nbytes(state)


@pytest.mark.parametrize(("source", "targets"), [(first, rest) for first, *rest in MOVES])
def test_a_run_goes_on_from_each_mesh_on_others(ranks, tmp_path, source, targets):
    """Params, moments, loss scale, step, place in the data and seed are those that torch's own reader finds; a rank
    reads what it holds, and no more."""
    given = {"batch": 8, "seq": 32, "steps": STEPS, "seed": 7, "eval_every": 0, "eval_batches": 1, "save_every": 0}
    given |= {"dtype": "fp16", "microbatches": 2, "resume": True, "pipeline": "interleaved:2"}
    settings = Settings(MODEL, write_text(), str(tmp_path), **given)
    ranks(run, source, replace(settings, zero=ZERO[0]))
    dcp_to_torch_save(f"step-{STEPS:06d}", "whole.pt")
    whole = torch.load("whole.pt")
    files = [*Path(f"step-{STEPS:06d}").glob("*.distcp")]
    assert len(files) <= prod(source.values())
    elements = [
        prod(block.shape) * leaf.dtype.itemsize
        for leaf in dcp.saved_leaves(f"step-{STEPS:06d}").values()
        for block in leaf.blocks
    ]
    assert sum(elements) == tree.nbytes(whole)  # no block is there twice
    assert [each["loss_scale"] for each in records(".")] == [whole["optimizer"]["scale"].item()] * STEPS
    for zero, target in zip(ZERO[1:], targets, strict=True):
        assert max(ranks(resumed, target, replace(settings, zero=zero), whole)) == 1  # padding is not read


def test_planning_visits_no_other_rank(monkeypatch):
    """A plan that walks all ranks for each leaf stops a run of 8,192 ranks for seconds."""
    small = AbstractMesh({"P": 2, "X": 3, "Y": 2, "Z": 1})
    for types in (["w[D_X, F_Y]"], ["b[F_Y]", "n[]"], ["w[D_YX, F]", "v[D_P]"], []):
        specs = [parse(text) for text in types]
        held = [any(first_replica(spec, small.coord_of(r), small) for spec in specs) for r in range(small.size())]
        assert writers(specs, small) == [rank for rank, writes in enumerate(held) if writes]
    large, spec = AbstractMesh({"X": 1024, "Y": 8}), parse("W[D_X, F_Y]")
    large.coord  # noqa: B018 (this rank's own may be computed)
    monkeypatch.setattr(AbstractMesh, "coord_of", None)
    assert own_blocks(torch.zeros(8, 16), spec, large, {})[0] == [8192, 128]
    assert len(writers([spec], large)) == 8192


PLACES = {"L": [0, 2, 1]}  # as on interleaved stages: no block of several layers is whole
TYPES = {"params": {"W": "W[L, D_X, F_Y]", "norm": "norm[D]"}, "moments": [{"W": "W[L, D_XY, F]"}], "n": "n[]"}


@pytest.mark.filterwarnings("ignore")  # torch's own deprecations
@on_ranks({"X": 2, "Y": 2})
def test_torch_opens_a_step_and_a_checkpoint_of_torch_is_opened(mesh, tmp_path):
    """Saved here, and loaded by torch's own load, one leaf as a DTensor of another sharding; then saved by torch."""
    W, norm = torch.arange(3 * 8 * 4.0, dtype=torch.float64).view(3, 8, 4), torch.arange(8).bfloat16() / 7
    state = {"params": {"W": W, "norm": norm}, "moments": [{"W": W.float() / 7}], "n": torch.tensor(5)}
    stored = tree.map(lambda W: W[PLACES["L"]] if W.dim() == 3 else W, state)
    checkpoint.save(tmp_path, tree.shard(stored, TYPES, mesh) | {"data": {"seed": 1}}, TYPES, mesh, 1, places=PLACES)
    on_mesh, found = partial(distribute_tensor, device_mesh=mesh.device_mesh), tree.map(torch.zeros_like, state)
    found["params"]["W"] = on_mesh(found["params"]["W"], placements=(Shard(2), Shard(1)))
    torch_dcp.load(found, checkpoint_id=tmp_path / "step-000001")
    found["params"]["W"] = found["params"]["W"].full_tensor()
    torch.testing.assert_close(found, state, rtol=0, atol=0)
    params = {"W": on_mesh(W, placements=(Shard(1), Replicate())), "other": "text"}
    params["norm"] = on_mesh(norm, placements=(Replicate(), Shard(0)))
    torch_dcp.save(state | {"params": params}, checkpoint_id=tmp_path / "theirs")
    for other in (Mesh({"X": 4, "Y": 1}, checked=True, timeout=60), mesh):
        found = dcp.load(tmp_path / "theirs", TYPES, other, places=PLACES)
        torch.testing.assert_close(found, tree.shard(stored, TYPES, other), rtol=0, atol=0)
    for name, words in (("W_in", "W_in; it has moments.0.W, "), ("other", "other")):  # the latter is a pickle
        with pytest.raises(ValueError, match=f"has no params.{words}"):
            dcp.load(tmp_path / "theirs", {"params": {name: "n[]"}}, ONE)


def test_the_newest_are_kept_and_a_latest_of_no_step_is_passed_over():
    """What is saved again replaces the other; what killed runs have left lying is removed."""
    for left in (".step-000001", ".step-000004-old", ".step-000009"):  # one half removed, one perhaps being written
        Path(left).mkdir()
    for step in range(1, 6):
        save(step, keep=2)
    assert load(step=4) == ([4.0] * 3, 4)
    save(5, torch.zeros(3), keep=2)
    assert load() == ([0.0] * 3, 5)
    assert {*os.listdir()} == {".step-000009", "step-000004", "step-000005", "latest"}
    assert Path("latest").read_text() == "5"
    save(3, keep=2)  # after going back: the step that is saved is never cleaned up
    assert (checkpoint.complete_steps(Path()), checkpoint.latest(".")) == ([3, 5], 3)
    for no_step in ("", "-1", "99"):
        Path("latest").write_text(no_step)
        assert load() == ([0.0] * 3, 5)


def test_of_a_view_its_own_elements_are_written_with_a_checksum_whatever_torch_is_set_to():
    """Numbers and strings beside it come back where they stood."""
    flat, data = torch.arange(1000.0), {"position": 3, "seeds": {0: 7, "a.b": "c"}}
    torch.serialization.set_crc32_options(False)
    try:
        checkpoint.save(".", {"W": flat[10:20], "data": data}, SPECS, ONE, 1)
    finally:
        torch.serialization.set_crc32_options(True)
    assert Path("step-000001/__0.distcp").stat().st_size < 2500
    found, _ = checkpoint.load(".", SPECS, ONE)
    assert (found["data"], found["W"].tolist()) == (data, flat[10:20].tolist())


def test_asynchronous():
    """What was handed over is what is written; steps are completed in the order in which they were asked for."""
    large = torch.ones(1 << 20)
    save(1, large, async_op=True, keep=2)
    large.zero_()
    save(2, async_op=True, keep=2).result()
    assert checkpoint.complete_steps(Path()) == [1, 2]
    assert sum(load(step=1)[0]) == 1 << 20


@on_ranks({"X": 2})
def test_a_late_rank_is_waited_for_where_it_has_something_to_write(mesh, tmp_path):
    """Each rank comes the later the greater its number. A run on another mesh has left a file of rank 1; then all that
    rank 1 holds is a replica."""
    real = checkpoint.write_step

    def write(*given):
        time.sleep(0.3 * mesh.rank)
        real(*given)

    if mesh.rank == 0:
        (tmp_path / ".step-000001").mkdir()
        torch.save(torch.zeros(7), tmp_path / ".step-000001" / "__1.distcp")
    tree.unshard({"n": torch.ones(1)}, {"n": "n[D_X]"}, mesh)  # all ranks see the leftovers
    with patch.object(checkpoint, "write_step", write), patch.object(durable, "WAIT", 5.0):
        checkpoint.save(tmp_path, {"W": torch.ones(4)}, {"W": "W[D_X]"}, mesh, 1)
        checkpoint.save(tmp_path, {"W": torch.ones(2)}, SPECS, mesh, 2)
    assert checkpoint.load(tmp_path, SPECS, mesh, 1)[0]["W"].tolist() == [1.0] * 8
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-000001", "step-000002"]


def test_a_step_counts_from_the_moment_at_which_it_has_its_name(monkeypatch):
    """Ranks other than 0 go on then, and may die, or be ended, before rank 0 does anything else."""
    save(1)
    save(2)
    real, seen = Path.rename, []

    def rename(self, to):
        before = checkpoint.latest(".")
        real(self, to)
        seen.append((to.name, before, checkpoint.latest(".")))

    monkeypatch.setattr(Path, "rename", rename)
    save(3)
    assert [step for _, *steps in seen[:-1] for step in steps] == [2] * 2 * (len(seen) - 1)
    assert seen[-1] == ("step-000003", 2, 3)


def test_a_step_gets_its_name_when_its_files_and_their_names_are_on_disk(monkeypatch):
    waiting, fsync, rename = set(), os.fsync, Path.rename

    def on_disk(fd):
        fsync(fd)
        waiting.discard(os.fstat(fd).st_ino)

    def renamed(self, to):
        assert not waiting & {self.stat().st_ino}, f"{self} is not on disk"
        waiting.add(self.parent.stat().st_ino)  # a folder, whose entries change
        return rename(self, to)

    monkeypatch.setattr(os, "fsync", on_disk)
    monkeypatch.setattr(Path, "rename", renamed)
    save(1)
    assert not waiting & {Path("step-000001").stat().st_ino, Path().stat().st_ino}
