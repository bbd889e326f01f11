"""What models take, trained and served: parameters, FLOPs, caches, decode steps and their collectives."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from scaling import serve
from scaling.configs import MODELS, Config, Latent, get, load
from scaling.cost import decoding as d
from scaling.cost import serving as s
from scaling.cost import transformer as tm
from scaling.cost.lanes import place_axes
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.spec.sizes import parse_mesh
from scaling.trace import trace

approx = pytest.approx
V5E, H100, L70 = chip("v5e"), chip("h100"), get("llama3-70b")


def test_published_parameter_counts():
    """Each model's own card or paper, where it says them to the last parameter or to three digits."""
    exact = {
        "llama2-13b": 13_015_864_320,
        "llama3-8b": 8_030_261_248,
        "llama3-70b": 70_553_706_496,
        "llama3-405b": 405_853_388_800,
        "gemma-7b": 8_537_680_896,
        "gemma2-27b": 27_227_128_320,
        "mixtral-8x7b": 46_702_792_704,
    }
    assert {name: tm.num_params(get(name)) for name in exact} == exact
    config = get("deepseek-v3")
    counts = [tm.num_params(config, active=active) for active in (False, True)]
    assert counts == [approx(671e9, rel=1e-3), approx(37e9, rel=0.02)]


def test_rule_of_thumb_is_the_exact_count_but_for_attention_embedding_and_norms():
    exact = tm.train_flops(L70, 1, 1)
    rest = 6 * (L70.D * L70.V + tm.params(L70)["norms"])
    assert tm.rule_of_thumb(L70, 1) == sum(exact.values()) - exact["attention"] + rest
    assert tm.rule_of_thumb(L70, 1e6, "block") / tm.rule_of_thumb(L70, 1e6) == 8 / 6


@settings(deadline=None, derandomize=True, max_examples=8)
@given(st.sampled_from(list(MODELS)), st.integers(1, 9), st.integers(1, 300))
def test_decoding_token_by_token_is_a_causal_forward_pass(name, B, T):
    config = get(name)
    steps = sum(sum(tm.forward_flops(config, B, 1, t, causal=True).values()) for t in range(1, T + 1))
    assert steps == sum(tm.forward_flops(config, B, T, causal=True).values())
    prefill = tm.prefill_flops(config, T, B)
    assert steps - prefill == 2 * B * (T - 1) * config.D * config.V


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.data())
def test_einsum_flops_equal_the_counter(data):
    letters = "abcde"
    x, y = (data.draw(st.lists(st.sampled_from(letters), min_size=1, max_size=4, unique=True)) for _ in range(2))
    both = {*x, *y}
    out = [i for i in letters if i in both and (i not in x or i not in y or data.draw(st.booleans()))]
    sizes = {letter: data.draw(st.integers(2, 5)) for letter in letters}
    equation = f"{''.join(x)},{''.join(y)}->{''.join(out)}"
    shapes = [tuple(sizes[letter] for letter in operand) for operand in (x, y)]
    flops = tm.einsum_flops(equation, *shapes)
    contracted = both - {*out}
    assert flops == math.prod(sizes[letter] for letter in both) * (2 if contracted else 1)
    if contracted:
        with FlopCounterMode(display=False) as counter:
            torch.einsum(equation, *(torch.empty(shape, device="meta") for shape in shapes))
        assert counter.get_total_flops() in (flops, 0)  # 0: torch multiplied elementwise and summed


HUGGING_FACE = {  # config.json
    "deepseek-v3": """{
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "tie_word_embeddings": false, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5
    }""",
    "mixtral-8x7b": """{
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": false
    }""",
    "gemma2-27b": """{
        "model_type": "gemma2", "num_hidden_layers": 46, "hidden_size": 4608, "intermediate_size": 36864,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 256000,
        "query_pre_attn_scalar": 144
    }""",
}


