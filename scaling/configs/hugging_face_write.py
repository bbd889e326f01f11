"""Write the config.json of a model in the book's letters, for a class of transformers that computes the same.

A class computes a model if the config.json written for it is read back as that model (`hugging_face.read_config`).
"""

from dataclasses import fields
from functools import lru_cache
from typing import Any

from scaling.configs.attention import NAMES, NAMES_OF
from scaling.configs.config import Config
from scaling.configs.hugging_face import ACTIVATIONS, DROPOUTS, LATENT, LETTERS, LINEAR, read_config
from scaling.configs.model_types import CONTEXTS, KINDS, ORIGINAL

IGNORED = {"name", "source", "dtype", "max_positions", "model_type", "uncomputed", "cached"}
IGNORED |= {"aux_coef", "z_coef", "balance_by", "balance_first", "dropout", "attention_dropout", "embed_dropout"}
OF_EXPERTS = ("k", "shared", "norm_topk", "routing", "expert_groups", "top_groups", "routed_scale", "dense_layers")
OF_EXPERTS += ("expert_bias", "clamp", "shared_gate")
CAPS = ("score_cap", "logit_cap", "head_clip")  # fields whose None a class reads as none
WRITTEN = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "gemma", "smollm3", "granite")


def kind_of(config: Config) -> str:
    """Return the model_type whose class computes this model: the model's own, or else the first that does.

    Raises:
        ValueError: No class of `KINDS` computes it; the message names the features that the nearest class lacks.
    """
    return _kind_of(config, config.model_type)


@lru_cache(maxsize=256)
def _kind_of(config: Config, own: str) -> str:
    nearest, least = "", []
    for kind in dict.fromkeys((own, *WRITTEN, *KINDS)):
        if kind in KINDS and KINDS[kind].architecture:
            lacking = _lacking(config, kind)
            if not lacking:
                return kind
            if not least or len(lacking) < len(least):
                nearest, least = kind, lacking
    raise ValueError(
        f"{config.name}: no class of Hugging Face's has its {', '.join(least)} (nearest: {nearest})"
        "\n  fix: save it in this project's own form (scaling.train), or change the config"
    )


def _lacking(config: Config, kind: str) -> list[str]:
    """Return the fields of the model that change when it is written for this class and read back."""
    try:
        again = Config(config.name, **read_config(_table(config, kind)))
    except ValueError as error:
        return str(error).splitlines()[:1] * 9  # a value that the class does not take
    ours, theirs = _compared(config), _compared(again)
    found = [name for name in ours if ours[name] != theirs.get(name)] + [*again.uncomputed]
    always = "n_shared_experts" in KINDS[kind].keys and config.moe  # these classes have tensors of shared experts
    return [*found, "shared"] if always and not config.shared else found


def _compared(config: Config) -> dict[str, Any]:
    """Return the fields that determine a model's function, in a form that is equal for two spellings of one model."""
    found = {field.name: getattr(config, field.name) for field in fields(Config) if field.name not in IGNORED}
    found |= {"activation": config.nonlinearity, "F_shared": config.S, "window": config.windows}
    return found if config.moe else {name: value for name, value in found.items() if name not in OF_EXPERTS}


def write_config(config: Config) -> dict:
    """Return config.json in its published form, which every version of transformers reads."""
    return _table(config, kind_of(config))


