"""A Hugging Face config.json in the book's letters; `hugging_face_write` writes one.

It is read as published (`rope_theta`, `rope_scaling`) and as transformers 5 writes it (`rope_parameters`). The keys
that each class reads, and their defaults, are in `model_types`. A model of another type is only counted, and its
features that no code here computes are listed in `uncomputed`.

With `output_router_logits`, transformers adds `router_aux_loss_coef` times E sum over experts of n P to the loss: n is
the mean number of tokens' choices and P the mean score of an expert, over the routers of all layers together. Of one
layer this is k times `models.moe.balance_loss`, so `aux_coef` is the coefficient times k. Of several layers it has
other gradients than a sum of the layers' own losses, so `aux_coef` is 0, and training asks for it.
"""

import math
from dataclasses import fields
from types import NoneType
from typing import Any, get_args

from scaling.common.arguments import check_within, of_type
from scaling.configs.attention import Latent, Linear
from scaling.configs.config import WITHIN, Config
from scaling.configs.model_types import COUNTED, KINDS, ModelType, rotary, scaling_of, unread_quantization

LETTERS = {
    "L": ("num_hidden_layers", "n_layer"),
    "D": ("hidden_size", "n_embd"),
    "F": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "N": ("num_attention_heads", "n_head"),
    "K": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "H": ("head_dim", "v_head_dim"),
    "V": ("vocab_size",),
    "E": ("n_routed_experts", "num_local_experts", "num_experts"),
    "k": ("num_experts_per_tok",),
    "shared": ("n_shared_experts",),
    "F_shared": ("shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "tied": ("tie_word_embeddings",),
    "eps": ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"),
    "attention_bias": ("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias"),
    "mlp_bias": ("mlp_bias", "use_bias"),
    "parallel": ("use_parallel_residual",),
    "clamp": ("swiglu_limit",),
    "head_clip": ("clip_qkv",),
    "score_cap": ("attn_logit_softcapping",),
    "logit_cap": ("final_logit_softcapping",),
    "output_bias": ("attention_out_bias",),
    "qk_norm": ("use_qk_norm", "qk_layernorm"),
    "routing": ("scoring_func",),
    "expert_groups": ("n_group",),
    "top_groups": ("topk_group",),
    "norm_topk": ("norm_topk_prob",),
    "routed_scale": ("routed_scaling_factor",),
    "embed_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling",),
    "score_scale": ("attention_multiplier",),
    "dropout": ("resid_pdrop", "residual_dropout"),
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "embed_dropout": ("embd_pdrop",),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu", "relu2": "relu2"}
ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "xielu": "xielu"}
UNGATED = ("apertus", "arcee", "bloom", "falcon", "gpt2", "gpt_neox", "mpt", "nemotron", "opt", "phi", "starcoder2")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
EXPERTS = ("E", "k", "shared", "F_shared", "dense_layers", "F_dense", "norm_topk")  # fields of a model with experts
EXPERTS += ("routing", "expert_groups", "top_groups", "routed_scale", "shared_gate")
COUNTS = "sliding_window max_window_layers intermediate_size intermediate_size_mlp decoder_sparse_step"
COUNTS += " query_pre_attn_scalar full_attention_interval attention_chunk_size floor_scale"
LINEAR = {  # fields of Linear, and their keys in a file
    "keys": "linear_num_key_heads", "values": "linear_num_value_heads", "key": "linear_key_head_dim",
    "value": "linear_value_head_dim", "width": "linear_conv_kernel_dim",
}  # fmt: skip
COUNTS += " n_positions interleave_moe_layer_step max_position_embeddings no_rope_layer_interval"
DROPOUTS = ("embedding_dropout", "hidden_dropout")  # kinds of dropout that training does not compute
TYPES: dict[str, type] = dict.fromkeys((*COUNTS.split(), *LATENT, *LINEAR.values()), int)
TYPES |= dict.fromkeys(DROPOUTS, float)
TYPES |= dict.fromkeys(("attention_multiplier", "logit_scale", "swiglu_alpha", "attn_scale"), float)
TYPES |= dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), str)
TYPES |= dict.fromkeys(("layer_types", "mlp_only_layers", "mlp_layer_types", "moe_layers", "no_rope_layers"), list)
BOOLS = ("use_sliding_window", "mlp_bias", "rope_interleave", "use_bias", "use_bidirectional_attention", "qk_layernorm")
BOOLS += ("attn_temperature_tuning", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention")
TYPES |= dict.fromkeys(BOOLS, bool)
NULL = (
    "num_key_value_heads",
    "sliding_window",
    "attention_dropout",
    "q_lora_rank",
    "head_dim",
    "use_bidirectional_attention",
)  # may be null, like keys whose default is null
ALPHA = 1.702  # of GPT-OSS's gate, the only one that is computed
PATTERNED = ("gemma3_text", "cohere2", "exaone4")  # that read sliding_window_pattern
SLIDES = {"full_attention", "attention", "sliding_attention"}  # layer types that are computed
CHUNKS = {"full_attention", "chunked_attention"}  # the types that are computed in a class with chunks
LINEAR_TYPES = {"linear_attention", "full_attention"}  # the types that are computed in a class with linear layers
# The types whose class in transformers adds a loss of the routers, and the default of its coefficient:
BALANCED: dict[str, float] = dict.fromkeys(
    ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "granitemoe", "gpt_oss"), 0.001
)
BALANCED |= {"olmoe": 0.01}
ATTENDS = SLIDES | {"chunked_attention", "indexed_attention"}  # layer types that cache keys and values


