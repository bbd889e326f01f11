"""Compute the loss of GRPO, by pure functions of log-probabilities (Shao et al. 2024, arXiv:2402.03300, section 4.1).

The G answers to one prompt are a group. An answer's advantage says how much better it did than its group:

    A = (r - mean r) / (std r + 1e-6)                    REINFORCE with a baseline: A = r - mean r

With ratio = exp(logp - old), where old is the token's log-probability when it was drawn, a token's loss is

    -min(ratio A, clip(ratio, 1 - low, 1 + high) A) + beta (exp(ref - logp) - (ref - logp) - 1)

The last term is an estimate of KL(policy || reference) that is never negative (K3). Each token has a share of the loss.
The share is 1 / all tokens with "token", and 1 / (its answer's tokens x answers) with "sequence", so that each token of
a long answer counts less.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Clip(NamedTuple):
    """The bounds 1 - low and 1 + high beyond which a ratio has no gradient, and beta, the weight of the KL term."""

    low: float = 0.2
    high: float = 0.2
    beta: float = 0.0


PLAIN = Clip()


class Rollouts(NamedTuple):
    """The answers of a step with their prompts, as rows of tokens and the token that follows each of them.

    A training rank holds its rows R of all G rows, and its tokens T of them.

    Attributes:
        tokens: int64[R, T].
        targets: int64[R, T], the token that follows each token.
        mask: bool[R, T], whether the target was drawn; otherwise it belongs to the prompt, or is padding.
        old: float64[R, T], the log-probability with which the target was drawn.
        rewards: float64[G], the reward of each answer; only the rank that scores has them before they are sent.
        version: int64[], the number of updates that had made the weights that drew the answers.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor
    old: Tensor
    rewards: Tensor
    version: Tensor


def advantages(rewards: Tensor, groups: int, divide: bool = True) -> Tensor:
    """Return the advantages A[R] of rewards[R], where `groups` neighbours form a group.

    `divide`: whether to divide by the group's standard deviation.

    Raises:
        ValueError: A group has fewer than 2 answers, or the answers do not divide into groups.
    """
    if groups < 2 or len(rewards) % groups:
        raise ValueError(
            f"{len(rewards)} rewards in groups of {groups}\n  rule: a group has at least 2 answers, to compare them\n"
            "  fix: give a number of at least 2 that divides the answers"
        )
    each = rewards.double().view(-1, groups)
    found = each - each.mean(1, keepdim=True)
    found = found / (each.std(1, keepdim=True) + 1e-6) if divide else found
    return found.flatten()


def shares(mask: Tensor, lengths: Tensor, total: "Tensor | int", mean: str) -> Tensor:
    """Return the share of the loss of each token of some rows, float64[R, T], zero outside the mask.

    Args:
        mask: bool[R, T], whether a token was drawn.
        lengths: [R], the number of drawn tokens in each whole row; the mask may hold a part of the row's tokens.
        total: The number of drawn tokens in all rows with "token", the number of all rows with "sequence".
        mean: "token" or "sequence".
    """
    divisor = torch.ones_like(lengths) if mean == "token" else lengths
    return mask.double() / (divisor * total).clamp(min=1)[:, None]


def loss(logprobs: Tensor, old: Tensor, reference: Tensor, A: Tensor, share: Tensor, clip: Clip = PLAIN) -> Tensor:
    """Return the loss of logprobs[R, T], or this rank's term of it.

    The advantages are A[R, 1], and the module's docstring defines the other arguments.
    """
    ratio = (logprobs - old).exp()
    kept = torch.minimum(ratio * A, ratio.clamp(1 - clip.low, 1 + clip.high) * A)
    each = clip.beta * k3(reference - logprobs) - kept if clip.beta else -kept
    return torch.where(share == 0, 0.0, share * each).sum()


def k3(away: Tensor) -> Tensor:
    """Return each token's estimate of KL(p || q), where the token was drawn from p and away = log q - log p."""
    return away.exp() - away - 1


def gap_sums(logprobs: Tensor, old: Tensor, A: Tensor, mask: Tensor, clip: Clip) -> dict[str, Tensor]:
    """Return how far the policy in training is from the policy that drew the answers, summed over the drawn tokens.

    The sums are of |logp - old|, of K3, and of the tokens whose ratio was clipped from above and from below.
    """
    away = torch.where(mask, logprobs - old, 0.0)
    high = mask & (A > 0) & (away.exp() > 1 + clip.high)
    low = mask & (A < 0) & (away.exp() < 1 - clip.low)
    found = {"gap_mean": away.abs(), "k3": k3(away), "clipped_high": high, "clipped_low": low}
    return {name: each.sum() for name, each in found.items()}