def _table(config: Config, kind: str) -> dict:
    of, keys, latent, layers = KINDS[kind], KINDS[kind].keys, config.latent, range(config.L)
    table: dict[str, Any] = {"architectures": [of.architecture], "model_type": kind}
    table["pad_token_id"] = None  # the class's default may lie beyond V
    for field, names in LETTERS.items():
        value, name = getattr(config, field), next((name for name in names if name in keys), None)
        written = value is not None or field in CAPS
        if name is not None and written and (config.moe or field not in ("E", *OF_EXPERTS)):
            table[name] = value
    table[of.rope_keys[0]] = config.theta
    table |= {key: 0.0 for key in DROPOUTS if keys.get(key)}  # a class may drop something by default
    act = next((name for name in ("hidden_activation", "activation_function") if name in keys), "hidden_act")
    table[act] = next(name for name, ours in ACTIVATIONS.items() if ours == config.nonlinearity)
    if of.partial is not None:
        table[of.rope_keys[1]] = config.rotary_share
    dense = [*config.dense] if config.moe else [*layers]  # layers without experts
    widths = {window for window in config.windows if window is not None}
    values = {  # of keys that only some classes read
        "topk_method": "greedy" if config.expert_groups == 1 else "group_limited_greedy",
        "first_k_dense_replace": len(dense),
        "mlp_only_layers": dense,
        "mlp_layer_types": ["dense" if l in dense else "sparse" for l in layers],
        "moe_layers": [l for l in layers if l not in dense],
        "intermediate_size_mlp": config.F_dense or config.F,
        "logit_scale": 1 / config.logit_scale,
        "use_sliding_window": bool(widths),
        # the class needs a size even where no layer has chunks
        "attention_chunk_size": next(iter(widths), keys.get("attention_chunk_size")),
        "attn_temperature_tuning": bool(config.query_growth),
        "attn_scale": config.query_growth,
        "floor_scale": config.growth_every,
        "no_rope_layers": [int(l not in config.unrotated) for l in layers],
        "n_positions": config.learned_positions,
    }
    values |= {key: getattr(config.linear, name) for name, key in LINEAR.items()} if config.linear else {}
    table |= {key: value for key, value in values.items() if key in keys}
    if "moe_intermediate_size" in keys:
        table["intermediate_size"] = config.F_dense or config.F
    if "n_positions" in keys:
        table.pop("rope_theta", None)
    elif config.max_positions:
        table["max_position_embeddings"] = config.max_positions
    if scaling := config.rope_scaling:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        for theirs, ours in (NAMES | NAMES_OF.get(scaling.kind, {})).items():
            value = getattr(scaling, ours)
            if (value is False or (value and value is not True)) and (theirs != ORIGINAL or scaling.kind in CONTEXTS):
                rope[theirs] = value
        if ORIGINAL in rope and ORIGINAL in keys:
            table[ORIGINAL] = rope.pop(ORIGINAL)
        table["rope_scaling"] = rope
    if latent and "kv_lora_rank" in keys:
        ranks = (latent.q_rank or None, latent.kv_rank, latent.nope, latent.rope, latent.value)
        table |= dict(zip(LATENT, ranks, strict=True)) | {"rope_interleave": latent.interleaved}
        table |= {"head_dim": latent.rope, "scoring_func": config.routing}
    if of.rope and not config.rope_scaling:
        table["rope_parameters"] = {"rope_type": "default", "rope_theta": config.theta}
    if of.local_theta is not None and config.local_theta is not None:
        full = {"rope_type": "default"} | table.get("rope_scaling", {}) | {"rope_theta": config.theta}
        sliding = {"rope_type": "default", "rope_theta": config.local_theta}
        table["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
    if "query_pre_attn_scalar" in keys and config.score_scale is not None:
        table["query_pre_attn_scalar"] = round(config.score_scale**-2)
    by_pattern = bool(of.pattern)  # such a class needs some width even where no layer has the window
    needs_none = not by_pattern or (of.still_full and not config.unrotated)
    if "sliding_window" in keys and (len(widths) == 1 or (not widths and needs_none)):
        table["sliding_window"] = next(iter(widths), None)
    # An older version of mistral's class would give every layer the window.
    chunks, listed = "attention_chunk_size" in keys, (widths or by_pattern) and "layer_types" in keys
    if chunks or (listed and kind != "mistral"):
        other = "chunked_attention" if chunks else "sliding_attention"
        table["layer_types"] = ["full_attention" if width is None else other for width in config.windows]
    if "linear_num_key_heads" in keys:
        table["layer_types"] = ["full_attention" if l in config.attending else "linear_attention" for l in layers]
    return table
