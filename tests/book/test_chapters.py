"""Every chapter as a reader runs it: its answers, what it prints, its pictures, and what it proposes to try; as a
notebook, in a kernel and cell by cell as one would, which has no `__file__`, its own `sys.argv`, and shows SystemExit
as an error; and the recap, whose numbers are the chapters' own."""

import importlib.util
import inspect
import itertools
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import running

from scaling.book import learning, notebook
from scaling.book.answers import VERDICTS


def nearly(value, rel: float):
    return value if isinstance(value, tuple | str) else pytest.approx(value, rel=rel)


@pytest.mark.chapter
@pytest.mark.parametrize("name", running.ON_A_PAGE)
def test_answers_and_what_is_printed(name):
    ran = running.chapter(name)
    page = ran.page
    assert (ran.status, page.failures) == (0, [])
    pinned = running.PINNED.get(name, {})
    got = {
        answer.question: answer.ours
        for answer in page.given  # the book's number alone does not hold the first ones in place
        if answer.verdict in ("ours", "erratum") or answer.rounded is not None or answer.question in pinned
    }
    assert got == {question: nearly(value, 1e-9) for question, value in pinned.items()}
    questions = [answer.question for answer in page.given]
    assert len(set(questions)) == len(questions), "rows are named so that they stand alone"
    lines = ran.text.splitlines()
    assert not [line for line in lines if len(line) > 80]
    assert lines[0].startswith(f"Part {int(name[:2])}")
    held = " ".join(ran.text.rpartition("\nWhat held: ")[2].split())  # as long as a line, or continued
    assert re.search(r": all hold \(\d[\d.]* s\)$", held)
    assert bool({"steps", "batch", "text"} & set(vars(ran.page.args))) == (name in running.TRAIN)


def test_every_chapter_proposes_things_to_try():
    assert running.TRIED.keys() == {*running.ALL}
    assert running.PINNED.keys() <= {*running.ON_A_PAGE}
    edited = {name: running.things_to_try(name)["old"] for name in running.ALL}
    assert [name for name, old in edited.items() if running.tried_in(name).count(old) != 1] == []


def test_the_loop_that_05_dp_shows_is_the_one_that_the_others_run():
    def body(text: str) -> str:
        return re.search(r"^def train\(.*?\n(?:    \"\"\".*?\"\"\"\n)?(.*?)\n\n\n", text, re.M | re.S)[1]

    assert body(running.source("05_dp")).replace("learning.", "") == body(inspect.getsource(learning))


