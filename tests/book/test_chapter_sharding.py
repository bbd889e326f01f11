"""Chapter 03_sharding: every answer agrees with the book or is a proven erratum, and the chapter runs on ranks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

CHAPTER = Path(__file__).parents[2] / "chapters" / "03_sharding.py"


def test_answers():
    spec = importlib.util.spec_from_file_location("chapter", CHAPTER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answers = module.answers()
    assert not [answer.row for answer in answers if answer.verdict == "DIFFERS"]
    assert sum(answer.verdict == "erratum" for answer in answers) == 3
    assert sum(answer.verdict in ("agrees", "rounding") for answer in answers) >= 27


def test_runs_on_ranks(tmp_path):
    picture = tmp_path / "nine.svg"
    command = [sys.executable, CHAPTER, "--mesh", "X=2", "--plot", picture]
    run = subprocess.run(command, capture_output=True, text=True, cwd=CHAPTER.parents[1])
    assert run.returncode == 0, run.stdout + run.stderr
    assert "17 comparisons, all hold" in run.stdout
    assert "case 3 and 4: A[I_X, J_Y] * B[J_Y, K_X] -> C[I_X, K]" in run.stdout
    assert picture.stat().st_size > 5000
