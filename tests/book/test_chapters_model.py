"""The chapters of Parts 5 (the analytic half) and 6: each answer agrees with the book or is a proven erratum."""

import importlib.util
from pathlib import Path

import pytest

CHAPTERS = Path(__file__).parents[2] / "chapters"


def chapter(name: str):
    spec = importlib.util.spec_from_file_location(name, CHAPTERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["05_when_bound", "06_applied_training"])
def test_answers(name):
    answers = chapter(name).answers()
    assert not [answer.row for answer in answers if answer.verdict == "DIFFERS"]
    assert sum(answer.verdict in ("agrees", "rounding") for answer in answers) > len(answers) / 2


def test_part_5_figures_cross_where_the_book_says():
    part5 = chapter("05_when_bound")
    ratio = {name: dict(points) for name, points in part5.ratio_figure().items()}
    assert ratio["FSDP"][840] < 1 < ratio["FSDP"][860]
    assert ratio["FSDP+TP"][100] < 1 < ratio["FSDP+TP"][120]
    assert all(y == pytest.approx(3 * 30_000 / (64 * 2550)) for y in ratio["TP only"].values())
    got = {name: part5.crossing(mesh) for name, mesh in part5.MESHES.items()}
    assert got == {
        "4096 FSDP": pytest.approx(3.4816e6, rel=1e-3),
        "1024 x 4": pytest.approx(1.3056e6, rel=1e-3),
        "512 x 8": pytest.approx(652_800, rel=1e-3),
        "256 x 16": float("inf"),
        "4096 TP": float("inf"),
    }


def test_errata_of_part_5():
    got = {a.question: a.ours for a in chapter("05_when_bound").answers() if a.verdict == "erratum"}
    assert got == {
        "DP: largest model with Adam on a v5p": 9.6e9,
        "X_opt, N=64, B=48,000, F=32768": pytest.approx(13.69, abs=0.01),
        "the same for the plotted 512 x 8": pytest.approx(652_800, rel=1e-5),
        "the same in the Takeaways": 73_440,
        "Table, FSDP+TP: backward bytes over Y / (BD/X)": 4,
    }


def test_errata_and_own_answers_of_part_6():
    answers = chapter("06_applied_training").answers()
    assert {a.question: a.ours for a in answers if a.verdict == "erratum"} == {
        "LLaMA-3 70B": 70_553_706_496,
        "the same": pytest.approx(4.836, abs=1e-3),
        "with 12 checkpoints a layer": pytest.approx(7.1e9, rel=1e-3),
        "2048 x 4: chips": 8192,
    }
    ours = {a.question: a.ours for a in answers if a.verdict == "ours"}
    assert ours["1 days at 40% MFU"] == pytest.approx(11.08, abs=0.01)
    assert ours["2a LLaMA-3 405B"] == 405_853_388_800
    assert ours["2a FLOPs a token"] == pytest.approx(2.435e12, rel=1e-3)
    assert ours["2b days at 40% MFU"] == pytest.approx(32.1, abs=0.1)
    assert ours["2b scheme"].startswith("pods 8 x FSDP")


@pytest.mark.parametrize("name", ["05_when_bound", "06_applied_training"])
def test_chapters_run(name, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [name])
    assert chapter(name).main() == 0
    assert "DIFFERS" not in capsys.readouterr().out
