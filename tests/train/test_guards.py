"""Guards: what is planted is found and named; runs in which nothing is planted are left alone. `compare`: the first
step and leaf at which two runs part. The flight record: what each rank did last, also of one that was killed."""

import os
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from machine import on_ranks, once
from runs import ONE, TINY, records, refusal, train, write_text

from scaling import launch, tree
from scaling.collectives import all_gather, all_reduce, wait
from scaling.mesh import AbstractMesh
from scaling.strategies import expert, transformer
from scaling.trace import trace
from scaling.train import dcp, flight, guards
from scaling.train.loop import run
from scaling.train.settings import Settings, optimizer_of
from scaling.train.shard_file import ShardReader, write_blocks
from scaling.train.step import drawn_params, make_step

SMALL = Settings(TINY, "", "", 4, 16)


@pytest.mark.parametrize(("mesh", "leaf", "rank", "words"), [
    ({"X": 2, "Y": 2}, "norm_mlp", 3, r'step 7: params\["layers"\]\["norm_mlp"\].*over [XY]+, but rank 3 of 4'),
    ({"P": 2, "Y": 2}, "W_in", 2, r'params\["layers"\]\["W_in"\].*is replicated over P, but rank 2 of 4'),
    ({"X": 2}, "W_in", 1, ""),  # sharded: only this rank has it
])  # fmt: skip
def test_replicas_that_have_come_apart_are_named(mesh, leaf, rank, words):
    """On one rank one element is off by its last bit."""
    types, params = transformer.specs(TINY, mesh), drawn_params(SMALL, mesh)
    if mesh.rank == rank:
        flat = (params["layers"] | params)[leaf].view(-1)
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0))
    with pytest.raises(ArithmeticError, match=words) if words else nullcontext():
        guards.check_replicas(params, types, mesh, 7, "params")


