"""The params of a decoder-only transformer, one leaf per line: the only table that defines them.

Init, sharding, checkpoints, Hugging Face files, memory, the planner, serving and pictures read it. While a layer is
computed, a leaf is gathered: it has its `trained` type without X and Z. Its gradient is then unreduced over every axis
that splits the tokens and not the leaf (the law of cotangents, notation.md). This module also decides which models are
computed. It needs no torch.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from scaling.configs import Config
from scaling.spec import parse

AXES = ("P", "Z", "X", "C", "Y", "E")  # of a training mesh
SCALINGS = ("linear", "llama3", "yarn", "longrope")  # of rotary frequencies: `models.rope`
STACKS = ("dense", "linear", "layers", "lora")  # trees of leaves that are stacked over layers
STACKED = ("L", "G", "l")  # dims that count layers: all or those after the dense ones, dense ones, linear ones
KV_HEADS = ("W_K", "W_V", "b_K", "b_V")  # leaves[.., K_Y, H]: without Y where |Y| does not divide K
Named = tuple[str, str]  # a tensor of Hugging Face's, and its dims: "NH, D" is two dims, and the first merges N and H


@dataclass(frozen=True)
class Leaf:
    """A param, as one line of the table.

    Attributes:
        trained: Its type as stored on a training mesh (P, Z, X, C, Y, E).
        served: Its type on a serving mesh (X, Y, Z, E) where it is split the most, in the form "2d".
        start: A constant, or the dims that it is contracted over: then it is normal with variance 1/(their sizes).
        hf: Its tensors in Hugging Face's files, as most classes name them; `models.hf_names` has the others.
        only: Whether a model has it.
    """

    trained: str
    served: str
    start: str | float
    hf: Named
    only: Callable[[Config], Any] = lambda config: True


def _attention(name: str, dims: str) -> Named:
    return f"model.layers.{{L}}.self_attn.{name}", dims


def _linear(name: str, dims: str) -> Named:
    return f"model.layers.{{l}}.linear_attn.{name}", dims


def _layer(name: str) -> Named:
    return f"model.layers.{{L}}.{name}", "D"


def _mlp(name: str, dims: str) -> Named:
    return f"model.layers.{{L}}.mlp.{name}", dims


def _gated(config: Config) -> bool:
    return config.gated


def _headed(config: Config) -> bool:
    return config.latent is None


def _reads_norms(config: Config) -> bool:
    return config.norms in ("before", "both")


def _adds_norms(config: Config) -> bool:
    return config.norms in ("after", "both")


def _latent(config: Config) -> bool:
    return config.latent is not None


def _ranked(config: Config) -> bool:
    return config.latent is not None and config.latent.q_rank > 0


def _gained_heads(config: Config) -> bool:
    return config.qk_norm and not config.qk_bare


def _xielu(config: Config) -> bool:
    return config.activation == "xielu"


def _biased(config: Config) -> bool:
    return config.routing == "sigmoid"


ENDS = {
    "embed": Leaf("E[V_YZ, D_X]", "E[V_YZ, D_X]", "", ("model.embed_tokens.weight", "V, D")),
    "positions": Leaf(
        "P[J, D_X]", "P[J, D_XYZ]", "", ("model.embed_positions.weight", "J, D"), lambda c: c.learned_positions
    ),
    "norm": Leaf("g[D]", "g[D_XYZ]", 1.0, ("model.norm.weight", "D")),
    "b_norm": Leaf("b[D]", "b[D_XYZ]", 0.0, ("model.norm.bias", "D"), lambda c: c.norm_bias),
    "unembed": Leaf("U[D_X, V_YZ]", "U[D_X, V_YZ]", "D", ("lm_head.weight", "V, D"), lambda c: not c.tied),
    "b_unembed": Leaf("b[V_YZ]", "b[V_YZ]", 0.0, ("lm_head.bias", "V"), lambda c: c.unembed_bias),
}
LAYER = {
    "norm_attn": Leaf("g[L_Z, D]", "g[L, D_XYZ]", 1.0, _layer("input_layernorm.weight"), lambda c: c.norms != "after"),
    "b_norm_attn": Leaf("b[L_Z, D]", "b[L, D_XYZ]", 0.0, _layer("input_layernorm.bias"), lambda c: c.norm_bias),
    "W_Q": Leaf("W_Q[L_Z, D_X, N_Y, H]", "W_Q[L, D_X, N_YZ, H]", "D", _attention("q_proj.weight", "NH, D"), _headed),
    "W_K": Leaf("W_K[L_Z, D_X, K_Y, H]", "W_K[L, D_X, K_Y, H]", "D", _attention("k_proj.weight", "KH, D"), _headed),
    "W_V": Leaf("W_V[L_Z, D_X, K_Y, H]", "W_V[L, D_X, K_Y, H]", "D", _attention("v_proj.weight", "KH, D"), _headed),
    "b_Q": Leaf("b_Q[L_Z, N_Y, H]", "b_Q[L, N_Y, H]", 0.0, _attention("q_proj.bias", "NH"), lambda c: c.attention_bias),
    "b_K": Leaf("b_K[L_Z, K_Y, H]", "b_K[L, K_Y, H]", 0.0, _attention("k_proj.bias", "KH"), lambda c: c.attention_bias),
    "b_V": Leaf("b_V[L_Z, K_Y, H]", "b_V[L, K_Y, H]", 0.0, _attention("v_proj.bias", "KH"), lambda c: c.attention_bias),
    "norm_Q": Leaf("g[L_Z, H]", "g[L, H]", 1.0, _attention("q_norm.weight", "H"), _gained_heads),
    "norm_K": Leaf("g[L_Z, H]", "g[L, H]", 1.0, _attention("k_norm.weight", "H"), _gained_heads),
    "W_DQ": Leaf("W_DQ[L_Z, D_X, R]", "W_DQ[L, D_X, R]", "D", _attention("q_a_proj.weight", "R, D"), _ranked),
    "norm_CQ": Leaf("g[L_Z, R]", "g[L, R]", 1.0, _attention("q_a_layernorm.weight", "R"), _ranked),
    "W_UQ": Leaf(
        "W_UQ[L_Z, R_X, N_Y, A]", "W_UQ[L, R_X, N_YZ, A]", "R", _attention("q_b_proj.weight", "NA, R"), _latent
    ),
    "W_DKV": Leaf(
        "W_DKV[L_Z, D_X, M]", "W_DKV[L, D_X, M]", "D", _attention("kv_a_proj_with_mqa.weight", "M, D"), _latent
    ),
    "norm_CKV": Leaf("g[L_Z, C]", "g[L, C]", 1.0, _attention("kv_a_layernorm.weight", "C"), _latent),
    "W_UKV": Leaf(
        "W_UKV[L_Z, C_X, N_Y, W]", "W_UKV[L, C_X, N_YZ, W]", "C", _attention("kv_b_proj.weight", "NW, C"), _latent
    ),
    "W_G": Leaf(
        "W_G[L_Z, D_X, N_Y, H]", "W_G[L, D_X, N_YZ, H]", "D", _attention("g_proj.weight", "NH, D"),
        lambda c: c.head_gate,
    ),
    "sinks": Leaf("s[L_Z, N_Y]", "s[L, N_Y]", 0.0, _attention("sinks", "N"), lambda c: c.sinks),
    "W_O": Leaf("W_O[L_Z, N_Y, H, D_X]", "W_O[L, N_YZ, H, D_X]", "NH", _attention("o_proj.weight", "D, NH")),
    "b_O": Leaf("b_O[L_Z, D]", "b_O[L, D_XYZ]", 0.0, _attention("o_proj.bias", "D"), lambda c: c.output_bias),
    "norm_attn_out": Leaf(
        "g[L_Z, D]", "g[L, D_XYZ]", 1.0, _layer("post_self_attn_layernorm.weight"), _adds_norms
    ),
    "norm_mlp": Leaf("g[L_Z, D]", "g[L, D_XYZ]", 1.0, _layer("post_attention_layernorm.weight"), _reads_norms),
    "b_norm_mlp": Leaf(
        "b[L_Z, D]", "b[L, D_XYZ]", 0.0, _layer("post_attention_layernorm.bias"),
        lambda c: c.norm_bias and _reads_norms(c),
    ),
    "W_in": Leaf("W_in[L_Z, D_X, F_Y]", "W_in[L, D_X, F_YZ]", "D", _mlp("up_proj.weight", "F, D")),
    "W_gate": Leaf("W_gate[L_Z, D_X, F_Y]", "W_gate[L, D_X, F_YZ]", "D", _mlp("gate_proj.weight", "F, D"), _gated),
    "W_out": Leaf("W_out[L_Z, F_Y, D_X]", "W_out[L, F_YZ, D_X]", "F", _mlp("down_proj.weight", "D, F")),
    "b_in": Leaf("b[L_Z, F_Y]", "b[L, F_YZ]", 0.0, _mlp("up_proj.bias", "F"), lambda c: c.mlp_bias),
    "b_gate": Leaf("b[L_Z, F_Y]", "b[L, F_YZ]", 0.0, _mlp("gate_proj.bias", "F"), lambda c: c.mlp_bias and c.gated),
    "b_out": Leaf("b[L_Z, D]", "b[L, D_XYZ]", 0.0, _mlp("down_proj.bias", "D"), lambda c: c.mlp_bias),
    "alpha_p": Leaf("alpha[L_Z]", "alpha[L]", math.log(math.expm1(0.8)), _mlp("act_fn.alpha_p", "*"), _xielu),
    "alpha_n": Leaf("alpha[L_Z]", "alpha[L]", math.log(math.expm1(0.3)), _mlp("act_fn.alpha_n", "*"), _xielu),
    "norm_mlp_out": Leaf("g[L_Z, D]", "g[L, D_XYZ]", 1.0, _layer("post_mlp_layernorm.weight"), _adds_norms),
}  # fmt: skip
LINEAR = {  # the leaves of a linear layer, in place of attention's: `models.linear`
    "W_QKVZ": Leaf("W_QKVZ[l, D_X, k_Y, m]", "W_QKVZ[l, D_X, k_Y, m]", "D", _linear("in_proj_qkvz.weight", "km, D")),
    "W_BA": Leaf("W_BA[l, D_X, k_Y, u]", "W_BA[l, D_X, k_Y, u]", "D", _linear("in_proj_ba.weight", "ku, D")),
    "conv_Q": Leaf("c[l, k_Y, h, w]", "c[l, k_Y, h, w]", "w", _linear("conv_q.weight", "kh, *, w")),
    "conv_K": Leaf("c[l, k_Y, h, w]", "c[l, k_Y, h, w]", "w", _linear("conv_k.weight", "kh, *, w")),
    "conv_V": Leaf("c[l, n_Y, v, w]", "c[l, n_Y, v, w]", "w", _linear("conv_v.weight", "nv, *, w")),
    "A_log": Leaf("A[l, n_Y]", "A[l, n_Y]", 0.0, _linear("A_log", "n")),
    "dt": Leaf("dt[l, n_Y]", "dt[l, n_Y]", 1.0, _linear("dt_bias", "n")),
    "gain": Leaf("gain[l, v]", "gain[l, v]", 1.0, _linear("norm.weight", "v")),
    "W_O": Leaf("W_O[l, n_Y, v, D_X]", "W_O[l, n_Y, v, D_X]", "nv", _linear("out_proj.weight", "D, nv")),
}
ATTENTION = re.compile(r"[Wb]_[QKVOG]|norm_[QK]|sinks")  # leaves of attention, which linear layers lack
WIDE = {  # leaves of a model with gains of each head, in place of gains that all heads share
    "norm_Q": Leaf("g[L_Z, N_Y, H]", "g[L, N_Y, H]", 1.0, _attention("q_norm.weight", "NH"), lambda c: c.qk_norm),
    "norm_K": Leaf("g[L_Z, K_Y, H]", "g[L, K_Y, H]", 1.0, _attention("k_norm.weight", "KH"), lambda c: c.qk_norm),
}
UNRANKED = {  # leaves of latent attention whose queries have no rank, so R is D
    "W_UQ": Leaf("W_UQ[L_Z, R_X, N_Y, A]", "W_UQ[L, R_X, N_YZ, A]", "R", _attention("q_proj.weight", "NA, R"))
}
EXPERTS = {  # of a model with experts, in place of the MLP's matrices
    "router": Leaf("router[L_Z, D, E]", "router[L, D, E]", "D", _mlp("gate.weight", "E, D")),
    "b_router": Leaf("b[L_Z, E]", "b[L, E]", 0.0, _mlp("gate.bias", "E"), lambda c: c.expert_bias),
    "bias": Leaf("bias[L_Z, E]", "bias[L, E]", 0.0, _mlp("gate.e_score_correction_bias", "E"), _biased),
    "W_in": Leaf(
        "W_in[L_Z, E_E, D_X, F_Y]", "W_in[L, E_E, D, F_YZ]", "D", _mlp("experts.{E}.up_proj.weight", "F, D")
    ),
    "W_gate": Leaf(
        "W_gate[L_Z, E_E, D_X, F_Y]", "W_gate[L, E_E, D, F_YZ]", "D", _mlp("experts.{E}.gate_proj.weight", "F, D"),
        _gated,
    ),
    "W_out": Leaf(
        "W_out[L_Z, E_E, F_Y, D_X]", "W_out[L, E_E, F_YZ, D]", "F", _mlp("experts.{E}.down_proj.weight", "D, F")
    ),
    "b_in": Leaf(
        "b[L_Z, E_E, F_Y]", "b[L, E_E, F_YZ]", 0.0, _mlp("experts.{E}.up_proj.bias", "F"), lambda c: c.expert_bias
    ),
    "b_gate": Leaf(
        "b[L_Z, E_E, F_Y]", "b[L, E_E, F_YZ]", 0.0, _mlp("experts.{E}.gate_proj.bias", "F"),
        lambda c: c.expert_bias and c.gated,
    ),
    "b_out": Leaf(
        "b[L_Z, E_E, D]", "b[L, E_E, D]", 0.0, _mlp("experts.{E}.down_proj.bias", "D"), lambda c: c.expert_bias
    ),
}  # fmt: skip
SHARED = {  # the experts that every token passes; S is their width together
    "W_in": Leaf("W_in[L_Z, D_X, S_Y]", "W_in[L, D, S_YZ]", "D", _mlp("shared_experts.up_proj.weight", "S, D")),
    "W_gate": Leaf(
        "W_gate[L_Z, D_X, S_Y]", "W_gate[L, D, S_YZ]", "D", _mlp("shared_experts.gate_proj.weight", "S, D"), _gated
    ),
    "W_out": Leaf("W_out[L_Z, S_Y, D_X]", "W_out[L, S_YZ, D]", "S", _mlp("shared_experts.down_proj.weight", "D, S")),
    "gate": Leaf("gate[L_Z, D]", "gate[L, D]", "D", _mlp("shared_expert_gate.weight", "*, D"), lambda c: c.shared_gate),
}


def _dense(leaf: Leaf) -> Leaf:
    """Return the leaf of the G dense layers beside those with experts, which have O features."""
    name, dims = leaf.hf
    types = (text.replace("[L_Z", "[G").replace("[L", "[G") for text in (leaf.trained, leaf.served))
    trained, served = (re.sub(r"\bF(?=_)", "O", text) for text in types)
    start = "O" if leaf.start == "F" else leaf.start
    return Leaf(trained, served, start, (name.replace("{L}", "{G}"), dims.replace("F", "O")), leaf.only)


def _of_linear(leaves: dict) -> dict:
    """Return a linear layer's leaves: LINEAR in place of attention's, and the others stacked along l, not L."""

    def each(leaf: Leaf) -> Leaf:
        name, dims = leaf.hf
        trained, served = (re.sub(r"\[L(_Z)?\b", "[l", text) for text in (leaf.trained, leaf.served))
        return Leaf(trained, served, leaf.start, (name.replace("{L}", "{l}"), dims), leaf.only)

    kept = {name: leaf for name, leaf in leaves.items() if not ATTENTION.fullmatch(name)}
    return LINEAR | {name: _restacked(leaf, each) for name, leaf in kept.items()}


def _restacked(leaf: Any, each: Callable) -> Any:
    return {name: each(inner) for name, inner in leaf.items()} if isinstance(leaf, dict) else each(leaf)


def matrices_of(config: Config) -> dict:
    """Return the inputs and outputs of each matrix, such as "D -> N H"; "" for other leaves and the ends."""

    def named(leaf: Leaf) -> str:
        if not isinstance(leaf.start, str):
            return ""
        dims = [part.split("_")[0].strip() for part in leaf.trained.split("[")[1].rstrip("]").split(",")]
        outputs = [dim for dim in dims if dim not in "LGEl" and dim not in leaf.start]
        outputs = outputs or [dim for dim in dims if dim == "E"]  # the router's outputs are the experts
        return f"{' '.join(leaf.start)} -> {' '.join(outputs)}" if outputs else ""

    def each(table: dict) -> dict:
        return {name: each(leaf) if isinstance(leaf, dict) else named(leaf) for name, leaf in table.items()}

    found = leaves_of(config)
    return {name: each(leaf) if isinstance(leaf, dict) else "" for name, leaf in found.items()}


def leaves_of(config: Config) -> dict:
    """Return the tree of this model's leaves: {"embed", "dense": {...}, "layers": {...}, "norm", "unembed"}.

    "dense" exists only if some layers are dense beside others with experts, and "linear" if some are linear.
    """

    def here(table: Mapping[str, Leaf]) -> dict[str, Any]:
        gains = config.norm_gain
        return {name: leaf for name, leaf in table.items() if leaf.only(config) and (gains or name[:4] != "norm")}

    layer = (
        LAYER
        | (WIDE if config.qk_wide or config.qk_layernorm else {})
        | (UNRANKED if _latent(config) and not _ranked(config) else {})
    )
    layers = here(layer | (EXPERTS if config.moe else {}))
    layers |= {"shared": here(SHARED)} if config.moe and config.shared else {}
    ends = here(ENDS)
    first = {"dense": {name: _dense(leaf) for name, leaf in here(layer).items()}} if config.dense_layers else {}
    first |= {"linear": _of_linear(layers)} if config.linear else {}
    return {"embed": ends.pop("embed")} | first | {"layers": layers} | ends


APART = {  # pairs of features that no code here computes in one model
    "latent attention": (
        "biases, qk_norm, LayerNorm, norms after blocks, parallel blocks, score_cap, sinks, head_gate, "
        "unrotated layers, score_scale, partial rotation, chunks, longrope, head_clip, norms without gains"
    ),
    "linear layers": (
        "dense_layers, latent attention, a window, LayerNorm, norms after blocks, parallel blocks, unrotated layers, "
        "norms without gains"
    ),
    "norms without gains": "experts, parallel blocks, norms after blocks, qk_norm, norm_bias, scaled logits",
    "head_clip": "qk_turned, qk_layernorm",
    "qk_bare": "qk_wide, qk_layernorm, qk_turned, head_clip, score_scale",
    "head_gate": "attention_bias",
    "experts": "LayerNorm, norms after blocks, mlp_bias, parallel blocks, scaled inputs and biases",
    "a gate": "xielu",
}


def uncomputed(config: Config) -> list[str]:
    """Return the names of the model's features that no code here computes."""
    scaling = config.rope_scaling
    has = vars(config) | {
        "latent attention": config.latent, "linear layers": config.linear, "experts": config.moe,
        "biases": config.attention_bias or config.output_bias, "norms without gains": not config.norm_gain,
        "norms after blocks": config.norms != "before", "LayerNorm": config.centered,
        "parallel blocks": config.parallel, "unrotated layers": config.unrotated,
        "partial rotation": config.rotary_share != 1, "chunks": config.chunked, "a window": any(config.windows),
        "scaled logits": config.logit_scale != 1, "xielu": _xielu(config), "a gate": config.gated,
        "scaled inputs and biases": config.routing == "inputs" and config.expert_bias,
        "longrope": scaling is not None and scaling.kind == "longrope",
    }  # fmt: skip
    found = list(config.uncomputed)
    found += [f"{a} with {b}" for a, others in APART.items() if has[a] for b in others.split(", ") if has[b]]
    if config.dense and not (config.moe and len(config.dense) < config.L):
        found.append(f"dense_layers={config.dense_layers} without layers with experts")
    still = 0 if config.latent else config.H - config.rotary
    found += [f"rotary positions of {config.rotary} dims, an odd number"] if config.rotary % 2 else []
    found += [f"{still} dims of a head without positions, an odd number"] if still % 2 and not config.rotary % 2 else []
    if scaling and scaling.kind not in SCALINGS:
        found.append(f"rope_scaling of type {scaling.kind!r}")
    if scaling and scaling.kind == "longrope" and not config.latent:
        sizes, planes = (len(scaling.short), len(scaling.long)), config.rotary // 2
        what = f"rope_scaling of type 'longrope' with {sizes[0]} and {sizes[1]} factors for {planes} planes"
        found += [what] if sizes != (planes,) * 2 else []
    if config.moe and config.activation is not None:
        found.append(f"activation {config.activation!r} in experts")
    return found


