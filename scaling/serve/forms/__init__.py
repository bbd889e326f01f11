"""The forms of sharded decoding, each a listing: what one layer's attention and MLP, and the ends, do on a mesh.

    heads        heads and features over Y; the cache's batch over Z, along which the weights are replicas
    heads_batch  heads and features over Y and Z; the cache's heads over Y and its batch over Z, by two AllToAlls
    sequence     the same weights; the cache's sequence over Z, partial softmaxes combined
    context      prefill under "heads" with the prompt over C
    experts      attention by data: the cache's batch over E, its heads over Y, and whole experts over both
    weights_2d   "2d": weights over X as well, and the residual stream over all axes (Part 7, Appendix B)

Each has embed(E, tokens, at) -> x, attention(W, x, at, l) -> Attn, mlp(W, x, at) -> Out, and head(params, x, at) ->
logits[B, T, V]. Axes that the mesh lacks drop out of a line, and on one device all forms are the same.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.configs import Config
from scaling.models.transformer import ACTIVATIONS
from scaling.serve.slots import Slots
from scaling.spec import block_index, parse
from scaling.strategies.axes import masked
from scaling.strategies.transformer.heads import own_heads


class At(NamedTuple):
    """What all layers of one call share: model, mesh, the slots of its tokens, and (cos, sin) of their positions."""

    config: Config
    mesh: Any
    slots: Slots
    rope: tuple[Tensor, Tensor]


def embedding_rows(E: Tensor, tokens: Tensor, mesh, spec: str) -> Tensor:
    """`spec`, x[B, T, D] {U_Y}, of tokens[B, T] by this rank's block of E[V_Y, D]: zeros for the tokens of others."""
    first = block_index([axis for axis in parse(spec).unreduced if axis in mesh.sizes], mesh.coord, mesh.sizes) * len(E)
    local = tokens - first
    here = (local >= 0) & (local < len(E))
    return masked(spec, F.embedding(torch.where(here, local, 0), E), here, mesh)


def own_biases(W: dict, at: At) -> dict:
    """The layer with b_K and b_V of the KV heads that this rank's query heads see."""
    return W | {"b_K": own_heads(W["b_K"], at, 0), "b_V": own_heads(W["b_V"], at, 0)} if "b_K" in W else W


def activated(Tmp: Tensor, Gate: Tensor | None, config: Config) -> Tensor:
    """The nonlinearity of Tmp, or of the gate times Tmp."""
    act = ACTIVATIONS[config.nonlinearity]
    return act(Tmp) if Gate is None else act(Gate) * Tmp
