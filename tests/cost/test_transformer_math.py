import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from scaling.configs import MODELS, Config, get, load
from scaling.cost import transformer as tm

L70 = MODELS["llama3-70b"]

# Published counts: each model's own card or paper, where it says them to the last parameter or to three digits.
EXACT = {
    "llama2-13b": 13_015_864_320,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "gemma-7b": 8_537_680_896,
    "gemma2-27b": 27_227_128_320,
    "mixtral-8x7b": 46_702_792_704,
}


def test_published_parameter_counts():
    assert {name: tm.num_params(get(name)) for name in EXACT} == EXACT


def test_deepseek_v3():
    config = get("deepseek-v3")
    counts = [tm.num_params(config, active=active) for active in (False, True)]
    assert counts == [pytest.approx(671e9, rel=1e-3), pytest.approx(37e9, rel=0.02)]
    assert tm.kv_cache_bytes(config, 1, "bf16") == 61 * 576 * 2  # 70 kB a token


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
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 256000
    }""",
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_files(name, tmp_path):
    path = tmp_path / f"{name}.json"
    path.write_text(HUGGING_FACE[name])
    assert get(path).with_(source=get(name).source, dtype=get(name).dtype) == get(name)
    path.write_text(f'{{"text_config": {HUGGING_FACE[name]}}}')
    assert tm.params(load(path)) == tm.params(get(name))


def test_utilization_counts_pairs_as_a_mask_does():
    """Causal, with two windows and none, GQA, and T < S: pairs counted one by one."""
    config = Config("windowed", L=4, D=16, F=32, N=4, K=2, H=4, V=32, window=(3, None, 50, 1))
    parts, spent = tm.params(config), (0.5, 4, 1e9)  # seconds, chips, FLOPs/s
    of_a_token = 2 * (parts["mlp"] + parts["attention"] + config.D * config.V)
    for T, S in ((6, 6), (1, 6), (2, 7)):
        seen = sum(0 <= S - T + t - s < (window or S) for window in config.windows for t in range(T) for s in range(S))
        for causal, pairs in ((True, seen), (False, config.L * T * S)):
            got = tm.utilization(config, 3, T, *spent, S=S, causal=causal, training=False)
            flops = 3 * T * of_a_token + 4 * 3 * pairs * config.N * config.H
            assert got == pytest.approx(flops / math.prod(spent))
    step = tm.utilization(config, 3, 6, *spent)
    assert step == pytest.approx(3 * tm.utilization(config, 3, 6, *spent, training=False))
    again = tm.utilization(config, 3, 6, *spent, remat="block") - step
    assert again == pytest.approx(tm.remat_flops(config, 3, 6, "block", causal=True) / math.prod(spent))
