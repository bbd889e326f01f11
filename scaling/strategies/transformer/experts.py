"""A mixture of experts in place of a Transformer layer's MLP: experts over E, each one's features over Y (Part 4).

The backward is the vjp of the layer of experts (`scaling.strategies.expert`). The routing is decided once: it is saved
under every policy, so a layer that is computed again never routes again.
"""

from typing import Any

import torch
from torch import Tensor

from scaling.models.pointwise import rms_norm, vjp
from scaling.strategies.expert import experts_of, moe, route_tokens
from scaling.strategies.transformer.lora import expert_gradients
from scaling.trace import open_logs

GIVEN: Any = {"tensor": "Y", "spec": "x[B_PXE, T_CY, D]"}


def experts(W: dict, s: dict, at: Any) -> tuple[Tensor, Tensor, dict]:
    """(Out[B_PXE, T_CY, D], the auxiliary terms Loss[] {U_PXECY}, s) of the residual stream s["mid"]."""
    config, mesh, own = at.config, at.mesh, owned(W, at)
    if "routing" not in s:
        with torch.no_grad():
            y = rms_norm(s["mid"], gain=own["norm_mlp"], eps=config.eps)
            s = s | {"routing": route_tokens(experts_of(own), y, config, mesh, "E", **GIVEN)}
        for log in open_logs:
            log.loads.append(s["routing"].load)

    def computed(W: dict, mid: Tensor) -> tuple[Tensor, Tensor]:
        y = rms_norm(mid, gain=W["norm_mlp"], eps=config.eps)
        Out, aux = moe(experts_of(W), y, config, mesh, "E", **GIVEN, routing=s["routing"])
        return Out, config.aux_coef * aux["balance"] + config.z_coef * aux["z"]

    (Out, extra), pull = vjp(computed, own, s["mid"])
    return Out, extra, s | {"pull": pull}


def experts_backward(W: dict, dOut: Tensor, scale: float, s: dict, at: Any) -> tuple[Tensor, dict]:
    """dOut[B_PXE, T_CY, D] -> (dMid[B_PXE, T_CY, D], dW). `scale`: the cotangent of the auxiliary terms."""
    s = s if "pull" in s else experts(W, s, at)[2]
    dW, dMid = s["pull"]((dOut, dOut.new_full((), scale, dtype=torch.promote_types(dOut.dtype, torch.float32))))
    return dMid, expert_gradients(W, dW, at.config) if "lora" in W else dW


def owned(W: dict, at: Any) -> dict:
    """Return the leaves of a layer that belong to its experts and their norm."""
    return {"norm_mlp": W["norm_mlp"]} | experts_of(W)
