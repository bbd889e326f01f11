"""What is asked of runs afterwards. `compare`: the first step and leaf at which two of them part. The flight record:
what each rank did last, also of one that was killed, and while all stand still."""

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import ONE, TINY, refusal, train, write_text

from scaling import launch
from scaling.collectives import all_gather, all_reduce, wait
from scaling.train import dcp, flight
from scaling.train.loop import run
from scaling.train.settings import Settings


@pytest.mark.slow
def test_where_two_runs_part(capsys):
    def compared(more: str = "") -> tuple[int, list[str]]:
        capsys.readouterr()
        return train(f"compare a b {more}"), capsys.readouterr().out.splitlines()

    a, b = Path("a"), Path("b")
    a.mkdir()
    settings = Settings(TINY, write_text(500), "a", 2, 16, steps=4, save_every=2, norms=True)
    run(ONE, settings)
    (a / "run.toml").write_text('lr = 1\nseq = 16\nprofile = ""\nsave_every = 5\n[mesh]\nX = 2\n')
    shutil.copytree(a, b)
    assert compared() == (0, ["no difference"])
    file = b / "step-000004" / dcp.saved_leaves(b / "step-000004")["params.layers.W_Q"].blocks[0].file
    held = torch.load(file, weights_only=True)
    held[0, 3, 1, 2] += 1
    with file.open("wb") as out:
        torch.save(held, out)
    assert compared() == (1, ["checkpoint of step 4: params.layers.W_Q: 1 of 256 elements differ, by up to 1"])
    shutil.rmtree(b)
    b.mkdir()
    run(ONE, replace(settings, out="b", lr=settings.lr * 2))
    (b / "run.toml").write_text('lr = 2\nseq = 16\nprofile = "p"\n[mesh]\nX = 2\n')
    code, (option, losses, norms, saved) = compared()
    assert (code, option) == (1, "option lr: 1 and 2")
    assert losses.startswith("step 2: loss ")
    assert norms.startswith('step 2: the gradient of params["embed"]: norms')
    assert saved.startswith("checkpoint of step 2: params.embed: ")
    assert compared("--tolerance 10")[0] == 0
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
