"""Chapters as notebooks: in a kernel where jupytext and nbclient are installed, and cell by cell as a kernel would.

A kernel has no `__file__`, its own `sys.argv`, and shows what raises as an error, SystemExit included.
"""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import running

from scaling.book import notebook

ROOT = running.CHAPTERS.parent
KERNEL = all(importlib.util.find_spec(name) for name in ("jupytext", "nbclient", "ipykernel"))


@pytest.mark.skipif(
    not KERNEL, reason="needs jupytext, nbclient and ipykernel: pip install 'scaling-book-torch[notebook]'"
)
def test_runs_in_a_kernel(tmp_path):
    file = tmp_path / "chapter.ipynb"
    command = [sys.executable, "-m", "scaling.book.notebook", f"chapters/{running.NOTEBOOK}.py", "--out", file]
    options = {"capture_output": True, "text": True, "cwd": ROOT, "env": {**os.environ, "CHAPTER": "--small"}}
    run = subprocess.run(command, **options)
    assert (run.returncode, run.stderr) == (0, "")
    assert "all hold" in run.stdout
    assert file.stat().st_size > 10_000


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
    assert cells[0][0] == "markdown"
    assert "https://jax-ml.github.io/scaling-book/" in cells[0][1]
    assert cells[-1][0] == "markdown"
    assert sum(kind == "markdown" for kind, _ in cells) >= 4
    lines = [sum(bool(line.strip()) for line in text.splitlines()) for kind, text in cells if kind == "code"]
    assert max(lines) <= 40
    assert 80 <= len(running.source(name).splitlines()) <= 300


def test_every_table_has_a_sentence():
    """In the text above its cell, or beside the cell's mark."""
    bare = []
    for name in (*running.ON_A_PAGE, "11_recap"):
        found = running.marked_cells(name)
        for (_, before, above), (mark, kind, text) in itertools.pairwise(found):
            shows = kind == "code" and re.search(r"page\.(table|same|equal|answers|chart|timeline)\(", text)
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
    for kind, text in running.cells(running.NOTEBOOK):
        if kind == "code":
            exec(compile(text, "cell", "exec"), names)
    printed = capsys.readouterr().out
    assert "Automatically" not in printed
    assert printed.splitlines()[-1].startswith("What held")
