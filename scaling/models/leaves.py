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


@dataclass(frozen=True)
class Leaf:
    """A param, as one line of the table.

    Attributes:
        trained: Its type as stored on a training mesh (P, Z, X, C, Y, E).
        served: Its type on a serving mesh (X, Y, Z, E) where it is split the most, in the form "2d".
        start: A constant, or the dims that it is contracted over: then it is normal with variance 1/(their sizes).
        file: Its tensors in Hugging Face's files, as most classes name them, and their dims: in "NH, D" the first dim
            merges N and H. Before a layer's name comes model.layers.{L}. model_types.toml has other classes' names.
        only: The features of the models that have it: fields of Config, or names of `FEATURES`.
    """

    trained: str
    served: str
    start: str | float
    file: str
    only: str = ""

    def belongs(self, config: Config) -> bool:
        """Return whether a model has the leaf."""
        names = self.only.split()
        return all(FEATURES[name](config) if name in FEATURES else getattr(config, name) for name in names)


FEATURES: dict[str, Callable[[Config], Any]] = {
    "heads": lambda c: c.latent is None,
    "ranked": lambda c: c.latent and c.latent.q_rank,
    "head_gains": lambda c: c.qk_norm and not c.qk_bare,
    "norm_first": lambda c: c.norms != "after",
    "norms_in": lambda c: c.norms in ("before", "both"),
    "norms_out": lambda c: c.norms in ("after", "both"),
    "xielu": lambda c: c.activation == "xielu",
    "sigmoid": lambda c: c.routing == "sigmoid",
    "untied": lambda c: not c.tied,
}
ENDS = {
    "embed": Leaf("E[V_YZ, D_X]", "E[V_YZ, D_X]", "", "model.embed_tokens.weight[V, D]"),
    "positions": Leaf("P[J, D_X]", "P[J, D_XYZ]", "", "model.embed_positions.weight[J, D]", "learned_positions"),
    "norm": Leaf("g[D]", "g[D_XYZ]", 1.0, "model.norm.weight[D]"),
    "b_norm": Leaf("b[D]", "b[D_XYZ]", 0.0, "model.norm.bias[D]", "norm_bias"),
    "unembed": Leaf("U[D_X, V_YZ]", "U[D_X, V_YZ]", "D", "lm_head.weight[V, D]", "untied"),
    "b_unembed": Leaf("b[V_YZ]", "b[V_YZ]", 0.0, "lm_head.bias[V]", "unembed_bias"),
}
LAYER = {
    "norm_attn": Leaf("g[L_Z, D]", "g[L, D_XYZ]", 1.0, "input_layernorm.weight[D]", "norm_first"),
    "b_norm_attn": Leaf("b[L_Z, D]", "b[L, D_XYZ]", 0.0, "input_layernorm.bias[D]", "norm_bias"),
    "W_Q": Leaf("W_Q[L_Z, D_X, N_Y, H]", "W_Q[L, D_X, N_YZ, H]", "D", "self_attn.q_proj.weight[NH, D]", "heads"),
    "W_K": Leaf("W_K[L_Z, D_X, K_Y, H]", "W_K[L, D_X, K_Y, H]", "D", "self_attn.k_proj.weight[KH, D]", "heads"),
    "W_V": Leaf("W_V[L_Z, D_X, K_Y, H]", "W_V[L, D_X, K_Y, H]", "D", "self_attn.v_proj.weight[KH, D]", "heads"),
    "b_Q": Leaf("b_Q[L_Z, N_Y, H]", "b_Q[L, N_Y, H]", 0.0, "self_attn.q_proj.bias[NH]", "attention_bias"),
    "b_K": Leaf("b_K[L_Z, K_Y, H]", "b_K[L, K_Y, H]", 0.0, "self_attn.k_proj.bias[KH]", "attention_bias"),
    "b_V": Leaf("b_V[L_Z, K_Y, H]", "b_V[L, K_Y, H]", 0.0, "self_attn.v_proj.bias[KH]", "attention_bias"),
    "norm_Q": Leaf("g[L_Z, H]", "g[L, H]", 1.0, "self_attn.q_norm.weight[H]", "head_gains"),
    "norm_K": Leaf("g[L_Z, H]", "g[L, H]", 1.0, "self_attn.k_norm.weight[H]", "head_gains"),
    "W_DQ": Leaf("W_DQ[L_Z, D_X, R]", "W_DQ[L, D_X, R]", "D", "self_attn.q_a_proj.weight[R, D]", "ranked"),
    "norm_CQ": Leaf("g[L_Z, R]", "g[L, R]", 1.0, "self_attn.q_a_layernorm.weight[R]", "ranked"),
    "W_UQ": Leaf("W_UQ[L_Z, R_X, N_Y, A]", "W_UQ[L, R_X, N_YZ, A]", "R", "self_attn.q_b_proj.weight[NA, R]", "latent"),
    "W_DKV": Leaf("W_DKV[L_Z, D_X, M]", "W_DKV[L, D_X, M]", "D", "self_attn.kv_a_proj_with_mqa.weight[M, D]", "latent"),
    "norm_CKV": Leaf("g[L_Z, C]", "g[L, C]", 1.0, "self_attn.kv_a_layernorm.weight[C]", "latent"),
    "W_UKV": Leaf(
        "W_UKV[L_Z, C_X, N_Y, W]", "W_UKV[L, C_X, N_YZ, W]", "C", "self_attn.kv_b_proj.weight[NW, C]", "latent"
    ),
    "W_G": Leaf("W_G[L_Z, D_X, N_Y, H]", "W_G[L, D_X, N_YZ, H]", "D", "self_attn.g_proj.weight[NH, D]", "head_gate"),
    "sinks": Leaf("s[L_Z, N_Y]", "s[L, N_Y]", 0.0, "self_attn.sinks[N]", "sinks"),
    "W_O": Leaf("W_O[L_Z, N_Y, H, D_X]", "W_O[L, N_YZ, H, D_X]", "NH", "self_attn.o_proj.weight[D, NH]"),
    "b_O": Leaf("b_O[L_Z, D]", "b_O[L, D_XYZ]", 0.0, "self_attn.o_proj.bias[D]", "output_bias"),
    "norm_attn_out": Leaf("g[L_Z, D]", "g[L, D_XYZ]", 1.0, "post_self_attn_layernorm.weight[D]", "norms_out"),
    "norm_mlp": Leaf("g[L_Z, D]", "g[L, D_XYZ]", 1.0, "post_attention_layernorm.weight[D]", "norms_in"),
    "b_norm_mlp": Leaf("b[L_Z, D]", "b[L, D_XYZ]", 0.0, "post_attention_layernorm.bias[D]", "norm_bias norms_in"),
    "W_in": Leaf("W_in[L_Z, D_X, F_Y]", "W_in[L, D_X, F_YZ]", "D", "mlp.up_proj.weight[F, D]"),
    "W_gate": Leaf("W_gate[L_Z, D_X, F_Y]", "W_gate[L, D_X, F_YZ]", "D", "mlp.gate_proj.weight[F, D]", "gated"),
    "W_out": Leaf("W_out[L_Z, F_Y, D_X]", "W_out[L, F_YZ, D_X]", "F", "mlp.down_proj.weight[D, F]"),
    "b_in": Leaf("b[L_Z, F_Y]", "b[L, F_YZ]", 0.0, "mlp.up_proj.bias[F]", "mlp_bias"),
    "b_gate": Leaf("b[L_Z, F_Y]", "b[L, F_YZ]", 0.0, "mlp.gate_proj.bias[F]", "mlp_bias gated"),
    "b_out": Leaf("b[L_Z, D]", "b[L, D_XYZ]", 0.0, "mlp.down_proj.bias[D]", "mlp_bias"),
    "alpha_p": Leaf("alpha[L_Z]", "alpha[L]", math.log(math.expm1(0.8)), "mlp.act_fn.alpha_p[*]", "xielu"),
    "alpha_n": Leaf("alpha[L_Z]", "alpha[L]", math.log(math.expm1(0.3)), "mlp.act_fn.alpha_n[*]", "xielu"),
    "norm_mlp_out": Leaf("g[L_Z, D]", "g[L, D_XYZ]", 1.0, "post_mlp_layernorm.weight[D]", "norms_out"),
}  # fmt: skip
LINEAR = {  # the leaves of a linear layer, in place of attention's: `models.linear`
    "W_QKVZ": Leaf("W_QKVZ[l, D_X, k_Y, m]", "W_QKVZ[l, D_X, k_Y, m]", "D", "linear_attn.in_proj_qkvz.weight[km, D]"),
    "W_BA": Leaf("W_BA[l, D_X, k_Y, u]", "W_BA[l, D_X, k_Y, u]", "D", "linear_attn.in_proj_ba.weight[ku, D]"),
    "conv_Q": Leaf("c[l, k_Y, h, w]", "c[l, k_Y, h, w]", "w", "linear_attn.conv_q.weight[kh, *, w]"),
    "conv_K": Leaf("c[l, k_Y, h, w]", "c[l, k_Y, h, w]", "w", "linear_attn.conv_k.weight[kh, *, w]"),
    "conv_V": Leaf("c[l, n_Y, v, w]", "c[l, n_Y, v, w]", "w", "linear_attn.conv_v.weight[nv, *, w]"),
    "A_log": Leaf("A[l, n_Y]", "A[l, n_Y]", 0.0, "linear_attn.A_log[n]"),
    "dt": Leaf("dt[l, n_Y]", "dt[l, n_Y]", 1.0, "linear_attn.dt_bias[n]"),
    "gain": Leaf("gain[l, v]", "gain[l, v]", 1.0, "linear_attn.norm.weight[v]"),
    "W_O": Leaf("W_O[l, n_Y, v, D_X]", "W_O[l, n_Y, v, D_X]", "nv", "linear_attn.out_proj.weight[D, nv]"),
}
ATTENTION = re.compile(r"[Wb]_[QKVOG]|norm_[QK]|sinks")  # leaves of attention, which linear layers lack
WIDE = {  # leaves of a model with gains of each head, in place of gains that all heads share
    "norm_Q": Leaf("g[L_Z, N_Y, H]", "g[L, N_Y, H]", 1.0, "self_attn.q_norm.weight[NH]", "qk_norm"),
    "norm_K": Leaf("g[L_Z, K_Y, H]", "g[L, K_Y, H]", 1.0, "self_attn.k_norm.weight[KH]", "qk_norm"),
}
UNRANKED = {  # leaves of latent attention whose queries have no rank, so R is D
    "W_UQ": Leaf("W_UQ[L_Z, R_X, N_Y, A]", "W_UQ[L, R_X, N_YZ, A]", "R", "self_attn.q_proj.weight[NA, R]"),
}
EXPERTS = {  # of a model with experts, in place of the MLP's matrices
    "router": Leaf("router[L_Z, D, E]", "router[L, D, E]", "D", "mlp.gate.weight[E, D]"),
    "b_router": Leaf("b[L_Z, E]", "b[L, E]", 0.0, "mlp.gate.bias[E]", "expert_bias"),
    "bias": Leaf("bias[L_Z, E]", "bias[L, E]", 0.0, "mlp.gate.e_score_correction_bias[E]", "sigmoid"),
    "W_in": Leaf("W_in[L_Z, E_E, D_X, F_Y]", "W_in[L, E_E, D, F_YZ]", "D", "mlp.experts.{E}.up_proj.weight[F, D]"),
    "W_gate": Leaf(
        "W_gate[L_Z, E_E, D_X, F_Y]", "W_gate[L, E_E, D, F_YZ]", "D", "mlp.experts.{E}.gate_proj.weight[F, D]", "gated"
    ),
    "W_out": Leaf("W_out[L_Z, E_E, F_Y, D_X]", "W_out[L, E_E, F_YZ, D]", "F", "mlp.experts.{E}.down_proj.weight[D, F]"),
    "b_in": Leaf("b[L_Z, E_E, F_Y]", "b[L, E_E, F_YZ]", 0.0, "mlp.experts.{E}.up_proj.bias[F]", "expert_bias"),
    "b_gate": Leaf(
        "b[L_Z, E_E, F_Y]", "b[L, E_E, F_YZ]", 0.0, "mlp.experts.{E}.gate_proj.bias[F]", "expert_bias gated"
    ),
    "b_out": Leaf("b[L_Z, E_E, D]", "b[L, E_E, D]", 0.0, "mlp.experts.{E}.down_proj.bias[D]", "expert_bias"),
}  # fmt: skip
SHARED = {  # the experts that every token passes; S is their width together
    "W_in": Leaf("W_in[L_Z, D_X, S_Y]", "W_in[L, D, S_YZ]", "D", "mlp.shared_experts.up_proj.weight[S, D]"),
    "W_gate": Leaf(
        "W_gate[L_Z, D_X, S_Y]", "W_gate[L, D, S_YZ]", "D", "mlp.shared_experts.gate_proj.weight[S, D]", "gated"
    ),
    "W_out": Leaf("W_out[L_Z, S_Y, D_X]", "W_out[L, S_YZ, D]", "S", "mlp.shared_experts.down_proj.weight[D, S]"),
    "gate": Leaf("gate[L_Z, D]", "gate[L, D]", "D", "mlp.shared_expert_gate.weight[*, D]", "shared_gate"),
}


