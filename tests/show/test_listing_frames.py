"""Pictures of listings, line by line: whose blocks each device holds, against what the collectives really move."""

import re
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from refused import evaluated, refused

from scaling.book.drawing import frames_of_strategy, listings, main
from scaling.collectives import all_gather, all_to_all, einsum, ppermute, reduce_scatter
from scaling.mesh import AbstractMesh
from scaling.show import svg
from scaling.show.frames import Drawing, frames_of, text
from scaling.spec import parse, parse_line
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel, zero
from scaling.trace import trace

MOVES = [
    (all_gather, "W[D_X, F_Y] -> W[D, F_Y]"),
    (all_gather, "W[D_YX, F] -> W[D, F]"),
    (all_gather, "W[L, D_X, F_Y] -> W[L, D_X, F]"),
    (all_to_all, "W[D_X, F] -> W[D, F_X]"),
    (all_gather, "W[D_XY] -> W[D_X]"),
    (partial(ppermute, axis="XY", perm=[(0, 1), (1, 2), (2, 3), (3, 0)]), "W[D_XY] -> W[D_XY]"),
    (partial(ppermute, axis="Y", perm=[(0, 1), (1, 0)]), "W[D_X, F_Y] -> W[D_X, F_Y]"),
    (partial(ppermute, axis="XY", perm=[(0, 0), (1, 2), (2, 1), (3, 3)]), "W[D_XY] -> W[D_YX]"),
]
FILE = '''
from scaling.collectives import all_gather, einsum

print("a cell of a chapter, which is not run" + 1)

def layer(x, W, mesh):
    """x[B_X, D], W[D_X, F] -> y[B_X, F]."""
    W = all_gather("W[D_X, F] -> W[D, F]", W, mesh)
    return einsum("x[B_X, D] * W[D, F] -> y[B_X, F]", x, W)
'''
PICTURE = """\
At first
   x[B_X, D]   W[D_X, F]
   X=0  X=1    X=0  X=1
   0    .      0    .
   .    1      .    1

(1/2) W[D, F] = AllGather_X(W[D_X, F])
   W[D_X, F]      W[D, F]
   X=0  X=1   ->  X=0  X=1
   0    .         0    0
   .    1         1    1

(2/2) y[B_X, F] = x[B_X, D] * W[D, F]
   x[B_X, D]   W[D, F]       y[B_X, F]
   X=0  X=1    X=0  X=1  ->  X=0  X=1
   0    .      0    0        0    .
   .    1      1    1        .    1"""


@pytest.mark.parametrize(("collective", "line"), MOVES, ids=[line for _, line in MOVES])
@pytest.mark.parametrize("mesh", [{"X": 2, "Y": 2}])
def test_the_picture_shows_whose_blocks_arrive(mesh, collective, line):
    before, after = parse_line(line).operands[0], parse_line(line).result
    first = {axis: n if axis in before.axes else 0 for axis, n in mesh.coord.items()}  # of its replicas
    with trace() as log:
        moved = collective(
            line, torch.full(before.local_shape([4] * len(before.dims), mesh), 2 * first["X"] + first["Y"]), mesh
        )
    (frame,) = frames_of(log.events)
    drawn = [n for row in Drawing([frame], mesh).cells(after, frame.after)[mesh.rank] for n in row if n is not None]
    numbers, counts = moved.unique(return_counts=True)
    assert {n: drawn.count(n) / len(drawn) for n in drawn} == dict(
        zip(numbers.tolist(), (counts / len(moved.flatten())).tolist(), strict=True)
    )


def test_the_frames_of_a_users_function(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FILE)
    assert main([str(tmp_path / "mine.py"), "--mesh", "X=2"]) == 0
    assert capsys.readouterr().out == f"mine.py: layer, on X=2\n----------------------\n{PICTURE}\n\n"


@pytest.mark.parametrize("strategy", [data_parallel, fsdp, tensor_parallel, fsdp_tp, zero])
def test_each_strategy_ends_with_the_types_that_it_declares(strategy):
    mesh = AbstractMesh({"X": 2, "Y": 3})
    found = frames_of_strategy(strategy, mesh)
    assert found["forward"][-1].held["Out"] == parse(strategy.SPECS["Out"])
    assert found["backward"][-1].held["dIn"].dims == parse(strategy.SPECS["In"]).dims
    every = [frame for frames in found.values() for frame in frames]
    drawing = Drawing(every, mesh)
    for frame in every:
        for spec in frame.held.values():
            cells = drawing.cells(spec)
            split = mesh.size(spec.axes)
            assert all(sum(n is not None for row in grid for n in row) * split == sum(map(len, grid)) for grid in cells)


