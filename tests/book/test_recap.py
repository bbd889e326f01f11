"""The recap: its numbers are the chapters' own, and one that differs fails it."""

import re
from pathlib import Path

import pytest
import running

from scaling.book import recap
from scaling.book.answers import VERDICTS

CHAPTERS = Path(running.CHAPTERS)


@pytest.mark.slow
def test_the_numbers_are_the_chapters_own(chapter):
    ran = running.run("11_recap", "--parts", "2")
    assert ran.code == 0
    own = [answer for name in ("02_networking", "02_tpus") for answer in chapter(name).page.given]
    assert [a.row for a in ran.names["ran"][0].answers + ran.names["ran"][1].answers] == [a.row for a in own]
    verdicts = [answer.verdict for answer in own]
    line = next(line.split() for line in ran.text.splitlines() if line.startswith("Part 2 "))
    assert line[2:] == [str(len(own)), *(str(verdicts.count(verdict)) for verdict in VERDICTS)]
    shown = [path for path in CHAPTERS.glob("*.py") if path.stem != "11_recap"]
    assert all(path.name in ran.text for path in shown)
    assert not [line for line in ran.text.splitlines() if len(line) > 80]


def test_what_differs_fails(tmp_path):
    wrong = tmp_path / "13_wrong.py"
    wrong.write_text(
        '"""Part 13, a chapter: https://example.org"""\n'
        "from scaling.book.answers import Answer\nfrom scaling.book.page import Page\n"
        'page = Page(__doc__)\npage.answers([Answer("pi", "3.14", 2.0), Answer("e", "2.72", 2.718)])\n'
        'page.check("it holds", False)\npage.end()\n'
    )
    chapter = recap.run_chapter(wrong)
    assert (chapter.part, chapter.shows, chapter.status) == (13, "a chapter", 1)
    assert dict(zip(VERDICTS, chapter.counts, strict=True)) == dict.fromkeys(VERDICTS, 0) | {"agrees": 1, "DIFFERS": 1}
    assert chapter.checks == (("it holds", False),)


def test_the_readme_says_how_long_each_takes():
    text = (CHAPTERS.parent / "README.md").read_text(encoding="utf-8")
    said = {}
    for row in re.findall(r"^\| .*`.*\|$", text.partition("## The book")[2].partition("\n## ")[0], re.M):
        names, minutes = re.findall(r"`(\w+)\.py`", row), row.strip("| ").rpartition("|")[2].split(",")
        said |= zip(names, map(int, minutes), strict=True)
    found = {path.stem: recap.minutes(path) for path in CHAPTERS.glob("*.py")}
    assert said.keys() == found.keys()
    assert [name for name, minutes in said.items() if abs(minutes - found[name]) > 5] == []