def test_models_from_files(tmp_path):
    assert get("LLaMA-3 70B") is get("llama3-70b")
    own = tmp_path / "own.toml"
    with pytest.raises(ValueError, match="no such file"):
        get(own)
    own.write_text("L = 2\nD = 8\nF = 16\nN = 2\nK = 1\nH = 4\nV = 10\ngated = false\n")
    assert load(own) == Config("own", 2, 8, 16, 2, 1, 4, 10, gated=False, source=str(own))
    own.write_text("L = 2\nD = 8\nwidth = 3\n")
    with pytest.raises(ValueError, match="lacks F, N, K, H, V; does not know width"):
        load(own)
    for name, config in HUGGING_FACE.items():
        path = tmp_path / f"{name}.json"
        path.write_text(config)
        assert get(path).with_(source=get(name).source, dtype=get(name).dtype) == get(name)
        path.write_text(f'{{"text_config": {config}}}')
        assert tm.params(load(path)) == tm.params(get(name))


@pytest.mark.parametrize("chunked", [False, True])
def test_flops_count_pairs_as_a_mask_does(chunked):
    """Causal, with two windows or chunks and none, GQA, and T < S: pairs counted one by one."""
    config = Config("windowed", L=4, D=16, F=32, N=4, K=2, H=4, V=32, window=(3, None, 50, 1), chunked=chunked)
    parts = tm.params(config)
    of_a_token = 2 * (parts["mlp"] + parts["attention"] + config.D * config.V)
    for T, S in ((6, 6), (1, 6), (2, 7)):
        kinds, at = [window or S for window in config.windows], range(S - T, S)
        pairs = ((w, q, s) for w in kinds for q in at for s in range(q + 1))
        seen = sum(q // w == s // w if chunked else q - s < w for w, q, s in pairs)
        for causal, pairs in ((True, seen), (False, config.L * T * S)):
            flops = 3 * T * of_a_token + 4 * 3 * pairs * config.N * config.H
            assert sum(tm.forward_flops(config, 3, T, S, causal).values()) == flops


# --- Serving

SMALL = Config("small", 2, 64, 96, 16, 4, 8, 80)
DENSE = "heads Y=8; heads Y=2; heads_batch Y=4,Z=2; heads_batch Y=2,Z=4; sequence Y=4,Z=2; sequence Y=1,Z=8"
SPREAD = "; 2d X=2,Y=4; 2d X=4,Y=8; 2d X=2,Y=2,Z=2"
OVER_E = "; heads Y=1,E=4; heads Y=2,E=2; experts Y=1,E=4; experts Y=2,E=2; experts Y=4,E=1"
STEPS = (
    (SMALL, DENSE + SPREAD),
    (SMALL.with_(gated=False), DENSE + SPREAD),
    (SMALL.with_(K=16, latent=Latent(q_rank=24, kv_rank=20, nope=6, rope=4, value=8)), DENSE),
    (SMALL.with_(E=4, k=2), DENSE + OVER_E),
)


@pytest.mark.parametrize(("config", "on"), [(config, on) for config, each in STEPS for on in each.split("; ")])
def test_what_a_decode_step_runs(config, on):
    """The collectives of scaling.serve.decode, traced on an abstract mesh: op, axes, V, how often."""
    form, sizes = on.split()[0], parse_mesh(on.split()[1])
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


def test_on_a_slice():
    """Axes fill it. What a slice without wraparound takes, plan/test_serve.py has; on rings an AllReduce is two passes
    of V over four links."""
    for shape in ((4, 4), (4, 8), (2, 4, 4)):
        chips = math.prod(shape)
        for y in (2**i for i in range(chips.bit_length())):
            placed = place_axes(shape, {"Y": y, "Z": chips // y})
            assert math.prod(placed["Y"]) == y
            assert tuple(a * b for a, b in zip(*placed.values(), strict=True)) == shape
    moved, tiny = d.StepCollective("AllReduce", "X", "Y", 1e9, 1), d.StepCollective("AllGather", "X", "Z", 1, 10)
    node, both = d.StepCollective("AllReduce", "X", "Y", 8e9, 3), {"Y": 8, "Z": 2}
    cases: tuple[tuple[Any, float], ...] = (
        ((moved, V5E, (16, 16), {"Y": 256}), 2e9 / (4 * 4.5e10)),
        ((tiny, V5E, (4, 4), both), 10 * 1e-6),  # one hop each
        ((node, H100, (8,), {"Y": 8}), 3 * 2 * 8e9 * 7 / 8 / 450e9),
        ((tiny, H100, (16,), both), 10 * 2e-5),
    )
    for asked, seconds in cases:
        assert d.collective_seconds(*asked) == approx(seconds)
    assert s.slices(V5E) == [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
    assert s.slices(H100, 8) == [(1,), (2,), (4,), (8,)]


def test_a_cache_is_counted_head_by_head():
    assert tm.kv_cache_bytes(get("deepseek-v3"), 1, "bf16") == 61 * 576 * 2  # 70 kB a token
    config = get("llama3-8b").with_(window=(4,) * 8 + (None,) * 24)
    for context in (1, 4, 5, 100):
        elements = sum(2 * config.K * config.H * min(context, window or context) for window in config.windows)
        assert s.load(config, kv="int8").kv(context) == elements
        assert s.load(config, kv="fp32").kv(context) == 4 * elements


def test_what_a_step_is_bound_by_and_a_pass_over_prompts_and_decodes_takes():
    """Of decodes alone it is their step; a prompt's FLOPs are a forward pass's, causal, with all its logits."""
    load = s.load(L70, "int8", "int8")
    assert [s.step(load, batch, 1, V5E, 8).bound for batch in (1, 1024)] == ["weights", "compute"]
    slow = s.step(load, 1, 1, V5E, 8, comms=1.0)
    assert (slow.bound, slow.seconds, slow.apart) == ("collectives", slow.kv + 1.0, slow.kv + slow.weights + 1.0)
    assert s.mixed(load, [(1, 4096)] * 32, V5E, 8) == s.step(load, 32, 4096, V5E, 8)
    prompt = s.mixed(load, [(4096, 4096)], V5E, 8)
    flops = tm.forward_flops(L70, 1, 4096, causal=True)
    norms = 2 * 4096 * (160 * 8192 + 8192)  # counted as params here
    assert prompt.kv == approx(flops["attention"] / (8 * 1.97e14))
    assert prompt.math * 8 * 1.97e14 == approx(sum(flops.values()) - flops["attention"] + norms)
    both = s.mixed(load, [(2, 300), (1, 50)], V5E, 8)
    assert both.kv == approx((300 + 50) * 163_840 / (8 * 8.2e11))
    assert both.math == approx(3 * 2 * load.params / (8 * 1.97e14))


@pytest.mark.parametrize(("E", "k", "batch"), [(4, 1, 3), (4, 2, 2), (3, 3, 2)])
def test_experts_read_are_enumerated(E, k, batch):
    """The mean number of different experts over all routings."""
    each = list(itertools.combinations(range(E), k))
    routings = list(itertools.product(each, repeat=batch))
    mean = sum(len(set(itertools.chain(*routing))) for routing in routings) / len(routings)
    load = s.Load(weights=100.0 + E, params=1.0, experts=float(E), E=E, k=k)
    assert load.read(batch) == approx(100 + mean)


def test_a_front_is_what_nothing_beats():
    points = [(3, 1), (1, 1), (2, 4), (2, 5), (4, 4), (5, 6), (5, 6)]
    front = s.pareto(points, lambda p: p[0], lambda p: p[1])
    beaten = {p for p in points for q in points if q != p and q[0] <= p[0] and q[1] >= p[1]}
    assert front == sorted({*points} - beaten)
