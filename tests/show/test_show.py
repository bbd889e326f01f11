"""Pictures of shardings against Spec.slices, and as each device sees them; the types of a Transformer's leaves and
their bytes on a rank; pictures of schedules; charts; the command lines, and files."""

import itertools
import math
import re
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from refused import evaluated, refused

from scaling.configs import get
from scaling.cost import transformer as tm
from scaling.schedules import SCHEDULES, make
from scaling.schedules.simulator import Times, simulate
from scaling.show import NINE, blocks, draw, main, params, picture_of_blocks, svg, timelines
from scaling.show.charts import chart, figure, ticks
from scaling.show.frames import device_grids
from scaling.show.timelines import draw_on, schedule_chart, summary
from scaling.spec import ShardingError, parse
from scaling.spec.sizes import parse_mesh

MESH = {"X": 2, "Y": 2}


@pytest.mark.parametrize("text", [*NINE, "A[I_YX, J]", "A[I_X, J_YZ]", "A[I_Z, J, K_YX]"])
def test_every_device_is_drawn_at_its_slice(text):
    spec, mesh = parse(text), {"X": 2, "Y": 3, "Z": 2}
    held = blocks(spec, mesh)
    shape = [12] * len(spec.dims)
    local = spec.local_shape(shape, mesh)
    coords = [dict(zip(mesh, at, strict=True)) for at in itertools.product(*(range(n) for n in mesh.values()))]
    for device, coord in enumerate(coords):
        block = tuple(s.start // n for s, n in zip(spec.slices(shape, mesh, coord), local, strict=True))
        assert [device] in held[block]
    assert sum(len(groups) for groups in held.values()) == 12


GRID = """\
A[I_X, J_Y]
  mesh X=2, Y=2
 J   0   1
   ┌───┬───┐
 0 │ 0 │ 1 │
   ├───┼───┤
 1 │ 2 │ 3 │
   └───┴───┘"""


def test_the_grid():
    assert draw("A[I_X, J_Y]", MESH) == GRID
    assert blocks("A[I] {U_X}", MESH) == {(0,): [[0, 2], [1, 3]]}
    text = draw("A[I_X, J] {U_Y}", MESH | {"Z": 1})
    assert "0+1" in text
    assert "partial sums over Y" in text


def test_what_else_a_grid_shows():
    """Of three dims a grid for each block of the first; a colour for each group of devices."""
    text = draw("A[B_X, I, J_Y]", MESH)
    assert [text.count(part) for part in ("┌", "B 0", "B 1")] == [2, 1, 1]
    painted = draw("A[I_X, J]", MESH, colour=True)
    assert len(set(re.findall("48;5;([0-9]+)", painted))) == 2
    assert re.sub("\x1b\\[[0-9;]*m", "", painted) == draw("A[I_X, J]", MESH)


def test_command_lines(capsys, tmp_path):
    assert main(["A[I_X, J_Y]", "--mesh", "X=2,Y=2", "--color"]) == 0
    assert "\033[48;5;" in capsys.readouterr().out
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in NINE)
    assert "\033" not in out
    assert main(["A[I_X, J_X]"]) == 1
    assert "mesh axis X is used twice" in capsys.readouterr().err
    assert main(["--plot", str(tmp_path / "nine.svg")]) == 0
    assert all(text in (tmp_path / "nine.svg").read_text() for text in NINE)

    capsys.readouterr()
    assert params.main(["--model", "llama3-70b", "--mesh", "P=2,X=64,Y=8"]) == 0
    out = capsys.readouterr().out
    assert "W_Q[L, D_X, N_Y, H]  80x128x8x128  20,971,520" in out
    assert max(map(len, out.splitlines())) <= 100
    assert params.main(["--mesh", "Q=2"]) == 1
    assert "splits nothing of a Transformer" in capsys.readouterr().err


# what is said: what is drawn
REFUSED = """
call                                  words of its error
draw('A[A, B, C, D]', MESH)           1, 2 or 3 dims
svg.types(['A[I_X, J]'], {'X': 128})  at most 64 are
"""
test_refused = refused(evaluated(REFUSED, globals()), ShardingError)

DRAWN = {  # what each of X=2, Y=2, or of X=3, has
    "A[I_X, J_Y]": """
            Y=0  Y=1
        X=0 0.   .1
            ..   ..
        X=1 ..   ..
            2.   .3""",
    "A[I_YX]": """
            Y=0   Y=1
        X=0 0...  ..1.
        X=1 .2..  ...3""",  # Y is the major one
    "A[I_Y] {U_X}": """
            Y=0  Y=1
        X=0 0.   .1
        X=1 0.   .1""",
    "A[I_X]": """
        X=0  X=1  X=2
        0..  .1.  ..2""",
}


def test_devices_drawn():
    found = {of: device_grids(of, MESH if "Y" in of else {"X": 3}) for of in DRAWN}
    assert found == {of: of + textwrap.dedent(drawn) for of, drawn in DRAWN.items()}


