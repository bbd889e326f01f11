"""`python -m scaling.train`: the same data on every mesh, resumed on another, stopped and gone on; clear refusals. On
fewer devices P is halved, then X, never another axis; the global batch stays, by more microbatches. Asked for by -m
sweep: real runs that are killed while they save, or lose a node."""

import contextlib
import fcntl
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from machine import Forked, RankFailed, be_rank
from runs import ONE, TINY, records, refusal, train, write_text
from torch.distributed.run import get_args_parser
from torch.utils._python_dispatch import TorchDispatchMode

from scaling import launch, tree
from scaling.configs import get
from scaling.cost import transformer as tm
from scaling.spec.sizes import parse_mesh
from scaling.train import checkpoint, command, evaluate, guards, loop
from scaling.train.command import fits_as_before, loss_note, shrink_mesh, with_more_microbatches
from scaling.train.counting import count
from scaling.train.loop import run
from scaling.train.progress import Progress
from scaling.train.settings import Settings, optimizer_of, rate


def settings(name, **options):
    """Of a run of four steps in a folder of this name. V does not divide over Y."""
    Path(name).mkdir(exist_ok=True)
    given: dict = {"steps": 4, "warmup": 2} | options
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


def run_on_other_data(mesh, settings, differs):
    """On rank 1 the file has another byte, or the tokens that are read from it differ."""
    real, text = loop.open_batches, Path(settings.data).parent / f"{mesh.rank}" / "text.txt"
    text.parent.mkdir()
    text.write_bytes(Path(settings.data).read_bytes() + bytes([mesh.rank if differs == "file" else 0]))

    def inputs(*given):
        train, valid = real(*given)
        (source,) = train.sources
        corpus = replace(source.corpus, parts=(source.corpus.parts[0] ^ mesh.rank,))
        return replace(train, sources=(replace(source, corpus=corpus),)), valid

    with mock.patch.object(loop, "open_batches", inputs if differs == "tokens" else real):
        loop.run(mesh, replace(settings, data=str(text)))


@pytest.mark.parametrize(("differs", "leaf"), [("file", "options and data"), ("tokens", "first rows")])
def test_ranks_that_read_other_data_are_named_though_each_reads_its_own_rows(ranks, differs, leaf):
    with pytest.raises(RankFailed, match=rf'step 1: state\["{leaf}"\].* over X, but rank 1 of 2 has other values'):
        ranks(run_on_other_data, {"X": 2}, settings("run"), differs)


def test_jumps_of_the_loss_and_slow_ranks_are_told_and_replicas_compared(monkeypatch, capsys):
    """The latter two every ten steps; nothing else is told."""
    real, compared = loop.make_step, []

    def with_a_wrong_batch(step, params, state, batch, **options):
        targets = torch.full_like(batch[1], 255) if int(state["step"]) == 24 else batch[1]
        return step(params, state, (batch[0], targets, batch[2]), **options)

    monkeypatch.setattr(loop, "make_step", lambda *given: partial(with_a_wrong_batch, real(*given)))
    monkeypatch.setattr(guards, "check_replicas", lambda state, specs, mesh, step: compared.append(step))
    monkeypatch.setattr(guards, "slow_ranks", lambda work, seconds, mesh, step: [f"slow at {step}"] * (step == 21))
    run(ONE, settings("run", steps=26, lr=5e-3, guard_every=10, eval_every=0, eval_batches=1))
    slow, jump = capsys.readouterr().err.splitlines()
    assert "slow at 21" in slow
    assert "step 25: the loss jumped" in jump
    run(ONE, settings("unguarded", guard_every=0, eval_every=0, eval_batches=1))
    assert compared == [1, 11, 21]


