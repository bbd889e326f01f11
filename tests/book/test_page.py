"""The page that chapters write on: options, verdicts, the end."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from machine import be_rank
from refused import named

from scaling.book.answers import Answer
from scaling.book.page import Page


def page(monkeypatch, *argv, **options) -> Page:
    monkeypatch.setattr("sys.argv", ["chapter.py", *argv])
    return Page("Part 1, A Title: what it shows.\nhttps://example.org\n\nMore words.", **options)


def refused(monkeypatch, capsys, *argv, **options) -> str:
    """What a page with these options says before it ends: on stderr alone, its lines, none too long, as one."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        page(monkeypatch, *argv, **options)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(len(line) <= 100 for line in printed.err.splitlines())
    return " ".join(printed.err.split())


def test_a_chapter_has_the_options_that_it_names(monkeypatch, capsys):
    assert vars(page(monkeypatch, "--small").args) == {"small": True}
    args = page(monkeypatch, "--mesh", "Y=2", "--largest", "7", mesh="X=2,Y=4", plot=True, largest=(3, "bytes")).args
    assert (args.mesh, args.largest, args.plot) == ({"X": 1, "Y": 2}, 7, None)
    assert page(monkeypatch, "--mesh", "Z=2", mesh="X=2,Y=4", axes="PZ").args.mesh == {"X": 1, "Y": 1, "Z": 2}
    assert REFUSED["--device tpu"] in refused(monkeypatch, capsys, "--device", "tpu", device=True)  # without a mesh too
    lazy = page(monkeypatch)
    assert capsys.readouterr().out == ""  # what the chapter refuses comes first
    lazy.say("words")
    assert capsys.readouterr().out.startswith("Part 1, A Title")


# what is given: what is said
REFUSED = named("""
options                         words of its error
--steps 3                       unrecognized arguments
--plot a.doc                    ends in .png or .svg
--plot nowhere/a.png            cannot write nowhere/a.png: there is no folder nowhere
--mesh X=2,Q=2                  --mesh X=2,Q=2: Q is no axis of this chapter; fix: name X, Y
--mesh X=3
    --mesh X=3,Y=1: W[D_X, F]: dim D of size 32 does not divide into 3 blocks (X=3); fix: MESH
--batch 7                       dim B of size 7 does not divide into 8 blocks (X=4 * Y=2); fix: --batch 256
--mesh X=99999999               --mesh X=99999999,Y=1: 99999999 ranks, of at most 256 on one machine; fix: MESH
--mesh X=2,X=2                  error: --mesh X=2,X=2: axis X is given twice; fix: MESH
--mesh X=0                      error: --mesh X=0: mesh axis X has size 0; fix: MESH
--mesh X                        error: --mesh X: cannot read 'X'; fix: MESH
--device tpu                    must be cpu, or cuda
--device cuda                   torch finds no GPU here
--text nowhere                  nowhere: no such file; fix: leave it out
--text README.md --batch 30000  of 60,000 that it takes; fix: leave it out
""")


@pytest.mark.parametrize("argv", REFUSED)
def test_impossible_options_are_refused_with_the_right_fix(monkeypatch, capsys, argv):
    if argv == "--device cuda" and torch.cuda.is_available():
        pytest.skip("of machines without a GPU")
    monkeypatch.chdir(Path(__file__).parents[2])
    options = {"mesh": "X=4,Y=2", "batch": (256, "rows"), "text": ("", "file"), "plot": True, "device": True}
    options["fits"] = (("W[D_X, F]", "Tokens[B_XY]"), {"D": 32, "F": 64})
    page(monkeypatch, "--mesh", "X=2", "--batch", "6", "--text", "README.md", **options)
    said = refused(monkeypatch, capsys, *argv.split(), **options)
    assert REFUSED[argv].replace("MESH", "--mesh X=4,Y=2") in said


def test_the_mesh_fits_the_ranks_of_torchrun_or_the_fix_is_another_number_of_them(monkeypatch, capsys):
    be_rank(monkeypatch, size=6)
    assert page(monkeypatch, mesh="X=4,Y=2").args.mesh == {"X": 3, "Y": 2}
    said = refused(monkeypatch, capsys, "--mesh", "X=8", mesh="X=4")
    assert "X=8 is a mesh of 8, and torchrun started 6 ranks; fix: torchrun --nproc-per-node 8, or another" in said
    be_rank(monkeypatch, size=3)
    said = refused(monkeypatch, capsys, mesh="X=4", fits=(["W[D_X]"], {"D": 32}))
    assert "does not divide into 3 blocks (X=3); fix: torchrun --nproc-per-node 4" in said


