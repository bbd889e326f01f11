"""The loss of GRPO as pure functions of log-probabilities (Shao et al. 2024, arXiv:2402.03300, section 4.1).

G answers to one prompt are a group. An answer's advantage says how much better than its group it did:

    A = (r - mean r) / (std r + 1e-6)                    REINFORCE with a baseline: A = r - mean r

With ratio = exp(logp - old), where old is what the token had when it was drawn, a token's loss is

    -min(ratio A, clip(ratio, 1 - low, 1 + high) A) + beta (exp(ref - logp) - (ref - logp) - 1)

The last term is an estimate of KL(policy || reference) that is never negative (K3). Each token has a share of the loss:
"token", 1 / all tokens, or "sequence", 1 / (its answer's tokens x answers), by which long answers count less a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Clip(NamedTuple):
    """How far a ratio may go before its token has no gradient, and beta, the weight of the KL term."""

    low: float = 0.2
    high: float = 0.2
    beta: float = 0.0


PLAIN = Clip()


class Rollouts(NamedTuple):
    """What was drawn: R rows of T tokens and the T tokens that follow each.

    Attributes:
        tokens: int64[R, T].
        targets: int64[R, T].
        mask: bool[R, T], whether the target was drawn; else it is the prompt's, or nothing.
        old: float64[R, T], the log-probability with which it was drawn.
        rewards: float64[R], of each answer.
        version: int64[], the number of updates of the weights that drew it.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor
    old: Tensor
    rewards: Tensor
    version: Tensor


def advantages(rewards: Tensor, groups: int, divide: bool = True) -> Tensor:
    """Return A[R] of rewards[R], whose groups are `groups` neighbours each; `divide` by the standard deviation."""
    if groups < 2 or len(rewards) % groups:
        raise ValueError(
            f"{len(rewards)} rewards in groups of {groups}\n  rule: a group has at least 2 answers, to compare them\n"
            "  fix: give a number of at least 2 that divides the answers"
        )
    each = rewards.double().view(-1, groups)
    found = each - each.mean(1, keepdim=True)
    found = found / (each.std(1, keepdim=True) + 1e-6) if divide else found
    return found.flatten()


def shares(mask: Tensor, mean: str) -> Tensor:
    """Return each token's share of the loss, float64[R, T]: "token" or "sequence", zeros outside the mask."""
    own = mask.double()
    if mean == "token":
        return own / own.sum().clamp(min=1)
    return own / own.sum(1, keepdim=True).clamp(min=1) / len(own)


def loss(logprobs: Tensor, old: Tensor, reference: Tensor, A: Tensor, share: Tensor, clip: Clip = PLAIN) -> Tensor:
    """Return the loss of logprobs[R, T], or this rank's term of it; A[R, 1] and the others as the module says."""
    ratio = (logprobs - old).exp()
    kept = torch.minimum(ratio * A, ratio.clamp(1 - clip.low, 1 + clip.high) * A)
    away = reference - logprobs
    each = clip.beta * (away.exp() - away - 1) - kept if clip.beta else -kept
    return torch.where(share == 0, 0.0, share * each).sum()


def gap(logprobs: Tensor, old: Tensor, A: Tensor, mask: Tensor, clip: Clip) -> dict[str, float]:
    """Return how far the policy that is trained is from the one that drew.

    These are, of the drawn tokens, the mean and the largest |logp - old|, K3, and the shares whose ratio was clipped
    from above and from below.
    """
    away = torch.where(mask, logprobs - old, 0.0)
    count, ratio = mask.sum().clamp(min=1), away.exp()
    high = mask & (A > 0) & (ratio > 1 + clip.high)
    low = mask & (A < 0) & (ratio < 1 - clip.low)
    found = {"gap_mean": away.abs().sum() / count, "gap_max": away.abs().max(), "k3": (ratio - 1 - away).sum() / count}
    found |= {"clipped_high": high.sum() / count, "clipped_low": low.sum() / count}
    return {name: float(value) for name, value in found.items()}