def counted_without(config: object) -> list[str]:
    """Return the line of a report that names the features missing from a model's counts; [] if nothing is missing."""
    if not isinstance(config, Config) or not (found := uncomputed(config)):
        return []
    return [f"Not computed here: {', '.join(found)}. {config.name} is counted by its sizes, without what these add."]


def computes(config: Config) -> bool:
    """Return whether `models.transformer` computes this model."""
    return not uncomputed(config)


def check_computed(config: Config) -> None:
    """Raise a ValueError that names the features which are not computed, if there are any."""
    if found := uncomputed(config):
        raise ValueError(
            f"{config.name}: not computed here: {', '.join(found)}"
            "\n  fix: choose a model that is, or take what is not computed out of the config"
        )


def specs_of(config: Config) -> dict:
    """Return the types of this model's whole params. Raise a ValueError for a model that is not computed."""
    check_computed(config)
    return types_of(config, lambda name, leaf: without(leaf.trained, AXES))


def types_of(config: Config, type_of: Callable[[str, Leaf], str]) -> dict:
    """Return the tree of this model's types, `type_of(name, leaf)` for each leaf."""

    def each(leaves: dict) -> dict:
        return {name: each(leaf) if isinstance(leaf, dict) else type_of(name, leaf) for name, leaf in leaves.items()}

    return each(leaves_of(config))


@lru_cache(maxsize=4096)
def without(text: str, gone: tuple[str, ...]) -> str:
    """Return the type without these axes in any of its dims."""
    spec = parse(text)
    for dim, axes in spec.dims:
        spec = spec.with_axes(dim, [axis for axis in axes if axis not in gone])
    return str(spec)