def words_and_colours(picture: str) -> tuple[list, list]:
    every = [*ElementTree.fromstring(picture).iter()]
    words = [each.text for each in every if each.tag.endswith("text")]
    return words, [fill for each in every if (fill := each.get("fill") or "").startswith("hsl")]


def test_pictures_of_devices_and_of_blocks():
    """Half of the two cells on each of four devices, of which those with the same block have the same colour; each
    block names its devices, as `draw` does, and has the colour of the first."""
    words, (a, b, c, d) = words_and_colours(svg.types(["A[I_X, J]"], MESH))
    assert words == ["A[I_X, J]", "Y=0", "X=0", "Y=1", "X=1"]
    assert (a, c) == (b, d)
    assert a != c
    words, colours = words_and_colours(picture_of_blocks(["A[I_X, J]", "A[I_X, J_Y]"], MESH))
    assert words == ["A[I_X, J]", "0, 1", "2, 3", "A[I_X, J_Y]", "0", "1", "2", "3"]
    assert colours[:2] == colours[2::2]


@pytest.mark.parametrize(("name", "mesh"), [("llama3-405b", "Z=2,X=8,Y=8"), ("mixtral-8x7b", "X=4,E=8")])
def test_all_ranks_together_hold_the_model(name, mesh):
    """Each leaf's bytes on a rank, times the ranks that do not replicate it."""
    config, sizes = get(name), parse_mesh(mesh)
    rows = params.leaf_rows(config, sizes, "bf16")
    on_all = sum(nbytes * math.prod(sizes[axis] for axis in parse(text).axes) for _, text, _, nbytes in rows)
    assert on_all == 2 * tm.num_params(config)


def test_the_chart_is_the_schedule():
    chart = schedule_chart(simulate(make("1f1b", 2, 3), Times(1, 1, 1)))
    assert chart.splitlines() == [
        "rank 0 |F0F1····B0--F2B1--··B2--|",
        "rank 1 |··F0B0--F1B1--F2B2--····|",
        "        F forward  B backward  · idle",
    ]
    line = summary(simulate(make("1f1b", 4, 8)), "units")
    assert line == "1f1b: makespan 33 units, bubble 27.3%, live activations 4, 3, 2, 1"
    with pytest.raises(ValueError, match="no computation"):
        schedule_chart(replace(simulate(make("1f1b", 2, 2)), spans=()))
    # halves and chunks have letters of their own
    assert "F0I0F1I1F2I2W0" in schedule_chart(simulate(make("zb-h1", 3, 4))).splitlines()[2]
    assert "F0f0F1f1" in schedule_chart(simulate(make("dualpipev", 2, 4))).splitlines()[1]


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_rows_are_aligned_and_as_wide_as_asked(name):
    timeline = simulate(make(name, 4, 8), Times(1.25, 1, 0.75, hop=0.1))
    rows = schedule_chart(timeline, width=90).splitlines()[:-1]
    assert [len(row) for row in rows] == [len("rank 0 ||") + 90] * 4
    coloured = schedule_chart(timeline, width=90, colour=True).splitlines()[:-1]
    plain = [re.sub("\x1b\\[[0-9;]*m", "", row) for row in coloured]
    assert [row.replace(" ", "-")[7:] for row in plain] == [row[7:] for row in rows]


