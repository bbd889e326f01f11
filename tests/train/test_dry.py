"""What the dry run says is what the run does: bytes, collectives, FLOPs; and what does not fit is refused in time.
Fewer devices: P is halved, then X, never another axis; the global batch stays, by more microbatches."""

import math
from pathlib import Path

import pytest
import torch
from runs import train, write_text

from scaling import tree
from scaling.configs import get
from scaling.mesh import AbstractMesh
from scaling.spec.sizes import parse_mesh
from scaling.trace.peak import peak_memory
from scaling.train import command, dry
from scaling.train.elastic import fits_as_before, fitted, shared
from scaling.train.evaluate import local
from scaling.train.settings import Settings, optimizer_of
from scaling.train.step import drawn_params, make_step

TINY = get("tiny").with_(L=2, D=64, F=128, H=16, N=4, K=2)
CASES = [
    (TINY, {"X": 1}, {"remat": "matmuls", "dtype": "bf16"}),
    (TINY.with_(L=3, tied=True), {"X": 1}, {"remat": "block", "microbatches": 2}),
    (TINY, {"C": 2, "Y": 2}, {"remat": "attention"}),
    (TINY.with_(E=4, k=2, F=64), {"X": 2, "E": 2}, {}),
    (TINY, {"Z": 2, "X": 2}, {"microbatches": 2, "remat": "block"}),
    (TINY.with_(K=1), {"X": 2, "Y": 2}, {"keep_weights": True, "optimizer": "muon"}),
]


def step_of(mesh, settings):
    """(bytes of params, of the state, the most at once, sent, FLOPs, collectives) of a step that is run."""
    params, optimizer = drawn_params(settings, mesh), optimizer_of(settings)
    rows = torch.randint(0, 256, (settings.batch, settings.seq), generator=torch.Generator().manual_seed(1))
    batch = [local(x, mesh) for x in (rows, rows, torch.zeros_like(rows))]
    state, step = optimizer.init(params), make_step(settings, mesh, optimizer)
    held, peaks = (tree.nbytes(params), tree.nbytes(state)), []
    for _ in range(2):  # a message's buffer may live a little longer while the machine is busy
        with peak_memory() as memory:
            tree.map(torch.Tensor.detach, (params, state))
            params, state, *_ = step(params, state, batch, donate=True)
        peaks.append(memory.peak)
    log = memory.log
    return *held, min(peaks), sum(e.wire_bytes for e in log.events), log.flops, len(log.collectives())


@pytest.mark.parametrize(("config", "sizes", "options"), CASES, ids=lambda x: "" if hasattr(x, "L") else str(x))
def test_the_dry_run_is_the_run(ranks, config, sizes, options):
    settings, last = Settings(config, "", "", 8, 64, **options), math.prod(sizes.values()) - 1
    of_ends = [dry.count(settings, sizes, AbstractMesh(sizes).coord_of(rank)) for rank in (0, last)]
    peaks, said = [], []
    for rank, (held, state, most, sent, flops, number) in enumerate(ranks(step_of, sizes, settings)):
        wanted = of_ends[2 * rank >= last > 0]  # those of a stage are alike
        assert (held, state, number) == (wanted.params, wanted.state, wanted.collectives)
        if not config.moe:  # with experts they follow the routing
            assert (sent, flops) == (wanted.sent, wanted.flops)
            assert most == pytest.approx(wanted.memory, rel=0.03)
        peaks.append(most)
        said.append(wanted.memory)
    assert sum(peaks) == pytest.approx(sum(said), rel=0.03)
    assert dry.fullest(settings, sizes).memory == pytest.approx(max(peaks), rel=0.05 if config.moe else 0.03)


@pytest.mark.slow
def test_too_large_a_batch_is_refused_with_the_largest_that_fits():
    settings, sizes = Settings(TINY, "", "", 40, 64), {"P": 2, "X": 2}  # half of 20 does not divide over both axes
    limit = dry.count(Settings(TINY, "", "", 12, 64), sizes).memory / dry.ROOM
    with pytest.raises(ValueError, match=r"a rank needs 0.0\d GB.*\n  fix: --batch 8;"):
        dry.refuse_too_large(settings, sizes, limit)
    dry.refuse_too_large(Settings(TINY, "", "", 8, 64), sizes, limit)
    with pytest.raises(ValueError, match="no batch fits"):
        dry.refuse_too_large(settings, sizes, 1000)


@pytest.mark.slow
def test_a_step_of_8b_holds_neither_all_logits_nor_its_tables_to_the_end():
    """Beside the state: 4,096 tokens of llama3-8b on a rank of X=32 would have 2.1 GB of float32 logits alone, and each
    table of the vocabulary, its gradient and the buffers of gloo's ReduceScatter take 1.05 GB each, and the sum of the
    chunks' gradients, in float32, 2.1 GB while the loss is made. Four layers add 0.14 GB."""
    settings = Settings(get("llama3-8b").with_(L=4), "", "", batch=32, seq=4096, dtype="bf16", remat="block")
    assert dry.count(settings, {"X": 32}, backend="abstract").step < 4.7e9
    assert dry.count(settings, {"X": 32}, backend="gloo").step < 8.4e9


GIVES = {  # a mesh, on so many ranks: what is left of it, or nothing
    ("P=2,X=4,Y=2", 8): "P=1,X=4,Y=2", ("P=2,X=4,Y=2", 4): "P=1,X=2,Y=2", ("Z=2,X=4,C=2", 8): "Z=2,X=2,C=2",
    ("X=2,Y=4", 2): "", ("X=3", 2): "", ("X=2", 4): "",
}  # fmt: skip


@pytest.mark.parametrize(("mesh", "world"), GIVES)
def test_what_gives(mesh, world):
    before, sizes, wanted = Settings(TINY, "", "", batch=32, microbatches=2), parse_mesh(mesh), GIVES[mesh, world]
    if not wanted:
        with pytest.raises(ValueError, match=f"does not fit {world} ranks"):
            fitted(sizes, world)
        return
    found = fitted(sizes, world)
    after = shared(before, sizes, found)
    assert found == parse_mesh(wanted)
    rows = [s.batch // s.microbatches // (m.get("P", 1) * m["X"]) for s, m in ((before, sizes), (after, found))]
    assert rows[0] == rows[1]  # of a microbatch on each rank
    assert after.batch == before.batch


def test_memory_is_counted_again_unless_pods_alone_are_fewer(monkeypatch):
    sizes = {"P": 2, "X": 2, "Y": 2}
    assert not fits_as_before(sizes, sizes)  # the first start
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert fits_as_before(sizes, sizes | {"P": 1})
    assert not fits_as_before(sizes, sizes | {"P": 1, "X": 1})


def test_restarts_on_fewer_ranks_keep_what_was_asked_for(monkeypatch):
    """run.toml, which each start reads, has the options as they were given: else each would share the batch again."""
    started = []
    monkeypatch.setattr(command, "trained", lambda settings, sizes, args: started.append((settings, sizes)))
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    write_text(1)
    for more in ("--data text.txt --mesh P=2,X=2", "", ""):
        train(f"--resume {more}")
    assert [(settings.microbatches, sizes) for settings, sizes in started] == [(2, {"P": 1, "X": 2})] * 3
    assert "microbatches = 1\n" in Path("run/run.toml").read_text()
