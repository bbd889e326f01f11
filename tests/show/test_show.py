"""Pictures of shardings against Spec.slices, the command line, and files."""

import itertools

import pytest
import torch

from scaling.show import NINE, blocks, draw, main, save
from scaling.spec import ShardingError, parse

MESH = {"X": 2, "Y": 2}


@pytest.mark.parametrize("text", [*NINE, "A[I_YX, J]", "A[I_X, J_YZ]", "A[I_Z, J, K_YX]"])
def test_every_device_stands_where_its_slice_is(text):
    spec, mesh = parse(text), {"X": 2, "Y": 3, "Z": 2}
    held = blocks(spec, mesh)
    shape = [12] * len(spec.dims)
    local = spec.local_shape(shape, mesh)
    coords = [dict(zip(mesh, at, strict=True)) for at in itertools.product(*(range(n) for n in mesh.values()))]
    for device, coord in enumerate(coords):
        block = tuple(s.start // n for s, n in zip(spec.slices(shape, mesh, coord), local, strict=True))
        assert [device] in held[block]
    assert sum(len(groups) for groups in held.values()) == 12


def test_partial_sums_and_replicas():
    assert blocks("A[I] {U_X}", MESH) == {(0,): [[0, 2], [1, 3]]}
    assert blocks("A[I_X] {U_Y}", MESH) == {(0,): [[0, 1]], (1,): [[2, 3]]}
    text = draw("A[I_X, J] {U_Y}", {"X": 2, "Y": 2, "Z": 1})
    assert "0+1" in text
    assert "partial sums over Y" in text


def test_the_grid():
    assert draw("A[I_X, J_Y]", MESH, sizes={"I": 4, "J": 8}).splitlines() == [
        "A[I_X, J_Y]",
        "  mesh X=2, Y=2",
        "   J   0:4   4:8",
        "     ┌─────┬─────┐",
        " 0:2 │  0  │  1  │",
        "     ├─────┼─────┤",
        " 2:4 │  2  │  3  │",
        "     └─────┴─────┘",
    ]


def test_a_real_array_gives_its_sizes():
    text = draw("A[I_X, J]", MESH, shard=torch.zeros(3, 5))
    assert "0:3" in text
    assert "3:6" in text
    assert "0:5" in text
    with pytest.raises(ShardingError, match="not 2 dims"):
        draw("A[I_X, J]", MESH, shard=torch.zeros(3))


def test_three_dims_are_a_grid_for_each_block_of_the_first():
    text = draw("A[B_X, I, J_Y]", MESH)
    assert text.count("┌") == 2
    assert "B 0" in text
    assert "B 1" in text
    with pytest.raises(ShardingError, match="1, 2 or 3 dims"):
        draw("A[A, B, C, D]", MESH)


def test_colours_tell_groups_of_devices_apart():
    painted = draw("A[I_X, J]", MESH, colour=True)
    assert len({code for code in painted.split("\033[48;5;")[1:] for code in [code.split(";")[0]]}) == 2
    assert "\033" not in draw("A[I_X, J]", MESH)


def test_command_line(capsys, tmp_path):
    assert main(["A[I_X, J_Y]", "--mesh", "X=2,Y=2", "--color"]) == 0
    assert "\033[48;5;" in capsys.readouterr().out
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in NINE)
    assert "\033" not in out
    assert main(["A[I_X, J_X]"]) == 1
    assert "mesh axis X is used twice" in capsys.readouterr().err
    for name in ("nine.svg", "nine.png"):
        assert main(["--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 5000
    assert "<svg" in (tmp_path / "nine.svg").read_text()


@pytest.mark.slow
def test_only_flat_arrays_are_plotted(tmp_path):
    save(str(tmp_path / "one.svg"), ["A[I_X]"], MESH)
    with pytest.raises(ShardingError, match="1 or 2 dims are plotted"):
        save(str(tmp_path / "x.svg"), ["A[I, J, K]"], MESH)
