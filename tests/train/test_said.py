"""What is said of runs. Perplexity of held-out text: the same on every mesh, whatever is left for the last batch.
Sample text: what serving the whole params would say, from any mesh; metrics for TensorBoard. `compare`: the first step
and leaf at which two runs part. The flight record: what each rank did last, also of one that was killed."""

import importlib.util
import os
import shutil
import signal
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from machine import on_ranks
from runs import ONE, TINY, refusal, train, write_text

from scaling import launch, serve
from scaling.collectives import all_gather, all_reduce, wait
from scaling.configs import get
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.train import dcp, evaluate, flight
from scaling.train.batches import Batches
from scaling.train.corpus import Corpus
from scaling.train.loop import run
from scaling.train.settings import Settings

SAMPLED = get("tiny").with_(L=3, D=32, F=64, H=8, N=4, K=2)
SETTINGS = Settings(SAMPLED, "", "", sample="Once upon ä", seed=3)


@on_ranks({"X": 2, "Y": 2})
def test_the_mean_of_all_sequences_on_any_mesh(mesh):
    ids = numpy.random.default_rng(0).integers(0, 256, 32 * 11 + 1)
    corpus = Corpus((ids[:200], ids[200:]), numpy.array([0, 100]))
    segments = torch.zeros(11, 32, dtype=torch.int64)
    segments[3, 4:] = 1  # the second document begins at 100
    params, rows = model.init(TINY, 0, torch.float64), torch.from_numpy(ids).unfold(0, 33, 32)
    wanted = model.loss(params, rows, config=TINY, segments=segments).item()
    for on, batch, microbatches in (ONE, 11, 1), (ONE, 8, 2), (mesh, 4, 1):  # one batch; of 4, 4 and 3 sequences
        settings = Settings(TINY, "", "", batch, 32, microbatches=microbatches, eval_batches=0)
        held = [Batches(corpus, batch, 32, 0, 0, len(ids))]
        found = evaluate.evaluate(transformer.shard(params, TINY, on), held, settings, on)
        assert found == pytest.approx(wanted, rel=1e-12)


@on_ranks({"Z": 2, "Y": 2})
def test_the_same_text_on_every_mesh_and_cold_what_serving_gives(mesh):
    params = model.init(SAMPLED, 5, torch.float64)
    with mock.patch.object(evaluate, "LENGTH", 16):
        found = evaluate.continuation(transformer.shard(params, SAMPLED, mesh), SETTINGS, mesh)
        assert found == ("" if mesh.rank else evaluate.continuation(params, SETTINGS, ONE))
        if mesh.rank == 0:
            wanted = serve.generate(params, [list(SETTINGS.sample.encode())], SAMPLED, 16)
            with mock.patch.object(evaluate, "TEMPERATURE", 1e-9):
                assert evaluate.continuation(params, SETTINGS, ONE) == bytes(wanted[0]).decode(errors="replace")


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


@pytest.mark.slow
def test_where_two_runs_part(capsys):
    def compared(more: str = "") -> tuple[int, list[str]]:
        capsys.readouterr()
        return train(f"compare a b {more}"), capsys.readouterr().out.splitlines()

    settings = Settings(TINY, write_text(500), "a", 2, 16, steps=4, save_every=2, norms=True)
    for out, lr, more in ("a", 1, 'profile = ""\nsave_every = 5'), ("b", 2, 'profile = "p"'):
        Path(out).mkdir()
        run(ONE, replace(settings, out=out, lr=lr * 1e-3))
        Path(out, "run.toml").write_text(f"lr = {lr}\nseq = 16\n{more}\n[mesh]\nX = 2\n")
    code, (option, losses, norms, saved) = compared()
    assert (code, option) == (1, "option lr: 1 and 2")
    assert losses.startswith("step 2: loss ")
    assert norms.startswith('step 2: the gradient of params["embed"]: norms')
    assert saved.startswith("checkpoint of step 2: params.embed: ")
    assert compared("--tolerance 10")[0] == 0
    shutil.rmtree("b")
    shutil.copytree("a", "b")
    assert compared() == (0, ["no difference"])
    step = Path("b/step-000004")
    file = step / dcp.saved_leaves(step)["params.layers.W_Q"].blocks[0].file
    held = torch.load(file, weights_only=True)
    held[0, 3, 1, 2] += 1
    with file.open("wb") as out:
        torch.save(held, out)
    assert compared() == (1, ["checkpoint of step 4: params.layers.W_Q: 1 of 256 elements differ, by up to 1"])
    assert train("compare a .") == 2
    assert "is not a run of scaling.train" in capsys.readouterr().err


def flown(mesh, killed):
    """Three steps of two collectives; before the last, one rank is killed, or comes too late."""
    record = flight.Flight(".", mesh.rank)
    for number in (1, 2, 3):
        with record.step(number):
            all_reduce("n[] {U_X} -> n[]", torch.ones(()), mesh)
            if number == 3 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL) if killed else time.sleep(30)
            wait(all_gather("W[D_X] -> W[D]", torch.ones(2), mesh, async_op=True))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "late"])
def test_what_ranks_did_last_outlives_them(killed, monkeypatch):
    monkeypatch.setattr("scaling.launch.watch.GRACE", 0.1)
    with pytest.raises(launch.RankError):
        launch.run(flown, {"X": 2}, killed, timeout=0.5)
    first, second = flight.records(".").values()
    assert [text.split("step ")[1].split()[0] for text in second] == ["1", "1", "2", "2", "3"]
    assert second[-1].endswith(" ms n[] = AllReduce_X(n[] {U_X})")
    assert first[-2].endswith(" ms n[] = AllReduce_X(n[] {U_X})")
    assert first[-1].endswith("step 3 under way W[D] = AllGather_X(W[D_X])")
    assert " under way " not in "".join(first[:-1])


def test_a_ring_of_the_last_and_the_command(capsys):
    for words in ("no run is here", "its ranks have sent nothing"):
        assert words in refusal(capsys, "flight .")
        Path("run.toml").touch()
    record = flight.Flight(".", 3)
    for number in range(1, 40):
        with record.step(number):
            for name in ("a", "b", "W" * 300):
                all_reduce(f"{name}[D] {{U_X}} -> {name}[D]", torch.ones(2), ONE)
    (lines,) = flight.records(".").values()
    assert len(lines) == flight.LAST
    assert [text.split()[2] for text in lines[-4:]] == ["38", "39", "39", "39"]
    assert Path("flight-0003.txt").stat().st_size == flight.LAST * flight.WIDTH
    assert train("flight . --last 1") == 0
    assert capsys.readouterr().out.startswith("rank 3: ")
    flight.keep_earlier(".")
    assert flight.records(".") == {}
    assert Path("flight-0003.before").is_file()
