import sys

import pytest
from refused import evaluated, refused

from scaling.show.charts import chart, figure, ticks

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


REFUSED = {  # what is said: what is drawn
    "chart({})": "nothing to draw", "chart({'a': [(0, 1)]})": "on logarithmic axes",
    "chart({'a': [(1, float('nan'))]})": "(1, nan) cannot be drawn",
    "chart({'a': [(1, 0)]}, log='y')": "(1, 0) cannot be drawn",
    "chart({str(i): [(1, 1)] for i in range(11)})": "11 series",
}  # fmt: skip
test_refused = refused(evaluated(REFUSED, globals()))


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