def _stacked(leaf: Leaf, stack: str, F: str = "F") -> Leaf:
    """Return a layer's leaf stacked over another dim than L, with F features of another letter."""
    trained, served = (
        re.sub(r"\bF(?=_)", F, re.sub(r"\[L(_Z)?\b", f"[{stack}", text)) for text in (leaf.trained, leaf.served)
    )
    return Leaf(trained, served, F if leaf.start == "F" else leaf.start, leaf.file.replace("F", F), leaf.only)


def map_leaves(f: Callable[[str, Leaf], Any], leaves: dict) -> dict:
    """Return the tree of f(name, leaf) of a tree of leaves."""
    return {name: map_leaves(f, leaf) if isinstance(leaf, dict) else f(name, leaf) for name, leaf in leaves.items()}


def matrices_of(config: Config) -> dict:
    """Return the inputs and outputs of each matrix, such as "D -> N H"; "" for other leaves and the ends.

    Routers do not count as matrices, nor do the filters of convolutions, because a filter belongs to one feature.
    """

    def named(name: str, leaf: Leaf) -> str:
        stack, *dims = parse(leaf.trained).dim_names
        if stack not in STACKED or not isinstance(leaf.start, str) or name.startswith("conv"):
            return ""
        outputs = [dim for dim in dims if dim not in leaf.start and dim != "E"]
        return f"{' '.join(leaf.start)} -> {' '.join(outputs)}" if outputs else ""

    return types_of(config, named)


