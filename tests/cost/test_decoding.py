import itertools
import math
from collections import Counter

import pytest
import torch

from scaling import serve
from scaling.configs import Config, Latent, get
from scaling.cost import decoding as d
from scaling.cost.lanes import place_axes
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.spec import ShardingError
from scaling.trace import trace

V5E, H100, L70 = chip("v5e"), chip("h100"), get("llama3-70b")


MESHES = [
    ("heads", {"Y": 8}), ("heads", {"Y": 2}), ("heads_batch", {"Y": 4, "Z": 2}), ("heads_batch", {"Y": 2, "Z": 4}),
    ("sequence", {"Y": 4, "Z": 2}), ("sequence", {"Y": 1, "Z": 8}), ("2d", {"X": 2, "Y": 4}), ("2d", {"X": 4, "Y": 8}),
    ("2d", {"X": 2, "Y": 2, "Z": 2}), ("heads", {"Y": 1, "E": 4}), ("heads", {"Y": 2, "E": 2}),
    ("experts", {"Y": 1, "E": 4}), ("experts", {"Y": 2, "E": 2}), ("experts", {"Y": 4, "E": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("form", "sizes"), MESHES)
@pytest.mark.parametrize("kind", ["gated", "plain", "experts", "latent"])
def test_what_a_decode_step_runs(form, sizes, kind):
    """The collectives of scaling.serve.decode, traced on an abstract mesh: op, axes, V, how often."""
    config = Config("small", 2, 64, 96, 16, 4, 8, 80, gated=kind != "plain")
    if kind == "experts":
        config = config.with_(E=4, k=2)
    if kind == "latent":
        config = config.with_(K=16, latent=Latent(q_rank=24, kv_rank=20, nope=6, rope=4, value=8))
    if kind == "latent" and form == "2d":
        with pytest.raises(ShardingError, match="fix: choose form"):
            d.collectives(form, config, 8, sizes)
        with pytest.raises(ShardingError, match="no latent attention"):
            serve.specs(config, AbstractMesh(sizes), form=form)
        return
    if (form == "2d") if kind == "experts" else (form == "experts" or "E" in sizes):
        pytest.skip("refused")
    mesh = AbstractMesh(sizes)
    params = model.init(config, mesh=mesh, specs=serve.specs(config, mesh, form=form))
    cache = serve.init_cache(config, 8, 64, mesh=mesh, form=form)
    with trace() as log:
        serve.decode(params, torch.empty(8, dtype=torch.int64, device="meta"), cache, config, mesh, form=form)
    wanted, found = Counter(), Counter()
    for event in log.collectives():
        if axes := "".join(axis for axis in sorted(event.axes) if sizes[axis] > 1):
            wanted[event.op, axes, event.nbytes] += 1
    for moved in d.collectives(form, config, 8, sizes, dtype="fp32"):
        found[moved.op, "".join(axis for axis in moved.axes if sizes.get(axis, 1) > 1), moved.nbytes] += moved.times
    assert found == wanted


def test_bytes_by_hand():
    """LLaMA-3 70B, 4 tokens in bf16: x is 4 x 8192 x 2 bytes, Q as many."""
    x = q = 2 * 4 * 8192

    def by_name(form, sizes):
        return {(moved.op, moved.what): moved for moved in d.collectives(form, L70, 4, sizes)}

    heads = by_name("heads", {"Y": 8})["AllReduce", "x"]
    assert (heads.nbytes, heads.times) == (x, 161)
    batch = by_name("heads_batch", {"Y": 8, "Z": 2})["AllToAll", "Q"]
    assert (batch.nbytes, batch.times) == (q / 8, 80)
    two = by_name("2d", {"X": 4, "Y": 4})
    assert (two["AllReduce", "Tmp"].nbytes, two["AllReduce", "Tmp"].times) == (2 * 4 * 28672 / 4, 160)
    assert two["ReduceScatter", "x"].nbytes == x / 4


@pytest.mark.parametrize("form", d.FORMS)
def test_one_chip_moves_nothing(form):
    config = get("mixtral-8x7b") if form == "experts" else L70
    assert d.collectives(form, config, 4, {"X": 1, "Y": 1, "Z": 1}) == []


@pytest.mark.parametrize(
    ("form", "sizes", "named"),
    [("heads", {"Y": 2, "Z": 2}, "the axis Z"), ("sequence", {"X": 2}, "the axis X"), ("heads", {"Y": 128}, "N = 64"),
     ("heads", {"Y": 3}, "N = 64"), ("experts", {"E": 4}, "of a model without"),
     ("heads", {"E": 4}, "of a model without"), ("ring", {"Y": 2}, "form")],
)  # fmt: skip
def test_refused(form, sizes, named):
    with pytest.raises((ShardingError, ValueError), match=named):
        d.check_form(form, L70, sizes)


def test_copies():
    assert d.copies(L70, {"Y": 8, "Z": 4}) == 1
    assert d.copies(L70, {"X": 4, "Y": 32}) == 4
    assert d.copies(get("deepseek-v3"), {"Y": 8, "Z": 2}) == 8


def test_places_fill_the_slice():
    for shape in ((4, 4), (4, 8), (2, 4, 4)):
        chips = math.prod(shape)
        for y in (2**i for i in range(chips.bit_length())):
            placed = place_axes(shape, {"Y": y, "Z": chips // y})
            assert math.prod(placed["Y"]) == y
            assert tuple(a * b for a, b in zip(*placed.values(), strict=True)) == shape
    with pytest.raises(ValueError, match="idle"):
        place_axes((4, 4), {"Y": 8})
    with pytest.raises(ValueError, match="Y = 3 does not fit"):
        place_axes((4, 4), {"Y": 3, "Z": 5})


def test_a_slice_without_wraparound_has_half_the_links():
    """An AllReduce of X on 4x4: two passes of 15/16 V over two lines; were they rings, of V over four links."""
    moved = d.StepCollective("AllReduce", "X", "Y", 1e9, 1)
    assert d.collective_seconds(moved, V5E, (4, 4), {"Y": 16}) == pytest.approx(2 * 1e9 * 15 / 16 / (2 * 4.5e10))
    assert d.collective_seconds(moved, V5E, (4, 4), {"Y": 16}, wrap=True) == pytest.approx(2 * 1e9 / (4 * 4.5e10))
    assert d.collective_seconds(moved, V5E, (16, 16), {"Y": 256}) == pytest.approx(2 * 1e9 / (4 * 4.5e10))
    tiny = d.StepCollective("AllGather", "X", "Z", 1, 10)
    assert d.collective_seconds(tiny, V5E, (4, 4), {"Y": 8, "Z": 2}) == pytest.approx(10 * 1e-6)  # one hop each
    node = d.StepCollective("AllReduce", "X", "Y", 8e9, 3)
    assert d.collective_seconds(node, H100, (8,), {"Y": 8}) == pytest.approx(3 * 2 * 8e9 * 7 / 8 / 450e9)
    assert d.collective_seconds(tiny, H100, (16,), {"Y": 8, "Z": 2}) == pytest.approx(10 * 2e-5)


@pytest.mark.parametrize(("F", "batch"), [(16384, 32), (28672, 64)])
def test_limits_are_where_two_times_are_equal(F, batch):
    W, ici, D = 8.2e11, 9e10, 8192
    Y = d.bandwidth_limit(F, batch, W, ici)
    assert 2 * batch * D / ici == pytest.approx(2 * D * F / (Y * W))
    Y = d.bandwidth_limit(F, batch, W, ici, weights="int8")
    assert 2 * batch * D / ici == pytest.approx(D * F / (Y * W))


@pytest.mark.parametrize(("D", "F"), [(8192, 32768), (4096, 14336), (8192, 8192)])
def test_2d_by_trying_every_split(D, F):
    W, splits = 9e10, [2 ** (i / 50) for i in range(1000)]

    def best(N):
        return min((d.stationary_2d(1, D, F, X, N / X, W), X) for X in splits if X <= N)

    for N in (64, 256, 4096):
        X, YZ = d.best_2d(N, D, F)
        assert pytest.approx(N) == X * YZ
        assert best(N)[1] == pytest.approx(X, rel=0.02)
        assert best(N)[0] == pytest.approx((32 * D * F / N) ** 0.5 / W, rel=1e-3)
    first = next(N for N in itertools.count(1) if best(N)[0] < d.stationary_1d(1, D, W))
    assert first == math.floor(d.threshold_2d(D, F)) + 1
