"""The chapters of Part 12: each answer agrees with the book or is a proven erratum."""

import importlib.util
from pathlib import Path

import pytest

CHAPTERS = Path(__file__).parents[2] / "chapters"
NAMES = ("12_gpus", "12_gpu_rooflines")
ERRATA = {  # ours, where the book errs
    "12_gpus": {
        "HBM bandwidth of a B200, text": 8e12,
        "SMEM of an H100, comparison table": 33.79,
        "1.5 with registers": 67.58,
        "AllToAll over 2 nodes against 1: more than": 18 / 7,
        "Collective bandwidth: bisection x 2/N": 900,
    },
    "12_gpu_rooflines": {
        "and what it used": 62_914_560,
        "'About 2500 on an H100 or B200'": 5625,
        "5.2.3 most TP": 13.03,
        "5.2.3 ZeRO-3's threshold over DP's": 1,
        "5.3 16B's threshold": 2475,
        "5.3 70B's ('roughly 1k')": 1237.5,
    },
}


def chapter(name: str):
    spec = importlib.util.spec_from_file_location(name, CHAPTERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_answers_agree_or_are_errata(name):
    answers = chapter(name).answers()
    assert not [answer.row for answer in answers if answer.verdict == "DIFFERS"]
    errata = {a.question: a.ours for a in answers if a.verdict == "erratum"}
    expected = ERRATA.get(name, {})
    assert errata == {
        q: value if isinstance(value, str) else pytest.approx(value, rel=1e-3) for q, value in expected.items()
    }


def test_ledgers_of_switches():
    part12 = chapter("12_gpus")
    for M, N in ((2, 8), (4, 4), (3, 5)):
        moved = part12.gather_ledger(M, N)
        expected = {"node in": 1, "node out": N, "top in": 1, "top out": M - 1}
        assert moved == {key: pytest.approx(value) for key, value in expected.items()}
    assert part12.sharp_ledger(8) == (pytest.approx(8), pytest.approx(8))


@pytest.mark.parametrize("name", NAMES)
def test_chapters_run(name, capsys, monkeypatch, tmp_path):
    plots = ["--plot", str(tmp_path / "p.svg")] if name == "12_gpus" else []
    monkeypatch.setattr("sys.argv", [name, *plots])
    module = chapter(name)
    assert module.main() == 0
    assert "DIFFERS" not in capsys.readouterr().out
    assert bool(plots) == (tmp_path / "p.svg").exists()
