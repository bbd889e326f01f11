"""Attention by data, whole experts over all ranks: as DeepSeek-V3 is served (arXiv:2412.19437, section 3.4.2).

    KV[2, B_E, S, K_Y, H], W_Q[D, N_Y, H], W_O[N_Y, H, D], W_in[E_EY, D, F], W_out[E_EY, F, D], x[B_E, T, D]

Requests are split over E, each with its whole cache. Along Y a group of ranks has the same requests, and heads are
split as in `heads`. Each rank has some whole experts. A rank takes its share of the group's tokens, sends their rows to
the experts, in numbers that the router decides, and gets them back; then the group gathers its tokens.
"""

import torch.nn.functional as F
from torch import Tensor

from scaling.collectives import all_gather, shard
from scaling.models.layer import Context
from scaling.models.pointwise import rms_norm
from scaling.serve.forms.heads import attention as attention
from scaling.serve.forms.heads import embed as embed
from scaling.serve.forms.heads import head as head
from scaling.serve.forms.heads import mlp as dense_mlp
from scaling.serve.forms.heads import normed_result as normed_result
from scaling.serve.forms.heads import routed


def mlp(W: dict, x: Tensor, at: Context) -> Tensor:
    """x[B_E, T, D] -> Out[B_E, T, D]; a dense layer runs as in `heads`.

    Rows that do not divide over Y are filled up with zeros.
    """
    if "router" not in W:
        return dense_mlp(W, x, at)
    y, rows = rms_norm(x, gain=W["norm_mlp"], eps=at.config.eps), len(x)
    y = F.pad(y, (0, 0, 0, 0, 0, -rows % at.mesh.sizes.get("Y", 1)))
    y = shard("y[B_E, T, D] -> y[B_EY, T, D]", y, at.mesh)
    Out = routed(W, y, at, "EY", "y[B_EY, T, D]")  # two AllToAlls
    return all_gather("Out[B_EY, T, D] -> Out[B_E, T, D]", Out, at.mesh)[:rows]  # on the critical path
