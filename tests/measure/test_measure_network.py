"""Bus bandwidth by axis, collective and size; ranks that are slow on their own are named."""

import pytest

from scaling.measure import network
from scaling.measure.command import main


def test_what_a_rank_must_send():
    assert network.bytes_on_wire("AllGather", 800, 4) == 600
    assert network.bytes_on_wire("AllReduce", 800, 4) == 1200
    assert network.bytes_on_wire("AllToAll", 800, 4) == 150


def test_slow_ranks_are_named():
    assert network.slow([4e9, 1e9, 4e9], "disk") == ["rank 1: disk 1.00 GB/s, the median is 4.00"]
    assert network.slow([4e9, 3e9], "disk") == []


def test_each_axis_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(network, "SIZES", (4096,))
    assert main(["network", "--mesh", "X=2,Y=1", "--repeats", "1", "--link", "10", "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["axis", "collective", "V", "bytes", "us", "bus", "GB/s", "of", "the", "link"]
    assert [line.split()[:3] for line in lines[2:6]] == [["X", op, "4,096"] for op in network.LINES]
    assert list(tmp_path.iterdir()) == []
    assert main(["network", "--mesh", "X=1"]) == 1
    assert "has no network" in capsys.readouterr().err


def test_what_cannot_be_measured(capsys):
    assert main(["network", "--repeats", "1", "--mesh", "X=x"]) == 1
    assert "Error" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["network", "--repeats", "1", "--folder", "/nowhere/at/all"])
