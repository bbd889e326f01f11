"""Perplexity of held-out text: the same on every mesh, whatever is left for the last batch. Sample text: what serving
the whole params would say, from any mesh; metrics for TensorBoard."""

import importlib.util
import sys
import types

import numpy
import pytest
import torch

from scaling import serve
from scaling.configs import get
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.train import evaluate
from scaling.train.batches import Batches
from scaling.train.command import main
from scaling.train.corpus import Corpus
from scaling.train.settings import Settings

TINY = get("tiny").with_(L=1, D=16, F=32, H=8, N=2, K=2)


def corpus():
    ids = numpy.random.default_rng(0).integers(0, 256, 32 * 11 + 1)
    return Corpus((ids[:200], ids[200:]), numpy.array([0, 100]))


def valid(mesh, batch, microbatches=1):
    params = transformer.shard(model.init(TINY, 0, torch.float64), TINY, mesh)
    settings = Settings(TINY, "", "", batch, 32, microbatches=microbatches, eval_batches=0)
    return evaluate.evaluate(params, [Batches(corpus(), batch, 32, 0, 0, len(corpus()))], settings, mesh)


def test_the_mean_of_all_sequences_on_any_mesh(ranks):
    ids = torch.from_numpy(numpy.concatenate(corpus().parts))
    rows = torch.stack([ids[i * 32 : i * 32 + 33] for i in range(11)])
    segments = torch.zeros(11, 32, dtype=torch.int64)
    segments[3, 4:] = 1  # the second document begins at 100
    wanted = model.loss(model.init(TINY, 0, torch.float64), rows, config=TINY, segments=segments).item()
    assert valid(Mesh({"X": 1}), 11) == pytest.approx(wanted, rel=1e-12)
    assert valid(Mesh({"X": 1}), 8, 2) == pytest.approx(wanted, rel=1e-12)  # 4, 4 and 3 sequences
    for mesh in ({"X": 4}, {"Z": 1, "X": 2, "Y": 2}):
        assert ranks(valid, mesh, 4) == pytest.approx([wanted] * 4, rel=1e-12)


SAMPLED = get("tiny").with_(L=3, D=32, F=64, H=8, N=4, K=2)
SETTINGS = Settings(SAMPLED, "", "", sample="Once upon ä", seed=3)


def sampled(mesh, settings):
    whole = model.init(settings.model, 5, torch.float64)
    return evaluate.continuation(transformer.shard(whole, settings.model, mesh), settings, mesh)


@pytest.mark.parametrize("sizes", [{"Z": 2, "X": 2}, {"P": 2, "Y": 2}], ids=str)
def test_the_same_text_on_every_mesh(ranks, sizes):
    text, *others = ranks(sampled, sizes, SETTINGS)
    assert text == sampled(Mesh({"X": 1}), SETTINGS)
    assert others == ["", "", ""]


def test_cold_it_is_what_serving_gives(monkeypatch):
    monkeypatch.setattr(evaluate, "TEMPERATURE", 1e-9)
    wanted = serve.generate(
        model.init(SAMPLED, 5, torch.float64), [list(SETTINGS.sample.encode())], SAMPLED, evaluate.LENGTH
    )
    assert sampled(Mesh({"X": 1}), SETTINGS) == bytes(wanted[0]).decode(errors="replace")


def test_refused_before_the_run():
    with pytest.raises(ValueError, match=r"--sample gathers the whole params .*\n  fix: leave it out"):
        evaluate.check_sample(SETTINGS, 2, 50_000, 1e5)
    evaluate.check_sample(SETTINGS, 1, 50_000, 1e5)  # which has them already
    with pytest.raises(ValueError, match=r"do not lie in 0\.\.99"):
        evaluate.check_sample(Settings(SAMPLED.with_(V=100), "", "", sample="prompt"), 1, 0, 1e9)


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
