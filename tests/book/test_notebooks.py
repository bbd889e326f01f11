"""Chapters as notebooks, in a kernel and cell by cell as one would, which has no `__file__`, its own `sys.argv`, and
shows SystemExit as an error; and the recap, whose numbers are the chapters' own."""

import importlib.util
import itertools
import re
from types import SimpleNamespace

import pytest
import running

from scaling.book import notebook, recap
from scaling.book.answers import VERDICTS

CHAPTERS = running.CHAPTERS
ROOT = CHAPTERS.parent
KERNEL = all(importlib.util.find_spec(name) for name in ("jupytext", "nbclient", "ipykernel"))


@pytest.mark.skipif(
    not KERNEL, reason="needs jupytext, nbclient and ipykernel: pip install 'scaling-book-torch[notebook]'"
)
def test_runs_in_a_kernel(tmp_path, capfd):
    """Cells of its own: .ci/run has the chapters."""
    (tmp_path / "chapter.py").write_text("# %%\nx = 1 + 1\n# %%\nprint('words')\nprint('held', x)\n")
    assert notebook.main([str(tmp_path / "chapter.py"), "--out", str(tmp_path / "chapter.ipynb")]) == 0
    assert capfd.readouterr() == ("held 2\n", "")
    assert "held 2" in (tmp_path / "chapter.ipynb").read_text()


def test_warnings_of_cells_are_shown(monkeypatch, capsys):
    streams = [("stderr", "UserWarning: old\n"), ("stdout", "What\nheld\n"), ("stderr", "")]
    outputs = [SimpleNamespace(output_type="stream", name=name, text=text) for name, text in streams]
    cells = [{"outputs": [SimpleNamespace(output_type="display_data")]}, {}, {"outputs": outputs}]
    monkeypatch.setattr(notebook, "execute", lambda path: SimpleNamespace(cells=cells))
    assert notebook.main(["chapter.py"]) == 0
    assert capsys.readouterr() == ("held\n", "UserWarning: old\n")


@pytest.mark.parametrize("name", running.ON_A_PAGE)
def test_cells(name):
    cells = running.cells(name)
    kinds = [kind for kind, *_ in cells]
    assert (kinds[0], kinds[-1]) == ("markdown", "markdown")
    assert "https://jax-ml.github.io/scaling-book/" in cells[0][-1]
    assert kinds.count("markdown") >= 4
    lines = [sum(bool(line.strip()) for line in text.splitlines()) for kind, _, text in cells if kind == "code"]
    assert max(lines) <= 40
    assert 80 <= len(running.source(name).splitlines()) <= 300


def test_every_table_has_a_sentence():
    """In the text above its cell, or beside the cell's mark."""
    bare = []
    for name in running.ALL:
        for (before, _, above), (kind, mark, text) in itertools.pairwise(running.cells(name)):
            shows = kind == "code" and re.search(r"page\.(table|same|equal|answers|chart)\(|show_lines\(", text)
            said = above if before == "markdown" else ""
            if shows and not mark.strip() and not re.search(r"^# [^#\s].*\w", said, flags=re.M):
                bare.append(f"{name}: {text.splitlines()[0]}")
    assert bare == []


@pytest.mark.slow
def test_runs_as_a_kernel_does(monkeypatch, capsys):
    """With arguments that are a kernel's, without `__file__`, cell by cell."""
    monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
    monkeypatch.setattr("scaling.book.page.Page.picture", lambda *_: False)
    monkeypatch.setattr("sys.argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setenv("CHAPTER", "--small")
    names = {"__name__": "__main__", "__doc__": "Automatically created module for IPython interactive environment"}
    for kind, _, text in running.cells(running.NOTEBOOK):
        if kind == "code":
            exec(compile(text, "cell", "exec"), names)
    printed = capsys.readouterr().out
    assert "Automatically" not in printed
    assert printed.splitlines()[-1].startswith("What held")


@pytest.mark.chapter
def test_the_numbers_are_the_chapters_own():
    ran = running.run("11_recap", "--parts", "2")
    assert ran.status == 0
    own = [answer for name in ("02_networking", "02_tpus") for answer in running.chapter(name).page.given]
    assert [answer.row for answer in ran.page.given] == [answer.row for answer in own]
    verdicts = [answer.verdict for answer in own]
    line = next(line.split() for line in ran.text.splitlines() if line.startswith("Part 2 "))
    assert line[2:] == [str(len(own)), *(str(verdicts.count(verdict)) for verdict in VERDICTS)]
    assert all(f"{name}.py" in ran.text for name in running.ON_A_PAGE)
    assert not [line for line in ran.text.splitlines() if len(line) > 80]


def test_what_differs_fails(tmp_path):
    wrong = tmp_path / "13_wrong.py"
    wrong.write_text(
        '"""Part 13, a chapter: https://example.org"""\n'
        "from scaling.book.answers import Answer\nfrom scaling.book.page import Page\n"
        'page = Page(__doc__)\npage.answers([Answer("pi", "3.14", 2.0), Answer("e", "2.72", 2.718)])\n'
        'page.check("it holds", False)\npage.end()\n'
    )
    chapter = recap.run_script(wrong)
    assert (recap.part(wrong), recap.shows(wrong), chapter.status) == (13, "a chapter", 1)
    assert [answer.verdict for answer in chapter.page.given] == ["DIFFERS", "agrees"]
    assert chapter.page.checks == [("it holds", False)]


def test_the_readme_says_how_long_each_takes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    said = {}
    for row in re.findall(r"^\| .*`.*\|$", text.partition("## The book")[2].partition("\n## ")[0], re.M):
        names, minutes = re.findall(r"`(\w+)\.py`", row), row.strip("| ").rpartition("|")[2].split(",")
        said |= zip(names, map(int, minutes), strict=True)
    found = {path.stem: recap.minutes(path) for path in CHAPTERS.glob("*.py")}
    assert said.keys() == found.keys()
    assert [name for name, minutes in said.items() if abs(minutes - found[name]) > 5] == []
