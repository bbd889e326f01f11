"""Write the config.json of a model in the book's letters, for a class of transformers that computes the same.

A class computes a model if the config.json written for it is read back as that model (`hugging_face.read_config`).
"""

from dataclasses import fields
from functools import lru_cache
from typing import Any

from scaling.configs.attention import NAMES, NAMES_OF
from scaling.configs.config import Config
from scaling.configs.hugging_face import ACTIVATIONS, DROPOUTS, LATENT, LETTERS, LINEAR, read_config
from scaling.configs.hugging_face_tables import CONTEXTS, ORIGINAL
from scaling.configs.model_types import KINDS

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
    keys, table = KINDS[kind].keys, {"architectures": [KINDS[kind].architecture], "model_type": kind}
    table["pad_token_id"] = None  # the class's default may lie beyond V
    for field, names in LETTERS.items():
        value, name = getattr(config, field), next((name for name in names if name in keys), None)
        if (
            name is not None
            and (value is not None or field in CAPS)
            and (config.moe or field not in ("E", *OF_EXPERTS))
        ):
            table[name] = value
    if "moe_intermediate_size" in keys:
        table["intermediate_size"] = config.F_dense or config.F
    table[KINDS[kind].rope_keys[0]] = config.theta
    table |= {key: 0.0 for key in DROPOUTS if keys.get(key)}  # a class may drop something by default
    table |= {"max_position_embeddings": config.max_positions} if config.max_positions else {}
    if "n_positions" in keys:
        table["n_positions"] = config.learned_positions
        table = {key: value for key, value in table.items() if key not in ("max_position_embeddings", "rope_theta")}
    act = next(
        name for name in ("hidden_activation", "activation_function", "hidden_act") if name in {*keys, "hidden_act"}
    )
    table[act] = next(name for name, ours in ACTIVATIONS.items() if ours == config.nonlinearity)
    if KINDS[kind].partial is not None:
        table[KINDS[kind].rope_keys[1]] = config.rotary_share
    if scaling := config.rope_scaling:
        names = {theirs: getattr(scaling, ours) for theirs, ours in (NAMES | NAMES_OF.get(scaling.kind, {})).items()}
        if scaling.kind not in CONTEXTS:
            del names[ORIGINAL]
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        rope |= {key: value for key, value in names.items() if value is False or (value and value is not True)}
        if ORIGINAL in rope and ORIGINAL in keys:
            table[ORIGINAL] = rope.pop(ORIGINAL)
        table["rope_scaling"] = rope
    if (latent := config.latent) and "kv_lora_rank" in keys:
        ranks = (latent.q_rank or None, latent.kv_rank, latent.nope, latent.rope, latent.value)
        table |= dict(zip(LATENT, ranks, strict=True)) | {"rope_interleave": latent.interleaved}
        table |= {"head_dim": latent.rope, "scoring_func": config.routing}
    if "topk_method" in keys:
        table["topk_method"] = "greedy" if config.expert_groups == 1 else "group_limited_greedy"
    dense = config.dense if config.moe else range(config.L)  # layers without experts
    sparse = [l for l in range(config.L) if l not in dense]
    if "first_k_dense_replace" in keys:
        table["first_k_dense_replace"] = len(dense)
    if "mlp_only_layers" in keys:
        table["mlp_only_layers"] = [*dense]
    if "mlp_layer_types" in keys:
        table["mlp_layer_types"] = ["sparse" if l in sparse else "dense" for l in range(config.L)]
    if KINDS[kind].rope and not config.rope_scaling:
        table["rope_parameters"] = {"rope_type": "default", "rope_theta": config.theta}
    if KINDS[kind].local_theta is not None and config.local_theta is not None:
        full = {"rope_type": "default"} | table.get("rope_scaling", {}) | {"rope_theta": config.theta}
        sliding = {"rope_type": "default", "rope_theta": config.local_theta}
        table["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
    if "logit_scale" in keys:
        table["logit_scale"] = 1 / config.logit_scale
    if "query_pre_attn_scalar" in keys and config.score_scale is not None:
        table["query_pre_attn_scalar"] = round(config.score_scale**-2)
    widths = {window for window in config.windows if window is not None}
    by_pattern = bool(KINDS[kind].pattern)  # such a class needs some width even where no layer has the window
    needs_none = not by_pattern or (KINDS[kind].still_full and not config.unrotated)
    if "sliding_window" in keys and (len(widths) == 1 or (not widths and needs_none)):
        table["sliding_window"] = next(iter(widths), None)
    if "use_sliding_window" in keys:
        table["use_sliding_window"] = bool(widths)
    # An older version of mistral's class would give every layer the window.
    if (widths or by_pattern) and "layer_types" in keys and kind != "mistral":
        table["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    if "attention_chunk_size" in keys:
        chunk = next(iter(widths), keys["attention_chunk_size"])  # the class needs one even where no layer has chunks
        table |= {"attention_chunk_size": chunk, "moe_layers": sparse}
        table["layer_types"] = ["full_attention" if w is None else "chunked_attention" for w in config.windows]
        table |= {"attn_temperature_tuning": bool(config.query_growth), "attn_scale": config.query_growth}
        table |= {"floor_scale": config.growth_every, "intermediate_size_mlp": config.F_dense or config.F}
    if "linear_num_key_heads" in keys:
        linear = config.linear
        table |= {key: getattr(linear, name) for name, key in LINEAR.items()} if linear else {}
        kinds = ["full_attention" if l in config.attending else "linear_attention" for l in range(config.L)]
        table["layer_types"] = kinds
    if "no_rope_layers" in keys:
        table["no_rope_layers"] = [int(l not in config.unrotated) for l in range(config.L)]
    return table
