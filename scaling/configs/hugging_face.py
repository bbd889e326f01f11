"""A Hugging Face config.json in the book's letters, and back.

As published (`rope_theta`, `rope_scaling`) and as transformers 5 writes it (`rope_parameters`). What a file leaves out
is its class's default there. A model of another kind is counted; what no code here computes stands in `uncomputed`.
Coefficients of auxiliary losses are left out: theirs is another loss, over the routers of all layers together.
"""

from dataclasses import dataclass, fields
from typing import Any

from scaling.common.arguments import of_type
from scaling.configs.config import Config, Latent, RopeScaling

LETTERS = {
    "L": ("num_hidden_layers",),
    "D": ("hidden_size",),
    "F": ("moe_intermediate_size", "intermediate_size"),
    "N": ("num_attention_heads",),
    "K": ("num_key_value_heads", "num_attention_heads"),
    "H": ("head_dim", "v_head_dim"),
    "V": ("vocab_size",),
    "E": ("n_routed_experts", "num_local_experts", "num_experts"),
    "k": ("num_experts_per_tok",),
    "shared": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "tied": ("tie_word_embeddings",),
    "eps": ("rms_norm_eps",),
    "attention_bias": ("attention_bias",),
    "routing": ("scoring_func",),
    "expert_groups": ("n_group",),
    "top_groups": ("topk_group",),
    "norm_topk": ("norm_topk_prob",),
    "routed_scale": ("routed_scaling_factor",),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}
ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
UNGATED = ("bloom", "falcon", "gpt_neox", "mpt", "opt", "phi", "starcoder2")
TABLES = ("text_config", "rope_parameters", "rope_scaling", "quantization_config")
NAMES = ("model_type", "hidden_act", "hidden_activation")
COUNTS = ("sliding_window", "max_window_layers", "intermediate_size")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DEEPSEEK = {"routing": "sigmoid", "expert_groups": 8, "top_groups": 4, "routed_scale": 2.5, "shared": 1}  # if silent
SPARSE = ("E", "k", "dense_layers", "F_dense", "norm_topk")


@dataclass(frozen=True)
class ModelType:
    """A model_type: its class, where its models are computed, and what that class takes where a file is silent."""

    architecture: str = ""
    eps: float = 1e-6
    theta: float = 1e4
    window: int | None = None
    alternate: bool = False  # a window in every other layer, the first included
    activation: str = "silu"
    fixed: tuple[tuple[str, object], ...] = ()


KINDS = {
    "llama": ModelType("LlamaForCausalLM"),
    "mistral": ModelType("MistralForCausalLM", window=4096),
    "qwen2": ModelType("Qwen2ForCausalLM", fixed=(("attention_bias", True),)),
    "qwen3": ModelType("Qwen3ForCausalLM", fixed=(("qk_norm", True),)),
    "mixtral": ModelType("MixtralForCausalLM", eps=1e-5, theta=1e6),
    "qwen3_moe": ModelType("Qwen3MoeForCausalLM", fixed=(("qk_norm", True),)),
    "deepseek_v3": ModelType("DeepseekV3ForCausalLM"),
    "gemma": ModelType(activation="gelu_pytorch_tanh"),
    "gemma2": ModelType(activation="gelu_pytorch_tanh", window=4096, alternate=True),
}


def _rotary(table: dict, kind: ModelType) -> dict:
    """theta and rope_scaling, from either form."""
    given = table.get("rope_parameters") or table.get("rope_scaling") or {}
    nested = [each for each in given.values() if isinstance(each, dict)]
    theta = given.get("rope_theta", table.get("rope_theta", kind.theta))
    if (longest := table.get("max_position_embeddings")) and given.get("rope_type", given.get("type")) == "yarn":
        given = {"original_max_position_embeddings": longest} | given
    return {"theta": float(theta), "rope_scaling": RopeScaling("by layer") if nested else RopeScaling.of(given)}


def _window(table: dict, name: str, L: int) -> int | tuple | None:
    kind = KINDS.get(name, ModelType())
    width = table.get("sliding_window", kind.window)
    if width is None or (name.startswith("qwen") and not table.get("use_sliding_window", False)):
        return None
    first = table.get("max_window_layers", 28) if name in ("qwen2", "qwen3") else 0
    slides = [i >= first and not (kind.alternate and i % 2) for i in range(L)]
    if types := table.get("layer_types"):
        slides = [each == "sliding_attention" for each in types]
    windows = tuple(width if each else None for each in slides)
    return windows[0] if windows and len(set(windows)) == 1 else windows


