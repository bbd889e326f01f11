"""Serving by brute force: caches counted by element, experts enumerated, batches and fronts tried one by one."""

import itertools

import pytest

from scaling.configs import get
from scaling.cost import serving as s
from scaling.cost import transformer as tm
from scaling.hardware import chip

V5E, L70 = chip("v5e"), get("llama3-70b")


def test_a_cache_is_counted_head_by_head():
    config = get("llama3-8b").with_(window=(4,) * 8 + (None,) * 24)
    for context in (1, 4, 5, 100):
        elements = sum(2 * config.K * config.H * min(context, window or context) for window in config.windows)
        assert s.load(config, kv="int8").kv(context) == elements
        assert s.load(config, kv="fp32").kv(context) == 4 * elements


def test_the_step_of_a_model_is_that_of_its_numbers():
    """70.55e9 params in int8, of which the embedding's 128256 x 8192 are looked up."""
    table = 128256 * 8192
    got = s.step(s.load(L70, "int8", "int8"), 32, 8192, V5E, 8)
    assert got.kv == pytest.approx(32 * 8192 * 2 * 80 * 8 * 128 / (8 * 8.2e11))
    assert got.weights == pytest.approx((tm.num_params(L70) - table) / (8 * 8.2e11))
    assert got.math == pytest.approx(2 * 32 * (tm.num_params(L70) - table) / (8 * 1.97e14))
    assert got.seconds == pytest.approx(got.kv + got.weights)
    assert got.bound == "weights"
    assert s.step(s.load(L70, "int8", "int8"), 1024, 1, V5E, 8).bound == "compute"
    slow = s.step(s.load(L70), 1, 1, V5E, 8, comms=1.0)
    assert (slow.bound, slow.seconds, slow.apart) == ("collectives", slow.kv + 1.0, slow.kv + slow.weights + 1.0)


def test_a_pass_over_prompts_and_decodes():
    """Of decodes alone it is their step; a prompt's FLOPs are a forward pass's, causal, with all its logits."""
    load = s.load(L70, "int8", "int8")
    assert s.mixed(load, [(1, 4096)] * 32, V5E, 8) == s.step(load, 32, 4096, V5E, 8)
    prompt = s.mixed(load, [(4096, 4096)], V5E, 8)
    flops = tm.forward_flops(L70, 1, 4096, causal=True)
    norms = 2 * 4096 * (160 * 8192 + 8192)  # counted as params here
    assert prompt.kv == pytest.approx(flops["attention"] / (8 * 1.97e14))
    assert prompt.math * 8 * 1.97e14 == pytest.approx(sum(flops.values()) - flops["attention"] + norms)
    both = s.mixed(load, [(2, 300), (1, 50)], V5E, 8)
    assert both.kv == pytest.approx((300 + 50) * 163_840 / (8 * 8.2e11))
    assert both.math == pytest.approx(3 * 2 * load.params / (8 * 1.97e14))


def test_attention_of_latents_may_be_bound_by_flops():
    """DeepSeek's 128 heads share one cache: 2 x 128 x (2 x 512 + 64) FLOPs for 576 elements."""
    flops = 2 * 128 * (2 * 512 + 64) / 576
    v3 = s.load(get("deepseek-v3"), "fp8", "fp8")
    assert v3.kv_flops == pytest.approx(flops)
    step = s.step(v3, 8, 4096, V5E, 64)
    assert step.kv == pytest.approx(flops * 8 * 4096 * 576 * 61 / (64 * 1.97e14))
    assert step.kv > 8 * v3.kv(4096) / (64 * 8.2e11)


@pytest.mark.parametrize(("E", "k", "batch"), [(4, 1, 3), (4, 2, 2), (3, 3, 2), (5, 2, 1)])
def test_experts_read_are_enumerated(E, k, batch):
    """The mean number of different experts over all routings."""
    each = list(itertools.combinations(range(E), k))
    routings = list(itertools.product(each, repeat=batch))
    mean = sum(len(set(itertools.chain(*routing))) for routing in routings) / len(routings)
    load = s.Load(weights=100.0 + E, params=1.0, experts=float(E), E=E, k=k)
    assert load.read(batch) == pytest.approx(100 + mean)


def test_the_experts_of_a_model():
    moe, dense = get("part7-moe"), get("part7-toy")
    more = s.load(moe, "int8").weights - s.load(dense, "int8").weights
    assert more == 15 * 3 * 64 * 4096 * 16384 + 64 * 4096 * 16  # experts, and the router
    assert s.load(moe, "int8").experts == 16 * 3 * 64 * 4096 * 16384


def test_slices():
    assert s.slices(V5E) == [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
    assert s.slices(chip("h100"), 8) == [(1,), (2,), (4,), (8,)]
    for name in ("v4p", "v5p", "v6e"):
        for shape in s.slices(chip(name)):
            assert all(side <= room for side, room in zip(shape, sorted(chip(name).pod), strict=True))
    assert s.smallest_slice(16e9, V5E) == (1, 1)
    assert s.smallest_slice(16e9 + 1, V5E) == (2, 2)
    with pytest.raises(ValueError, match="fit no slice of v5e: the largest is 16x16"):
        s.smallest_slice(1e15, V5E)


@pytest.mark.parametrize("context", [100, 8192, 100_000])
@pytest.mark.parametrize("headroom", [0.8, 1.0])
def test_the_largest_batch_is_the_last_that_fits(context, headroom):
    load = s.load(L70, "int8", "int8")
    tried = [B for B in range(1, 20_000) if load.weights + B * load.kv(context) <= headroom * 16 * 16e9]
    assert s.largest_batch(load, context, V5E, 16, headroom) == max(tried, default=0)
    assert s.largest_batch(load, context, V5E, 2) == 0


def test_a_front_is_what_nothing_beats():
    points = [(3, 1), (1, 1), (2, 4), (2, 5), (4, 4), (5, 6), (5, 6)]
    front = s.pareto(points, lambda p: p[0], lambda p: p[1])
    beaten = {p for p in points for q in points if q != p and q[0] <= p[0] and q[1] >= p[1]}
    assert front == sorted({*points} - beaten)


def test_servers_keep_pace():
    """A discrete count: in one long run both kinds are busy, prompts in = sequences out."""
    prefill, step, batch, generated = 0.5, 0.02, 10, 100
    ratio = s.prefill_servers(prefill, step, batch, generated)
    seconds = 1000.0
    assert ratio * seconds / prefill == pytest.approx(batch * seconds / (step * generated))
    ended, evicted = s.turnover(32, 8192, 4096)
    lengths, steps, gone, tokens = [8192 + i * 128 for i in range(32)], 4096, 0, 0  # the sequences evenly out of step
    for _ in range(steps):
        lengths = [length + 1 for length in lengths]
        gone += sum(length == 8192 + 4096 for length in lengths)
        tokens += sum(length for length in lengths if length == 8192 + 4096)
        lengths = [8192 if length == 8192 + 4096 else length for length in lengths]
    assert (gone / steps, tokens / steps) == (ended, evicted)


@pytest.mark.parametrize("bad", [{"weights": 0, "params": 1}, {"weights": 1, "params": 1, "kv_token": -1}])
def test_bad_numbers(bad):
    with pytest.raises(ValueError, match="must be a"):
        s.Load(**bad)
    with pytest.raises(ValueError, match="batch = 0"):
        s.step(s.Load(1, 1), 0, 1, V5E)