def test_a_batch_on_the_cpu_is_looked_at_beside_a_state_on_another_device(monkeypatch):
    seen = []
    monkeypatch.setattr(guards, "gather_over_ranks", lambda x, mesh: seen.append(x.device.type) or torch.ones(1, 2))
    typed = [("t", torch.zeros(2), "t[B]"), ("W", torch.zeros(2, dtype=torch.int64, device="meta"), "W[D]")]
    assert guards.ranks_not_finite(typed, SimpleNamespace(device=torch.device("meta"))) == [[], []]
    assert seen == ["meta"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_a_digest_tells_every_bit_and_place(dtype):
    n = 5 * guards.ROW + 7
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    x = x > 0 if dtype == torch.bool else x.to(dtype)
    said = guards.digest(x)
    for i, j in {(0, n - 1), (n // 2 - 1, n - 3), (n - 2, n - 3)}:
        flipped, swapped = x.clone(), x.clone()
        flipped[i] = ~x[i] if dtype == torch.bool else -x[i]  # the highest bit of a word
        swapped[i], swapped[j] = x[j], x[i]
        assert guards.digest(flipped) != said
        assert (guards.digest(swapped) == said) == (x[i] == x[j])
    assert guards.digest(torch.cat([x[:1], x])[1:]) == said  # wherever it lies in memory


def test_what_is_finite():
    inf, half = float("inf"), torch.float16
    for good in (torch.full((9,), 3e38), torch.full((9,), 6e4, dtype=half), torch.tensor([1, 2]), torch.zeros(0)):
        assert guards.all_finite(good)  # also where a sum is not
    for bad in ([1.0, float("nan"), 2.0], [1.0, inf], [-inf], [inf, -inf]):
        assert not guards.all_finite(torch.tensor(bad))
    with pytest.raises(ArithmeticError, match=r'step 4: state\["W"\], W\[D\], is not finite on ranks \[0\]'):
        guards.check_replicas({"W": torch.ones(2) / 0}, {"W": "W[D]"}, ONE, 4)


def test_two_that_have_come_apart_along_different_axes():
    mesh = AbstractMesh({"X": 2, "Y": 3})
    assert guards.replica_mismatch([1, 1, 1, 1, 1, 2], "W[D]", mesh) == ([5], ["X"])
    assert guards.replica_mismatch([1, 2, 3, 1, 9, 3], "W[D_Y]", mesh) == ([4], ["X"])
    assert guards.replica_mismatch([1, 1, 2, 4, 4, 4], "W[D_X]", mesh) == ([2], ["Y"])


@on_ranks({"X": 2})
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_what_is_not_finite_is_named_before_it_is_learnt(mesh, dtype):
    """Also where no scale of the loss helps."""
    settings, rows = replace(SMALL, dtype=dtype), torch.ones(2, 16, dtype=torch.int64)
    params, optimizer = drawn_params(settings, mesh), optimizer_of(settings)
    if mesh.rank == 1:
        params["layers"]["W_out"].view(-1)[0] = float("nan")
    before, step = tree.map(torch.clone, params), make_step(settings, mesh, optimizer)
    with pytest.raises(ArithmeticError, match=r'step 1: the loss is nan.*grads\["embed"\] on ranks \[0, 1\]'):
        step(params, optimizer.init(params), (rows, rows, None), donate=True)
    torch.testing.assert_close(params, before, rtol=0, atol=0, equal_nan=True)


def test_a_jump_of_the_loss_is_told_from_noise():
    g, losses, falling = torch.Generator().manual_seed(0), guards.Losses(), guards.Losses()
    for step in range(400):
        assert losses.jump(2 + 3 * 0.98**step + 0.1 * torch.randn((), generator=g).item(), step) == ""
    assert "step 400: the loss jumped to 4.0000; the median of the 8 before is 2" in losses.jump(4.0, 400)
    assert losses.jump(2.0, 401) == ""
    assert not any(falling.jump(6 * 0.95**step, step) for step in range(30))
    assert "jumped to 6.0000" in falling.jump(6.0, 30)


@on_ranks({"X": 2})
def test_a_slow_rank_is_named_by_all(mesh):
    """Ten steps of 20 ms of work and a collective; rank 1 works longer."""

    def named():
        kept = guards.Pace()
        for _ in range(10):
            began = time.perf_counter()
            with trace() as log:
                time.sleep(0.02 + mesh.rank * 0.05)
                all_reduce("x[] {U_X} -> x[]", torch.ones(()), mesh)
            kept.add(time.perf_counter() - began, guards.wait_seconds(log))
        said = kept.slow(mesh, 11)
        assert "step 11: rank 1 (X=1) is slow" in said
        assert "rank 0" not in said

    once(named)  # all ranks are told the same, and try again together


def test_stages_have_their_own_pace():
    mesh = AbstractMesh({"Z": 2, "X": 2})
    assert guards.slow_ranks([1.0, 1.0, 1.5, 1.5], 1.6, mesh, 3) == []
    (only,) = guards.slow_ranks([1.0, 1.0, 1.5, 1.9], 2.0, mesh, 3)
    assert only.startswith("step 3: rank 3 (Z=1, X=1) is slow: it works 1900 ms a step, its peers 1500 ms")
    assert guards.slow_ranks([1.0], 1.0, AbstractMesh({"X": 1}), 3) == []
    assert guards.slow_ranks([0.002, 0.002, 0.006], 0.006, AbstractMesh({"X": 3}), 3) == []  # a few ms are noise


@pytest.mark.slow
def test_where_two_runs_part(capsys):
    def compared(more: str = "") -> tuple[int, list[str]]:
        capsys.readouterr()
        return train(f"compare a b {more}"), capsys.readouterr().out.splitlines()

    settings = Settings(TINY, write_text(500), "a", 2, 16, steps=4, save_every=2, norms=True)
    for out, lr, more in ("a", 1, 'profile = ""\nsave_every = 5'), ("b", 2, 'profile = "p"'):
        Path(out).mkdir()
        run(ONE, replace(settings, out=out, lr=lr * 1e-3))
        Path(out, "run.toml").write_text(f"lr = {lr}\nseq = 16\n{more}\n[mesh]\nX = 2\n")
    code, (option, losses, norms, saved) = compared()
    assert (code, option) == (1, "option lr: 1 and 2")
    assert losses.startswith("step 2: loss ")
    assert norms.startswith('step 2: the gradient of params["embed"]: norms')
    assert saved.startswith("checkpoint of step 2: params.embed: ")
    assert compared("--tolerance 10")[0] == 0
    shutil.rmtree("b")
    shutil.copytree("a", "b")
    assert compared() == (0, ["no difference"])
    step = Path("b/step-000004")
    leaves, read = dcp.saved_leaves(step), ShardReader(step, verified=False)
    blocks = {name: (leaf.blocks[0].at, read(name, leaf, leaf.blocks[0], False)) for name, leaf in leaves.items()}
    held = blocks["params.layers.W_Q"][1]

    def write_again() -> None:
        with (step / "again").open("w+b") as out:
            write_blocks(out, [(name, *block) for name, block in blocks.items()])
        (step / "again").rename(step / leaves["params.embed"].blocks[0].file)

    held[0, 3, 1, 2] += 1
    write_again()
    assert compared() == (1, ["checkpoint of step 4: params.layers.W_Q: 1 of 256 elements differ, by up to 1"])
    held[0, 3, 1, 2] = torch.nan
    held[0, 0, 0, 0] = torch.inf
    write_again()
    for more in ("", "--tolerance 10"):
        assert compared(more) == (
            1,
            ["checkpoint of step 4: params.layers.W_Q: 2 of 256 elements differ, by up to inf"],
        )
    assert train("compare a .") == 2
    assert "is not a run of scaling.train" in capsys.readouterr().err


def flown(mesh, killed):
    """Three steps of two collectives; before the last, one rank is killed, or comes too late."""
    record = flight.Flight(".", mesh.rank)
    for number in (1, 2, 3):
        with record.step(number):
            all_reduce("n[] {U_X} -> n[]", torch.ones(()), mesh)
            if number == 3 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL) if killed else time.sleep(30)
            wait(all_gather("W[D_X] -> W[D]", torch.ones(2), mesh, async_op=True))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "late"])
