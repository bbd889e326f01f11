"""A sharding as each device sees it."""

import pytest

from scaling.show import NINE, devices
from scaling.spec import ShardingError, parse

MESH = {"X": 2, "Y": 2}


def test_drawn():
    assert devices.draw("A[I_X, J_Y]", MESH).splitlines() == [
        "A[I_X, J_Y]",
        "    Y=0   Y=1",
        "X=0 ██··  ··██",
        "    ██··  ··██",
        "    ····  ····",
        "    ····  ····",
        "",
        "X=1 ····  ····",
        "    ····  ····",
        "    ██··  ··██",
        "    ██··  ··██",
    ]
    assert devices.draw("A[I_X]", {"X": 3}).splitlines() == ["A[I_X]", "X=0 █··", "X=1 ·█·", "X=2 ··█"]
    assert "▒" in devices.draw("A[I] {U_X}", MESH)


@pytest.mark.parametrize("spec", [*NINE, "A[I_YX, J]", "A[I, J_YX]", "A[I_Y] {U_X}"])
def test_every_device_is_drawn_with_what_it_holds(spec):
    """Squares held, added over the devices of one replica, are the whole array once; their place is the block's."""
    found, spec = devices.held_cells(spec, MESH, 8), parse(spec)
    once = [
        (row, column)
        for row in range(2)
        for column in range(2)
        if all(at == 0 for axis, at in (("X", row), ("Y", column)) if axis not in spec.axes)
    ]
    total = [[sum(found[place][i][j] for place in once) for j in range(8)] for i in range(len(found[0, 0]))]
    assert total == [[1] * 8] * (8 if len(spec.dims) == 2 else 1)
    for (row, column), squares in found.items():
        down = spec.dims[0][1] if len(spec.dims) == 2 else ()
        at, parts = 0, 1
        for axis in down:  # the first axis of a subscript is the major one
            at, parts = at * 2 + {"X": row, "Y": column}[axis], parts * 2
        if down:
            assert [any(line) for line in squares] == [i * parts // 8 == at for i in range(8)]


def test_what_is_not_drawn_is_refused():
    for spec, mesh in (("A[I_X, J, K]", MESH), ("A[I_X]", {"X": 2, "Y": 2, "Z": 2})):
        with pytest.raises(ShardingError, match="1 or 2 dims on meshes of 1 or 2 axes"):
            devices.draw(spec, mesh)


@pytest.mark.slow
def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    picture = devices.figure(["A[I_X, J]", "A[I_YX, J]", "A[I] {U_X}"], MESH)
    assert [axes.get_title() for axes in picture.axes] == ["A[I_X, J]", "A[I_YX, J]", "A[I] {U_X}"]
    axes = picture.axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["Y=0", "Y=1"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["X=0", "X=1"]
    coloured = [patch for patch in axes.patches if patch.get_fill() and patch.get_facecolor()[:3] != (1.0, 1.0, 1.0)]
    assert len(coloured) == 4 * 8, "half of 16 squares on each of four devices"
    assert devices.save(tmp_path / "a.svg", ["A[I_X]"], MESH).read_bytes().startswith(b"<?xml")