def read_config(table: dict) -> dict:
    """Return Config's fields from a config.json: LLaMA's kind, Mixtral's, DeepSeek-V3's, Gemma's and others alike.

    Raises:
        ValueError: A key's value is of another type than the class takes, or sizes contradict each other.
    """
    of_type("text_config", table.get("text_config"), dict, NoneType)
    whole, table = table, table.get("text_config") or table  # of a model that also sees
    name = table.get("model_type")
    of_type("model_type", name, str, NoneType)
    kind = KINDS.get(name or "", COUNTED)
    read = kind.read(table)
    check_types(read, kind)
    read["hidden_act"] = kind.meant.get(_activation(read), _activation(read))
    found = dict(kind.fixed)
    for letter, keys in LETTERS.items():
        if values := [read[key] for key in keys if read.get(key) is not None]:
            found.setdefault(letter, values[0])
    check_within("config.json: L", found.get("L", 1), WITHIN["L"])  # before the layers are looked at one by one
    if "H" not in found and {"D", "N"} <= found.keys():
        found["H"] = found["D"] // max(1, found["N"])
    if read.get("kv_lora_rank"):
        found |= _latent(read, found)
    uncomputed = _not_computed(whole, table, read, kind) + _experts(found, read, kind)
    found.setdefault("output_bias", bool(found.get("attention_bias")))
    found |= {"model_type": name} if kind.architecture else {}
    found.setdefault("norms", "both" if (name or "").startswith(("gemma2", "gemma3")) else "before")
    found["gated"] = name not in UNGATED
    activation = ACTIVATIONS.get(_activation(read))
    found["activation"] = None if activation == ("silu" if found["gated"] else "gelu") else activation
    found |= {"embed_scale": math.sqrt(found["D"])} if kind.root_scaled else {}
    found |= {} if "n_positions" in kind.keys else rotary(table, read, kind)
    L, known = found.get("L", 0), bool(kind.architecture)
    if "n_positions" in kind.keys:
        found |= {"learned_positions": read["n_positions"], "unrotated": tuple(range(L))}
        found.setdefault("F", 4 * found["D"])
    found |= {"unrotated": _unrotated(read, L)} if known and "no_rope_layers" in read else {}
    found |= _scales(read)
    if read.get("attn_temperature_tuning") and read["attn_scale"]:
        found |= {"query_growth": float(read["attn_scale"]), "growth_every": read["floor_scale"]}
    found |= {"linear": _linear(read, L)} if known and "linear_num_key_heads" in read else {}
    found |= {"window": _window(table, read, name or "", found, kind), "cached": _cached(read, known, L)}
    if kind.still_full and read["sliding_window"] is not None:
        windows = found["window"] if isinstance(found["window"], tuple) else [found["window"]] * L
        found["unrotated"] = tuple(l for l, window in enumerate(windows) if window is None)
    if name == "stablelm" and found["parallel"]:
        found["norms"] = "shared"
    if (weight := router_weight(table)) and L - len(found.get("dense_layers", ())) == 1:
        found["aux_coef"] = weight * found["k"]
    found["max_positions"] = read.get("n_positions") or table.get("max_position_embeddings") or 0
    return found | {"uncomputed": tuple(uncomputed)}


