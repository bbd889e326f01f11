"""The keys of a config.json that each model_type's class in transformers reads, with their defaults.

A class reads the keys that it names and ignores all others, so a `sliding_window` in a Llama's file changes nothing. A
key that the file leaves out has the class's default. `tests/models/test_config_keys.py` compares both with
transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class ModelType:
    """One model_type.

    Attributes:
        architecture: The class in transformers whose models are computed here; "" for a type that is only counted.
        keys: The keys that change the class's function, each with its default. For a type that is only counted, the
            defaults of the keys that it shares with others.
        theta: The class's base of rotary positions.
        aliases: Other names of keys. Where a file has both, the class takes the other name's value.
        fixed: Fields of Config that all models of the class share.
        meant: Values of hidden_act that the class reads as another activation.
        root_scaled: Whether the class multiplies embeddings by sqrt(D).
        gated_window: Whether a window counts only with use_sliding_window.
        pattern: In a file without layer_types, each layer whose number is a multiple of this has full attention, and
            the others have the window.
        partial: The default of partial_rotary_factor in a class that rotates only a part of each head.
        rope_keys: The keys of the base and of the rotated part, where they are not in a separate table.
        local_theta: The base of layers with a window, in a class in which it differs from the other layers' base.
        stretched: Whether positions of type "dynamic" with an `alpha` have a larger base, theta alpha^(H / (H - 2)).
        rope: The default table of rotary positions.
        longrope: Whether scalings of the types "su" and "yarn" mean longrope.
        still_full: Whether layers with full attention rotate nothing in a model whose other layers have a window.
    """

    architecture: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 1e4
    aliases: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    meant: Mapping[str, str] = field(default_factory=dict)
    root_scaled: bool = False
    gated_window: bool = False
    pattern: int = 0
    partial: float | None = None
    rope_keys: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    local_theta: float | None = None
    stretched: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    longrope: bool = False
    still_full: bool = False

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that the class reads, each from the file or with its default."""
        if not self.architecture:
            return {**self.keys, **table}
        given = {**table, **{key: table[alias] for alias, key in self.aliases.items() if alias in table}}
        return {key: given.get(key, default) for key, default in self.keys.items()}


