"""The flight record: what each rank did last, also of one that was killed, and while all stand still."""

import os
import signal
import time

import pytest
import torch

from scaling import launch
from scaling.collectives import all_gather, all_reduce, wait
from scaling.mesh import Mesh
from scaling.train import flight
from scaling.train.command import main


def flown(mesh, folder, killed):
    """Three steps of two collectives; before the last, one rank is killed, or comes too late."""
    record = flight.Flight(folder, mesh.rank)
    for number in (1, 2, 3):
        with record.step(number):
            all_reduce("n[] {U_X} -> n[]", torch.ones(()), mesh)
            if number == 3 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL) if killed else time.sleep(30)
            wait(all_gather("W[D_X] -> W[D]", torch.ones(2), mesh, async_op=True))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "late"])
def test_what_ranks_did_last_outlives_them(tmp_path, killed, monkeypatch):
    monkeypatch.setattr("scaling.launch.watch.GRACE", 0.1)
    with pytest.raises(launch.RankError):
        launch.run(flown, {"X": 2}, tmp_path, killed, timeout=0.5)
    first, second = flight.records(tmp_path).values()
    assert [text.split("step ")[1].split()[0] for text in second] == ["1", "1", "2", "2", "3"]
    assert second[-1].endswith(" ms n[] = AllReduce_X(n[] {U_X})")
    assert first[-2].endswith(" ms n[] = AllReduce_X(n[] {U_X})")
    assert first[-1].endswith("step 3 under way W[D] = AllGather_X(W[D_X])")
    assert " under way " not in "".join(first[:-1])


def test_a_ring_of_the_last(tmp_path):
    record, mesh = flight.Flight(tmp_path, 0), Mesh({"X": 1})
    long = "W" * 300
    for number in range(1, 40):
        with record.step(number):
            for name in ("a", "b", long):
                all_reduce(f"{name}[D] {{U_X}} -> {name}[D]", torch.ones(2), mesh)
    (lines,) = flight.records(tmp_path).values()
    assert len(lines) == flight.LAST
    assert [text.split()[2] for text in lines[-4:]] == ["38", "39", "39", "39"]
    assert (tmp_path / "flight-0000.txt").stat().st_size == flight.LAST * flight.WIDTH


def test_the_command(tmp_path, capsys):
    assert main(["flight", str(tmp_path)]) == 1
    assert "no run is here" in capsys.readouterr().err
    (tmp_path / "run.toml").touch()
    assert main(["flight", str(tmp_path)]) == 1
    assert "its ranks have sent nothing" in capsys.readouterr().err
    record = flight.Flight(tmp_path, 3)
    with record.step(7):
        all_reduce("a[D] {U_X} -> a[D]", torch.ones(2), Mesh({"X": 1}))
    assert main(["flight", str(tmp_path), "--last", "1"]) == 0
    assert capsys.readouterr().out.startswith("rank 3: ")
    flight.keep_earlier(tmp_path)
    assert flight.records(tmp_path) == {}
    assert (tmp_path / "flight-0003.before").is_file()
