"""A layer of experts beside Hugging Face's DeepseekV3MoE, and the small table that the suite compares with.

    pip install transformers
    python tests/oracles/experts.py            # prints how far apart they are; --write stores the table

Sigmoid scores, a bias in the choice, groups, shared experts; in float64, their casts to float32 lifted.
"""

import json
import sys
from pathlib import Path

import torch
from hugging_face import wide
from storing import asked_to_store
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from scaling.book.largest import largest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from probes import DEEPSEEK, layer_of_experts, probes, probes_of_experts

TABLE = Path(__file__).parents[1] / "models" / "experts.json"


def theirs() -> dict:
    c = DEEPSEEK
    config = DeepseekV3Config(
        hidden_size=c.D, moe_intermediate_size=c.F, n_routed_experts=c.E, num_experts_per_tok=c.k,
        n_group=c.expert_groups, topk_group=c.top_groups, n_shared_experts=c.shared,
        routed_scaling_factor=c.routed_scale, norm_topk_prob=True,
        experts_implementation="eager",
    )  # fmt: skip
    params, x, dy = layer_of_experts()
    layer = DeepseekV3MoE(config).double()
    shared = params["shared"]
    leaves = {
        "gate.weight": params["router"].T,
        "experts.gate_up_proj": torch.cat([params["W_gate"], params["W_in"]], -1).mT,
        "experts.down_proj": params["W_out"].mT,
        "shared_experts.gate_proj.weight": shared["W_gate"].T,
        "shared_experts.up_proj.weight": shared["W_in"].T,
        "shared_experts.down_proj.weight": shared["W_out"].T,
        "gate.e_score_correction_bias": params["bias"],
    }
    layer.load_state_dict({name: leaf.contiguous() for name, leaf in leaves.items()})
    x = x.clone().requires_grad_()
    with wide():
        y = layer(x)
        y.backward(dy)
        chosen = layer.gate(x)[2].sort(-1).values
    g = {name: p.grad for name, p in layer.named_parameters()}
    gate, up = g["experts.gate_up_proj"].mT.chunk(2, -1)
    grads = {
        "router": g["gate.weight"].T, "W_gate": gate, "W_in": up, "W_out": g["experts.down_proj"].mT,
        "shared": {
            "W_gate": g["shared_experts.gate_proj.weight"].T, "W_in": g["shared_experts.up_proj.weight"].T,
            "W_out": g["shared_experts.down_proj.weight"].T,
        },
    }  # fmt: skip
    return {"experts": chosen.view(-1).tolist(), "probes": probes({"y": y.detach(), "x": x.grad, "params": grads})}


if __name__ == "__main__":
    write = asked_to_store(__doc__, TABLE)
    found, mine = theirs(), probes_of_experts()
    print("the same experts:", found["experts"] == mine["experts"])
    for name, want in found["probes"].items():
        print(f"{name:30} {largest(abs(a - b) for a, b in zip(want, mine['probes'][name], strict=True)):.1e}")
    if write:
        TABLE.write_text(json.dumps(found) + "\n")
