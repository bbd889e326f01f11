"""Every chapter as a reader runs it: its answers, what it prints, its pictures, and what it proposes to try."""

import inspect
import math
import os
import re
import subprocess
import sys

import pytest
import running
from pinned import PINNED
from running import TRIED

from scaling.book import learning
from scaling.book.answers import Answer


def to_be_pinned(answer: Answer) -> bool:
    """Whether the book's number alone does not hold this answer in place."""
    return answer.verdict in ("ours", "erratum") or answer.rounded is not None


def nearly(value, rel: float):
    return value if isinstance(value, tuple | str) else pytest.approx(value, rel=rel)


@pytest.mark.chapter
@pytest.mark.parametrize("name", running.ON_A_PAGE)
def test_answers_and_what_is_printed(name):
    ran = running.chapter(name)
    page = ran.page
    assert (ran.status, page.failures) == (0, [])
    pinned = PINNED.get(name, {})
    got = {answer.question: answer.ours for answer in page.given if to_be_pinned(answer) or answer.question in pinned}
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
    assert TRIED.keys() == {*running.ALL}
    assert PINNED.keys() <= {*running.ON_A_PAGE}
    edited = {name: running.things_to_try(name)["old"] for name in running.ALL}
    assert [name for name, old in edited.items() if tried_in(name).count(old) != 1] == []


def test_the_loop_that_05_dp_shows_is_the_one_that_the_others_run():
    def body(text: str) -> str:
        return re.search(r"^def train\(.*?\n(?:    \"\"\".*?\"\"\"\n)?(.*?)\n\n\n", text, re.M | re.S)[1]

    assert body(running.source("05_dp")).replace("learning.", "") == body(inspect.getsource(learning))


def tried_in(name: str) -> str:
    """The text that the proposed edit is made in."""
    return running.without_training(running.source(name).rpartition("# %% [markdown]")[0])


@pytest.mark.sweep
@pytest.mark.parametrize("name", TRIED)
def test_things_to_try(name, monkeypatch, tmp_path):
    """Each proposal stands in the chapter's last cell; the edit is made in its text, the flag given."""
    after_edit, value, with_flag = TRIED[name]
    proposed = running.things_to_try(name)
    body = tried_in(name)
    found = eval(proposed["expression"], running.chapter(name).names)
    assert found == nearly(value, 1e-3)
    monkeypatch.chdir(tmp_path)
    edited = running.run(name, code=body.replace(proposed["old"], proposed["new"]))
    flagged = running.run(name, *proposed["flag"].split(), code=body)
    for ran, wanted in ((edited, after_edit), (flagged, with_flag)):
        printed = " ".join(ran.text.split())
        assert [words for words in wanted.split(" ... ") if words not in printed] == [], ran.text
    assert flagged.status == 0


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in running.ON_A_PAGE if "mesh=" in running.source(name)])
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
def test_what_a_chapter_refuses_comes_before_its_first_line(case, capsys):
    ran = running.run(*case)
    assert (ran.status, ran.text) == (2, "")
    assert REFUSED[case] in " ".join(capsys.readouterr().err.split())