def test_schedules_command_line(capsys, tmp_path):
    picture = tmp_path / "a.svg"
    assert timelines.main(["1f1b", "--stages", "4", "--microbatches", "8", "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "bubble 27.3%" in shown
    assert "closed form 9 = simulated 9" in shown
    root = ElementTree.parse(picture).getroot()
    assert (
        sum(each.get("stroke") is not None for each in root.iter() if each.tag.endswith("rect")) == 2 * 4 * 8
    )  # F and B

    assert timelines.main(["all", "--stages", "2", "--microbatches", "3", "--times", "1,2,1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("rank 1 |") == 4
    assert "interleaved: 3 microbatches are not a multiple of 2 stages" in shown.err
    assert timelines.main(["dualpipev", "--stages", "4", "--microbatches", "4"]) == 2
    assert timelines.main(["gpipe", "--split", "--hop", "1/2"]) == 0


def test_on_a_page_it_is_text_or_a_picture():
    said = []
    page = SimpleNamespace(columns=70, show=lambda text, html: said.extend([text, html()]))
    timeline = simulate(make("1f1b", 2, 3))
    draw_on(page, timeline, "s")
    assert said[0] == f"{summary(timeline, 's')}\n{schedule_chart(timeline, width=60)}"
    assert said[1].startswith("<svg")


ROOF = {"roof": [(1, 1e12), (100, 1e14), (1e4, 1e14)]}
MARKS = [("x", 100, "C/W = 100"), ("y", 1e13, "a tenth"), ("x", 1e9, "beyond")]
LOGARITHMIC = """
title
FLOPs/s against FLOPs/byte
     1e14 |                   **********************
          |                  * :
          |               ***  :
          |             **     :
          |            *       :
     1e13 |---------***--------:--------------------
          |        *           :
          |      **            :
          |   ***              :
          |  *                 :
     1e12 |**                  :
          ++---------+---------+---------+---------+
           1        10        100      1000      1e4
           * roof   : C/W = 100   - a tenth
           : beyond (off the chart)"""
LINEAR = """
        1 |                  ***
          |             *****
        0 |        **o**
          |   *****
       -1 |***
          ++---------+---------+
           0        0.5        1
           * a   o b"""
OF_ONE_AXIS = """
        2 |                  ***
          |             *****
        1 |        *****
          |   *****
        0 |***
          ++-------------------+
           1                 100
           * a"""


def test_charts_drawn():
    """Up and then level, crossed by marks; a point on a line; one axis alone logarithmic."""
    roof = chart(ROOF, "FLOPs/byte", "FLOPs/s", "title", width=41, height=11, marks=MARKS)
    assert f"\n{roof}" == LOGARITHMIC
    line = chart({"a": [(0, -1), (1, 1)]}, log=False, points={"b": [(0.5, 0)]}, width=21, height=5)
    assert f"\n{line}" == LINEAR
    curve = chart({"a": [(1, 0), (10, 1), (100, 2)]}, log="x", width=21, height=5)
    assert f"\n{curve}" == OF_ONE_AXIS
    assert chart({"a": [(1, 1)]}).count("*") == 2, "one point, and in the legend"
    names = {f"a series with a name, {i}": [(1, 1), (2, i + 1)] for i in range(6)}
    assert max(len(line) for line in chart(names, width=60).splitlines()) <= 71, "a long legend goes on below"


TICKS = {  # ends: round numbers between them
    (0.1, 1e4, "log"): [0.1, 1, 10, 100, 1e3, 1e4],
    (1e3, 1e14, "log"): [1e4, 1e6, 1e8, 1e10, 1e12, 1e14],
    (30, 80, "log"): [50],
    (3, 45, "log"): [5, 10, 20],
    (0, 511, ""): [0, 100, 200, 300, 400, 500],
    (-1, 1, ""): [-1, -0.5, 0, 0.5, 1],
}


def test_ticks_are_round():
    found = {(low, high, scale): ticks(low, high, log=scale == "log") for low, high, scale in TICKS}
    assert found == {ends: pytest.approx(wanted) for ends, wanted in TICKS.items()}


UNCHARTED = """
call                                          words of its error
chart({})                                     nothing to draw
chart({'a': [(0, 1)]})                        on logarithmic axes
chart({'a': [(1, float('nan'))]})             (1, nan) cannot be drawn
chart({'a': [(1, 0)]}, log='y')               (1, 0) cannot be drawn
chart({str(i): [(1, 1)] for i in range(11)})  11 series
"""
test_charts_that_cannot_be_drawn = refused(evaluated(UNCHARTED, globals()))


def test_a_picture_shows_what_the_chart_is_given():
    pytest.importorskip("matplotlib")
    axes = figure(ROOF, "x", "y", "title", points={"p": [(10, 1e13)]}, marks=[("x", 100, "C/W")]).axes[0]
    assert (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()) == ("title", "x", "y")
    assert [line.get_label() for line in axes.get_lines()][:2] == ["roof", "p"]
    assert list(axes.get_lines()[0].get_xdata()) == [1, 100, 1e4]
    assert [text.get_text() for text in axes.texts] == ["C/W"]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert list(axes.xaxis.get_major_locator()()) == [1, 10, 100, 1000, 1e4]


def test_a_picture_s_legend_and_names_of_marks_cover_nothing_and_are_not_cut_off():
    pytest.importorskip("matplotlib")
    lines = {"a series of a long name that takes a row": [(1, 1), (1e4, 1)], "low": [(1, 1e-4), (99, 2e-4)]}
    marks = [("x", 10, "a name so long that higher up it is cut off"), ("x", 100, "C/W")]
    picture = figure(lines | {"high": [(5, 2e-4), (9.9, 0.9)]}, "x", "y", marks=marks)
    picture.draw_without_rendering()
    (axes,), legend = picture.axes, picture.legends[0].get_window_extent()
    assert not legend.overlaps(axes.get_window_extent())
    assert 0 <= legend.x0 <= legend.x1 <= picture.bbox.x1
    assert all(name.get_window_extent().y1 <= axes.get_window_extent().y1 for name in axes.texts)

    crowded = {"flat": [(1, 1), (1e4, 1)], "steep": [(1, 1), (1e4, 1e4)]}
    axes = figure(crowded, marks=[("x", 10, "ten"), ("x", 10.5, "a little more"), ("y", 1, "one")]).axes[0]
    names = [text.get_window_extent() for text in axes.texts]
    assert not any(name.count_overlaps([*names[:i], *names[i + 1 :]]) for i, name in enumerate(names))
    for line in axes.lines[:2]:
        drawn = line.get_transform().transform_path(line.get_path()).interpolated(50).vertices
        assert not any(name.count_contains(drawn) for name in names)


def test_without_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib")] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'scaling-book-torch\[plot\]'"):
        figure(ROOF)