class HostReads(TorchDispatchMode):
    """Counts the values that the host reads: on a GPU it would wait for each."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal", "bincount")
        return func(*args, **(kwargs or {}))


def test_steps_ahead_of_the_reads_learn_the_same_and_stop_at_what_is_not_finite(monkeypatch):
    """As on a GPU, whose queue must not run empty: such a step reads nothing on the host."""
    reads, real = [], loop.make_step

    def counted(step, *given, **options):
        with HostReads() as mode:
            found = step(*given, **options)
        reads.append(mode.count)
        return found

    monkeypatch.setattr(loop, "make_step", lambda *given: partial(counted, real(*given)))
    how = {"steps": 7, "eval_every": 3, "save_every": 5, "norms": True, "eval_batches": 1}
    run(ONE, settings("read", **how))
    assert min(reads) > 1
    monkeypatch.setattr(loop, "AHEAD", {"cpu": 1})
    reads.clear()
    run(ONE, settings("ahead", **how))
    assert reads == [1] * 7  # the learning rate, which a CPU alone checks
    names = ("step", "loss", "grad_norm", "lr", "valid")
    read, ahead = ([[record.get(name) for name in names] for record in records(out)] for out in ("read", "ahead"))
    assert ahead == read
    assert records("ahead", "norms.jsonl") == records("read", "norms.jsonl")
    with pytest.raises(ArithmeticError, match=r"step 2: .*not finite: grads\["):
        run(ONE, settings("broken", steps=9, lr=1e30, warmup=0, save_every=1, guard_every=0))
    assert [record["step"] for record in records("broken")] == [1]
    assert 2 not in checkpoint.complete_steps(Path("broken"))
    Path("ahead/stop").touch()
    assert run(ONE, settings("ahead", **how | {"steps": 20, "resume": True}))["step"] == 9
    assert checkpoint.complete_steps(Path("ahead"))[-1] == 9
    assert "valid" not in records("ahead")[-1]  # at step 9 an evaluation is due


def test_stopped_in_an_evaluation_it_saves_without_the_rest_of_it_or_a_sample(monkeypatch):
    """torchrun waits for so long as the docs' script for Slurm says, and no longer."""
    real, batches = evaluate.transformer.loss, []

    def stopping(*given, **options):
        batches.append(Path("run/stop").touch())
        return real(*given)

    monkeypatch.setattr(evaluate.transformer, "loss", stopping)
    monkeypatch.setattr(loop, "continuation", None)  # which cannot be called
    assert run(ONE, settings("run", eval_every=2, eval_batches=0, sample="line"))["step"] == 2
    assert (len(batches), checkpoint.complete_steps(Path("run"))) == (1, [2])
    assert [record.get("valid") for record in records("run")] == [None, None]
    page = (Path(__file__).parents[2] / "docs" / "from-laptop-to-cluster.md").read_text()
    _, script = page.split("srun torchrun ")
    asked = get_args_parser().parse_args(shlex.split(script.partition("```")[0].replace("\\\n", "")))
    assert (asked.shutdown_timeout, "--signal=TERM@120" in page) == (110, True)


def test_learning_rates_and_that_only_matrices_decay():
    wanted = {
        ("constant", 0.5): {0: 0.1, 9: 1, 50: 1}, ("cosine", None): {10: 1, 55: 0.55, 145: 0.1},
        ("cosine", 0.0): {10: 1, 55: 0.5, 145: 0},
        ("wsd", None): {50: 1, 95: 0.5, 145: 0}, ("wsd", 0.2): {50: 1, 95: 0.6, 145: 0.2},
    }  # fmt: skip
    for (schedule, least), rates in wanted.items():
        how = {"warmup": 10, "lr": 1.0, "schedule": schedule, "min_lr": least}
        at = rate(Settings(get("tiny"), "", "", steps=100, **how))
        assert {count: at(torch.tensor(count)).item() for count in rates} == pytest.approx(rates)
        longer = rate(Settings(get("tiny"), "", "", steps=300, decay_steps=100, **how))
        assert [longer(torch.tensor(count)) for count in (50, 145)] == [at(torch.tensor(count)) for count in (50, 145)]
    params = {
        "b_unembed": torch.ones(2),
        "embed": torch.ones(2, 2),
        "layers": {"W_Q": torch.ones(2, 2), "norm_attn": torch.ones(2)},
    }
    rule = optimizer_of(Settings(get("tiny"), "", "", lr=0.1, warmup=0, schedule="constant", weight_decay=0.5))
    new, _ = rule.update(tree.map(torch.zeros_like, params), rule.init(params), params)
    assert [leaf.unique().item() for leaf in tree.leaves(new)] == pytest.approx([1, 1, 0.95, 1])


SMALL = "--data text.txt --out run --batch 4 --seq 32 --eval-every 0"


@pytest.mark.slow
def test_stopped_it_saves_and_can_go_on(capsys):
    """As a user: Ctrl-C on the command, then --resume with its options, or a few others. Another length of sequences,
    or nothing left to do, is refused."""
    write_text(500)
    process = Forked(lambda: sys.exit(train(f"{SMALL} --mesh X=2 --steps 2000")))
    for line in process.stdout:
        if line.startswith("step") and "3/" in line:
            assert process.pid
            os.kill(process.pid, signal.SIGINT)
            break
    rest, _ = process.communicate(60)
    assert process.returncode == 0, rest
    assert "stopped at step" in rest
    assert "--resume goes on" in rest
    assert 3 <= (step := int(Path("run/latest").read_text())) < 200
    assert train(f"--out run --resume --mesh X=1 --batch 8 --steps {step + 1}") == 0
    assert f"{32 * (4 * step + 8):,} tokens seen" in capsys.readouterr().out
    assert int(Path("run/latest").read_text()) == step + 1
    assert f"fix: give --steps above {step + 1}" in refusal(capsys, "--out run --resume")
    assert "was begun with --seq 32" in refusal(capsys, f"--out run --resume --steps {step + 2} --seq 16")


