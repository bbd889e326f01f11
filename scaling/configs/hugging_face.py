"""A Hugging Face config.json in the book's letters, and back.

As published (`rope_theta`, `rope_scaling`) and as transformers 5 writes it (`rope_parameters`). What a file leaves out
is its class's default there. A model of another kind is counted; what no code here computes stands in `uncomputed`.
"""

from dataclasses import dataclass

from scaling.configs.config import Latent, RopeScaling

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
    "dropout": ("attention_dropout",),
    "routing": ("scoring_func",),
    "expert_groups": ("n_group",),
    "top_groups": ("topk_group",),
    "norm_topk": ("norm_topk_prob",),
    "routed_scale": ("routed_scaling_factor",),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}
ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
UNGATED = ("bloom", "falcon", "gpt_neox", "mpt", "opt", "phi", "starcoder2")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Kind:
    """A model_type: its class, where its models are computed, and what that class takes where a file is silent."""

    architecture: str = ""
    eps: float = 1e-6
    theta: float = 1e4
    window: int | None = None
    switched: bool = False  # a window only with use_sliding_window, and from layer max_window_layers on
    alternate: bool = False  # a window in every other layer, the first included
    activation: str = "silu"
    fixed: tuple[tuple[str, object], ...] = ()


KINDS = {
    "llama": Kind("LlamaForCausalLM"),
    "mistral": Kind("MistralForCausalLM", window=4096),
    "qwen2": Kind("Qwen2ForCausalLM", switched=True, fixed=(("attention_bias", True),)),
    "qwen3": Kind("Qwen3ForCausalLM", switched=True, fixed=(("qk_norm", True),)),
    "mixtral": Kind("MixtralForCausalLM", eps=1e-5, theta=1e6),
    "gemma": Kind(activation="gelu_pytorch_tanh"),
    "gemma2": Kind(activation="gelu_pytorch_tanh", window=4096, alternate=True),
}


def _rotary(table: dict, kind: Kind) -> dict:
    """theta and rope_scaling, from either form."""
    given = table.get("rope_parameters") or table.get("rope_scaling") or {}
    nested = [each for each in given.values() if isinstance(each, dict)]
    theta = given.get("rope_theta", table.get("rope_theta", kind.theta))
    return {"theta": float(theta), "rope_scaling": RopeScaling("by layer") if nested else RopeScaling.of(given)}


def _window(table: dict, kind: Kind, L: int) -> int | tuple | None:
    width = table.get("sliding_window", kind.window)
    if width is None or (kind.switched and not table.get("use_sliding_window", False)):
        return None
    first = table.get("max_window_layers", 28) if kind.switched else 0
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
    partial = (table.get("rope_parameters") or table).get("partial_rotary_factor", 1.0)
    found += [] if partial == 1.0 else [f"partial_rotary_factor {partial}"]
    return found


def read(table: dict) -> dict:
    """Config's fields from a config.json: LLaMA's kind, Mixtral's, DeepSeek-V3's, Gemma's and others alike."""
    table = table.get("text_config", table)  # of a model that also sees
    found = {}
    for letter, keys in LETTERS.items():
        if values := [table[key] for key in keys if table.get(key) is not None]:
            found[letter] = values[0]
    name = table.get("model_type", "llama")
    kind = KINDS.get(name, Kind())
    if "H" not in found and {"D", "N"} <= found.keys():
        found["H"] = found["D"] // found["N"]
    if found.get("dense_layers"):
        found["F_dense"] = table["intermediate_size"]
    if table.get("kv_lora_rank"):
        if absent := [key for key in LATENT if table.get(key) is None]:
            raise ValueError(f"latent attention needs {', '.join(absent)}")
        found["latent"] = Latent(*(table[key] for key in LATENT))
    if name == "deepseek_v3":
        found.setdefault("routing", "sigmoid")
    if found.get("attention_bias"):
        found["output_bias"] = True
    if table.get("output_router_logits"):  # without, their loss leaves the auxiliary one out
        found["aux_coef"] = table.get("router_aux_loss_coef", 0.001)
    found.setdefault("tied", name.startswith("gemma"))
    found.setdefault("eps", kind.eps)
    found["norms"] = 4 if name.startswith(("gemma2", "gemma3")) else 2
    found["gated"] = name not in UNGATED
    act = table.get("hidden_activation") or table.get("hidden_act") or kind.activation
    plain = "silu" if found["gated"] else "gelu"
    found["activation"] = None if ACTIVATIONS.get(act) == plain else ACTIVATIONS.get(act)
    found |= _rotary(table, kind) | {"window": _window(table, kind, found.get("L", 0))} | dict(kind.fixed)
    return found | {"uncomputed": tuple(_uncomputed(table, name, act))}
