"""Params, the layer of experts, and short tables of gradients, for tests that compare with stored numbers of others."""

import torch
from torch.func import vjp

from scaling import tree
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models import moe, transformer

DEEPSEEK = Config(
    "deepseek", L=1, D=8, F=6, N=1, K=1, H=1, V=1, E=12, k=3, shared=2, routing="sigmoid", expert_groups=4,
    top_groups=2, routed_scale=2.5,
)  # fmt: skip
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


def layer_of_experts(config=DEEPSEEK, B=2, T=9):
    """Params, x and the cotangent of y: equal to the bit on any machine."""
    some = {"bias": config.routing == "sigmoid", "W_gate": config.gated, "shared": config.shared}
    types = {name: types for name, types in TYPES.items() if some.get(name, True)}
    types |= {"x": "x[B, T, D]", "dy": "dy[B, T, D]"}
    inits = tree.map(lambda _: tree.Normal(0.7), types) | ({"bias": tree.Normal(0.1)} if "bias" in types else {})
    sizes = {"B": B, "T": T, "S": config.S} | {dim: config.sizes[dim] for dim in "DEF"}
    params = tree.init(inits, types, sizes, AbstractMesh({}), 5, torch.float64, "cpu")
    return params, params.pop("x"), params.pop("dy")


def probes_of_experts() -> dict:
    """What is compared with Hugging Face's DeepseekV3MoE (tests/oracles/hugging_face.py)."""
    params, x, dy = layer_of_experts()
    y, pull = vjp(lambda params, x: moe.forward(params, x, DEEPSEEK)[0], params, x)
    grads, dx = pull(dy)
    grads.pop("bias")
    chosen = moe.choose_experts(x, params["router"], DEEPSEEK, params["bias"]).sort(-1).values
    return {"experts": chosen.flatten().tolist(), "probes": probes({"y": y, "x": dx, "params": grads})}
