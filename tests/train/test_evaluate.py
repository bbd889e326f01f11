"""Perplexity of held-out text: the same on every mesh, whatever is left for the last batch. Sample text: what serving
the whole params would say, from any mesh; metrics for TensorBoard."""

import importlib.util
import sys
import types
from unittest import mock

import numpy
import pytest
import torch
from runs import ONE, TINY, refusal, train, write_text

from scaling import serve
from scaling.configs import get
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.train import evaluate
from scaling.train.batches import Batches
from scaling.train.corpus import Corpus
from scaling.train.settings import Settings


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
    found = [valid(ONE, 11), valid(ONE, 8, 2), *ranks(valid, {"X": 2, "Y": 2}, 4)]  # one batch; of 4, 4 and 3 sequences
    assert found == pytest.approx([wanted] * 6, rel=1e-12)


SAMPLED = get("tiny").with_(L=3, D=32, F=64, H=8, N=4, K=2)
SETTINGS = Settings(SAMPLED, "", "", sample="Once upon ä", seed=3)


def sampled(mesh, settings):
    params = transformer.shard(model.init(settings.model, 5, torch.float64), settings.model, mesh)
    with mock.patch.object(evaluate, "LENGTH", 16):
        return evaluate.continuation(params, settings, mesh)


def test_the_same_text_on_every_mesh_and_cold_what_serving_gives(ranks, monkeypatch):
    assert ranks(sampled, {"Z": 2, "Y": 2}, SETTINGS) == [sampled(ONE, SETTINGS), "", "", ""]
    monkeypatch.setattr(evaluate, "TEMPERATURE", 1e-9)
    prompts, params = [list(SETTINGS.sample.encode())], model.init(SAMPLED, 5, torch.float64)
    wanted = serve.generate(params, prompts, SAMPLED, 16)
    assert sampled(ONE, SETTINGS) == bytes(wanted[0]).decode(errors="replace")


def test_refused_before_the_run():
    with pytest.raises(ValueError, match=r"--sample gathers the whole params .*\n  fix: leave it out"):
        evaluate.check_sample(SETTINGS, 2, 50_000, 1e5)
    evaluate.check_sample(SETTINGS, 1, 50_000, 1e5)  # which has them already
    with pytest.raises(ValueError, match=r"do not lie in 0\.\.99"):
        evaluate.check_sample(Settings(SAMPLED.with_(V=100), "", "", sample="prompt"), 1, 0, 1e9)


@pytest.mark.slow
def test_a_run_shows_and_records_its_sample(monkeypatch, capsys):
    board, find = mock.MagicMock(), importlib.util.find_spec
    monkeypatch.setattr(evaluate, "LENGTH", 4)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=board))
    write_text(300)
    given = "--data text.txt --batch 2 --seq 16 --steps 2 --eval-batches 1 --sample 'a \"😀' --tensorboard board"
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if "tensorboard" in name else find(name))
        assert "fix: pip install 'scaling-book-torch[tensorboard]'" in refusal(capsys, given)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: board if "tensorboard" in name else find(name))
    assert train(given) == 0
    assert '    a "😀' in capsys.readouterr().out
    assert board.call_args.args == ("board",)
    written = {call.args[::2] for call in board.return_value.method_calls if call.args}
    assert written >= {("loss", 1), ("loss", 2), ("sample", 2), ("memory", 1)}
    assert train("--resume --steps 3") == 0  # with the options written back
    assert '    a "😀' in capsys.readouterr().out