def _keys(**others: Any) -> dict[str, Any]:
    """Return the keys of a decoder with these changes and additions."""
    common = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    common |= {"num_key_value_heads": 8, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    return common | {"tie_word_embeddings": False, "attention_dropout": 0.0} | others


def _without(keys: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the keys without these."""
    return {key: default for key, default in keys.items() if key not in names}


LLAMA = _keys(
    intermediate_size=11008, num_key_value_heads=None, max_position_embeddings=2048, attention_bias=False,
    mlp_bias=False,
)  # fmt: skip
MISTRAL = _keys(
    intermediate_size=14336, max_position_embeddings=131072, sliding_window=4096,
    layer_types=None,  # AutoModel builds a Mistral with this key by the class Ministral, which has no other difference
)  # fmt: skip
MIXTRAL = _keys(
    intermediate_size=14336, max_position_embeddings=131072, sliding_window=None, rms_norm_eps=1e-5,
    num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
QWEN2 = _keys(
    vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768,
    use_sliding_window=False, sliding_window=4096, max_window_layers=28, layer_types=None,
)  # fmt: skip
QWEN3_MOE = _keys(
    vocab_size=151936, hidden_size=2048, num_hidden_layers=24, intermediate_size=6144, num_key_value_heads=4,
    max_position_embeddings=32768, attention_bias=False, use_sliding_window=False, sliding_window=4096,
    moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=False, decoder_sparse_step=1,
    mlp_only_layers=None,
)  # fmt: skip
DEEPSEEK_V3 = _without(_keys(
    vocab_size=129280, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
    intermediate_size=18432, max_position_embeddings=4096, attention_bias=False, q_lora_rank=1536, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope_interleave=True, moe_intermediate_size=2048,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4, norm_topk_prob=True,
    routed_scaling_factor=2.5, first_k_dense_replace=3,
), "head_dim")  # fmt: skip  # the class takes qk_rope_head_dim for it
GLM4_MOE_LITE = _without(DEEPSEEK_V3, "first_k_dense_replace") | {
    "vocab_size": 154880, "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "intermediate_size": 10240, "max_position_embeddings": 202752, "q_lora_rank": 768,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "moe_intermediate_size": 1536, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5,
    "mlp_layer_types": None,
}  # fmt: skip
GEMMA_1 = _keys(
    vocab_size=256000, hidden_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=16,
    head_dim=256, intermediate_size=24576, max_position_embeddings=8192, hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True, attention_bias=False, use_bidirectional_attention=None,
)  # fmt: skip
PHI3 = _keys(
    vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_key_value_heads=None, max_position_embeddings=4096,
    rms_norm_eps=1e-5, sliding_window=None, resid_pdrop=0.0, embd_pdrop=0.0, original_max_position_embeddings=4096,
)  # fmt: skip
ERNIE = _without(_keys(
    vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_hidden_layers=18, num_attention_heads=16,
    num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
    use_bias=False,
), "attention_dropout")  # fmt: skip
HELIUM = _keys(
    vocab_size=48000, hidden_size=2560, intermediate_size=7040, num_hidden_layers=24, num_attention_heads=20,
    num_key_value_heads=20, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-8, attention_bias=False,
    mlp_bias=False,
)  # fmt: skip
GRANITE = LLAMA | {
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip
SMOLLM3 = _keys(
    vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
    num_key_value_heads=4, max_position_embeddings=32768, use_sliding_window=False, sliding_window=None,
    no_rope_layers=None, no_rope_layer_interval=4, layer_types=None, attention_bias=False, mlp_bias=False,
    tie_word_embeddings=True,
)  # fmt: skip
SEED_OSS = _keys(
    vocab_size=155136, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=80, head_dim=128,
    max_position_embeddings=524288, attention_bias=True, attention_out_bias=False, attention_dropout=0.1,
    residual_dropout=0.1, mlp_bias=False,
)  # fmt: skip
QWEN2_MOE = _without(QWEN3_MOE, "attention_bias") | {
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "qkv_bias": True,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
QWEN3_NEXT = _without(QWEN3_MOE, "sliding_window", "use_sliding_window", "max_window_layers", "layer_types") | {
    "intermediate_size": 5632, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10,
    "num_experts": 512, "norm_topk_prob": True, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "layer_types": None,
    "full_attention_interval": 4,
}  # fmt: skip
GRANITEMOE = _without(GRANITE, "mlp_bias") | {"num_local_experts": 8, "num_experts_per_tok": 2}
GLM4_MOE = _keys(
    vocab_size=151552, num_hidden_layers=46, num_attention_heads=96, intermediate_size=10944, rms_norm_eps=1e-5,
    max_position_embeddings=131072, attention_bias=False, moe_intermediate_size=1408, num_experts_per_tok=8,
    n_shared_experts=1, n_routed_experts=128, routed_scaling_factor=1.0, n_group=1, topk_group=1,
    first_k_dense_replace=1, norm_topk_prob=True, use_qk_norm=False,
)  # fmt: skip
OLMO = _without(LLAMA, "mlp_bias") | {"vocab_size": 50304, "rms_norm_eps": 1e-5}
OLMO_1 = _without(OLMO, "rms_norm_eps") | {"clip_qkv": None}
OLMO3 = OLMO | {"sliding_window": 4096, "layer_types": None}
OLMOE = _without(OLMO, "head_dim") | {
    "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
    "max_position_embeddings": 4096, "clip_qkv": None, "num_experts_per_tok": 8, "num_experts": 64,
    "norm_topk_prob": False,
}  # fmt: skip
GEMMA_2 = _without(GEMMA_1, "hidden_act") | {
    "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 9216, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
GEMMA_3 = _without(GEMMA_2, "attn_logit_softcapping") | {  # the class has this key and does not use it
    "vocab_size": 262208, "max_position_embeddings": 131072, "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}  # fmt: skip
GLM = _keys(
    vocab_size=151552, intermediate_size=13696, num_hidden_layers=40, num_key_value_heads=2, head_dim=128,
    max_position_embeddings=131072, rms_norm_eps=1.5625e-07, attention_bias=True,
)  # fmt: skip
LAYER_NORM = _without(_keys(attention_dropout=0.0), "rms_norm_eps", "head_dim")
STARCODER2 = LAYER_NORM | {
    "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
    "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "sliding_window": None, "residual_dropout": 0.0,
    "embedding_dropout": 0.0, "use_bias": True, "tie_word_embeddings": True, "head_dim": None,
}  # fmt: skip
STABLELM = LAYER_NORM | {
    "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "use_qkv_bias": False, "qk_layernorm": False,
    "use_parallel_residual": False, "hidden_dropout": 0.0,
}  # fmt: skip
PHI = LAYER_NORM | {
    "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_key_value_heads": None, "hidden_act": "gelu_new", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "qk_layernorm": False, "head_dim": None,
}  # fmt: skip
NEMOTRON = LAYER_NORM | {
    "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48, "head_dim": None,
    "num_key_value_heads": None, "hidden_act": "relu2", "max_position_embeddings": 4096, "norm_eps": 1e-5,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
ARCEE = LLAMA | {
    "hidden_size": 2560, "intermediate_size": 18432, "hidden_act": "relu2", "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
APERTUS = _without(LLAMA, "mlp_bias") | {
    "vocab_size": 131072, "intermediate_size": 14336, "hidden_act": "xielu", "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
APERTUS_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
VAULT_GEMMA = _without(GEMMA_2, "use_bidirectional_attention")
HUNYUAN = _without(LLAMA, "mlp_bias") | {"vocab_size": 290943, "rms_norm_eps": 1e-5}
GPT_NEOX = _without(LAYER_NORM, "num_key_value_heads") | {
    "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
    "num_attention_heads": 64, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
    "use_parallel_residual": True, "attention_bias": True, "hidden_dropout": 0.0,
}  # fmt: skip
COHERE2 = LAYER_NORM | {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "logit_scale": 0.0625,
    "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": None, "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": False, "sliding_window": 4096,
    "layer_types": None,
}  # fmt: skip
COHERE = _without(COHERE2, "sliding_window", "layer_types") | {"use_qk_norm": False}
EXAONE4 = _without(LLAMA, "mlp_bias", "attention_bias") | {
    "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
    "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None,
}  # fmt: skip
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "vocab_size": 102400, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": None, "intermediate_size": 11008, "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": None,
    "n_group": None, "topk_group": None, "topk_method": "greedy", "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0, "mlp_bias": False,
}  # fmt: skip
DEEPSEEK_V2 = _without(DEEPSEEK_V2, "norm_topk_prob", "rope_interleave")
GPT_OSS = _without(MIXTRAL, "hidden_act") | {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4,
    "sliding_window": 128, "layer_types": None, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True,
}  # fmt: skip
GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

GPT2 = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
}  # fmt: skip

_OLMO_FIXED = {"qk_norm": True, "qk_wide": True, "norms": "after"}
_GEMMA_FIXED = {"unit_offset": True, "norms": "both"}
_COHERE_FIXED = {"norms": "shared", "parallel": True, "centered": True}
_LAYER_NORM_FIXED = {"centered": True, "norm_bias": True}
_V3 = ModelType(
    "DeepseekV3ForCausalLM", DEEPSEEK_V3, aliases={"num_local_experts": "n_routed_experts"},
    fixed={"routing": "sigmoid"},
)  # fmt: skip

KINDS: dict[str, ModelType] = {
    "llama": ModelType("LlamaForCausalLM", LLAMA),
    "mistral": ModelType("MistralForCausalLM", MISTRAL),
    "qwen2": ModelType(
        "Qwen2ForCausalLM", QWEN2, fixed={"attention_bias": True, "output_bias": False}, gated_window=True,
    ),
    "qwen3": ModelType(
        "Qwen3ForCausalLM", QWEN2 | {"head_dim": 128, "attention_bias": False}, fixed={"qk_norm": True},
        gated_window=True,
    ),
    "mixtral": ModelType("MixtralForCausalLM", MIXTRAL, 1e6, {"num_experts": "num_local_experts"}),
    "qwen3_moe": ModelType(
        "Qwen3MoeForCausalLM", QWEN3_MOE, aliases={"num_local_experts": "num_experts"}, fixed={"qk_norm": True},
        gated_window=True,
    ),
    "qwen2_moe": ModelType(
        "Qwen2MoeForCausalLM", QWEN2_MOE, fixed={"shared_gate": True, "output_bias": False}, gated_window=True,
    ),
    "granitemoe": ModelType("GraniteMoeForCausalLM", GRANITEMOE),
    "glm4_moe": ModelType(
        "Glm4MoeForCausalLM", GLM4_MOE, aliases={"num_local_experts": "n_routed_experts"},
        fixed={"routing": "sigmoid", "output_bias": False}, partial=0.5,
    ),
    "deepseek_v3": _V3,
    "deepseek_v2": ModelType(
        "DeepseekV2ForCausalLM", DEEPSEEK_V2, aliases={"num_experts": "n_routed_experts"}, fixed={"norm_topk": False},
    ),
    "glm4_moe_lite": replace(_V3, architecture="Glm4MoeLiteForCausalLM", keys=GLM4_MOE_LITE, partial=1.0),
    "kimi_k2": _V3,  # its own code is DeepSeek-V3's
    "gemma": ModelType(
        "GemmaForCausalLM", GEMMA_1, fixed={"unit_offset": True}, meant={"gelu": "gelu_pytorch_tanh"}, root_scaled=True,
    ),
    "phi3": ModelType("Phi3ForCausalLM", PHI3, partial=1.0, longrope=True),
    "ernie4_5": ModelType("Ernie4_5ForCausalLM", ERNIE, 5e5),
    "helium": ModelType("HeliumForCausalLM", HELIUM, 1e5),
    "seed_oss": ModelType("SeedOssForCausalLM", SEED_OSS),
    "granite": ModelType("GraniteForCausalLM", GRANITE),
    "smollm3": ModelType("SmolLM3ForCausalLM", SMOLLM3, 2e6, gated_window=True),
    "gpt_oss": ModelType(
        "GptOssForCausalLM", GPT_OSS, 1.5e5, {"num_experts": "num_local_experts"},
        fixed={"sinks": True, "expert_bias": True}, pattern=2, rope=GPT_OSS_ROPE,
    ),
    "olmo2": ModelType("Olmo2ForCausalLM", OLMO, fixed=_OLMO_FIXED),
    "olmo3": ModelType("Olmo3ForCausalLM", OLMO3, 5e5, fixed=_OLMO_FIXED, pattern=4, local_theta=5e5),
    "olmoe": ModelType(
        "OlmoeForCausalLM", OLMOE, aliases={"num_local_experts": "num_experts"},
        fixed={"qk_norm": True, "qk_wide": True},
    ),
    "gemma2": ModelType("Gemma2ForCausalLM", GEMMA_2, fixed=_GEMMA_FIXED, root_scaled=True, pattern=2),
    "gemma3_text": ModelType(
        "Gemma3ForCausalLM", GEMMA_3, 1e6, fixed=_GEMMA_FIXED | {"qk_norm": True}, root_scaled=True, pattern=6,
        local_theta=1e4,
    ),
    "glm": ModelType("GlmForCausalLM", GLM, fixed={"output_bias": False}, partial=0.5),
    "glm4": ModelType("Glm4ForCausalLM", GLM, fixed={"output_bias": False, "norms": "both"}, partial=0.5),
    "starcoder2": ModelType("Starcoder2ForCausalLM", STARCODER2, fixed=_LAYER_NORM_FIXED),
    "stablelm": ModelType(
        "StableLmForCausalLM", STABLELM, fixed=_LAYER_NORM_FIXED | {"output_bias": False, "qk_layernorm": True},
        partial=0.25,
    ),
    "gpt_neox": ModelType(
        "GPTNeoXForCausalLM", GPT_NEOX, fixed=_LAYER_NORM_FIXED | {"mlp_bias": True}, partial=0.25,
        rope_keys=("rotary_emb_base", "rotary_pct"),
    ),
    "gpt2": ModelType(
        "GPT2LMHeadModel", GPT2,
        aliases={
            "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        fixed=_LAYER_NORM_FIXED | {"attention_bias": True, "mlp_bias": True},
    ),
    "phi": ModelType(
        "PhiForCausalLM", PHI,
        fixed=_LAYER_NORM_FIXED
        | {"norms": "shared", "parallel": True, "attention_bias": True, "mlp_bias": True, "unembed_bias": True},
        partial=0.5,
    ),
    "olmo": ModelType("OlmoForCausalLM", OLMO_1, fixed={"centered": True, "norm_gain": False, "eps": 1e-5}),
    "arcee": ModelType("ArceeForCausalLM", ARCEE),
    "apertus": ModelType("ApertusForCausalLM", APERTUS, 1.2e7, fixed={"qk_norm": True}, rope=APERTUS_ROPE),
    "vaultgemma": ModelType(
        "VaultGemmaForCausalLM", VAULT_GEMMA, fixed={"unit_offset": True}, root_scaled=True, pattern=2,
    ),
    "nemotron": ModelType(
        "NemotronForCausalLM", NEMOTRON, fixed=_LAYER_NORM_FIXED | {"unit_offset": True}, partial=0.5,
    ),
    "hunyuan_v1_dense": ModelType(
        "HunYuanDenseV1ForCausalLM", HUNYUAN, fixed={"qk_norm": True, "qk_turned": True}, stretched=True,
    ),
    "cohere": ModelType("CohereForCausalLM", COHERE, 5e5, fixed=_COHERE_FIXED | {"qk_layernorm": True}),
    "cohere2": ModelType("Cohere2ForCausalLM", COHERE2, fixed=_COHERE_FIXED, pattern=4, still_full=True),
    "exaone4": ModelType(
        "Exaone4ForCausalLM", EXAONE4, fixed={"qk_norm": True, "norms": "after"}, pattern=4, still_full=True,
    ),
    "llama4_text": ModelType("", {"rms_norm_eps": 1e-5}, 5e5, fixed={"shared": 1}),
    "qwen3_next": ModelType(
        "Qwen3NextForCausalLM", QWEN3_NEXT,
        fixed={"qk_norm": True, "unit_offset": True, "head_gate": True, "shared_gate": True}, partial=0.25,
    ),
}  # fmt: skip
COUNTED = ModelType("", {"rms_norm_eps": 1e-6})  # a type without a row