def leaves_of(config: Config) -> dict:
    """Return the tree of this model's leaves: {"embed", "dense": {...}, "layers": {...}, "norm", "unembed"}.

    "dense" exists only if some layers are dense beside others with experts, and "linear" if some are linear.
    """
    layer = LAYER | (WIDE if config.qk_wide or config.qk_layernorm else {})
    layer |= UNRANKED if config.latent and not config.latent.q_rank else {}
    layers = layer | (EXPERTS if config.moe else {}) | ({"shared": SHARED} if config.moe and config.shared else {})
    found: dict[str, Any] = {"embed": ENDS["embed"]}
    if config.dense_layers:
        found["dense"] = {name: _stacked(leaf, "G", "O") for name, leaf in layer.items()}
    if config.linear:
        others = {name: leaf for name, leaf in layers.items() if not ATTENTION.fullmatch(name)}
        found["linear"] = LINEAR | map_leaves(lambda _, leaf: _stacked(leaf, "l"), others)
    return leaves_here(found | {"layers": layers} | ENDS, config)


def leaves_here(table: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the leaves of a table, which may have tables in it, that belong to a model."""
    found = {}
    for name, leaf in table.items():
        if isinstance(leaf, dict):
            found[name] = leaves_here(leaf, config)
        elif leaf.belongs(config) and (config.norm_gain or name[:4] != "norm"):
            found[name] = leaf
    return found


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
        "scaled logits": config.logit_scale != 1, "xielu": config.activation == "xielu", "a gate": config.gated,
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


def types_of(config: Config, type_of: Callable[[str, Leaf], Any]) -> dict:
    """Return the tree of this model's types, or of other values, `type_of(name, leaf)` for each leaf."""
    return map_leaves(type_of, leaves_of(config))


@lru_cache(maxsize=4096)
def without(text: str, dropped: tuple[str, ...]) -> str:
    """Return the type without these axes in any of its dims."""
    spec = parse(text)
    for dim, axes in spec.dims:
        spec = spec.with_axes(dim, [axis for axis in axes if axis not in dropped])
    return str(spec)
