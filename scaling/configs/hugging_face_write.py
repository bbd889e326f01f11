"""The config.json of a model in the book's letters, for a class of transformers that computes the same."""

import math

from scaling.configs.config import Config
from scaling.configs.hugging_face import ACTIVATIONS, LATENT
from scaling.configs.model_types import KINDS

MOVED = ("phi3", "ernie4_5", "helium")  # Llama's arithmetic with another layout of tensors in files


def kind_of(config: Config) -> str:
    """Return the model_type whose class computes this model. ValueError if no class of `KINDS` does."""
    if config.model_type in KINDS and all(_fits(config, config.model_type).values()):
        return config.model_type
    if config.latent:
        kind = "deepseek_v3"
    elif config.moe:
        kind = "qwen3_moe" if config.qk_norm else "mixtral"
    elif config.unit_offset:
        kind = "gemma"
    elif config.unrotated:
        kind = "smollm3"
    elif any(scale != default for scale, default in _scales(config)):
        kind = "granite"
    elif config.qk_norm:
        kind = "qwen3"
    elif config.attention_bias and not config.output_bias:
        kind = "qwen2"
    else:
        kind = "llama" if config.window is None else "mistral"
    if lacking := [name for name, fits in _fits(config, kind).items() if not fits]:
        raise _unwritten(config, kind, lacking)
    return kind


def _scales(config: Config) -> list[tuple[float | None, float | None]]:
    """Return the scales of Granite's class, each with its value in other classes."""
    ours = (config.embed_scale, config.residual_scale, config.logit_scale, config.score_scale)
    return [*zip(ours, (1.0, 1.0, 1.0, None), strict=True)]


def _unwritten(config: Config, kind: str, lacking: list[str]) -> ValueError:
    return ValueError(
        f"{config.name}: no class of Hugging Face's has its {', '.join(lacking)} (nearest: {kind})"
        "\n  fix: save it in this project's own form (scaling.train), or change the config"
    )


def _fits(config: Config, kind: str) -> dict[str, bool]:
    """Return whether the class of `kind` has each feature of this model, by name."""
    both = config.attention_bias == config.output_bias
    routing = (config.routing, config.expert_groups, config.routed_scale)
    routing = routing[:1] if kind == "deepseek_v3" else routing
    return {
        "MLP without a gate": config.gated,
        "output_bias": both or kind == "qwen2",
        "attention_bias": not config.attention_bias or kind not in ("mistral", "mixtral", "deepseek_v3", *MOVED),
        "experts": not config.moe or kind in ("mixtral", "qwen3_moe", "deepseek_v3"),
        "latent attention, norms of heads": kind not in MOVED or not (config.latent or config.qk_norm),
        "rotary scaling": kind != "phi3" or config.rope_scaling is None,
        "unit_offset": config.unit_offset == (kind == "gemma"),
        "scales": _scaled_as(config, kind),
        "unrotated layers": not config.unrotated or kind == "smollm3",
        "windows": config.window is None
        or kind in ("mistral", "qwen2", "qwen3", "smollm3")
        or (isinstance(config.window, int) and kind in ("mixtral", "qwen3_moe", "phi3")),
        "shared experts": bool(config.shared) == (config.moe and kind == "deepseek_v3"),
        "F_shared": config.shared * config.F == config.S,
        "routing": not config.moe or routing == (("sigmoid",) if kind == "deepseek_v3" else ("softmax", 1, 1.0)),
        "norm_topk": config.norm_topk or kind in ("qwen3_moe", "deepseek_v3"),
        "capacity": config.capacity is None,
        "dense_layers": not config.dense_layers or kind == "deepseek_v3",
    }


def _scaled_as(config: Config, kind: str) -> bool:
    """Return whether that class has the scales of this model."""
    if kind == "granite":
        return config.score_scale is not None
    embeds = math.sqrt(config.D) if KINDS[kind].root_scaled else 1.0
    return [scale for scale, _ in _scales(config)] == [embeds, 1.0, 1.0, None]


def write_config(config: Config) -> dict:
    """Return config.json in its published form, which every version of transformers reads."""
    kind = kind_of(config)
    if kind == "mistral" and isinstance(config.window, tuple):  # older versions would give every layer the window
        raise _unwritten(config, kind, ["windows"])
    letters = {"L": "num_hidden_layers", "D": "hidden_size", "F": "intermediate_size", "V": "vocab_size"}
    letters |= {"N": "num_attention_heads", "K": "num_key_value_heads", "H": "head_dim"}
    letters |= {"tied": "tie_word_embeddings", "theta": "rope_theta", "eps": "rms_norm_eps"}
    table = {"architectures": [KINDS[kind].architecture], "model_type": kind}
    table |= {name: getattr(config, letter) for letter, name in letters.items()}
    table |= {"max_position_embeddings": config.max_positions} if config.max_positions else {}
    table["hidden_act"] = next(name for name, ours in ACTIVATIONS.items() if ours == config.nonlinearity)
    if kind not in ("qwen2", "mistral", "mixtral", "phi3"):
        table["attention_bias"] = config.attention_bias
    if scaling := config.rope_scaling:
        table["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            table["rope_scaling"] |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
            table["rope_scaling"] |= {"original_max_position_embeddings": scaling.original}
        if scaling.kind == "yarn":
            table["rope_scaling"] |= {"beta_slow": scaling.low, "beta_fast": scaling.high}
            table["rope_scaling"] |= {"original_max_position_embeddings": scaling.original}
        if scaling.kind == "yarn" or config.latent:
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
    if kind.startswith(("qwen", "smollm3")):
        table["use_sliding_window"] = bool(widths)
    if kind in ("qwen2", "qwen3", "smollm3") and widths:
        table["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    if kind == "granite":
        table |= {"embedding_multiplier": config.embed_scale, "residual_multiplier": config.residual_scale}
        table |= {"logits_scaling": config.logit_scale, "attention_multiplier": config.score_scale}
    if kind == "smollm3":
        table["no_rope_layers"] = [int(l not in config.unrotated) for l in range(config.L)]
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
