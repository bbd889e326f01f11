"""Tables of how the files of each model_type name, join and order the params, where they differ from Llama's.

`models.leaves` has the names and dims of most classes. A row here is about one model_type.
"""

_AFTER = {
    "post_self_attn_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"
}  # fmt: skip
RENAMED: dict[str, dict[str, str]] = {  # parts of names, each with what replaces it
    "mixtral": {
        "mlp.gate": "block_sparse_moe.gate", "mlp.experts": "block_sparse_moe.experts", ".up_proj": ".w3",
        ".gate_proj": ".w1", ".down_proj": ".w2",
    },
    "gpt_oss": {"mlp.gate": "mlp.router"},
    "qwen2_moe": {"shared_experts": "shared_expert"},
    "qwen3_next": {"shared_experts": "shared_expert"},
    "olmo2": _AFTER,
    "olmo3": _AFTER,
    "exaone4": _AFTER,
    "gemma2": {"post_attention_layernorm": "pre_feedforward_layernorm"} | _AFTER,
    "vaultgemma": {"post_attention_layernorm": "pre_feedforward_layernorm"},
    "gemma3_text": {"post_attention_layernorm": "pre_feedforward_layernorm"} | _AFTER,
    "hunyuan_v1_dense": {"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    "apertus": {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
    "phi": {
        "model.norm": "model.final_layernorm", "o_proj": "dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
    },
    "starcoder2": {"up_proj": "c_fc", "down_proj": "c_proj"},
    "gpt_neox": {
        "model.embed_tokens": "gpt_neox.embed_in", "lm_head": "embed_out", "model.norm": "gpt_neox.final_layer_norm",
        "model.layers": "gpt_neox.layers", "self_attn.o_proj": "attention.dense", "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
    },
    "gpt2": {
        "model.embed_tokens": "transformer.wte", "model.embed_positions": "transformer.wpe",
        "model.norm": "transformer.ln_f", "model.layers": "transformer.h", "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    },
    "llama4_text": {"mlp.gate.": "feed_forward.router.", "mlp.": "feed_forward.", "shared_experts": "shared_expert"},
    "granitemoe": {"mlp.gate.weight": "block_sparse_moe.router.layer.weight"},
}  # fmt: skip

# Params that share a tensor or have other dims in it: part of a name -> (what replaces it, the tensor's dims). A "*" in
# the dims numbers the params of the tensor, which its rows before the colon list: "NH KH KH: 1" is the second of three
# that follow each other along the rows; "2: 0" is the first of two, at index 0 of "*".
Row = tuple[str, str, str]
_FUSED_MLP: dict[str, Row] = {
    "mlp.gate_proj": ("mlp.gate_up_proj", "*F, D", "2: 0"),
    "mlp.up_proj": ("mlp.gate_up_proj", "*F, D", "2: 1"),
}
JOINED: dict[str, dict[str, Row]] = {
    "phi3": {
        "self_attn.q_proj": ("self_attn.qkv_proj", "NH, D", "NH KH KH: 0"),
        "self_attn.k_proj": ("self_attn.qkv_proj", "KH, D", "NH KH KH: 1"),
        "self_attn.v_proj": ("self_attn.qkv_proj", "KH, D", "NH KH KH: 2"),
    }
    | _FUSED_MLP,
    "qwen3_next": {
        "self_attn.q_proj": ("self_attn.q_proj", "N*H, D", "2: 0"),
        "self_attn.g_proj": ("self_attn.q_proj", "N*H, D", "2: 1"),
        "conv_q": ("conv1d", "kh, *, w", "kh kh nv: 0"),
        "conv_k": ("conv1d", "kh, *, w", "kh kh nv: 1"),
        "conv_v": ("conv1d", "nv, *, w", "kh kh nv: 2"),
    },
    "cohere": {"q_norm": ("q_norm", "N, H", ""), "k_norm": ("k_norm", "K, H", "")},
    "stablelm": {"q_norm": ("q_layernorm.norms.{N}", "H", ""), "k_norm": ("k_layernorm.norms.{K}", "H", "")},
    "glm": _FUSED_MLP,
    "glm4": _FUSED_MLP,
    "gpt_neox": {
        f"model.layers.{{L}}.self_attn.{name}_proj.{kind}": (
            f"gpt_neox.layers.{{L}}.attention.query_key_value.{kind}",
            dims,
            f"3: {i}",
        )
        for i, name in enumerate("qkv")
        for kind, dims in (("weight", f"{'N' if i == 0 else 'K'}*H, D"), ("bias", f"{'N' if i == 0 else 'K'}*H"))
    },
    "gpt2": {
        f"model.layers.{{L}}.self_attn.{name}_proj.{kind}": (f"transformer.h.{{L}}.attn.c_attn.{kind}", dims, f"3: {i}")
        for i, (name, N) in enumerate(zip("qkv", "NKK", strict=True))
        for kind, dims in (("weight", f"D, *{N}H"), ("bias", f"*{N}H"))
    }
    | {
        f"model.layers.{{L}}.{ours}.{kind}": (f"transformer.h.{{L}}.{theirs}.{kind}", dims, "")
        for ours, theirs, rows, columns in (
            ("self_attn.o_proj", "attn.c_proj", "NH", "D"),
            ("mlp.up_proj", "mlp.c_fc", "D", "F"),
            ("mlp.down_proj", "mlp.c_proj", "F", "D"),
        )
        for kind, dims in (("weight", f"{rows}, {columns}"), ("bias", columns))
    },
    "gpt_oss": {
        "mlp.experts.{E}.gate_proj.weight": ("mlp.experts.gate_up_proj", "E, D, F*", "2: 0"),
        "mlp.experts.{E}.up_proj.weight": ("mlp.experts.gate_up_proj", "E, D, F*", "2: 1"),
        "mlp.experts.{E}.down_proj.weight": ("mlp.experts.down_proj", "E, F, D", ""),
        "mlp.experts.{E}.gate_proj.bias": ("mlp.experts.gate_up_proj_bias", "E, F*", "2: 0"),
        "mlp.experts.{E}.up_proj.bias": ("mlp.experts.gate_up_proj_bias", "E, F*", "2: 1"),
        "mlp.experts.{E}.down_proj.bias": ("mlp.experts.down_proj_bias", "E, D", ""),
    },
    "llama4_text": {
        "mlp.experts.{E}.gate_proj.weight": ("feed_forward.experts.gate_up_proj", "E, D, *F", "2: 0"),
        "mlp.experts.{E}.up_proj.weight": ("feed_forward.experts.gate_up_proj", "E, D, *F", "2: 1"),
        "mlp.experts.{E}.down_proj.weight": ("feed_forward.experts.down_proj", "E, F, D", ""),
    },
    "granitemoe": {
        "mlp.experts.{E}.gate_proj": ("block_sparse_moe.input_linear", "E, *F, D", "2: 0"),
        "mlp.experts.{E}.up_proj": ("block_sparse_moe.input_linear", "E, *F, D", "2: 1"),
        "mlp.experts.{E}.down_proj": ("block_sparse_moe.output_linear", "E, D, F", ""),
    },
}

# The two coordinates of a rotary plane are neighbours in these classes.
PAIRED = ("ernie4_5", "helium", "glm", "glm4", "cohere", "cohere2", "llama4_text")
TURNED = ("W_Q", "W_K", "b_Q", "b_K", "norm_Q", "norm_K")  # leaves[.., H] whose H positions turn


def file_of(kind: str, name: str, dims: str) -> Row:
    """Return the tensors' name and dims in files of this model_type, and how params are joined in them."""
    for part, (other, theirs, joined) in JOINED.get(kind, {}).items():
        if part in name:
            return name.replace(part, other), theirs, joined
    for part, other in RENAMED.get(kind, {}).items():
        name = name.replace(part, other)
    return name, dims, ""
