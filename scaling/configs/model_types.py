"""The keys of a config.json that each model_type's class in transformers reads, with their defaults.

A class reads the keys that it names and ignores all others, so a `sliding_window` in a Llama's file changes nothing. A
key that the file leaves out has the class's default. `tests/models/test_config_keys.py` compares both with
transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scaling.configs import model_keys as keys


@dataclass(frozen=True)
class ModelType:
    """One model_type.

    Attributes:
        architecture: The class in transformers whose models are computed here; "" for a type that is only counted.
        keys: The keys that change what the class computes, each with its default. For a type that is only counted, the
            defaults of the keys that it shares with others.
        theta: The class's base of rotary positions.
        aliases: Other names of keys. Where a file has both, the class takes the other name's value.
        fixed: Fields of Config that all models of the class share.
        meant: Values of hidden_act that the class takes for another.
        root_scaled: Whether the class multiplies embeddings by sqrt(D).
        gated_window: Whether a window counts only with use_sliding_window.
        pattern: Without layer_types, every layer whose number this divides sees all, and the others have the window.
        partial: The default of partial_rotary_factor in a class that rotates only a part of each head.
        rope_keys: The keys of the base and of the rotated part, where they are not in a table of their own.
        local_theta: The base of layers with a window, in a class in which it is another.
        stretched: Whether positions of type "dynamic" with an `alpha` are of a larger base, theta alpha^(H / (H - 2)).
        rope: The table of rotary positions of a file that has none.
        still_full: Whether layers without a window rotate nothing where others have one.
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
    still_full: bool = False

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that the class reads, each from the file or with its default."""
        if not self.architecture:
            return {**self.keys, **table}
        given = {**table, **{key: table[alias] for alias, key in self.aliases.items() if alias in table}}
        return {key: given.get(key, default) for key, default in self.keys.items()}


_OLMO_FIXED = {"qk_norm": True, "qk_wide": True, "norms": "after"}
_GEMMA_FIXED = {"unit_offset": True, "norms": "both"}
_COHERE_FIXED = {"norms": "shared", "parallel": True, "centered": True}
_LAYER_NORM_FIXED = {"centered": True, "norm_bias": True}
_V3 = ModelType(
    "DeepseekV3ForCausalLM", keys.DEEPSEEK_V3, aliases={"num_local_experts": "n_routed_experts"},
    fixed={"routing": "sigmoid"},
)  # fmt: skip

KINDS: dict[str, ModelType] = {
    "llama": ModelType("LlamaForCausalLM", keys.LLAMA),
    "mistral": ModelType("MistralForCausalLM", keys.MISTRAL),
    "qwen2": ModelType(
        "Qwen2ForCausalLM", keys.QWEN2, fixed={"attention_bias": True, "output_bias": False}, gated_window=True
    ),
    "qwen3": ModelType(
        "Qwen3ForCausalLM",
        keys.QWEN2 | {"head_dim": 128, "attention_bias": False},
        fixed={"qk_norm": True},
        gated_window=True,
    ),
    "mixtral": ModelType("MixtralForCausalLM", keys.MIXTRAL, 1e6, {"num_experts": "num_local_experts"}),
    "qwen3_moe": ModelType(
        "Qwen3MoeForCausalLM",
        keys.QWEN3_MOE,
        aliases={"num_local_experts": "num_experts"},
        fixed={"qk_norm": True},
        gated_window=True,
    ),
    "qwen2_moe": ModelType(
        "Qwen2MoeForCausalLM", keys.QWEN2_MOE, fixed={"shared_gate": True, "output_bias": False}, gated_window=True
    ),
    "granitemoe": ModelType("GraniteMoeForCausalLM", keys.GRANITEMOE),
    "glm4_moe": ModelType(
        "Glm4MoeForCausalLM",
        keys.GLM4_MOE,
        aliases={"num_local_experts": "n_routed_experts"},
        fixed={"routing": "sigmoid", "output_bias": False},
        partial=0.5,
    ),
    "deepseek_v3": _V3,
    "deepseek_v2": ModelType(
        "DeepseekV2ForCausalLM",
        keys.DEEPSEEK_V2,
        aliases={"num_experts": "n_routed_experts"},
        fixed={"norm_topk": False},
    ),
    "kimi_k2": _V3,  # its own code is DeepSeek-V3's
    "gemma": ModelType(
        "GemmaForCausalLM",
        keys.GEMMA_1,
        fixed={"unit_offset": True},
        meant={"gelu": "gelu_pytorch_tanh"},
        root_scaled=True,
    ),
    "phi3": ModelType("Phi3ForCausalLM", keys.PHI3, partial=1.0),
    "ernie4_5": ModelType("Ernie4_5ForCausalLM", keys.ERNIE, 5e5),
    "helium": ModelType("HeliumForCausalLM", keys.HELIUM, 1e5),
    "seed_oss": ModelType("SeedOssForCausalLM", keys.SEED_OSS),
    "granite": ModelType("GraniteForCausalLM", keys.GRANITE),
    "smollm3": ModelType("SmolLM3ForCausalLM", keys.SMOLLM3, 2e6, gated_window=True),
    "gpt_oss": ModelType(
        "GptOssForCausalLM",
        keys.GPT_OSS,
        1.5e5,
        {"num_experts": "num_local_experts"},
        fixed={"sinks": True, "expert_bias": True},
        pattern=2,
        rope=keys.GPT_OSS_ROPE,
    ),
    "olmo2": ModelType("Olmo2ForCausalLM", keys.OLMO, fixed=_OLMO_FIXED),
    "olmo3": ModelType("Olmo3ForCausalLM", keys.OLMO3, 5e5, fixed=_OLMO_FIXED, pattern=4, local_theta=5e5),
    "olmoe": ModelType(
        "OlmoeForCausalLM",
        keys.OLMOE,
        aliases={"num_local_experts": "num_experts"},
        fixed={"qk_norm": True, "qk_wide": True},
    ),
    "gemma2": ModelType("Gemma2ForCausalLM", keys.GEMMA_2, fixed=_GEMMA_FIXED, root_scaled=True, pattern=2),
    "gemma3_text": ModelType(
        "Gemma3ForCausalLM",
        keys.GEMMA_3,
        1e6,
        fixed=_GEMMA_FIXED | {"qk_norm": True},
        root_scaled=True,
        pattern=6,
        local_theta=1e4,
    ),
    "glm": ModelType("GlmForCausalLM", keys.GLM, fixed={"output_bias": False}, partial=0.5),
    "glm4": ModelType("Glm4ForCausalLM", keys.GLM, fixed={"output_bias": False, "norms": "both"}, partial=0.5),
    "starcoder2": ModelType("Starcoder2ForCausalLM", keys.STARCODER2, fixed=_LAYER_NORM_FIXED),
    "stablelm": ModelType(
        "StableLmForCausalLM",
        keys.STABLELM,
        fixed=_LAYER_NORM_FIXED | {"output_bias": False, "qk_layernorm": True},
        partial=0.25,
    ),
    "gpt_neox": ModelType(
        "GPTNeoXForCausalLM",
        keys.GPT_NEOX,
        fixed=_LAYER_NORM_FIXED | {"mlp_bias": True},
        partial=0.25,
        rope_keys=("rotary_emb_base", "rotary_pct"),
    ),
    "nemotron": ModelType(
        "NemotronForCausalLM", keys.NEMOTRON, fixed=_LAYER_NORM_FIXED | {"unit_offset": True}, partial=0.5
    ),
    "hunyuan_v1_dense": ModelType(
        "HunYuanDenseV1ForCausalLM", keys.HUNYUAN, fixed={"qk_norm": True, "qk_turned": True}, stretched=True
    ),
    "cohere": ModelType("CohereForCausalLM", keys.COHERE, 5e5, fixed=_COHERE_FIXED | {"qk_layernorm": True}),
    "cohere2": ModelType("Cohere2ForCausalLM", keys.COHERE2, fixed=_COHERE_FIXED, pattern=4, still_full=True),
    "exaone4": ModelType(
        "Exaone4ForCausalLM", keys.EXAONE4, fixed={"qk_norm": True, "norms": "after"}, pattern=4, still_full=True
    ),
    "llama4_text": ModelType("", {"rms_norm_eps": 1e-5}, 5e5, fixed={"shared": 1}),
    "qwen3_next": ModelType(
        "Qwen3NextForCausalLM",
        keys.QWEN3_NEXT,
        aliases={"num_local_experts": "num_experts"},
        fixed={"qk_norm": True, "unit_offset": True, "head_gate": True, "shared_gate": True},
        partial=0.25,
    ),
}
COUNTED = ModelType("", {"rms_norm_eps": 1e-6})  # a type without a row
