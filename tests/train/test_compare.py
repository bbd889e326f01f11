"""`python -m scaling.train compare`: the first step and leaf at which two runs part."""

from dataclasses import replace

import pytest
import torch
from runs import write_text

from scaling.configs import get
from scaling.mesh import Mesh
from scaling.train import checkpoint, dcp
from scaling.train.command import main
from scaling.train.loop import run
from scaling.train.settings import Settings


@pytest.fixture
def runs(tmp_path):
    text = write_text(tmp_path, 500)
    config, found = get("tiny").with_(L=1, D=16, F=32, H=8, N=2, K=2), []
    for name in ("a", "b"):
        (out := tmp_path / name).mkdir()
        settings = Settings(config, text, str(out), 2, 16, steps=4, save_every=2, norms=True)
        run(Mesh({"X": 1}), settings)
        (out / "run.toml").write_text(f'out = "{out}"\n')
        found.append((out, settings))
    return found


@pytest.mark.slow
def test_runs_that_are_alike_and_where_they_part(runs, capsys):
    (a, settings), (b, _) = runs
    capsys.readouterr()
    assert main(["compare", str(a), str(b)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    (b / "metrics.jsonl").unlink()
    (b / "norms.jsonl").unlink()
    run(Mesh({"X": 1}), replace(settings, out=str(b), lr=settings.lr * 2))
    (a / "run.toml").write_text('lr = 1\nseq = 16\nprofile = ""\nsave_every = 5\n[mesh]\nX = 2\n')
    (b / "run.toml").write_text('lr = 2\nseq = 16\nprofile = "p"\n[mesh]\nX = 2\n')
    capsys.readouterr()
    assert main(["compare", str(a), str(b)]) == 1
    option, losses, norms, saved = capsys.readouterr().out.splitlines()
    assert option == "option lr: 1 and 2"
    assert losses.startswith("step 2: loss ")
    assert norms.startswith('step 2: the gradient of params["embed"]: norms')
    assert saved.startswith("checkpoint of step 2: params.embed: ")
    assert main(["compare", str(a), str(b), "--tolerance", "10"]) == 0


@pytest.mark.slow
def test_one_leaf_alone_is_found(runs, capsys):
    (a, _), (b, _) = runs
    saved = dcp.saved_leaves(b / "step-000004")["params.layers.W_Q"]
    file = b / "step-000004" / saved.blocks[0].file
    held = torch.load(file, weights_only=True)
    held[0, 3, 1, 2] += 1
    with file.open("wb") as out:
        torch.save(held, out)
    capsys.readouterr()
    assert main(["compare", str(a), str(b)]) == 1
    wanted = "checkpoint of step 4: params.layers.W_Q: 1 of 256 elements differ, by up to 1\n"
    assert capsys.readouterr().out == wanted
    assert checkpoint.complete(b) == [2, 4]
    assert main(["compare", str(a), str(a.parent)]) == 2
    assert "is not a run of scaling.train" in " ".join(capsys.readouterr().err.split())
