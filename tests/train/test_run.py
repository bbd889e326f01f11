"""`python -m scaling.train`: the same data on every mesh, resumed on another, stopped and gone on; clear refusals."""

import fcntl
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from machine import Forked
from runs import ONE, records, refusal, train, write_text

from scaling import tree
from scaling.configs import get
from scaling.cost import transformer as tm
from scaling.train import dry, guards, loop
from scaling.train.loop import run
from scaling.train.progress import Progress
from scaling.train.settings import Settings, optimizer_of, rate


def settings(name, **options):
    """Of a run of four steps in a folder of this name. V does not divide over Y."""
    Path(name).mkdir(exist_ok=True)
    given = {"steps": 4, "warmup": 2} | options
    return Settings(get("tiny").with_(L=1, V=257), write_text(500), str(Path(name).absolute()), 4, 32, **given)


def test_resumed_on_another_mesh_it_goes_on_as_if_nothing_had_been(ranks):
    run(ONE, settings("whole"))
    ranks(run, {"X": 2}, settings("parts", save_every=2, norms=True))
    Path("parts/step-000004/index.json").unlink()  # as if the run had been killed before it was through
    ranks(run, {"Y": 2}, settings("parts", resume=True, norms=True))
    for name in ("metrics.jsonl", "norms.jsonl"):  # of a step done again the last record alone
        assert [record["step"] for record in records("parts", name)] == [1, 2, 3, 4]
    losses = [[record["loss"] for record in records(out)] for out in ("parts", "whole")]
    torch.testing.assert_close(*losses, rtol=2e-5, atol=0)


def test_jumps_of_the_loss_and_slow_ranks_are_told_and_replicas_compared(monkeypatch, capsys):
    """The latter two every ten steps; nothing else is told."""
    real, compared = loop.make_step, []

    def make_step(*given):
        def with_a_wrong_batch(params, state, batch, donate):
            targets = torch.full_like(batch[1], 255) if int(state["step"]) == 24 else batch[1]
            return real(*given)(params, state, (batch[0], targets, batch[2]), donate)

        return with_a_wrong_batch

    monkeypatch.setattr(loop, "make_step", make_step)
    monkeypatch.setattr(guards, "check_replicas", lambda state, specs, mesh, step: compared.append(step))
    monkeypatch.setattr(guards, "slow_ranks", lambda work, seconds, mesh, step: [f"slow at {step}"] * (step == 21))
    run(ONE, settings("run", steps=26, lr=5e-3, guard_every=10, eval_every=0, eval_batches=1))
    slow, jump = capsys.readouterr().err.splitlines()
    assert "slow at 21" in slow
    assert "step 25: the loss jumped" in jump
    run(ONE, settings("unguarded", guard_every=0, eval_every=0, eval_batches=1))
    assert compared == [1, 11, 21]


def test_learning_rates():
    wanted = {"constant": {0: 0.1, 9: 1, 50: 1}, "cosine": {10: 1, 55: 0.55, 100: 0.1}, "wsd": {50: 1, 95: 0.5}}
    for schedule, rates in wanted.items():
        at = rate(Settings(get("tiny"), "", "", steps=100, warmup=10, lr=1.0, schedule=schedule))
        assert {count: at(torch.tensor(count)).item() for count in rates} == pytest.approx(rates)


def test_only_matrices_decay():
    params = {"embed": torch.ones(2, 2), "layers": {"W_Q": torch.ones(2, 2), "norm_attn": torch.ones(2)}}
    rule = optimizer_of(Settings(get("tiny"), "", "", lr=0.1, warmup=0, schedule="constant", weight_decay=0.5))
    new, _ = rule.update(tree.map(torch.zeros_like, params), rule.init(params), params)
    after = {where: leaf.unique().item() for where, leaf in tree.named_leaves(new, "").items()}
    assert after == pytest.approx({'["embed"]': 1, '["layers"]["W_Q"]': 0.95, '["layers"]["norm_attn"]': 1})


SMALL = "--data text.txt --out run --batch 4 --seq 32 --eval-every 0"


@pytest.mark.slow
def test_stopped_it_saves_and_can_go_on():
    """As a user: Ctrl-C on the command, then --resume."""
    write_text(500)
    process = Forked(lambda: sys.exit(train(f"{SMALL} --mesh X=2 --steps 2000")))
    for line in process.stdout:
        if line.startswith("step") and "3/" in line:
            os.kill(process.pid, signal.SIGINT)
            break
    rest, _ = process.communicate(60)
    assert process.returncode == 0, rest
    assert "stopped at step" in rest
    assert "--resume goes on" in rest
    step = int(Path("run/latest").read_text())
    assert 3 <= step < 200
    assert train(f"--out run --resume --mesh X=1 --steps {step + 1}") == 0  # its other options are those of the run
    assert int(Path("run/latest").read_text()) == step + 1


@pytest.mark.slow
def test_resumed_with_what_does_not_fit(capsys):
    """Another batch is fine, and counted rightly; another length of sequences, or nothing left to do, is refused."""
    write_text(500)
    assert train(f"{SMALL} --steps 2") == 0
    assert "256 tokens seen" in capsys.readouterr().out
    assert train("--out run --resume --batch 8 --steps 3") == 0
    assert "512 tokens seen" in capsys.readouterr().out
    assert "fix: give --steps above 3" in refusal(capsys, "--out run --resume")
    assert "was begun with --seq 32" in refusal(capsys, "--out run --resume --steps 9 --seq 16")


REFUSED = {  # what is given: what is said
    "--data nowhere.txt": "nowhere.txt: no such file",
    "--mesh Q=2": "splits nothing of a Transformer",
    "--mesh Y=3": "KV heads over Y=3",
    "--seq 19999 --batch 1": "hold no sequence of 19999",
    "--batch 2": "fix: more ranks along X, or a smaller model: no batch fits",
}


@pytest.mark.parametrize("more", REFUSED)
def test_refused_in_a_line(capsys, monkeypatch, more):
    monkeypatch.setattr(dry, "memory_of_rank", lambda device, ranks: 1e5 if more == "--batch 2" else 1e12)
    write_text(500)
    assert REFUSED[more] in refusal(capsys, f"--data text.txt {more}")


def test_two_runs_do_not_share_a_folder(capsys):
    write_text(500)
    Path("run").mkdir()
    with open("run/lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another run writes here" in refusal(capsys, "--data text.txt")


def test_flops_by_both_conventions_and_the_share_of_the_chip(capsys):
    config = get("tiny")
    progress = Progress(Settings(config, "", ".", batch=8, seq=64, dtype="bf16", chip="h100"), ONE)
    record = progress.record(3, 1.5, 0.25, 0.5, 0.1)
    assert record["flops_per_second"] == 6 * tm.num_params(config) * 8 * 64 / 0.5
    matmuls = tm.num_params(config) - config.D * config.V - (2 * config.L + 1) * config.D  # no look-up, no norms
    attention = 12 * config.L * config.N * config.H * 64
    assert record["flops_per_second_with_attention"] == (6 * matmuls + attention) * 8 * 64 / 0.5
    assert record["mfu"] == pytest.approx(record["flops_per_second"] / 990e12, rel=0.01)
    assert record["exposed"] == 0.2
    progress.say(record)
    assert "step      3/200  loss 1.5000  norm 0.25  1,024 tokens/s  MFU 0.0%" in capsys.readouterr().out
    assert records(".") == [record]
