"""Speculative sampling by the book's rule (Part 7, Appendix D): a draft proposes tokens, the target checks them.

`generate` and the engine keep proposals by another rule: see `scaling.serve.engine`.

The rule (Leviathan et al. 2022, arxiv.org/abs/2211.17192; Chen et al. 2023, arxiv.org/abs/2302.01318): a proposed token
x, drawn from q, is kept with probability min(1, p(x) / q(x)). The first token that is not kept is drawn again from the
excess of p over q, max(p - q, 0) divided by its sum, and the tokens after it are dropped. If all are kept, one more is
drawn from p. The output is distributed exactly as p, whatever q is. But q must be the distribution that x was drawn
from: after temperature and filters, like p. All randomness is given as uniform numbers, so that the output is a
function that can be enumerated.
"""

import torch
from torch import Tensor

from scaling.serve.sampling import draw_token


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution of a token that replaces a rejected one: max(p - q, 0) over its sum; p if that is 0."""
    excess = (p - q).clamp(min=0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / torch.where(total > 0, total, 1), p)


def verify(p: Tensor, q: Tensor, proposed: Tensor, keep: Tensor, again: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens[B, k + 1], count[B]): a step's tokens; only the first `count` (1 to k + 1) are valid.

    Args:
        p: p[B, k + 1, V], the target's distributions at the proposed positions and the one after.
        q: q[B, k, V], the distributions from which the proposals were drawn.
        proposed: proposed[B, k], the proposals.
        keep: keep[B, k], uniform numbers that decide about the proposals.
        again: again[B, k + 1], uniform numbers that draw the replacement of the first rejected one, or the last token.
    """
    k = proposed.shape[1]
    at = proposed[..., None]
    kept = keep * q.gather(-1, at)[..., 0] < p[:, :k].gather(-1, at)[..., 0]
    count = kept.long().cumprod(-1).sum(-1)  # the length of the kept prefix
    last = torch.cat([residual(p[:, :k], q), p[:, k:]], 1)
    drawn = draw_token(last, again)
    places = torch.arange(k + 1, device=p.device)
    tokens = torch.cat([proposed, proposed[:, :1]], 1)
    return torch.where(places < count[:, None], tokens, drawn), count + 1


def expected_tokens(rate: float, k: int) -> float:
    """Return the tokens per step if each proposal is kept with this rate, independently: (1 - a^(k+1)) / (1 - a)."""
    return k + 1.0 if rate == 1 else (1 - rate ** (k + 1)) / (1 - rate)
