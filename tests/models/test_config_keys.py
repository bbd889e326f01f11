"""Every key of a config.json, dropped, moved, added and given twice, beside transformers' class: a small model is built
there with random weights, saved, and its config.json edited. Both read the folder, and their logits are equal; or one
of them refuses it, this library in words."""

import contextlib
import itertools
import json
import random
from dataclasses import fields
from functools import cache

import pytest
from probes import outcome, read_cases
from refused import named

from scaling.configs import load
from scaling.configs.model_types import KINDS
from scaling.models import transformer

theirs = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
theirs.logging.set_verbosity(60)
theirs.logging.disable_progress_bar()

SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 16, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
LATENT |= {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "moe_intermediate_size": 20}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
EXPERTS = {"moe_intermediate_size": 20, "num_experts": 10, "num_experts_per_tok": 3}
NEXT = {"full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4}
NEXT |= {"linear_value_head_dim": 6, "shared_expert_intermediate_size": 12}
BARE = {key: SMALL[key] for key in SMALL if key != "head_dim"}
SMALL_MODELS = """
llama(SMALL)
mistral(SMALL, sliding_window=5)
mixtral(SMALL, num_local_experts=6, num_experts_per_tok=3, sliding_window=5)
qwen2(SMALL | WINDOWS)
qwen3(SMALL | WINDOWS)
qwen3_moe(SMALL | WINDOWS | EXPERTS)
gemma(SMALL)
granite(SMALL, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2)
smollm3(SMALL, use_sliding_window=True, sliding_window=5, pad_token_id=0)
ernie4_5(SMALL)
helium(SMALL, head_dim=4, pad_token_id=0)
phi3(SMALL, pad_token_id=0, sliding_window=5, hidden_size=32)
olmo2(SMALL, pad_token_id=0)
olmo3(SMALL, pad_token_id=0, sliding_window=5, num_hidden_layers=4)
olmoe(SMALL, pad_token_id=0, head_dim=4, num_experts=8, num_experts_per_tok=3)
gemma3_text(SMALL, sliding_window=5, query_pre_attn_scalar=9)
gemma2(SMALL, sliding_window=5, query_pre_attn_scalar=9, attn_logit_softcapping=2.0)
gpt_oss(SMALL, sliding_window=5, num_local_experts=8, num_experts_per_tok=3)
glm(SMALL, pad_token_id=0)
glm4(SMALL, pad_token_id=0)
starcoder2(SMALL)
stablelm(SMALL, pad_token_id=0, num_attention_heads=2, num_key_value_heads=1)
gpt_neox(SMALL, num_attention_heads=2)
cohere(SMALL, head_dim=4)
cohere2(SMALL, head_dim=4, sliding_window=5, num_hidden_layers=4)
exaone4(SMALL, sliding_window=5, num_hidden_layers=4)
deepseek_v2(BARE | LATENT)
seed_oss(SMALL)
nemotron(SMALL, num_attention_heads=2)
hunyuan_v1_dense(SMALL)
arcee(SMALL)
apertus(SMALL)
gpt2(SMALL, n_inner=24, head_dim=4)
phi(SMALL)
olmo(SMALL, clip_qkv=0.5)
vaultgemma(SMALL, sliding_window=5, query_pre_attn_scalar=9)
qwen2_moe(SMALL | WINDOWS | EXPERTS, shared_expert_intermediate_size=12)
llama4_text(SMALL, num_local_experts=8, attention_chunk_size=5, floor_scale=4, pad_token_id=0)
qwen3_next(SMALL | EXPERTS | NEXT)
granitemoe(SMALL, num_local_experts=8, num_experts_per_tok=3, attention_multiplier=0.2)
glm4_moe(SMALL | EXPERTS, n_routed_experts=8, n_group=2)
glm4_moe_lite(BARE | LATENT)
deepseek_v3(BARE | LATENT)
"""
BASES = dict(read_cases(SMALL_MODELS, globals()).values())  # by type
ROPE = {"rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0, "beta_fast": 8.0}
ROPE |= {"beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3, "original_max_position_embeddings": 20}
ROPE |= {"partial_rotary_factor": 0.5, "attention_factor": 1.2, "truncate": False, "short_factor": [1.0] * 4}
ROPE |= {"long_factor": [2.0] * 4}
KINDS_OF_ROPE = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional", "mrope")
FEW = {key: ROPE[key] for key in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor")}
WHOLE = {key: ROPE[key] for key in ROPE if key not in ("partial_rotary_factor", "attention_factor", "truncate")}
# keys that the class may not know, or not have in its file
OTHERS = named(
    """
key                               value
num_local_experts                 5
num_experts                       5
n_routed_experts                  8
kv_lora_rank                      4
scoring_func                      "softmax"
is_causal                         False
per_layer_config                  {"0": {"intermediate_size": 8}}
attention_chunk_size              4
original_max_position_embeddings  20
rope_theta                        50.0
partial_rotary_factor             0.5
mlp_bias                          True
hidden_activation                 "relu"
quantization_config               {"quant_method": "awq"}
layer_types                       ["full_attention"] * 3
torch_dtype                       "bfloat16"
tie_encoder_decoder               True
use_bidirectional_attention       True
topk_method                       "x"
shared_expert_intermediate_size   8
final_logit_softcapping           1.0
attn_logit_softcapping            1.0
embedding_multiplier              3.0
logits_scaling                    3.0
attention_multiplier              2.0
residual_multiplier               2.0
query_pre_attn_scalar             2.0
head_dim                          4
moe_layer_freq                    2
no_rope_layers                    [0, 1, 1]
nobody_knows                      1
unknown                           {"a": 1}
text_config                       {"hidden_size": 8}
full_attention_interval           2
use_qk_norm                       True
""",
    globals(),
)
VALUES = {  # what else a key may be
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh", "gelu_new", "swish", "relu2", "tanh"],
    "layer_types": [
        ["sliding_attention"] * 3, ["full_attention", "sliding_attention", "full_attention"], ["full_attention"] * 2,
        ["attention"] * 3, ["chunked_attention"] * 3, [], ["full_attention", "full_attention", "chunked_attention"],
    ],
    "mlp_only_layers": [[1], [7], []], "pad_token_id": [0, 39], "model_type": ["kimi_k2"],
    "rope_parameters": [{}, {"rope_theta": 30.0}],
}  # fmt: skip
GONE = object()


@cache
def written(kind: str) -> dict:
    """The whole config.json of the type's small model, every key of the class with its value."""
    config = theirs.AutoConfig.for_model(kind, **BASES[kind])
    return json.loads(config.to_json_string(use_diff=False))


def edited(table: dict, edits: dict) -> dict:
    return {key: value for key, value in (table | edits).items() if value is not GONE}


def others(value) -> list:
    """Other values of the type that this one has."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, 1, 0]
    if isinstance(value, float):
        return [value / 2, value * 10, 0.0, 1]
    return []


def single_edits(kind: str) -> list[dict]:
    """Each key dropped, null and with other values; each key of another class added."""
    table = written(kind)
    found: list[dict] = [{key: GONE} for key in table] + [{key: None} for key in table]
    for key in table:
        found += [{key: value} for value in (VALUES.get(key, []) or others(table[key]))]
    for key, value in OTHERS.items():
        found += [{key: value}, {key: None}]
    return found


def rope_edits() -> list[dict]:
    """Scalings in each of the two tables and in both, with keys left out, null, and at the top level."""
    found = [{"rope_scaling": {"type": kind} | FEW} for kind in KINDS_OF_ROPE]
    found += [{"rope_parameters": {"type": kind, "rope_type": "linear"} | FEW} for kind in KINDS_OF_ROPE]
    for kind, place in itertools.product(KINDS_OF_ROPE, ("rope_scaling", "rope_parameters")):
        whole, few = ({"rope_type": kind} | keys for keys in (WHOLE, FEW))
        found += [{place: few, "max_position_embeddings": GONE}, {place: few, "original_max_position_embeddings": None}]
        found += [{place: {key: value for key, value in whole.items() if key != gone}} for gone in whole]
        found += [{place: whole | {key: None}} for key in whole]
        found += [{place: few | {key: value}} for key, value in ROPE.items()]
        found += [{place: few, key: value} for key, value in ROPE.items()]
        found += [{place: {k: v for k, v in few.items() if k != key}, key: ROPE[key]} for key in FEW]
    both = itertools.product(KINDS_OF_ROPE, ("default", "linear", "yarn"))
    other = {"rope_theta": 7.0, "factor": 3.0}
    found += [{"rope_scaling": {"rope_type": a} | FEW, "rope_parameters": {"rope_type": b} | other} for a, b in both]
    return found


# values around the published ones, of keys whose others would often be refused
DRAWN = named(
    """
key                        values
vocab_size                 [29, 40]
intermediate_size          [24, 40]
num_experts                [4, 8]
num_local_experts          [4, 8]
n_routed_experts           [4, 8]
num_experts_per_tok        [1, 2, 3]
decoder_sparse_step        [1, 2]
mlp_only_layers            [[], [0], [1]]
mlp_layer_types            [None, ["sparse"] * 3, ["dense", "dense", "sparse"]]
n_group                    [1, 2]
topk_group                 [1, 2]
first_k_dense_replace      [0, 1, 9]
q_lora_rank                [None, 12]
qk_rope_head_dim           [4, 2]
v_head_dim                 [8, 6]
topk_method                ["greedy", "group_limited_greedy"]
sliding_window             [None, 1, 3, 100]
max_window_layers          [0, 2, 9]
clip_qkv                   [None, 0.5, 1.0]
layer_types                [None, ["full_attention"] * 3, ["full_attention", "sliding_attention", "full_attention"]]
no_rope_layers             [None, [0, 1, 1], [1, 0, 0]]
no_rope_layer_interval     [1, 2, 3]
rms_norm_eps               [1e-6, 1e-2]
num_key_value_heads        [1, 2, 4]
hidden_act                 ["silu", "gelu", "gelu_pytorch_tanh", "relu"]
query_pre_attn_scalar      [4, 9]
linear_conv_kernel_dim     [2, 4]
full_attention_interval    [2, 3]
attn_logit_softcapping     [None, 0.3]
final_logit_softcapping    [None, 0.7]
rope_theta                 [30.0, 1e5]
partial_rotary_factor      [0.5, 1.0]
moe_layers                 [None, [], [1, 2], [0, 1, 2]]
attention_chunk_size       [None, 2, 9]
interleave_moe_layer_step  [1, 2, 3]
floor_scale                [1, 7]
attn_scale                 [0.0, 0.7]
""",
    globals(),
)


def drawn(kind: str, seed: int) -> dict:
    """A config.json of the small model in which each key has, with some probability, another value or is dropped."""
    draw, table = random.Random(f"{kind} {seed}"), dict(written(kind))
    share, fixed = draw.choice([0.15, 0.35]), {"model_type", *BASES["llama"]} - DRAWN.keys()
    for key in dict.fromkeys((*table, "rope_theta", "partial_rotary_factor")):
        values = DRAWN.get(key) or VALUES.get(key) or others(table[key])
        if key not in fixed and values and draw.random() < share:
            table[key] = draw.choice(values)
        elif key not in fixed | DRAWN.keys() and draw.random() < (0.2 if key == "rope_parameters" else 0.02):
            del table[key]
    if draw.random() < 0.4:
        scaling = {key: value for key, value in ROPE.items() if draw.random() < 0.7 or key in FEW}
        rope = {"rope_type": draw.choice(KINDS_OF_ROPE[:4])} | scaling
        if isinstance(table.get("rope_parameters", {}).get("full_attention"), dict) and draw.random() < 0.7:
            rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 70.0}}
        table[draw.choice(["rope_parameters", "rope_scaling"])] = rope
    return table


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20}
# what was read otherwise once: a type, edits
READ_OTHERWISE_ONCE = """
rope_scaling wins: qwen2(rope_scaling=YARN, rope_parameters={'rope_theta': 7.0}, rope_theta=30.0)
and drops the other's base: mixtral(rope_scaling={'type': 'linear', 'factor': 2.0},
    rope_parameters={'rope_theta': 7.0})
the original context is at the top: llama(rope_scaling=YARN, original_max_position_embeddings=33)
but not where kinds of layers have tables: olmo3(rope_scaling={'rope_type': 'llama3'} | FEW,
    original_max_position_embeddings=20)
which are rounded by yarn in any case: olmo3(rope_scaling={'rope_type': 'yarn', 'truncate': False} | FEW)
or it is the context: llama(rope_parameters={'rope_type': 'llama3'} | FEW)
scaled by mscale without yarn: deepseek_v3(rope_scaling={'type': 'linear', 'factor': 4.0, 'mscale_all_dim': 1.0})
beta_fast is null: llama(rope_scaling=YARN | {'beta_fast': None, 'beta_slow': 0})
two experts a token: mixtral(num_experts_per_tok=GONE)
eight experts a token: qwen3_moe(num_experts_per_tok=GONE)
the experts' other name: mixtral(num_experts=5)
no window in llama: llama(sliding_window=3)
nor in deepseek: deepseek_v3(sliding_window=3)
a window beside full layers: qwen3_moe(layer_types=['full_attention'] * 3)
layers of mistral: mistral(layer_types=['full_attention', 'sliding_attention', 'full_attention'])
a cap that Gemma 3 does not use: gemma3_text(attn_logit_softcapping=1.0)
latent keys in llama: llama(kv_lora_rank=4, num_experts=8, hidden_activation='relu')
"""
KNOWN = read_cases(READ_OTHERWISE_ONCE, globals())


@pytest.mark.slow
@pytest.mark.parametrize("what", KNOWN)
def test_a_key_is_read_as_the_class_reads_it(what, tmp_path):
    kind, edits = KNOWN[what]
    assert outcome(edited(written(kind), edits), tmp_path)[0] == "equal"


@pytest.mark.parametrize("kind", ["gpt_neox", "cohere"])
def test_a_width_of_heads_that_only_a_part_of_the_class_reads_is_refused(kind, tmp_path):
    assert outcome(written(kind) | {"head_dim": 16}, tmp_path)[0] == "refused here"


def test_a_scale_of_zero_and_a_whole_number_are_read(tmp_path):
    for kind, edits, said in (
        ("cohere", {"logit_scale": 0.0}, "logit_scale"),
        ("gemma2", {"attn_logit_softcapping": 9}, ""),
    ):
        (tmp_path / "config.json").write_text(json.dumps(written(kind) | edits))
        if said:
            with pytest.raises(ValueError, match=said):
                load(tmp_path / "config.json")
        else:
            assert load(tmp_path / "config.json").score_cap == 9


LONG = {"rope_scaling": {"rope_type": "longrope"} | WHOLE, "original_max_position_embeddings": 20}
EXPORTS = [
    ("glm", {}),
    ("phi3", {}),
    ("phi3", LONG),
    ("gpt2", {}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
]
BY_LAYER = ("gemma2", "gemma3_text", "gpt_oss", "olmo3", "cohere2", "exaone4", "llama4_text", "qwen3_next")
EXPORTS += [(kind, {"layer_types": ["full_attention"] * written(kind)["num_hidden_layers"]}) for kind in BY_LAYER]


@pytest.mark.parametrize(("kind", "edits"), EXPORTS, ids=str)
def test_the_class_computes_what_is_exported(kind, edits, tmp_path):
    """Ids of padding beyond the vocabulary, windows that no layer has, and caps that are left out."""
    assert outcome(edited(written(kind), edits), tmp_path, whole=True)[0] == "equal"


@pytest.mark.parametrize("kind", BASES)
def test_the_defaults_are_the_classes(kind):
    row, config = KINDS[kind], theirs.AutoConfig.for_model(kind)
    defaults: dict = {"head_dim": None, "layer_types": None, "full_attention_interval": 4}
    defaults |= {field.name: field.default for field in fields(config)}
    assert row.keys == {key: defaults[key] for key in row.keys}
    theta = config.default_theta
    assert row.theta == (theta["global"] if isinstance(theta, dict) else theta)
    assert {frozenset(pair) for pair in row.aliases.items()} <= {
        frozenset(pair) for pair in config.attribute_map.items()
    }


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path):
    tables = [written("deepseek_v3") | {"model_type": name} for name in ("deepseek_v3", "kimi_k2")]
    configs = []
    for table in tables:
        (tmp_path / "config.json").write_text(json.dumps(table))
        configs.append(load(tmp_path / "config.json"))
    assert configs[0] == configs[1]
    assert transformer.uncomputed(configs[1]) == []


@pytest.mark.sweep
def test_no_other_type_is_taken_for_one_that_is_computed(tmp_path):
    """Of all types that transformers knows, with their class's defaults."""
    computed, counted = set(), set()
    for name in theirs.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        with contextlib.suppress(Exception):  # two need a library
            (tmp_path / "config.json").write_text(theirs.AutoConfig.for_model(name).to_json_string(use_diff=False))
        with contextlib.suppress(ValueError):
            (counted if transformer.uncomputed(load(tmp_path / "config.json")) else computed).add(name)
    assert computed == {*BASES, "gpt-sw3"} - {"glm4_moe"}  # GPT-SW3's class is GPT-2's; GLM-4.5's heads have 21 planes
    assert len(counted) > 300


def check(kind: str, table: dict, folder, whole: bool = False) -> str:
    """The outcome, which is neither a difference nor an error without words."""
    found, said = outcome(table, folder, whole)
    shown = {key: table.get(key, "(left out)") for key in {**written(kind), **table}}
    shown = {key: value for key, value in shown.items() if value != written(kind).get(key, GONE)}
    assert found not in ("DIFFER", "BROKEN"), (kind, shown, said)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
def test_some_edits_of_a_config(kind, tmp_path):
    edits = single_edits(kind) + rope_edits()
    found = [check(kind, edited(written(kind), each), tmp_path) for each in random.Random(1).sample(edits, 4)]
    assert "equal" in found


@pytest.mark.sweep
@pytest.mark.parametrize("kind", BASES)
def test_every_edit_of_a_config(kind, tmp_path):
    for each in single_edits(kind) + rope_edits():
        check(kind, edited(written(kind), each), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", BASES)
def test_drawn_configs(kind, tmp_path):
    assert "equal" in [check(kind, drawn(kind, seed), tmp_path, whole=True) for seed in range(60)]