@pytest.mark.parametrize(("more", "words"), [
    ("--data nowhere.txt", "nowhere.txt: no such file"),
    ("--mesh Q=2", "splits nothing of a Transformer"),
    ("--mesh Y=3", "KV heads over Y=3"),
    ("--seq 19999 --batch 1", "hold no sequence of 19999"),
    ("--out held", "another run writes here"),
    ("--batch 2", "fix: more ranks along X, or a smaller model: no batch fits"),
])  # fmt: skip
def test_refused_in_a_line(capsys, monkeypatch, more, words):
    monkeypatch.setattr(launch, "free_memory", lambda device, ranks: 1e5 if more == "--batch 2" else 1e12)
    write_text(500)
    Path("held").mkdir()
    with open("held/lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert words in refusal(capsys, f"--data text.txt {more}")


@pytest.mark.parametrize("on", ["W_Q,W_V", "W_Q,W_K,W_V,W_O,W_in,W_gate,W_out"])
def test_flops_with_adapters_are_less_by_what_the_step_does_not_compute(on):
    whole = Settings(get("tiny"), "", ".", batch=256, seq=64)
    adapted = replace(whole, lora=8, lora_on=on)
    counted = [count(each, {"X": 1}, backend="abstract").flops for each in (whole, adapted)]
    found = [Progress(each, ONE).flops for each in (whole, adapted)]
    assert counted[1] < 0.75 * counted[0]
    assert counted[0] - counted[1] == pytest.approx(found[0]["attention"] - found[1]["attention"], rel=0.02)
    assert 2 / 3 < found[1]["params"] / found[0]["params"] < 0.73


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
    progress.report(record)
    assert "step      3/200  loss 1.5000  norm 0.25  1,024 tokens/s  MFU 0.0%" in capsys.readouterr().out
    assert records(".") == [record]


@pytest.mark.parametrize(("mesh", "world", "left"), [
    ("P=2,X=4,Y=2", 8, "P=1,X=4,Y=2"), ("P=2,X=4,Y=2", 4, "P=1,X=2,Y=2"), ("Z=2,X=4,C=2", 8, "Z=2,X=2,C=2"),
    ("X=2,Y=4", 2, ""), ("X=3", 2, ""), ("X=2", 4, ""),
])  # fmt: skip
def test_what_gives(mesh, world, left, monkeypatch):
    before, sizes = Settings(TINY, "", "", batch=32, microbatches=2), parse_mesh(mesh)
    if not left:
        with pytest.raises(ValueError, match=f"does not fit {world} ranks"):
            shrink_mesh(sizes, world)
        return
    after = with_more_microbatches(before, sizes, found := shrink_mesh(sizes, world))
    assert found == parse_mesh(left)
    rows = [s.batch // s.microbatches // (m.get("P", 1) * m["X"]) for s, m in ((before, sizes), (after, found))]
    assert rows[0] == rows[1]  # of a microbatch on each rank
    assert after.batch == before.batch
    assert loss_note(before, after) == ""
    experts = replace(before, model=TINY.with_(E=4, k=2))
    for changed, words in ({"capacity": 1.25}, "capacity hold"), ({"aux_coef": 0.01}, "aux_coef hold"):
        given = replace(experts, model=experts.model.with_(**changed))
        fewer = with_more_microbatches(given, sizes, found)
        assert f"in place of 2: the experts' {words} for each" in loss_note(given, fewer)
        assert loss_note(given, given) == ""
        assert loss_note(replace(given, model=given.model.with_(balance_by="sequence")), fewer) == "" or "cap" in words
    assert not fits_as_before(sizes, found)  # the first start
    be_rank(monkeypatch, size=world, TORCHELASTIC_RESTART_COUNT="1")
    assert fits_as_before(sizes, found) == (found | {"P": 0} == sizes | {"P": 0})  # else memory is counted again


def test_restarts_on_fewer_ranks_keep_what_was_asked_for(monkeypatch):
    """run.toml, which each start reads, has the options as they were given: else each would share the batch again."""
    started = []
    trained = lambda settings, sizes, args, keep: keep() or started.append((settings, sizes))  # noqa: E731
    monkeypatch.setattr(command, "launch_training", trained)
    be_rank(monkeypatch, size=2, TORCHELASTIC_RESTART_COUNT="1")
    write_text(1)
    for more in ("--data text.txt --mesh P=2,X=2", "", ""):
        train(f"--resume {more}")
    assert [(settings.microbatches, sizes) for settings, sizes in started] == [(2, {"P": 1, "X": 2})] * 3
    assert "microbatches = 1\n" in Path("run/run.toml").read_text()


TRAIN = [sys.executable, "-m", "scaling.train"]
OPTIONS = "--data text.txt --seq 32 --eval-every 0"


@pytest.mark.slow
def test_a_run_shows_and_records_its_sample(monkeypatch, capsys):
    board = mock.MagicMock()
    monkeypatch.setattr(evaluate, "LENGTH", 4)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", mock.Mock(SummaryWriter=board))
    write_text(300)
    given = "--data text.txt --batch 2 --seq 16 --steps 2 --eval-batches 1 --sample 'a \"😀' --tensorboard board"
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    assert "fix: pip install 'scaling-book-torch[tensorboard]'" in refusal(capsys, given)
    monkeypatch.setitem(sys.modules, "tensorboard", board)
    assert train(given) == 0
    assert '    a "😀' in capsys.readouterr().out
    assert board.call_args.args == ("board",)
    written = {call.args[::2] for call in board.return_value.method_calls if call.args}
    assert written >= {("loss", 1), ("loss", 2), ("sample", 2), ("memory", 1)}
    assert train("--resume --steps 3") == 0  # with the options written back
    assert '    a "😀' in capsys.readouterr().out


@pytest.mark.sweep
def test_a_run_that_is_killed_while_it_saves_goes_on_with_the_same_losses():
    """-9 at random moments of a run that saves after every step."""
    write_text()
    out, log, draw, ran = Path("run"), Path("log"), random.Random(0), []
    same = [*TRAIN, *f"{OPTIONS} --batch 4 --mesh X=2 --schedule constant --guard-every 0".split()]
    for _ in range(10):
        before = max(checkpoint.complete_steps(out), default=0)
        more = ["--steps", "100000", "--save-every", "1", *["--resume"] * bool(before)]
        with log.open("w") as said:
            process = subprocess.Popen([*same, *more], stdout=said, stderr=said, start_new_session=True)
        while "\nstep " not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 1.5))
        finished = max(checkpoint.complete_steps(out), default=0)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert int(log.read_text().partition("\nstep ")[2].partition("/")[0]) == before + 1
        assert max(checkpoint.complete_steps(out), default=0) >= finished
        ran += [(each["step"], each["loss"]) for each in records(out) if each["step"] > before]
    subprocess.run([*same, *f"--out whole --save-every 0 --steps {max(ran)[0]}".split()], check=True)
    wanted = {each["step"]: each["loss"] for each in records("whole")}
    assert [(step, wanted[step]) for step, _ in ran] == ran