def router_weight(table: dict) -> float:
    """Return the coefficient by which transformers adds the routers' loss in training; 0 if it does not add it.

    Raises:
        ValueError: A value has the wrong type.
    """
    table = table.get("text_config") or table
    added, default = table.get("output_router_logits"), BALANCED.get(table.get("model_type") or "")
    of_type("output_router_logits", added, bool, NoneType)
    if not added or default is None:
        return 0.0
    weight = table.get("router_aux_loss_coef", default)
    of_type("router_aux_loss_coef", weight, int, float)
    return float(weight)


def check_types(read: dict, kind: ModelType) -> None:
    """Raise a ValueError naming a key whose value has another type than the class takes."""
    fields_of: dict[str, Any] = {field.name: field.type for field in fields(Config)}
    types = {key: fields_of[letter] for letter, keys in LETTERS.items() for key in keys} | TYPES
    for key, value in read.items():
        if value is None and (not kind.architecture or key in NULL or kind.keys[key] is None):
            continue
        if key in types:
            of_type(key, value, *(get_args(types[key]) or (types[key],)))
            if isinstance(value, int) and value < 0:
                raise ValueError(f"{key} is {value}: must not be negative\n  fix: give 0 or more")


def _latent(read: dict, found: dict) -> dict:
    """Return the fields of latent attention. Its heads are as wide as their values."""
    if absent := [key for key in LATENT[1:] if read.get(key) is None]:
        raise ValueError(f"latent attention needs {', '.join(absent)}\n  fix: add them, or leave kv_lora_rank out")
    latent = Latent(*(read.get(key) or 0 for key in LATENT), interleaved=bool(read.get("rope_interleave", True)))
    return {"latent": latent, "H": latent.value, "K": found.get("N", 1)}


def _experts(found: dict, read: dict, kind: ModelType) -> list[str]:
    """Put the layers with experts and those without into the fields; return what of them is not computed."""
    L, said = found.get("L", 1), []
    if found.get("E") == 1 and kind.architecture:
        said.append("a mixture of one expert")
    if not kind.architecture:  # a routing that is not known here changes no count
        found |= {"routing": "sigmoid" if found.get("routing") == "sigmoid" else "softmax"}
        found |= {} if found.get("E") else {"E": 1}
    if read.get("topk_method") == "greedy":
        found |= {"expert_groups": 1, "top_groups": 1}
    if found.get("F_shared") and not found.get("shared"):
        found["shared"] = 1
    dense = _dense_layers(read, L) or [*range(min(L, found.get("dense_layers", 0)))]
    if dense and (found.get("E", 1) > 1 or found.get("dense_layers")):
        found["dense_layers"] = tuple(dense)
        widths = read.get("intermediate_size_mlp"), read.get("intermediate_size"), found.get("F")
        found["F_dense"] = next((width for width in widths if width is not None), 0)
        if len(dense) == L:  # none has experts
            found["F"] = found["F_dense"]
            for name in EXPERTS:
                found.pop(name, None)
    return said


