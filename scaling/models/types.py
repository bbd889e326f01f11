"""The types of a decoder-only transformer's params, without mesh axes, and which models are computed.

`SPECS` are the types of all that a layer may have; `specs_of(config)` those that a model has. No torch is needed.
"""

from scaling.configs import Config

SCALINGS = ("linear", "llama3")  # of rotary frequencies: `models.rope`
SPECS = {
    "embed": "E[V, D]",
    "layers": {
        "norm_attn": "g[L, D]",
        "W_Q": "W_Q[L, D, N, H]",
        "W_K": "W_K[L, D, K, H]",
        "W_V": "W_V[L, D, K, H]",
        "b_Q": "b_Q[L, N, H]",
        "b_K": "b_K[L, K, H]",
        "b_V": "b_V[L, K, H]",
        "norm_Q": "g[L, H]",
        "norm_K": "g[L, H]",
        "W_O": "W_O[L, N, H, D]",
        "b_O": "b_O[L, D]",
        "norm_mlp": "g[L, D]",
        "W_in": "W_in[L, D, F]",
        "W_gate": "W_gate[L, D, F]",
        "W_out": "W_out[L, F, D]",
    },
    "norm": "g[D]",
    "unembed": "U[D, V]",
}
EXPERTS = {  # in place of the MLP's; S is the width of the shared experts together
    "router": "router[L, D, E]",
    "bias": "bias[L, E]",
    "W_in": "W_in[L, E, D, F]",
    "W_gate": "W_gate[L, E, D, F]",
    "W_out": "W_out[L, E, F, D]",
    "shared": {"W_in": "W_in[L, D, S]", "W_gate": "W_gate[L, D, S]", "W_out": "W_out[L, S, D]"},
}


def uncomputed(config: Config) -> list[str]:
    """What the model has that no code here computes, by name."""
    found = list(config.uncomputed)
    found += ["latent attention"] if config.latent else []
    found += [f"dense_layers={config.dense_layers} before those with experts"] if config.dense_layers else []
    found += [f"{config.norms} norms a layer"] if config.norms != 2 else []
    if config.rope_scaling and config.rope_scaling.kind not in SCALINGS:
        found.append(f"rope_scaling of type {config.rope_scaling.kind!r}")
    if config.moe and config.activation is not None:
        found.append(f"activation {config.activation!r} in experts")
    return found


def computes(config: Config) -> bool:
    """Whether `models.transformer` computes that model."""
    return not uncomputed(config)


def check_computed(config: Config) -> None:
    """ValueError that names what is not computed, if anything is not."""
    if found := uncomputed(config):
        raise ValueError(
            f"{config.name}: not computed here: {', '.join(found)}"
            "\n  fix: choose a model that is, or take what is not computed out of the config"
        )


def specs_of(config: Config) -> dict:
    """The types of this model's params, whole, a part of `SPECS`. ValueError for a model that is not computed."""
    check_computed(config)
    absent = set() if config.gated else {"W_gate"}
    absent |= set() if config.attention_bias else {"b_Q", "b_K", "b_V"}
    absent |= set() if config.output_bias else {"b_O"}
    absent |= set() if config.qk_norm else {"norm_Q", "norm_K"}
    absent |= {"unembed"} if config.tied else set()
    absent |= set() if config.routing == "sigmoid" else {"bias"}
    absent |= set() if config.shared else {"shared"}

    def present(specs: dict) -> dict:
        return {n: present(s) if isinstance(s, dict) else s for n, s in specs.items() if n not in absent}

    return present(SPECS | {"layers": SPECS["layers"] | (EXPERTS if config.moe else {})})
