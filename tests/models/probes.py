"""Params, the layer of experts, and short tables of gradients, for tests that compare with stored numbers of others."""

import torch

from scaling import tree
from scaling.mesh import AbstractMesh
from scaling.models import moe, transformer

TYPES = {**moe.SPECS, "shared": {"W_in": "W_in[D, S]", "W_gate": "W_gate[D, S]", "W_out": "W_out[S, D]"}}


def shaken(config):
    """Params of which no gain is 1 and no bias 0."""
    specs = transformer.specs_of(config)
    noise = tree.map(lambda _: tree.Normal(0.1), specs)
    more = tree.init(noise, specs, config.sizes, AbstractMesh({}), 4, torch.float64, "cpu")
    return tree.map(torch.add, transformer.init(config, 3, torch.float64), more)


def probes(grads) -> dict[str, list[float]]:
    """Two numbers a leaf, of which any change in it changes one: its norm, and its product with a fixed vector."""
    found = {}
    for name, leaf in tree.named_leaves(grads, "").items():
        along = torch.arange(leaf.numel(), dtype=leaf.dtype).cos()
        found[name] = [leaf.norm().item(), (leaf.flatten() @ along).item()]
    return found


def layer_of_experts(config, B=2, T=9):
    """Params, x and the cotangent of y: equal to the bit on any machine."""
    some = {"bias": config.routing == "sigmoid", "W_gate": config.gated, "shared": config.shared}
    types = {name: types for name, types in TYPES.items() if some.get(name, True)}
    types |= {"x": "x[B, T, D]", "dy": "dy[B, T, D]"}
    inits = tree.map(lambda _: tree.Normal(0.7), types) | ({"bias": tree.Normal(0.1)} if "bias" in types else {})
    sizes = {"B": B, "T": T, "S": config.S} | {dim: config.sizes[dim] for dim in "DEF"}
    params = tree.init(inits, types, sizes, AbstractMesh({}), 5, torch.float64, "cpu")
    return params, params.pop("x"), params.pop("dy")