def _uncomputed(table: dict, name: str, act: str) -> list[str]:
    """What no code here computes, by name; latent attention says so itself."""
    known = name in KINDS and KINDS[name].architecture
    found = [] if known or table.get("kv_lora_rank") else [f"model_type {name!r}"]
    found += [] if act in ACTIVATIONS else [f"hidden_act {act!r}"]
    found += ["mlp_bias"] if table.get("mlp_bias") else []
    found += [f"attention_dropout={rate}"] if (rate := table.get("attention_dropout")) else []
    if quantized := table.get("quantization_config"):
        found.append(f"quantization_config {quantized.get('quant_method', '')!r}")
    sparse = not table.get("mlp_only_layers") and table.get("decoder_sparse_step", 1) == 1
    found += [] if sparse else ["dense layers among those with experts"]
    partial = (table.get("rope_parameters") or table).get("partial_rotary_factor", 1.0)
    found += [] if partial == 1.0 else [f"partial_rotary_factor {partial}"]
    return found


def check_types(table: dict) -> None:
    """ValueError that names a key of which the value is of another type than it has in every config.json."""
    of_type("text_config", table, dict)
    kinds: dict[str, Any] = {field.name: field.type for field in fields(Config)}
    types = {key: kinds[letter] for letter, keys in LETTERS.items() for key in keys}
    types |= dict.fromkeys(TABLES, dict) | dict.fromkeys(NAMES, str) | dict.fromkeys((*COUNTS, *LATENT), int)
    types |= {"rope_theta": float, "layer_types": list}
    for key, kind in types.items():
        if table.get(key) is not None:
            of_type(key, table[key], kind)
            if kind is int and table[key] < 0:
                raise ValueError(f"{key} is {table[key]}: must not be negative\n  fix: give 0 or more")
    if theta := (table.get("rope_parameters") or table.get("rope_scaling") or {}).get("rope_theta"):
        of_type("rope_theta", theta, float)


def read_config(table: dict) -> dict:
    """Config's fields from a config.json: LLaMA's kind, Mixtral's, DeepSeek-V3's, Gemma's and others alike."""
    table = table.get("text_config", table)  # of a model that also sees
    check_types(table)
    found = {}
    for letter, keys in LETTERS.items():
        if values := [table[key] for key in keys if table.get(key) is not None]:
            found[letter] = values[0]
    name = table.get("model_type", "llama")
    kind = KINDS.get(name, ModelType())
    if "H" not in found and {"D", "N"} <= found.keys():
        found["H"] = found["D"] // max(1, found["N"])
    if found.get("dense_layers"):
        found["F_dense"] = table["intermediate_size"]
    if table.get("kv_lora_rank"):
        if absent := [key for key in LATENT if table.get(key) is None]:
            raise ValueError(f"latent attention needs {', '.join(absent)}\n  fix: add them, or leave kv_lora_rank out")
        found["latent"] = Latent(*(table[key] for key in LATENT), interleaved=table.get("rope_interleave", True))
        found |= {"H": table["v_head_dim"], "K": found.get("N", 1)}  # transformers writes the rotary part as head_dim
    if name == "deepseek_v3":
        found = DEEPSEEK | found if "E" in found else found
        if found.get("dense_layers", 0) >= found.get("L", 1):  # none has experts
            found = {key: value for key, value in found.items() if key not in (*DEEPSEEK, *SPARSE)}
            found["F"] = table["intermediate_size"]
    if name == "qwen3_moe":
        found.setdefault("norm_topk", False)
    if found.get("attention_bias"):
        found["output_bias"] = True
    found.setdefault("tied", name.startswith("gemma"))
    found.setdefault("eps", kind.eps)
    found["norms"] = 4 if name.startswith(("gemma2", "gemma3")) else 2
    found["gated"] = name not in UNGATED
    act = table.get("hidden_activation") or table.get("hidden_act") or kind.activation
    plain = "silu" if found["gated"] else "gelu"
    found["activation"] = None if ACTIVATIONS.get(act) == plain else ACTIVATIONS.get(act)
    found |= _rotary(table, kind) | {"window": _window(table, name, found.get("L", 0))} | dict(kind.fixed)
    found["max_positions"] = table.get("max_position_embeddings") or 0
    return found | {"uncomputed": tuple(_uncomputed(table, name, act))}