@pytest.mark.sweep
@pytest.mark.parametrize("name", running.TRIED)
def test_things_to_try(name, monkeypatch, tmp_path):
    """Each proposal stands in the chapter's last cell; the edit is made in its text, the flag given."""
    tried = running.TRIED[name]
    proposed = running.things_to_try(name)
    body = running.tried_in(name)
    found = eval(proposed["expression"], running.chapter(name).names)
    assert found == nearly(eval(str(tried["question"])), 1e-3)
    monkeypatch.chdir(tmp_path)
    edited = running.run(name, code=body.replace(proposed["old"], proposed["new"]))
    flagged = running.run(name, *proposed["flag"].split(), code=body)
    for ran, wanted in ((edited, tried["edit"]), (flagged, tried["flag"])):
        printed = " ".join(ran.text.split())
        assert [words for words in wanted.split(" ... ") if words not in printed] == [], ran.text
    assert flagged.status == 0


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in running.ON_A_PAGE if 'mesh="' in running.source(name)])
def test_an_odd_mesh_is_run_or_refused(name, capfd):
    """Refused at once, in one line; what the line proposes then runs."""
    axis = re.search(r'mesh="(\w)=', running.source(name))[1]
    batch = [["--batch", "96"]] if "learning.OPTIONS" in running.source(name) else []
    for options in (["--mesh", f"{axis}=1"], *(["--mesh", f"{axis}=3", *more] for more in ([], *batch))):
        ran = running.run(name, *options)
        said = " ".join(capfd.readouterr().err.split())
        assert "Traceback" not in said, options
        assert ran.status in (0, 2), options
        if ran.status == 2:
            assert "---" not in ran.text, "some of the chapter ran before"
            option, value = re.search(r"fix: (--\w+) (\S+)", said).groups()
            assert running.run(name, *options, option, value).status == 0
            capfd.readouterr()


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["07_sharded_decode", "09_profiling"])
def test_under_torchrun_every_rank_ends_well(name):
    """What is checked is of rank 0, or holds on all."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command = [*torchrun, str(running.CHAPTERS / f"{name}.py"), "--small"]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.count("What held") == 1


@pytest.mark.chapter
def test_part_5_has_thresholds_of_each_chip_and_its_figures_cross_where_the_book_says():
    names, text = running.chapter("05_when_bound").names, running.chapter("05_when_bound").text
    links = {"v4p": (2.75e14, 9e10, 3, 6.25e9), "v5p": (4.59e14, 1.8e11, 3, 6.25e9),
             "v5e": (1.97e14, 9e10, 2, 3.125e9), "v6e": (9.2e14, 1.8e11, 2, 1.25e10)}  # fmt: skip
    for name, (flops, ici, axes, dcn) in links.items():
        alpha = flops / ici
        mixed = alpha**2 / ((axes - 1) * 28672)
        row = (alpha, alpha / axes, 28672 / alpha, mixed, 4 * mixed, flops / dcn)
        assert [name, str(axes), *(f"{x:,.0f}" for x in row)] in [line.split() for line in text.splitlines()]
    assert names["turns"] == {
        "4096 FSDP": pytest.approx(850 * 4096),
        "1024 x 4": pytest.approx(4096 * 2550 / 4 / 2),
        "512 x 8": pytest.approx(4096 * 2550 / 8 / 2),
        "256 x 16": math.inf,  # never
        "4096 TP": math.inf,
    }
    assert names["ratios"](850)["FSDP"] == pytest.approx(1)
    assert names["ratios"](2550**2 / 60_000)["FSDP+TP"] == pytest.approx(1)
    assert names["ratios"](100)["TP only"] == names["ratios"](1000)["TP only"]


REFUSED = {
    ("05_pp", "--only=x"): "choose one of naive",
    ("05_pp", "--microbatches=1000"): "not a whole number from 1 to 128",
    ("06_train_llama", "--mesh=Y=3"): "fix: ",
    ("11_recap", "--parts=13"): "fix: ",
}


@pytest.mark.chapter
@pytest.mark.parametrize("case", REFUSED, ids="".join)
def test_a_chapter_refuses_before_its_first_line(case, capsys):
    ran = running.run(*case)
    assert (ran.status, ran.text) == (2, "")
    assert REFUSED[case] in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("jupytext", "nbclient", "ipykernel")),
    reason="needs jupytext, nbclient and ipykernel: pip install 'scaling-book-torch[notebook]'",
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
    assert notebook.main([str(running.CHAPTERS / "01_roofline.py")]) == 0
    assert capsys.readouterr() == ("held\n", "UserWarning: old\n")


def test_a_file_that_is_not_a_script_is_refused_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(notebook, "execute", None)
    no_script, readme = "no such script", str(running.CHAPTERS.parent / "README.md")
    for options, words in {"no.py": no_script, readme: no_script, "a.py --out nowhere/x.ipynb": "no folder"}.items():
        with pytest.raises(SystemExit, match="2"):
            notebook.main(options.split())
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", running.ON_A_PAGE)
def test_cells(name):
    cells = running.cells(name)
    kinds = [kind for kind, *_ in cells]
    assert (kinds[0], kinds[-1]) == ("markdown", "markdown")
    assert "https://jax-ml.github.io/scaling-book/" in cells[0][-1]
    assert kinds.count("markdown") >= 4
    lines = [sum(bool(line.strip()) for line in text.splitlines()) for kind, _, text in cells if kind == "code"]
    assert max(lines) <= 40
    assert 80 <= sum(not line.startswith("# ") for line in running.source(name).splitlines()) <= 300


def test_no_line_of_a_sentence_begins_as_a_list_does():
    """Markdown reads a line that begins with a plus or a star as an item."""
    texts = [(name, text) for name in running.ALL for kind, _, text in running.cells(name) if kind == "markdown"]
    assert [name for name, text in texts if re.search(r"^(# )?[+*] ", text, re.MULTILINE)] == []


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
    for kind, _, text in running.cells("01_roofline"):
        if kind == "code":
            exec(compile(text, "cell", "exec"), names)
    printed = capsys.readouterr().out
    assert "Automatically" not in printed
    assert printed.splitlines()[-1].startswith("What held")


@pytest.mark.chapter
def test_the_recap_s_numbers_are_the_chapters_own():
    ran = running.run("11_recap", "--parts", "2")
    assert ran.status == 0
    own = [answer for name in ("02_networking", "02_tpus") for answer in running.chapter(name).page.given]
    assert [answer.row for answer in ran.page.given] == [answer.row for answer in own]
    verdicts = [answer.verdict for answer in own]
    line = next(line.split() for line in ran.text.splitlines() if line.startswith("Part 2 "))
    assert line[2:] == [str(len(own)), *(str(verdicts.count(verdict)) for verdict in VERDICTS)]
    assert all(f"{name}.py" in ran.text for name in running.ON_A_PAGE)
    assert not [line for line in ran.text.splitlines() if len(line) > 80]


def test_a_script_with_a_wrong_answer_fails(tmp_path):
    wrong = tmp_path / "13_wrong.py"
    wrong.write_text(
        '"""Part 13, a chapter: https://example.org"""\n'
        "from scaling.book.answers import Answer\nfrom scaling.book.page import Page\n"
        'page = Page(__doc__)\npage.answers([Answer("pi", "3.14", 2.0), Answer("e", "2.72", 2.718)])\n'
        'page.check("it holds", False)\npage.end()\n'
    )
    chapter = notebook.run_script(wrong)
    assert (notebook.part(wrong), notebook.shows(wrong), chapter.status) == (13, "a chapter", 1)
    assert [answer.verdict for answer in chapter.page.given] == ["DIFFERS", "agrees"]
    assert chapter.page.checks == [("it holds", False)]


def test_the_readme_says_how_long_each_takes():
    text = (running.CHAPTERS.parent / "README.md").read_text(encoding="utf-8")
    said = {}
    for row in re.findall(r"^\| .*`.*\|$", text.partition("## The book")[2].partition("\n## ")[0], re.M):
        names, minutes = re.findall(r"`(\w+)\.py`", row), row.strip("| ").rpartition("|")[2].split(",")
        said |= zip(names, map(int, minutes), strict=True)
    found = {path.stem: notebook.minutes(path) for path in running.CHAPTERS.glob("*.py")}
    assert said.keys() == found.keys()
    assert [name for name, minutes in said.items() if abs(minutes - found[name]) > 5] == []