def _dense_layers(read: dict, L: int) -> list[int]:
    """Return the layers without experts, by the keys with which classes mix both kinds."""
    if "mlp_layer_types" in read:
        types = read["mlp_layer_types"] or ["dense"] + ["sparse"] * (L - 1)
        if len(types) < L:
            raise ValueError(f"mlp_layer_types has {len(types)} entries for {L} layers\n  fix: give one for each layer")
        return [i for i in range(L) if types[i] != "sparse"]
    if (listed := read.get("moe_layers")) is not None:
        return [i for i in range(L) if i not in listed]
    steps = [key for key in ("decoder_sparse_step", "interleave_moe_layer_step") if read.get(key) is not None]
    dense = set(read.get("mlp_only_layers") or ())  # of these a class does not ask whether their number divides
    return [i for i in range(L) if i in dense or (steps and (i + 1) % _interval(read, steps[0]))]


def _interval(read: dict, key: str) -> int:
    """Return the number of layers after which a kind of layer comes again. ValueError if it is 0."""
    if not read[key]:
        raise ValueError(f"{key} is 0\n  fix: give at least 1")
    return read[key]


def _linear(read: dict, L: int) -> Linear | None:
    """Return the linear layers, or None if there are none. ValueError if no layer has attention."""
    if (types := read["layer_types"]) is None:
        every = _interval(read, "full_attention_interval")
        layers = tuple(l for l in range(L) if (l + 1) % every)
    else:
        layers = tuple(l for l, kind in enumerate(types) if kind == "linear_attention")
    return Linear(**{name: read[key] for name, key in LINEAR.items()}, layers=layers) if layers else None


def _scales(read: dict) -> dict:
    """Return the scales that some classes write by their inverses."""
    found = {}
    if (scale := read.get("logit_scale")) is not None:
        check_within("logit_scale", scale, "(0, inf)")
        found = {"logit_scale": 1 / scale}
    return found | ({"score_scale": read["query_pre_attn_scalar"] ** -0.5} if read.get("query_pre_attn_scalar") else {})


def _unrotated(read: dict, L: int) -> tuple[int, ...]:
    """Return the layers without rotary positions. ValueError if the list of them is too short."""
    if (turned := read["no_rope_layers"]) is None:
        every = _interval(read, "no_rope_layer_interval")
        turned = [(l + 1) % every for l in range(L)]
    if len(turned) < L:
        raise ValueError(f"no_rope_layers has {len(turned)} entries for {L} layers\n  fix: give one for each layer")
    return tuple(l for l in range(L) if not turned[l])


def _window(table: dict, read: dict, name: str, found: dict, kind: ModelType) -> int | tuple | None:
    """Return the window of all layers, or of each. ValueError if layer_types contradicts the other keys."""
    chunks = "attention_chunk_size" in kind.keys
    width = read["attention_chunk_size"] if chunks else read.get("sliding_window")
    types, L = read.get("layer_types"), found.get("L", 0)
    if (kind.gated_window or name.startswith("qwen")) and not read.get("use_sliding_window"):
        width = None
    if types is None:
        first = read.get("max_window_layers") or 0
        pattern = table.get("sliding_window_pattern", kind.pattern) if name in PATTERNED else kind.pattern
        of_type("sliding_window_pattern", pattern, int)
        slides = [i >= first and not (pattern and (i + 1) % pattern == 0) for i in range(L)]
        slides = [i in found["unrotated"] for i in range(L)] if name == "smollm3" else slides
        slides = [i % 2 == 0 and i < first for i in range(L)] if name == "qwen2_moe" else slides
        slides = [i not in found["unrotated"] for i in range(L)] if chunks else slides
    elif len(types) != L:
        raise ValueError(f"layer_types has {len(types)} entries for {L} layers\n  fix: give one for each layer")
    else:
        slides = [each == ("chunked_attention" if chunks else "sliding_attention") for each in types]
        if any(slides) and width is None and kind.architecture:
            what = "layer_types has sliding_attention, and no window is given"
            fix = "give sliding_window, and to Qwen and SmolLM3 use_sliding_window: true"
            if chunks:
                what, fix = "layer_types has chunked_attention, and no chunk is given", "give attention_chunk_size"
            raise ValueError(f"{what}\n  fix: {fix}")
    windows = tuple(width if each else None for each in slides)
    return windows[0] if windows and len(set(windows)) == 1 else windows


