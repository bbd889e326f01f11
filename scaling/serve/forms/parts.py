"""What the forms share: each rank's own rows of the embedding, its KV heads' biases, and the activation."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.configs import Config
from scaling.models.transformer import ACTIVATIONS
from scaling.spec import block_index, parse
from scaling.strategies.axes import masked
from scaling.strategies.transformer.heads import own_heads


def embedding_rows(E: Tensor, tokens: Tensor, mesh, spec: str) -> Tensor:
    """`spec`, x[B, T, D] {U_Y}, of tokens[B, T] by this rank's block of E[V_Y, D]: zeros for the tokens of others."""
    first = block_index([axis for axis in parse(spec).unreduced if axis in mesh.sizes], mesh.coord, mesh.sizes) * len(E)
    local = tokens - first
    here = (local >= 0) & (local < len(E))
    return masked(spec, F.embedding(torch.where(here, local, 0), E), here, mesh)


def own_biases(W: dict, at: Any) -> dict:
    """The layer with b_K and b_V of the KV heads that this rank's query heads see; `at` as in `own_heads`."""
    return W | {"b_K": own_heads(W["b_K"], at, 0), "b_V": own_heads(W["b_V"], at, 0)} if "b_K" in W else W


def activated(Tmp: Tensor, Gate: Tensor | None, config: Config) -> Tensor:
    """The nonlinearity of Tmp, or of the gate times Tmp."""
    act = ACTIVATIONS[config.nonlinearity]
    return act(Tmp) if Gate is None else act(Gate) * Tmp
