"""The params of a decoder-only transformer: their types, how they start, and which models are computed.

`SPECS` are the types of all that a layer may have, here without mesh axes; `specs_of(config)` those that a model has.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from scaling import tree
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models.rope import SCALINGS
from scaling.spec import Spec, parse

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


def inits(config: Config) -> dict:
    """How each param starts: normal with variance 1/(elements contracted), norms 1, biases 0."""

    def leaf(spec: str) -> tree.Normal | tree.Constant:
        name, dims = parse(spec).name, parse(spec).dim_names
        if name in ("g", "bias") or name.startswith("b_"):
            return tree.Constant(float(name == "g"))
        contracted = {"E": (), "W_O": ("N", "H"), "W_out": dims[-2:-1]}.get(name, ("D",))
        return tree.Normal(math.prod(config.sizes[dim] for dim in contracted) ** -0.5)

    return tree.map(leaf, specs_of(config))


def init(
    config: Config,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: "torch.device | str | None" = None,
    *,
    mesh=None,
    specs: dict | None = None,
    slots: Sequence[int] | None = None,
) -> dict:
    """Params of this model, whole and on the CPU; on a `mesh`, by sharded `specs`, only this device's shards.

    The values are the same on every mesh: each is a function of the seed, its leaf and its place in the whole array.
    `slots`: which layer each place of a stack stored for a pipeline's stages holds, -1 for none (zeros). On the device
    "meta", shapes only. ValueError for a model that is not computed.
    """
    if mesh is None:
        mesh, device = AbstractMesh({}), device or "cpu"
    device = mesh.device if device is None else device
    how, specs = inits(config), specs_of(config) if specs is None else specs
    if slots is None or list(slots) == list(range(config.L)):
        return tree.init(how, specs, config.sizes, mesh, seed, dtype, device)

    types = tree.map(lambda text: parse(text).with_axes("L", ("layer",)), specs["layers"])  # a layer at a time

    def layer(l: int) -> dict:
        at = AbstractMesh(mesh.sizes | {"layer": config.L}, mesh.coord | {"layer": max(l, 0)})
        made = tree.init({"layers": how["layers"]}, {"layers": types}, config.sizes, at, seed, dtype, device)["layers"]
        return made if l >= 0 else tree.map(torch.zeros_like, made)

    layers = [layer(slots[i]) for i in places_of(specs, slots, mesh)]
    ends = [{name: leaf for name, leaf in each.items() if name != "layers"} for each in (how, specs)]
    made = tree.init(ends[0], ends[1], config.sizes, mesh, seed, dtype, device)
    return {name: made.get(name) for name in how} | {"layers": tree.map(lambda *each: torch.cat(each), *layers)}


def places_of(specs: dict, slots: Sequence[int], mesh) -> range:
    """The places of the stored stack [L_Z] that this rank holds."""
    spec = parse(specs["layers"]["W_Q"])
    mine = Spec("L", spec.dims[:1]).slices({"L": len(slots)}, mesh, mesh.coord)[0]
    return range(mine.start, mine.stop)


def config_of_params(params: dict, name: str = "params") -> Config:
    """The sizes of these params, with Config's defaults for what no shape tells."""
    layers = params["layers"]
    if "router" in layers:
        raise ValueError("params with experts do not say how many are active, and how: give config=")
    (V, D), (L, _, N, H) = params["embed"].shape, layers["W_Q"].shape
    K, F = layers["W_K"].shape[2], layers["W_in"].shape[-1]
    has: dict[str, Any] = {"gated": "W_gate" in layers, "tied": "unembed" not in params}
    has |= {"attention_bias": "b_Q" in layers, "output_bias": "b_O" in layers, "qk_norm": "norm_Q" in layers}
    return Config(name, L, D, F, N, K, H, V, **has)
