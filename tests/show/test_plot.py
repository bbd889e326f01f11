import builtins

import pytest

from scaling.show.charts import chart, save

ROOF = {"roof": [(1, 1e12), (100, 1e14), (1e4, 1e14)]}


def test_chart_goes_up_and_then_stays_level():
    lines = chart(ROOF, "FLOPs/byte", "FLOPs/s", "title", width=40, height=10).splitlines()
    assert lines[:2] == ["title", "FLOPs/s against FLOPs/byte"]
    body = [line.partition("|")[2] for line in lines[2:12]]
    assert body[0][20:] == "*" * 20
    assert body[-1].startswith("*")
    columns = ["".join(column) for column in zip(*body, strict=True)]
    assert all("*" in column for column in columns)
    heights = [column.index("*") for column in columns]
    assert heights == sorted(heights, reverse=True)
    assert "1e+14" in lines[2]
    assert "1e+12" in lines[11]
    assert "* roof" in lines[-1]


def test_linear_axes_and_points():
    text = chart({"a": [(0, -1), (1, 1)]}, log=False, points={"b": [(0.5, 0)]}, width=21, height=5)
    assert "+" not in text.splitlines()[0]
    assert text.splitlines()[2].partition("|")[2][10] == "o"
    assert "o b" in text


def test_one_point_is_drawn():
    assert "*" in chart({"a": [(1, 1)]}).splitlines()[9]


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ({}, "nothing to draw"),
        ({"a": [(0, 1)]}, "on logarithmic axes"),
        ({"a": [(1, float("nan"))]}, "cannot be drawn"),
    ],
)
def test_nonsense_is_refused(series, message):
    with pytest.raises(ValueError, match=message):
        chart(series)


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_pictures(tmp_path, name, start):
    pytest.importorskip("matplotlib")
    path = save(tmp_path / name, ROOF, "x", "y", points={"p": [(10, 1e13)]})
    assert path.read_bytes().startswith(start)


def test_without_matplotlib(monkeypatch, tmp_path):
    real = builtins.__import__

    def refuse(name, *args):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RuntimeError, match=r"pip install 'scaling\[plot\]'"):
        save(tmp_path / "a.png", ROOF)
