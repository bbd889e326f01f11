"""Sample text: what serving the whole params would say, from any mesh; metrics for TensorBoard."""

import importlib.util
import sys
import types

import pytest
import torch

from scaling import serve
from scaling.configs import get
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.train import sample
from scaling.train.command import main
from scaling.train.settings import Settings

TINY = get("tiny").with_(L=3, D=32, F=64, H=8, N=4, K=2)
SETTINGS = Settings(TINY, "", "", sample="Once upon ä", seed=3)


def sampled(mesh, settings):
    whole = model.init(settings.model, 5, torch.float64)
    return sample.continuation(transformer.shard(whole, settings.model, mesh), settings, mesh)


@pytest.mark.parametrize("sizes", [{"Z": 2, "X": 2}, {"P": 2, "Y": 2}], ids=str)
def test_the_same_text_on_every_mesh(ranks, sizes):
    text, *others = ranks(sampled, sizes, SETTINGS)
    assert text == sampled(Mesh({"X": 1}), SETTINGS)
    assert others == ["", "", ""]


def test_cold_it_is_what_serving_gives(monkeypatch):
    monkeypatch.setattr(sample, "TEMPERATURE", 1e-9)
    wanted = serve.generate(model.init(TINY, 5, torch.float64), [list(SETTINGS.sample.encode())], TINY, sample.LENGTH)
    assert sampled(Mesh({"X": 1}), SETTINGS) == bytes(wanted[0]).decode(errors="replace")


def test_refused_before_the_run():
    with pytest.raises(ValueError, match=r"--sample gathers the whole params .*\n  fix: leave it out"):
        sample.check_sample(SETTINGS, 2, 50_000, 1e5)
    sample.check_sample(SETTINGS, 1, 50_000, 1e5)  # which has them already
    with pytest.raises(ValueError, match=r"do not lie in 0\.\.99"):
        sample.check_sample(Settings(TINY.with_(V=100), "", "", sample="prompt"), 1, 0, 1e9)


@pytest.mark.slow
def test_a_run_shows_and_records_its_sample(tmp_path, monkeypatch, capsys):
    said = []

    class SummaryWriter:
        def __init__(self, folder):
            said.append(folder)

        def add_scalar(self, *given):
            said.append(given)

        add_text = add_scalar

        def flush(self):
            pass

    stub = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: stub if "tensorboard" in name else find(name))
    (tmp_path / "a.txt").write_text("some text to learn from " * 200)
    given = ["--data", str(tmp_path / "a.txt"), "--out", str(tmp_path / "run"), "--batch", "2", "--seq", "16"]
    given += ["--steps", "2", "--eval-every", "2", "--eval-batches", "1", "--sample", 'a "😀']
    assert main([*given, "--tensorboard", "board"]) == 0
    assert '    a "😀' in capsys.readouterr().out
    assert said[0] == "board"
    assert {(name, step) for name, _, step in said[1:]} >= {("loss", 1), ("loss", 2), ("sample", 2), ("memory", 1)}
    assert main(["--out", str(tmp_path / "run"), "--resume", "--steps", "3"]) == 0  # with the options written back
    assert '    a "😀' in capsys.readouterr().out


def test_without_tensorboard(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("scaling.train.progress.importlib.util.find_spec", lambda name: None)
    (tmp_path / "x").write_text("x")
    given = ["--data", str(tmp_path / "x"), "--out", str(tmp_path / "run")]
    assert main([*given, "--tensorboard", "board"]) == 1
    assert "fix: pip install 'scaling-book-torch[tensorboard]'" in capsys.readouterr().err
