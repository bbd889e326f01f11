"""Linear layers, by the form "heads": heads over Y, with a state for each row in place of keys and values.

    S[l, B_ZE, n_Y, h, v]        in float32 or wider
    tail[l, B_ZE, t, k_Y, c]     the last t = w - 1 tokens before the convolution

Prefill runs the rule in chunks, and a decode step is a chunk of one token. A row without tokens in the cache starts
with zeros. Padded tokens neither decay a state nor write to it. A state cannot take back a token that it has read.
"""

import torch
from torch import Tensor

from scaling.collectives import all_reduce, einsum
from scaling.models.layer import Context, normed, rms
from scaling.models.linear import attend_linear, split_gate


def attention(W: dict, x: Tensor, at: Context, l: int) -> Tensor:
    """x[B_ZE, T_C, D] -> Attn[B_ZE, T_C, D], reading and updating layer l's states of the rows."""
    S, tail, new, rows = at.slots.cache["S"][l], at.slots.cache["tail"][l], at.slots.new, at.slots.states
    y, _ = normed(W, "norm_attn", x, at.config, rms)
    real = torch.arange(x.shape[1], device=x.device) < new[:, None]
    begun = (~((at.slots.begun == 0) & (new > 0)))[:, None, None, None]
    values = {"y": y, "S": S[rows] * begun, "tail": tail[rows].to(x.dtype) * begun, "real": real[..., None]}
    values = attend_linear(W, values, at)
    whole = torch.cat([values["tail"], split_gate(values["QKVZ"], at.config)[0]], 1)
    last = new[:, None] + torch.arange(tail.shape[1], device=x.device)  # the last real tokens' indices in `whole`
    tail[rows] = whole[torch.arange(len(whole), device=x.device)[:, None], last].to(tail.dtype)
    S[rows] = values["S_out"].to(S.dtype)
    line = "O[B_ZE, T_C, n_Y, v] * W_O[n_Y, v, D] -> Attn[B_ZE, T_C, D] {U_Y}"
    Attn = einsum(line, values["O"], W["W_O"])
    return all_reduce("Attn[B_ZE, T_C, D] {U_Y} -> Attn[B_ZE, T_C, D]", Attn, at.mesh)
