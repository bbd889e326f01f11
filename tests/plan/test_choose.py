"""The mesh for a run: every mesh is tried, the fastest that fits is taken, and the command runs on it."""

from dataclasses import replace

import pytest

from scaling.configs import get
from scaling.hardware import Chip, Measured, chip
from scaling.measure import rates
from scaling.plan import choose
from scaling.plan.transformer_step import predict_transformer
from scaling.train import command as train
from scaling.train import dry
from scaling.train.settings import Settings

SOME = Settings(get("tiny").with_(L=1, D=32, F=64, H=8, N=4, K=2), "", "", 4, 16)
OPS = ("AllGather", "ReduceScatter", "AllReduce", "AllToAll", "CollectivePermute")


def machine(latency=1e-4, bandwidth=1e9, memory=8e9):
    rows = tuple(Measured(op, 2, latency, bandwidth) for op in OPS)
    return Chip("ours", "cpu", "", (("fp32", 1e10),), hbm_bytes=memory, hbm_bw=1e10, measured=rows)


def test_every_mesh_is_tried():
    meshes = [*choose.meshes(SOME, 4)]
    assert len(meshes) == 5 + 10  # one axis of 4, or two of 2
    assert {"P": 2, "Y": 2} in meshes
    assert [*choose.meshes(SOME, 1)] == [{"X": 1}]
    assert len([*choose.meshes(replace(SOME, model=SOME.model.with_(E=4, k=2)), 4)]) == 6 + 15


@pytest.mark.slow
def test_the_fastest_is_taken_of_all_that_suit():
    found, refused = choose.choices(SOME, 2, machine())
    assert [c.seconds for c in found] == sorted(c.seconds for c in found)
    assert {c.name for c in found} == {"P=2", "X=2", "C=2", "Y=2"}
    assert refused == ["Z=2: tiny: L=1 layers cannot fill 2 stages"]
    for one in found:
        assert one.seconds == predict_transformer(SOME, one.sizes, machine()).seconds
        assert one.memory == dry.fullest(SOME, one.sizes).memory


@pytest.mark.slow
def test_what_is_sent_decides():
    """Where a call is dear the mesh has few collectives."""
    few, refused = choose.choices(SOME, 2, machine(latency=1.0))
    calls = {c.name: dry.count(SOME, c.sizes).collectives for c in few}
    assert calls[few[0].name] == min(calls.values()) < calls["Y=2"]
    text = choose.table(few, refused)
    assert text.splitlines()[2].startswith(few[0].name)
    assert "it saves most in collectives" in text
    assert "4 meshes were compared, 1 do not suit, such as\n  Z=2: " in text


@pytest.mark.slow
def test_what_does_not_fit_is_not_taken():
    held = sorted(dry.fullest(SOME, {axis: 2}).memory for axis in "PXCY")
    left, refused = choose.choices(SOME, 2, machine(memory=held[1] / dry.ROOM))
    assert sorted(c.memory for c in left) == held[:2]
    assert sum("a rank needs" in why for why in refused) == 2


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_stages_that_fit_are_not_refused_by_formula(tied):
    """Layers that stages share unevenly, and ends that are stored over all stages and gathered at their own."""
    job = Settings(
        get("llama3-8b").with_(L=6, tied=tied), "", "", 16, 2048, microbatches=8, dtype="bf16", remat="block"
    )
    stages = [one for one in choose.evaluated(job, chip("h100"), 4) if one.layout.sizes["pipe"] > 1]
    assert {one.layout.sizes["pipe"] for one in stages} == {2, 4}
    for one in stages:
        memory = dry.fullest(job, choose.mesh_of(one.layout), "abstract").memory
        assert 0.75 < float(one.held.total) / memory < 1.05


@pytest.mark.slow
def test_a_chip_of_the_catalogue_is_planned_by_formula():
    job = Settings(get("llama3-8b").with_(V=32768), "", "", batch=64, seq=4096, dtype="bf16", remat="block")
    found, refused = choose.choices(job, 8, chip("h100"))
    assert found[0].sizes == {"X": 8}
    assert len(found) == choose.OFFERED
    assert all(c.memory < dry.ROOM * 80e9 for c in found)
    assert refused == []  # what comes first by formula fits by count
    found, refused = choose.choices(replace(job, batch=63), 7, chip("h100"))
    assert {tuple(c.sizes) for c in found} == {("P",)} or not found  # 7 divides no dim
    assert any(why.startswith("X=7: ") for why in refused)


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    file = tmp_path / "machine.toml"
    file.write_text(rates.toml(machine()))
    given = ["--model", "tiny", "--batch", "4", "--seq", "16", "--dry-run", "--chip", str(file)]
    assert train.main([*given, "--plan", "2"]) == 0
    out = capsys.readouterr().out
    assert "meshes were compared" in out
    assert "of 2 ranks of" in out
    assert train.main([*given, "--mesh", "X=5", "--plan"]) == 1
    assert "no mesh suits\n  " in capsys.readouterr().err
    assert train.main(["--model", "tiny", "--dry-run", "--plan", "2"]) == 1
    assert "scaling.measure --ranks 2 --out machine.toml" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "batch", "remat", "memory", "least"),
    [pytest.param(32, 64, "none", 20e9, 0, marks=pytest.mark.sweep), (16, 32, "block", 10e9, 2)],
)
def test_no_mesh_is_offered_on_which_the_run_does_not_fit(ranks, batch, remat, memory, least):
    """By the count of the run's own step, all layers of it; at `least` so many fit by formula alone."""
    settings = Settings(get("llama3-8b").with_(L=8), "", "", batch, 4096, dtype="bf16", microbatches=2, remat=remat)
    small = replace(chip("h100"), hbm_bytes=memory)
    found, refused = choose.choices(settings, ranks, small)
    assert 0 < len(found) <= choose.OFFERED
    assert sum("a rank needs" in why for why in refused) >= least
    for one in found:
        counted = dry.count(settings, one.sizes).memory
        assert one.memory >= counted * 0.98  # that of the fullest rank
        assert counted <= dry.ROOM * small.need("hbm_bytes")
