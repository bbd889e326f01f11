"""`python -m scaling.profile` runs a chapter as it is, and writes a profile of what its ranks do."""

import json
import subprocess
import sys

import pytest

from scaling.profile.command import main

LINE = "a[I] = AllReduce_X(a[I] {U_X})"
CHAPTER = '''
"""A chapter that goes to its ranks twice."""
import torch

from scaling.book.page import Page
from scaling.collectives import all_reduce

page = Page(__doc__, mesh="X=2", times=(1, "how often"))


def act(mesh, times):
    for _ in range(times):
        x = all_reduce("a[I] {U_X} -> a[I]", torch.ones(4), mesh)
    return x.tolist()


page.check("what the ranks give", page.on_ranks(act, page.args.times) == [2.0] * 4)
page.check("and again", page.on_ranks(act, 2 * page.args.times) == [2.0] * 4)
page.end()
'''


@pytest.mark.slow
def test_each_time_that_a_chapter_goes_to_its_ranks_has_a_profile(tmp_path, capfd):
    (tmp_path / "chapter.py").write_text(CHAPTER)
    assert main([str(tmp_path / "found"), str(tmp_path / "chapter.py"), "--times", "3"]) == 0
    assert "2 checks: all hold" in capfd.readouterr().out
    for place, times in (("found", 3), ("found-2", 6)):
        assert LINE in (tmp_path / place / "lines.txt").read_text()
        events = json.loads((tmp_path / place / "trace.json").read_text())["traceEvents"]
        assert sorted(e["pid"] // 1000 for e in events if e["name"] == LINE) == [0] * times + [1] * times


@pytest.mark.slow
def test_a_chapter_asks_for_its_profile_itself(tmp_path):
    chapter, found = tmp_path / "chapter.py", tmp_path / "found"
    chapter.write_text(CHAPTER)
    command = [sys.executable, str(chapter), "--times", "2", f"--profile={found}", "--mesh", "X=2"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 checks: all hold" in run.stdout
    assert LINE in (found / "lines.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pyproject.toml", "chapter.py"], "it must be FILE.json or a folder, and "),
        (["pyproject.toml/deeper", "chapter.py"], "it must be FILE.json or a folder, and "),
        (["found", "nowhere.py"], "nowhere.py: there is no such chapter"),
        (["found", "chapter.py", "--steps", "0"], "unrecognized arguments: --steps 0"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chapter.py").write_text(CHAPTER)
    (tmp_path / "pyproject.toml").write_text("")
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "found").exists()


def test_a_chapter_without_ranks_has_no_profile(tmp_path, capsys):
    (tmp_path / "chapter.py").write_text("print(1)")
    assert main([str(tmp_path / "found"), str(tmp_path / "chapter.py")]) == 1
    assert "started no ranks" in capsys.readouterr().err
