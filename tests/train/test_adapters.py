"""A run with low-rank adapters: on another mesh, resumed, exported and loaded, it is one run, and its weights stay."""

from pathlib import Path

import pytest
import torch
from runs import SMALL, losses, records, refusal, train, write_model, write_text

from scaling import tree
from scaling.configs import get
from scaling.mesh import Mesh
from scaling.models import adapters, hf, transformer
from scaling.models.leaves import specs_of
from scaling.train import dcp
from scaling.train.export import params_of_run
from scaling.train.record import read_record

LORA = f"{SMALL.replace('model.toml', 'hf')} --data text.txt --dtype fp64 --lora 2 --lora-on W_Q,W_in --lr 0.05"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A text and a model's folder in the working folder."""
    monkeypatch.chdir(tmp_path)
    write_model()
    write_text(500)
    hf.save("hf", get("model.toml"), transformer.init(get("model.toml"), 0, torch.float64))


@pytest.mark.parametrize(
    ("kind", "peak"),
    {
        "--model model.toml": 1e-3, "--model hf --from-scratch": 1e-3, "--model hf": 2e-5, "--model hf --lora 2": 1e-4,
        "--model hf --lora 2 --lr 0.5": 0.5,
    }.items(),
)  # fmt: skip
def test_the_learning_rate_follows_from_what_is_trained(folder, capsys, kind, peak):
    how = "--data text.txt --batch 4 --seq 8 --eval-batches 1 --schedule constant --warmup 0"
    assert train(f"{kind} {how} --steps 1 --out run") == 0
    assert f"peak learning rate {peak:g}," in " ".join(capsys.readouterr().out.split())
    assert train("--resume --steps 2 --out run") == 0  # with the rate that its options name, as those of before do
    assert [record["lr"] for record in records("run")] == pytest.approx([peak] * 2)
    assert f"lr = {peak}\n" in Path("run/run.toml").read_text()
    assert read_record(Path("run"), 2)["options"]["lr"] == peak


@pytest.mark.slow
def test_a_run_with_adapters_is_one_run_on_any_mesh(folder, capsys):
    assert train(f"{LORA} --steps 6 --out whole --save-every 3") == 0
    assert "params, 160 of adapters trained (rank 2 on W_Q, W_in)" in capsys.readouterr().out
    assert train(f"{LORA} --steps 3 --out parts --mesh X=2") == 0
    assert train("--resume --steps 6 --out parts --mesh Y=2") == 0
    assert losses("parts") == pytest.approx(losses("whole"), rel=1e-12)
    saved = dcp.saved_leaves(Path("whole/step-000006"))
    assert {name.split(".")[1] for name in saved if name.startswith("params.")} == {"lora"}
    for where in ("merged", "adapter --adapters"):
        assert train(f"export whole --out {where}") == 0
    config, base = hf.load("hf")
    lora, own = adapters.load("adapter", config)
    merged = hf.load("merged")[1]
    wanted = {
        name: base["layers"][name] + 8 * torch.einsum("ldr,lr...->ld...", *own["layers"][name].values())
        for name in ("W_Q", "W_in")
    }
    assert lora.scale == 8
    torch.testing.assert_close(merged, base | {"layers": base["layers"] | wanted}, rtol=1e-12, atol=1e-12)
    loaded = params_of_run(Path("parts"), config, specs_of(config), Mesh({"X": 1}))
    torch.testing.assert_close(loaded, merged, rtol=1e-9, atol=1e-9)
    assert train(f"{LORA} --steps 1 --lora-from adapter --lora 7 --lr 0 --out more") == 0
    assert "rank 2 on W_Q, W_in" in capsys.readouterr().out
    assert tree.leaves(own)[1].abs().max() > 0
    after = adapters.load("adapter", config)[1]
    assert train("export more --out again --adapters") == 0
    torch.testing.assert_close(adapters.load("again", config)[1], after, rtol=0, atol=0)


@pytest.mark.slow
def test_a_run_with_adapters_refuses_other_weights_and_adapters(folder, capsys):
    assert train(f"{LORA} --steps 1 --out run") == 0
    assert "--lora 2, not 3" in refusal(capsys, "--resume --steps 2 --lora 3 --out run")
    assert "--lora-on W_Q,W_in, not W_Q" in refusal(capsys, "--resume --steps 2 --lora-on W_Q --out run")
    hf.save("hf", get("model.toml"), transformer.init(get("model.toml"), 1, torch.float64))
    assert "another base model" in refusal(capsys, "--resume --steps 2 --out run")
    assert "belong to other weights" in refusal(capsys, "export run --out merged")


WRONG = {
    "--lora 2 --lora-on W_X": "no adapter is computed for W_X",
    "--lora 2 --optimizer muon": "give --optimizer adamw",
    "--lora 2 --zero 1": "not beside weights that X replicates",
    "--lora-from nowhere": "has no adapter_config.json",
}


def test_adapters_that_cannot_be_trained_are_refused(folder, capsys):
    for flags, words in WRONG.items():
        assert words in refusal(capsys, f"--model model.toml --data text.txt --out run {flags}"), flags
        assert not Path("run/run.toml").exists(), flags


def test_dry_run_counts_the_state_of_adapters_alone(folder, capsys):
    assert train(f"{LORA} --dry-run") == 0
    rows = dict(line.rsplit("  ", 1) for line in capsys.readouterr().out.splitlines() if line.endswith(" bytes"))
    held = {name.strip(): int(value.split()[0].replace(",", "")) for name, value in rows.items()}
    whole = sum(W.numel() for W in tree.leaves(hf.load("hf")[1]))
    assert held["params"] == 8 * (whole + 160)
    assert held["optimizer's state"] == 8 * (2 * 160 + 1)
