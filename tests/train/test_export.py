"""A run's params as a Hugging Face folder, by one process and by several, from a run on another mesh."""

import pytest
import torch

from scaling import tree
from scaling.models import hf
from scaling.train.__main__ import main

pytest.importorskip("safetensors")


@pytest.fixture
def run(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of {i * i % 97}\n" for i in range(500)))
    command = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), "--batch", "2", "--seq", "32"]
    assert main([*command, "--steps", "2", "--mesh", "X=2"]) == 0
    return tmp_path / "run"


@pytest.mark.slow
def test_it_is_opened_again_and_trained_on(run, tmp_path, capsys):
    for name, mesh in (("one", "X=1"), ("two", "Z=2")):
        assert main(["export", str(run), "--out", str(tmp_path / name), "--mesh", mesh]) == 0
    assert f"step 2: {tmp_path / 'two'}" in capsys.readouterr().out
    config, params = hf.load(tmp_path / "one")
    assert (config.L, config.V) == (4, 256)
    again = hf.load(tmp_path / "two")[1]
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(again), strict=True))
    more = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "more"), "--batch", "2", "--seq", "32"]
    assert main([*more, "--steps", "1", "--model", str(tmp_path / "one")]) == 0
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "no")]) == 1
    assert "run.toml" in capsys.readouterr().err