def node(port: int, run: str, log: str) -> subprocess.Popen:
    """An agent of torchrun and its four ranks, a process group of its own."""
    started = (
        "-m torch.distributed.run --nnodes 1:2 --nproc-per-node 4 --max-restarts 3 --monitor-interval 0.2 "
        f"--rdzv-id sweep --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf "
        f"last_call_timeout=2,keep_alive_interval=1 -m scaling.train --out two --mesh P=2,X=2,Y=2 --resume {run}"
    ).split()
    # A store that nodes share keeps the address of its first round, where nobody answers a node that comes later.
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(log, "w") as out:
        return subprocess.Popen([sys.executable, *started], stdout=out, stderr=out, start_new_session=True, env=env)


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have, by /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


@pytest.mark.sweep
@pytest.mark.parametrize("lost", ["node", "rank"])
def test_a_run_of_two_nodes_goes_on_when_one_is_lost(lost):
    """The losses are those of one device. Without its second node the run has half of P."""
    write_text()
    common = f"{OPTIONS} --batch 8 --warmup 5 --save-every 5 --guard-every 10 --steps 40"
    subprocess.run([*TRAIN, "--out", "one", *common.split()], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [node(port, common, "node-0.log")]
    try:
        while agents[0].poll() is None:  # until this node hosts the rendezvous
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.2)
        agents.append(node(port, common, "node-1.log"))
        deadline = time.monotonic() + 600
        while len(records("two")) < 8:
            assert time.monotonic() < deadline, "too late: see the logs beside it"
            assert any(agent.poll() is None for agent in agents), "all have ended: see the logs beside it"
            time.sleep(0.05)
        ranks = below(agents[1].pid)
        for pid in [agents[1].pid, *ranks] if lost == "node" else ranks[-1:]:
            os.kill(pid, signal.SIGKILL)
        agents[0].wait(300)
    finally:
        for pid in [pid for agent in agents for pid in (*below(agent.pid), agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in agents:
            agent.wait()
    losses = [[each["loss"] for each in records(name)] for name in ("two", "one")]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    if lost == "node":
        assert " on P=1, X=2, Y=2, " in Path("node-0.log").read_text()