@pytest.mark.parametrize("argv", [["--help"], ["--steps", "3"], ["--mesh", "Q=1"]])
def test_only_rank_0_prints(monkeypatch, capsys, argv):
    be_rank(monkeypatch, 1, 2)
    page(monkeypatch).say("words")
    with pytest.raises(SystemExit):
        page(monkeypatch, *argv, mesh="X=1")
    assert capsys.readouterr() == ("", "")


def test_the_end_says_what_held(monkeypatch, capsys):
    good = page(monkeypatch)
    good.answers([Answer("a", "1.0", 1.0), Answer("b", "", 2.0, note="n")])
    good.answers([Answer("in a table", "1.0", 1.0), Answer("c", "", 3.0, note="n")], agreeing=False)
    assert good.check("equal", True) == "yes"
    good.equal([("Out", 1e-15, 1e-12)])
    good.same([("bytes", "2BD", 12, 12.0)], ["what", "formula", "value", "counted"])
    good.end()
    printed = capsys.readouterr().out
    assert "What held: 2 agrees, 2 ours, 3 checks: all hold" in printed
    assert "1 of 2 numbers agree with the book's." in printed
    assert ("in a table" in printed, "\nc " in printed) == (False, True)

    bad = page(monkeypatch)
    bad.answers([Answer("a", "1.0", 2.0)])
    assert bad.check("equal", False) == "NO"
    bad.equal([("Out", 1e-9, 1e-12), ("dIn", float("nan"), 1e-12)])
    bad.same([("bytes", "2BD", 12, 13)], ["what", "formula", "value", "counted"])
    assert bad.failures == ["a", "equal", "Out", "dIn", "bytes"]
    with pytest.raises(SystemExit, match="1"):
        bad.end()
    bad.first = False
    be_rank(monkeypatch, 3, 4)
    with pytest.raises(SystemExit, match="rank 3: 5 FAILED: a, equal, Out, dIn, bytes"):
        bad.end()
    monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
    with pytest.raises(AssertionError, match="5 FAILED"):
        bad.end()


def test_in_a_notebook_tables_are_html_and_what_is_printed_elsewhere_is_their_plain_text(monkeypatch, capsys):
    shown = []
    display = SimpleNamespace(display=lambda bundle, raw: shown.append(bundle))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display, __spec__="found"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    one = page(monkeypatch)
    one.open()
    capsys.readouterr()
    printed = []
    for is_notebook in (False, True):
        if is_notebook:
            monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
        one.title("Bytes & times")
        one.table([("W<1>", 2048, 0.5)], ["leaf", "bytes", "s"])
        one.answers([Answer("params", "13e9", 13.9e9, erratum="counted")])
        one.say("x < 1 holds.")
        printed.append(capsys.readouterr().out)
    title, table, answers, said = shown
    assert printed == ["".join(each["text/plain"] + "\n" for each in shown), ""]
    assert "Bytes &amp; times" in title["text/html"]
    assert "<td>W&lt;1&gt;</td><td style=text-align:right>2,048</td>" in table["text/html"]
    assert "<em>counted</em>" in answers["text/html"]
    assert said["text/html"] == "<p>x &lt; 1 holds.</p>"
    one.say("set  out by spaces\n")
    assert (len(shown), capsys.readouterr().out) == (4, "set  out by spaces\n\n")


@pytest.mark.slow
def test_pictures(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    one = page(monkeypatch, "--plot", str(tmp_path / "one.svg"), plot=True)
    one.chart("a", {"line": [(1, 1), (2, 2)]}, "x", "y", "title")
    one.end()
    two = page(monkeypatch, "--plot", str(tmp_path / "two.png"), plot=True)
    for name in "ab":
        two.chart(name, {"line": [(1, 1), (2, 2)]}, log=False)
    two.end()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.svg", "two-a.png", "two-b.png"]
    assert capsys.readouterr().out.count("wrote ") == 3


def test_where_ranks_cannot_be_forked_the_script_starts_again_under_torchrun(monkeypatch):
    begun = []
    monkeypatch.setattr("scaling.launch.ranks.can_fork", lambda device: False)
    monkeypatch.setattr("os.execve", lambda *call: begun.append(call))
    page(monkeypatch, "--small", mesh="X=2,Y=2")
    ((_, command, environment),) = begun
    assert " ".join(command[1:]) == "-m torch.distributed.run --standalone --nproc-per-node 4 chapter.py --small"
    assert "OMP_NUM_THREADS" in environment
