import shutil
from pathlib import Path

import numpy
import pytest
from runs import SMALL, train, write_model, write_text


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test stands in an empty folder of its own. Ranks that are used again do not: they are given whole paths."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory):
    """A folder with a text and with two runs on it: "run" of two steps, and "whole" of four."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here := tmp_path_factory.mktemp("runs"))
        write_text(300)
        write_model()
        for out, steps in (("run", 2), ("whole", 4)):
            assert train(f"--data text.txt --out {out} {SMALL} --steps {steps} --save-every 1 --keep 9") == 0
        Path("short.txt").write_text("a few words")
        numpy.save("large.npy", numpy.arange(4000) % 300)
        numpy.save("negative.npy", numpy.arange(4000) % 40 - 1)
        write_model("other.toml", L=2)
    return here


@pytest.fixture
def begun(finished_runs, tmp_path):
    """Both runs, and their text, in the working folder."""
    shutil.copytree(finished_runs, tmp_path, dirs_exist_ok=True)
