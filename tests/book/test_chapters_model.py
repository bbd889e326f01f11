"""The chapter of Part 6: each answer agrees with the book or is a proven erratum."""

import importlib.util
from pathlib import Path

import pytest

CHAPTERS = Path(__file__).parents[2] / "chapters"


def chapter(name: str):
    spec = importlib.util.spec_from_file_location(name, CHAPTERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["06_applied_training"])
def test_answers(name):
    answers = chapter(name).answers()
    assert not [answer.row for answer in answers if answer.verdict == "DIFFERS"]
    assert sum(answer.verdict in ("agrees", "rounding") for answer in answers) > len(answers) / 2


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


@pytest.mark.parametrize("name", ["06_applied_training"])
def test_chapters_run(name, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [name])
    assert chapter(name).main() == 0
    assert "DIFFERS" not in capsys.readouterr().out