def _cached(read: dict, known: bool, L: int) -> int | None:
    """Return how many layers cache keys and values, for a model that is counted but not computed; None: all layers."""
    if known:
        return None
    if types := read.get("layer_types"):
        return None if {*types} <= ATTENDS else sum(each in ATTENDS for each in types)
    return L // every if (every := read.get("full_attention_interval")) else None


def _activation(read: dict) -> str:
    return read.get("hidden_activation") or read.get("hidden_act") or read.get("activation_function") or "silu"


def _not_computed(whole: dict, table: dict, read: dict, kind: ModelType) -> list[str]:
    """Return the names of features that no code here computes, except latent attention and rotary scalings."""
    found = [] if table is whole else [f"model_type {whole.get('model_type')!r}"]
    name = table.get("model_type")  # without one no class is named, and a file is read by its keys
    found += [] if kind.architecture or name is None else [f"model_type {name!r}"]
    known = ACTIVATIONS.keys() - ({"xielu"} if name != "apertus" else set())  # other classes name its numbers otherwise
    found += [] if _activation(read) in known else [f"hidden_act {_activation(read)!r}"]
    refused = ("use_bidirectional_attention", "scale_attn_by_inverse_layer_idx", "add_cross_attention")
    found += [key for key in refused if read.get(key)]
    found += ["norms of heads with biases"] if name == "phi" and read["qk_layernorm"] else []
    found += [] if read.get("scale_attn_weights", True) else ["scale_attn_weights false"]
    found += ["swiglu_alpha"] if read.get("swiglu_alpha", ALPHA) != ALPHA else []
    found += ["attention_bias without one of the output"] if name == "helium" and read["attention_bias"] else []
    found += [f"{key}={read[key]}" for key in DROPOUTS if read.get(key)]
    found += unread_quantization(table)
    given = scaling_of(table, kind)
    for each in (
        given,
        *(each for each in given.values() if isinstance(each, dict)),
    ):
        partial = each.get("partial_rotary_factor", table.get("partial_rotary_factor"))
        scaled = each.get("rope_type", each.get("type", "default")) != "default"
        if partial not in (None, 1.0) and (scaled or not kind.architecture) and kind.partial is None:  # else ignored
            found.append(f"partial_rotary_factor {partial}")
    if "qk_rope_head_dim" in kind.keys and table.get("head_dim", rope := read["qk_rope_head_dim"]) != rope:
        found.append(f"head_dim {table['head_dim']} beside qk_rope_head_dim {rope}")  # the class turns so many dims
    if kind.architecture and not {"head_dim", "qk_rope_head_dim"} & {*kind.keys}:  # the class's parts differ in it
        D, N = (next(read[key] for key in LETTERS[letter] if key in read) for letter in "DN")
        wide = D // max(1, N)
        found += (
            [] if table.get("head_dim") in (None, wide) else [f"head_dim {table['head_dim']} beside D / N = {wide}"]
        )
    allowed = LINEAR_TYPES if kind.architecture and "linear_num_key_heads" in kind.keys else SLIDES
    allowed = CHUNKS if "attention_chunk_size" in kind.keys else allowed
    strange = sorted({*map(str, read.get("layer_types") or ())} - allowed)
    found += [f"layer_types {strange[0]!r}"] if strange else []
    found += [] if table.get("is_causal", True) else ["is_causal false"]
    return found + [key for key in ("per_layer_config", "configuration_files") if table.get(key)]
