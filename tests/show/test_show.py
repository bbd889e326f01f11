"""Pictures of shardings against Spec.slices, and as each device sees them; the types of a Transformer's leaves and
their bytes on a rank; the command line, and files."""

import itertools
import math

import pytest
import torch

from scaling.configs import get
from scaling.cost import transformer as tm
from scaling.show import NINE, blocks, devices, draw, main, params, save
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


# --- As each device sees it


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


# --- A Transformer's leaves


@pytest.mark.parametrize(
    ("name", "sizes"), [("llama3-70b", {"X": 64, "Y": 8}), ("llama3-405b", {"Z": 2, "X": 8, "Y": 8}),
                        ("mixtral-8x7b", {"X": 4, "E": 8})]
)  # fmt: skip
def test_all_ranks_together_hold_the_model(name, sizes):
    config, on_all = get(name), 0
    for _, text, _, nbytes in params.leaf_rows(config, sizes, "bf16"):
        on_all += nbytes * math.prod(
            sizes[axis] for axis in parse(text).axes
        )  # one copy of what the rest of the mesh replicates
    assert on_all == 2 * tm.num_params(config)


def test_params_command_line(capsys):
    assert params.main(["--model", "llama3-70b", "--mesh", "P=2,X=64,Y=8"]) == 0
    out = capsys.readouterr().out
    assert "W_Q[L, D_X, N_Y, H]  80x128x8x128  20,971,520" in out
    assert max(map(len, out.splitlines())) <= 100
    assert params.main(["--mesh", "Q=2"]) == 1
    assert "splits nothing of a Transformer" in capsys.readouterr().err
