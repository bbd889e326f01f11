"""Initialize the params of a decoder-only transformer by the table `models.leaves`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from scaling import tree
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models.leaves import ENDS, Leaf, check_computed, leaves_of, specs_of
from scaling.spec import Spec, parse

# for a dim that is stored in another order or padded: the model's index of each stored entry, -1 for padding
Places = Mapping[str, Sequence[int]]
IN_ORDER: Places = {}


def inits(config: Config) -> dict:
    """Return each param's initial values: normal with variance 1/(elements contracted), gains in use 1, biases 0.

    An embedding contracts nothing, but one that is tied is the unembedding, too, which contracts D. So logits have a
    variance of 1, and the loss begins near ln V. The `initializer_range` of a config.json is not used.
    """

    def start(leaf: Leaf) -> tree.Normal | tree.Constant:
        if isinstance(leaf.start, str):
            contracted = "D" if config.tied and leaf is ENDS["embed"] else leaf.start
            return tree.Normal(math.prod(config.sizes[dim] for dim in contracted) ** -0.5)
        return tree.Constant(0.0 if config.unit_offset and leaf.trained.startswith("g[") else leaf.start)

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
    """Return params of this model, whole and on the CPU; on a `mesh`, by sharded `specs`, only this device's shards.

    The values are equal on every mesh: each is a function of the seed, its leaf and its index in the whole array.
    `places` maps each entry of a stack stored for a pipeline's stages to a layer, and each entry of a padded vocabulary
    to a token, with -1 for padding (zeros). On the device "meta" there are shapes only.

    Raises:
        ValueError: The model is not computed here.
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
    """Return the sizes of the stored model, including its padding."""
    return config.sizes | {dim: len(at) for dim, at in places.items()}


def places_of(specs: dict, slots: Sequence[int], mesh) -> range:
    """Return the entries of the stored stack [L_Z] that this rank holds."""
    spec = parse(specs["layers"]["W_O"])
    mine = Spec("L", spec.dims[:1]).slices({"L": len(slots)}, mesh, mesh.coord)[0]
    return range(mine.start, mine.stop)


def config_of_params(params: dict) -> Config:
    """Return a Config with the sizes of these params, and defaults for everything that shapes do not determine."""
    layers = params["layers"]
    if "router" in layers:
        raise ValueError("params with experts do not say how many are active, and how\n  fix: give config=")
    if "W_DKV" in layers:
        raise ValueError("params with latent attention do not say how a head's dims are divided\n  fix: give config=")
    (V, D), (L, _, N, H) = params["embed"].shape, layers["W_Q"].shape
    K, F = layers["W_K"].shape[2], layers["W_in"].shape[-1]
    has: dict[str, Any] = {"gated": "W_gate" in layers, "tied": "unembed" not in params}
    has |= {"attention_bias": "b_Q" in layers, "output_bias": "b_O" in layers, "qk_norm": "norm_Q" in layers}
    return Config("params", L, D, F, N, K, H, V, **has)
