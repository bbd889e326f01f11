"""The params of a decoder-only transformer: how they start, by the table `models.leaves`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from scaling import tree
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models.leaves import Leaf, check_computed, leaves_of, specs_of
from scaling.spec import Spec, parse

# of a dim that is stored in another order or padded: its index in the model at each place, -1 for none
Places = Mapping[str, Sequence[int]]
IN_ORDER: Places = {}


def inits(config: Config) -> dict:
    """Return how each param starts: normal with variance 1/(elements contracted), gains in use 1, biases 0."""

    def start(leaf: Leaf) -> tree.Normal | tree.Constant:
        if isinstance(leaf.start, str):
            return tree.Normal(math.prod(config.sizes[dim] for dim in leaf.start) ** -0.5)
        return tree.Constant(0.0 if config.unit_offset else leaf.start)  # a gain, or a bias that starts at 0 anyway

    check_computed(config)
    return tree.map(start, leaves_of(config))


def init(
    config: Config,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: "torch.device | str | None" = None,
    *,
    mesh=None,
    specs: dict | None = None,
    places: Places = IN_ORDER,
) -> dict:
    """Params of this model, whole and on the CPU; on a `mesh`, by sharded `specs`, only this device's shards.

    The values are the same on every mesh: each is a function of the seed, its leaf and its place in the whole array.
    `places`: which layer each place of a stack stored for a pipeline's stages holds, and which entry each of a padded
    vocabulary, -1 for none (zeros). On the device "meta", shapes only. ValueError for a model that is not computed.
    """
    if mesh is None:
        mesh, device = AbstractMesh({}), device or "cpu"
    device = mesh.device if device is None else device
    how, specs = inits(config), specs_of(config) if specs is None else specs
    slots, padded = places.get("L", range(config.sizes["L"])), stored_sizes(config, places)
    if list(slots) == list(range(config.sizes["L"])):
        return tree.init(how, specs, config.sizes, mesh, seed, dtype, device, padded=padded)

    types = tree.map(lambda text: parse(text).with_axes("L", ("layer",)), specs["layers"])  # a layer at a time

    def layer(l: int) -> dict:
        at = AbstractMesh(mesh.sizes | {"layer": config.sizes["L"]}, mesh.coord | {"layer": max(l, 0)})
        made = tree.init({"layers": how["layers"]}, {"layers": types}, config.sizes, at, seed, dtype, device)["layers"]
        return made if l >= 0 else tree.map(torch.zeros_like, made)

    layers = [layer(slots[i]) for i in places_of(specs, slots, mesh)]
    ends = [{name: leaf for name, leaf in each.items() if name != "layers"} for each in (how, specs)]
    made = tree.init(ends[0], ends[1], config.sizes, mesh, seed, dtype, device, padded=padded)
    return {name: made.get(name) for name in how} | {"layers": tree.map(lambda *each: torch.cat(each), *layers)}


def stored_sizes(config: Config, places: Places) -> dict[str, int]:
    """The sizes of the model as it is stored, with what is padded."""
    return config.sizes | {dim: len(at) for dim, at in places.items()}


def used_gains(params: Any, config: Config) -> Any:
    """Return the params with the gains by which norms multiply.

    They are 1 + those of a model with `unit_offset`. The last norm's are divided by `logit_scale`, since logits are
    linear in what it gives. In bfloat16 the sum is float32, as Hugging Face's classes have it.
    """
    if not config.unit_offset and config.logit_scale == 1:
        return params

    def used(name: str, leaf: Any) -> Any:
        if isinstance(leaf, dict):
            return {inner: used(inner, each) for inner, each in leaf.items()}
        gain = 1 + leaf.to(torch.promote_types(leaf.dtype, torch.float32)) if config.unit_offset else leaf
        return leaf if not name.startswith("norm") else gain / config.logit_scale if name == "norm" else gain

    return {name: used(name, leaf) for name, leaf in params.items()}


def places_of(specs: dict, slots: Sequence[int], mesh) -> range:
    """The places of the stored stack [L_Z] that this rank holds."""
    spec = parse(specs["layers"]["norm_attn"])
    mine = Spec("L", spec.dims[:1]).slices({"L": len(slots)}, mesh, mesh.coord)[0]
    return range(mine.start, mine.stop)


def config_of_params(params: dict, name: str = "params") -> Config:
    """The sizes of these params, with Config's defaults for what no shape tells."""
    layers = params["layers"]
    if "router" in layers:
        raise ValueError("params with experts do not say how many are active, and how\n  fix: give config=")
    if "W_DKV" in layers:
        raise ValueError("params with latent attention do not say how a head's dims are divided\n  fix: give config=")
    (V, D), (L, _, N, H) = params["embed"].shape, layers["W_Q"].shape
    K, F = layers["W_K"].shape[2], layers["W_in"].shape[-1]
    has: dict[str, Any] = {"gated": "W_gate" in layers, "tied": "unembed" not in params}
    has |= {"attention_bias": "b_Q" in layers, "output_bias": "b_O" in layers, "qk_norm": "norm_Q" in layers}
    return Config(name, L, D, F, N, K, H, V, **has)
