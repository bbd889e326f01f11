"""The MLP of one expert, and of the experts that every token passes, on rows of tokens.

Row[R, D] -> Tmp[R, F], Gate[R, F] -> Act[R, F] -> Out[R, D]
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

OF_EACH = ("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out")  # the leaves of each expert
ALPHA = 1.702  # of GPT-OSS's gate, x sigmoid(1.702 x), which is close to GELU


def mlp(W: dict, x: Tensor, clamp: float | None = None) -> Tensor:
    """x[n, D] through W_in[D, F], W_out[F, D]: SwiGLU if there is a W_gate[D, F], else GELU."""
    Out = act_rows(W, x @ W["W_in"], x @ W["W_gate"] if "W_gate" in W else None, clamp) @ W["W_out"]
    return Out + W["b_out"] if "b_out" in W else Out


def act_rows(W: dict, Tmp: Tensor, Gate: Tensor | None, clamp: float | None) -> Tensor:
    """Return Act[R, F] of the products of an expert's rows, to which its biases are added.

    With a `clamp` both products are kept within it, and Act = (Tmp + 1) Gate sigmoid(1.702 Gate) (GPT-OSS).
    """
    Tmp = Tmp + W["b_in"] if "b_in" in W else Tmp
    if Gate is None:
        return F.gelu(Tmp)
    Gate = Gate + W["b_gate"] if "b_gate" in W else Gate
    if clamp is None:
        return F.silu(Gate) * Tmp
    Gate, Tmp = Gate.clamp(max=clamp), Tmp.clamp(-clamp, clamp)
    return (Tmp + 1) * Gate * torch.sigmoid(ALPHA * Gate)


def shared_experts(W: dict, x: Tensor, mlp: Callable = mlp) -> Tensor:
    """x[n, D] through the experts that every token passes, times a sigmoid of the token if there is a gate[D]."""
    Out = mlp(W, x)
    return Out * (x @ W["gate"]).sigmoid()[..., None] if "gate" in W else Out


def by_expert(mlp: Callable, params: dict, Row: Tensor, counts: Sequence[int]) -> Tensor:
    """Row[R, D] -> Out[R, D]: the first counts[0] rows through `mlp(weights, rows)` of the first expert, and so on."""
    names = [name for name in OF_EACH if name in params]
    weights = zip(*(params[name].unbind() for name in names), strict=True)
    parts = zip(weights, Row.split(list(counts)), strict=True)
    return torch.cat([mlp(dict(zip(names, W, strict=True)), rows) for W, rows in parts])
