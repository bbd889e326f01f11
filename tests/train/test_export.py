"""A run's params as a Hugging Face folder, by one process and by several, from a run on another mesh."""

import json

import pytest
import torch
from runs import options, write_text

from scaling import tree
from scaling.models import hf
from scaling.train.command import main

pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    write_text(folder, 500)
    assert main(options(folder, "run", "--batch", "2", "--seq", "32", "--steps", "2", "--mesh", "X=2")) == 0
    return folder / "run"


@pytest.mark.slow
def test_it_is_opened_again_and_trained_on(run, tmp_path, capsys):
    for name, mesh in (("one", "X=1"), ("two", "Z=2")):
        assert main(["export", str(run), "--out", str(tmp_path / name), "--mesh", mesh]) == 0
    assert f"step 2: {tmp_path / 'two'}" in capsys.readouterr().out
    config, params = hf.load(tmp_path / "one")
    assert (config.L, config.V) == (4, 256)
    again = hf.load(tmp_path / "two")[1]
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(again), strict=True))
    more = ["--data", str(run.parent / "text.txt"), "--out", str(tmp_path / "more"), "--batch", "2", "--seq", "32"]
    assert main([*more, "--steps", "1", "--model", str(tmp_path / "one")]) == 0
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "no")]) == 1
    assert "run.toml" in capsys.readouterr().err


@pytest.mark.slow
def test_its_tokenizer_goes_with_it(run, tmp_path):
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    vocab = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(256))
    tokenizers = pytest.importorskip("tokenizers")
    by, text = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")), " a\tb\n\nÄ€😀\x7f  "
    assert by.encode(text).ids == list(text.encode())
    assert by.decode(list(text.encode())) == text
