"""Speculative sampling (Part 7, Appendix D), the book's rule: a draft proposes k tokens, the target checks them in one
pass. `generate` and the engine keep proposals by another: see `scaling.serve.engine`.

The rule (Leviathan et al. 2022, arxiv.org/abs/2211.17192; Chen et al. 2023, arxiv.org/abs/2302.01318): the proposed
token x, drawn from q, is kept with probability min(1, p(x) / q(x)). The first that is not kept is drawn again from what
p has more than q, max(p - q, 0) over its sum, and what follows is dropped; if all are kept, one more comes from p. What
comes out is distributed as p, exactly, whatever q is. q must be what x was drawn from: after temperature and filters,
as p. All randomness is given, as uniform numbers, so that the output is a function that can be enumerated.
"""

import torch
from torch import Tensor

from scaling.serve.sampling import draw_token


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a token is drawn from when a proposal is not kept: max(p - q, 0) over its sum; p where that is 0."""
    more = (p - q).clamp(min=0)
    total = more.sum(-1, keepdim=True)
    return torch.where(total > 0, more / torch.where(total > 0, total, 1), p)


def verify(p: Tensor, q: Tensor, proposed: Tensor, keep: Tensor, again: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens[B, k + 1], count[B]): what a step yields, of which the first `count` (1 to k + 1) are valid.

    p[B, k + 1, V]: the target's distributions at the proposed places and the one after; q[B, k, V]: what proposed[B, k]
    was drawn from; keep[B, k] and again[B, k + 1]: uniform numbers, for the proposals and for what is drawn in place
    of the first that is not kept (the last: after all of them).
    """
    k = proposed.shape[1]
    at = proposed[..., None]
    kept = keep * q.gather(-1, at)[..., 0] < p[:, :k].gather(-1, at)[..., 0]
    count = kept.long().cumprod(-1).sum(-1)  # the length of the longest prefix that is kept
    last = torch.cat([residual(p[:, :k], q), p[:, k:]], 1)
    drawn = draw_token(last, again)
    places = torch.arange(k + 1, device=p.device)
    tokens = torch.cat([proposed, proposed[:, :1]], 1)
    return torch.where(places < count[:, None], tokens, drawn), count + 1


def expected_tokens(rate: float, k: int) -> float:
    """Tokens per step when each proposal is kept with this rate, independently: (1 - a^(k+1)) / (1 - a)."""
    return k + 1.0 if rate == 1 else (1 - rate ** (k + 1)) / (1 - rate)
