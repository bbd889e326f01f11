"""What the forms share at the ends: the vocabulary is split, so that a rank has some rows of the embedding alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.spec import block_index


def rows_of(E: Tensor, tokens: Tensor, mesh, axes: str) -> Tensor:
    """x[B, T, D] of tokens[B, T] by this rank's block E of E[V_axes, D]: zeros for the tokens of other ranks."""
    first = block_index([axis for axis in axes if axis in mesh.sizes], mesh.coord, mesh) * len(E)
    local = tokens - first
    here = (local >= 0) & (local < len(E))
    return F.embedding(torch.where(here, local, 0), E) * here[..., None]


def unembedding(params: dict) -> Tensor:
    """U[D, V_axes], of a tied model the transpose of its embedding."""
    return params["unembed"] if "unembed" in params else params["embed"].T