def test_what_ranks_did_last_outlives_them(killed, monkeypatch):
    monkeypatch.setattr("scaling.launch.watch.GRACE", 0.1)
    with pytest.raises(launch.RankError):
        launch.run(flown, {"X": 2}, killed, timeout=0.5)
    first, second = flight.records(".").values()
    assert [text.split("step ")[1].split()[0] for text in second] == ["1", "1", "2", "2", "3"]
    assert second[-1].endswith(" ms n[] = AllReduce_X(n[] {U_X})")
    assert first[-2].endswith(" ms n[] = AllReduce_X(n[] {U_X})")
    assert first[-1].endswith("step 3 in flight W[D] = AllGather_X(W[D_X])")
    assert " in flight " not in "".join(first[:-1])


def test_a_ring_of_the_last_and_the_command(capsys):
    for words in ("no run is here", "its ranks have sent nothing"):
        assert words in refusal(capsys, "flight .")
        Path("run.toml").touch()
    flight.Flight(".", 10_000)  # a rank whose number is wider than the others' names
    record = flight.Flight(".", 3)
    for number in range(1, 40):
        with record.step(number):
            for name in ("a", "b", "W" * 300):
                all_reduce(f"{name}[D] {{U_X}} -> {name}[D]", torch.ones(2), ONE)
    lines, none = flight.records(".").values()
    assert ([*flight.records(".")], none, len(lines)) == ([3, 10_000], [], flight.LAST)
    assert [text.split()[2] for text in lines[-4:]] == ["38", "39", "39", "39"]
    assert Path("flight-0003.txt").stat().st_size == flight.LAST * flight.WIDTH
    assert train("flight . --last 1") == 0
    assert capsys.readouterr().out.startswith("rank 3: ")
    flight.keep_earlier(".")
    assert flight.records(".") == {}
    assert Path("flight-0003.before").is_file()


@pytest.mark.slow
def test_the_share_of_tokens_of_each_expert_is_recorded_on_every_mesh(ranks, monkeypatch):
    """As the choices themselves count, of all layers and microbatches."""
    model = TINY.with_(L=2, E=4, k=2, aux_coef=0.01)
    settings = Settings(model, write_text(200), str(Path("one").absolute()), 4, 16, steps=2, microbatches=2)
    chosen, real = [], expert.route_tokens

    def seen(*given, **how):
        found = real(*given, **how)
        chosen.append(found.experts.flatten())
        return found

    Path("one").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(expert, "route_tokens", seen)
        run(ONE, replace(settings, eval_batches=1))
    wanted = [torch.cat(chosen[i : i + 4]).bincount(minlength=4) / (2 * 4 * 16 * 2) for i in (0, 4)]  # 2 layers, k = 2
    shares = [record["expert_load"] for record in records("one")]
    torch.testing.assert_close(torch.tensor(shares), torch.stack(wanted), atol=1e-4, rtol=0)
    for mesh in {"Z": 2}, {"E": 2}:
        Path(other := str(Path(*mesh).absolute())).mkdir()
        ranks(run, mesh, replace(settings, out=other, eval_batches=1))
        assert [record["expert_load"] for record in records(other)] == shares
