"""The layer of experts that is compared with stored numbers of Hugging Face's DeepseekV3MoE (tests/oracles)."""

import torch
from probes import probes
from torch.func import vjp

from scaling import tree
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models import moe

CONFIG = Config(
    "deepseek", L=1, D=8, F=6, N=1, K=1, H=1, V=1, E=12, k=3, shared=2, routing="sigmoid", expert_groups=4,
    top_groups=2, routed_scale=2.5,
)  # fmt: skip
TYPES = {**moe.SPECS, "shared": {"W_in": "W_in[D, S]", "W_gate": "W_gate[D, S]", "W_out": "W_out[S, D]"}}


def inputs(config=CONFIG, B=2, T=9):
    """Params, x and the cotangent of y: equal to the bit on any machine."""
    some = {"bias": config.routing == "sigmoid", "W_gate": config.gated, "shared": config.shared}
    types = {name: types for name, types in TYPES.items() if some.get(name, True)}
    types |= {"x": "x[B, T, D]", "dy": "dy[B, T, D]"}
    inits = tree.map(lambda _: tree.Normal(0.7), types) | ({"bias": tree.Normal(0.1)} if "bias" in types else {})
    sizes = {"B": B, "T": T, "S": config.S} | {dim: config.sizes[dim] for dim in "DEF"}
    params = tree.init(inits, types, sizes, AbstractMesh({}), 5, torch.float64, "cpu")
    return params, params.pop("x"), params.pop("dy")


def ours() -> dict:
    params, x, dy = inputs()
    y, pull = vjp(lambda params, x: moe.forward(params, x, CONFIG)[0], params, x)
    grads, dx = pull(dy)
    grads.pop("bias")
    chosen = moe.choose_experts(x, params["router"], CONFIG, params["bias"]).sort(-1).values
    return {"experts": chosen.flatten().tolist(), "probes": probes({"y": y, "x": dx, "params": grads})}