def kind_of(config: Config) -> str:
    """The model_type whose class computes this model. ValueError if none of `KINDS` does."""
    if config.latent:
        kind = "deepseek_v3"
    elif config.moe:
        kind = "qwen3_moe" if config.qk_norm else "mixtral"
    elif config.qk_norm:
        kind = "qwen3"
    elif config.attention_bias and not config.output_bias:
        kind = "qwen2"
    else:
        kind = "llama" if config.window is None else "mistral"
    unsaid = [name for name, fine in _fits(config, kind).items() if not fine]
    if unsaid:
        raise ValueError(
            f"{config.name}: no class of Hugging Face's has its {', '.join(unsaid)} (nearest: {kind})"
            "\n  fix: save it in this project's own form (scaling.train), or change the config"
        )
    return kind


def _fits(config: Config, kind: str) -> dict[str, bool]:
    """Whether that class has what this model has, by name."""
    both = config.attention_bias == config.output_bias
    routing = (config.routing, config.expert_groups, config.routed_scale)
    routing = routing[:1] if kind == "deepseek_v3" else routing
    return {
        "MLP without a gate": config.gated,
        "output_bias": both or kind == "qwen2",
        "attention_bias": not config.attention_bias or kind in ("llama", "qwen2", "qwen3", "qwen3_moe"),
        "windows": isinstance(config.window, int | None) or kind in ("qwen2", "qwen3"),
        "shared experts": bool(config.shared) == (config.moe and kind == "deepseek_v3"),
        "F_shared": config.shared * config.F == config.S,
        "routing": not config.moe or routing == (("sigmoid",) if kind == "deepseek_v3" else ("softmax", 1, 1.0)),
        "norm_topk": config.norm_topk or kind in ("qwen3_moe", "deepseek_v3"),
        "capacity": config.capacity is None,
        "dense_layers": not config.dense_layers or kind == "deepseek_v3",
    }


def write_config(config: Config) -> dict:
    """config.json in its published form, which every version of transformers reads."""
    kind = kind_of(config)
    letters = {"L": "num_hidden_layers", "D": "hidden_size", "F": "intermediate_size", "V": "vocab_size"}
    letters |= {"N": "num_attention_heads", "K": "num_key_value_heads", "H": "head_dim"}
    letters |= {"tied": "tie_word_embeddings", "theta": "rope_theta", "eps": "rms_norm_eps"}
    table = {"architectures": [KINDS[kind].architecture], "model_type": kind}
    table |= {name: getattr(config, letter) for letter, name in letters.items()}
    table |= {"max_position_embeddings": config.max_positions} if config.max_positions else {}
    table["hidden_act"] = next(name for name, ours in ACTIVATIONS.items() if ours == config.nonlinearity)
    if kind != "qwen2" and kind not in ("mistral", "mixtral"):
        table["attention_bias"] = config.attention_bias
    if scaling := config.rope_scaling:
        table["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            table["rope_scaling"] |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
            table["rope_scaling"] |= {"original_max_position_embeddings": scaling.original}
        if scaling.kind == "yarn":
            table["rope_scaling"] |= {"beta_slow": scaling.low, "beta_fast": scaling.high}
            table["rope_scaling"] |= {"original_max_position_embeddings": scaling.original}
            given = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all}
            table["rope_scaling"] |= {key: value for key, value in given.items() if value}
    if latent := config.latent:
        ranks = (latent.q_rank, latent.kv_rank, latent.nope, latent.rope, latent.value)
        table |= dict(zip(LATENT, ranks, strict=True)) | {"rope_interleave": latent.interleaved}
        table |= {"head_dim": latent.rope, "first_k_dense_replace": config.dense_layers if config.moe else config.L}
    widths = {window for window in config.windows if window is not None}
    if len(widths) > 1:
        raise ValueError(
            f"{config.name}: windows of {len(widths)} widths; a config.json has one"
            "\n  fix: give all layers with a window the same one"
        )
    table["sliding_window"] = next(iter(widths), None)
    if kind.startswith("qwen"):
        table["use_sliding_window"] = bool(widths)
    if kind in ("qwen2", "qwen3") and widths:
        table["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    if config.moe:
        names = {"mixtral": "num_local_experts", "deepseek_v3": "n_routed_experts"}
        table[names.get(kind, "num_experts")] = config.E
        table["num_experts_per_tok"] = config.k
    if config.moe and kind == "deepseek_v3":
        table |= {"n_shared_experts": config.shared, "scoring_func": config.routing, "n_group": config.expert_groups}
        table |= {"topk_group": config.top_groups, "routed_scaling_factor": config.routed_scale}
    if kind in ("qwen3_moe", "deepseek_v3") and config.moe:
        table |= {"moe_intermediate_size": config.F, "norm_topk_prob": config.norm_topk}
        table |= {"intermediate_size": config.F_dense} if config.dense_layers else {}
    return table
