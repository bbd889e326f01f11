"""The page that chapters write on: options, verdicts, the end."""

import pytest
import torch

from scaling.book.answers import Answer
from scaling.book.page import Page

DOC = "Part 1, A Title: what it shows.\nhttps://example.org\n\nMore words."


def page(monkeypatch, *argv, **options) -> Page:
    monkeypatch.setattr("sys.argv", ["chapter.py", *argv])
    return Page(DOC, **options)


def test_a_chapter_has_the_options_that_it_names(monkeypatch, capsys):
    assert vars(page(monkeypatch, "--small").args) == {"small": True}
    args = page(monkeypatch, "--mesh", "Y=2", "--largest", "7", mesh="X=2,Y=4", plot=True, largest=(3, "bytes")).args
    assert (args.mesh, args.largest, args.plot) == ({"X": 1, "Y": 2}, 7, "")
    assert capsys.readouterr().out.startswith("Part 1, A Title")
    for argv, message in [
        (["--steps", "3"], "unrecognized arguments"),
        (["--mesh", "X"], "X"),
        (["--plot", "a.doc"], "ends in .png or .svg"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            page(monkeypatch, *argv, mesh="X=2,Y=4", plot=True)
        assert message in capsys.readouterr().err


def test_the_mesh_fits_the_ranks_of_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert page(monkeypatch, mesh="X=4,Y=2").args.mesh == {"X": 3, "Y": 2}


def test_only_rank_0_prints(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    page(monkeypatch).say("words")
    assert capsys.readouterr().out == ""


def test_what_held(monkeypatch, capsys):
    good = page(monkeypatch)
    good.answers([Answer("a", "1.0", 1.0), Answer("b", "", 2.0, note="n")])
    assert good.check("equal", True) == "yes"
    good.equal([("Out", 1e-15, 1e-12)])
    good.same([("bytes", "2BD", 12, 12.0)], ["what", "formula", "value", "counted"])
    good.end()
    assert "What held: 1 agrees, 1 ours, 3 checks: all hold" in capsys.readouterr().out

    bad = page(monkeypatch)
    bad.answers([Answer("a", "1.0", 2.0)])
    assert bad.check("equal", False) == "NO"
    bad.equal([("Out", 1e-9, 1e-12), ("dIn", float("nan"), 1e-12)])
    bad.same([("bytes", "2BD", 12, 13)], ["what", "formula", "value", "counted"])
    assert bad.failures == ["a", "equal", "Out", "dIn", "bytes"]
    with pytest.raises(SystemExit, match="1"):
        bad.end()
    monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
    with pytest.raises(AssertionError, match="5 FAILED"):
        bad.end()


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
    assert f"wrote {tmp_path / 'two-a.png'}" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_any_rank(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        page(monkeypatch, "--device", "cuda", mesh="X=2", device=True)
    assert "torch finds no GPU here" in capsys.readouterr().err


def test_where_ranks_cannot_be_forked_the_script_starts_again_under_torchrun(monkeypatch):
    begun = []
    monkeypatch.setattr("scaling.launch.ranks.can_fork", lambda device: False)
    monkeypatch.setattr("os.execve", lambda *call: begun.append(call))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    page(monkeypatch, "--small", mesh="X=2,Y=2")
    ((_, command, environment),) = begun
    assert command[1:] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        "chapter.py",
        "--small",
    ]
    assert "OMP_NUM_THREADS" in environment