@pytest.mark.parametrize("chapter", ["05_dp", "05_fsdp", "05_tp", "05_fsdp_tp"])
def test_a_chapters_frames_are_its_typed_lines_in_order(chapter):
    source = Path(f"chapters/{chapter}.py").read_text()
    found = listings(f"chapters/{chapter}.py", AbstractMesh({"X": 2, "Y": 2}))
    for name in ("forward", "backward"):
        (function,) = re.findall(rf"^def {name}\(.*?(?=^\S)", source, re.DOTALL | re.MULTILINE)
        body = function.split('"""')[2]
        written = [parse_line(line) for line in re.findall(r'"([^"]*->[^"]*)"', body)]
        assert [frame.read for frame in found[name][1:]] == [line.operands for line in written]
        assert [frame.made for frame in found[name][1:]] == [line.result for line in written]


def test_an_svg_plays_each_frame_and_a_slider_stops_it(tmp_path, capsys):
    mesh = AbstractMesh({"X": 2, "Y": 2})
    frames = frames_of_strategy(fsdp_tp, mesh)["forward"]
    tree = ElementTree.fromstring(svg.played(frames, mesh, "a < b"))
    groups = [each for each in tree.iter("{http://www.w3.org/2000/svg}g") if "line" in each.get("class", "")]
    assert len(groups) == len(frames) == 7
    width, height = float(tree.get("width", 0)), float(tree.get("height", 0))
    for box in tree.iter("{http://www.w3.org/2000/svg}rect"):
        if box.get("x"):
            assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
            assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height
    lines = [str(each.text) for each in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert width > 7.8 * max(len(line) for line in lines if line.startswith("("))  # of size 13: "(1/7) ..."
    assert 'max="6"' in svg.player(frames, mesh)
    assert main(["chapters/05_dp.py", "--mesh", "X=4", "--plot", str(tmp_path / "dp.svg")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {tmp_path}/dp-{name}.svg" for name in ("forward", "backward")
    ]
    ElementTree.parse(tmp_path / "dp-backward.svg")


def test_sums_that_are_not_complete_are_hatched_and_moves_are_lines_between_neighbours():
    mesh = AbstractMesh({"X": 3})
    with trace() as log:
        y = einsum(
            "x[B, D_X] * W[D_X, F] -> y[B, F] {U_X}", torch.zeros(6, 2, device="meta"), torch.zeros(2, 6, device="meta")
        )
        reduce_scatter("y[B, F] {U_X} -> y[B_X, F]", y, mesh)
    first, second = svg.played(frames_of(log.events), mesh).split('<g class="line')[1:]
    assert first.count("url(#partial)") == 2 * 3 * 3  # large and small, on each device each block
    assert (first.count("<line x1"), second.count("<line x1")) == (0, 2)


MESH = AbstractMesh({"X": 2})
UNDRAWN = """
call                                                words of its error
text(frames_of([], [parse('x[B_X]')]), {'X': 128})  128 devices is not drawn, at most 64
text(frames_of([], [parse('x[B_X]')]), {'X': 64})   columns wide, at most 100
text(frames_of([], [parse('x[B_Z]')]), MESH)        Z
listings(__file__, MESH)                            has no listing
"""
test_what_cannot_be_drawn_is_refused = refused(evaluated(UNDRAWN, globals()))


READS = """def f(In, mesh):
    'In[B_X, D] -> In[B_X, D].'
    return In if In.sum() > 0 else -In
"""
FAILING = {  # a file: words of its error
    "import nosuchmodule": "line 1 raises ModuleNotFoundError: No module named 'nosuchmodule'",
    READS: "f raises RuntimeError",
    "def f(:": "mine.py, line 1",
}


@pytest.mark.parametrize("code", FAILING, ids=str)
def test_what_a_file_raises_is_said_in_words(code, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(code)
    assert main([str(tmp_path / "mine.py"), "--mesh", "X=2"]) == 1
    assert FAILING[code] in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("sizes", [{"X": 3, "Y": 5}, {"X": 2, "Y": 2}, {"X": 10, "Y": 3}], ids=str)
def test_pictures_that_are_too_wide_beside_each_other_are_below_each_other(sizes):
    mesh = AbstractMesh(sizes)
    frames = frames_of([], [parse("In[B_X, D]"), parse("W[D, F_Y]"), parse("Z[D, F_Y]")])
    assert max(map(len, text(frames, mesh).splitlines())) <= 100


def test_a_listing_is_plotted_as_svg_only(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    for name in ("a.png", "missing/a.svg"):
        with pytest.raises(SystemExit):
            main([str(tmp_path / "mine.py"), "--mesh", "X=2", "--plot", str(tmp_path / name)])
