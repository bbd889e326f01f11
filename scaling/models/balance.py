"""How even the load of experts is, and the losses that keep it so (Part 4, mixtures of experts)."""

import torch
from torch import Tensor

from scaling.configs import Config


def scores(logits: Tensor, config: Config) -> Tensor:
    """Each expert's score: softmax or sigmoid of logits[..., E]."""
    return logits.softmax(-1) if config.routing == "softmax" else logits.sigmoid()


def load_of(experts: Tensor, E: int) -> Tensor:
    """int64[E]: how many tokens chose each expert."""
    flat = experts.flatten()
    return torch.zeros(E, dtype=torch.int64, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))


def balanced_load(experts: Tensor, config: Config, mask: Tensor | None = None) -> Tensor:
    """The load that `balance_loss` wants even, int64[E], or [B, E] by sequence, of experts[B, T, k]: of the tokens that
    mask[B, T] counts, of their first choices alone where `config.balance_first` says so. ValueError for another mask.
    """
    if mask is not None and (mask.dtype != torch.bool or mask.shape != experts.shape[:-1]):
        found, wanted = f"{mask.dtype} {list(mask.shape)}", list(experts.shape[:-1])
        raise ValueError(f"mask must be bool[B, T], {wanted}; got {found}\n  fix: give one for each token")
    chosen = experts[..., :1] if config.balance_first else experts
    counted = torch.ones_like(chosen) if mask is None else mask[..., None].to(torch.int64).expand_as(chosen)
    load = torch.zeros(len(experts), config.E, dtype=torch.int64, device=experts.device)
    load = load.scatter_add(1, chosen.flatten(1), counted.flatten(1))
    return load if config.balance_by == "sequence" else load.sum(0)


def balance_loss(
    logits: Tensor, load: Tensor, config: Config, tokens: "int | Tensor", sequences: int = 1, mask: Tensor | None = None
) -> Tensor:
    """E * sum over experts of f P: f the share of the choices that fell on an expert, P its mean score; 1 if even.

    load int64[E], of `balanced_load`, and `tokens` are those of the global batch, logits[..., E] this rank's part of
    it: then this is the part's term, and the terms add up to the loss. By sequence, load[B, E] is of the whole of each,
    and the loss is the mean over all `sequences` of the global batch (DeepSeek-V3, arXiv:2412.19437, equations 17 to
    20). Tokens that mask[B, T] does not count have no part in it. Sigmoid scores are first divided by their sum.
    """
    score, choices = scores(logits, config), 1 if config.balance_first else config.k
    if config.routing == "sigmoid":
        score = score / (score.sum(-1, keepdim=True) + 1e-20)
    if mask is not None:
        score = score * mask[..., None]
    load = load.to(score.dtype)
    if load.dim() == 1:
        share = load / (tokens * choices)
        return (share * score.flatten(0, -2).sum(0)).sum() * config.E / tokens
    each = (load.sum(-1, keepdim=True) / choices).clamp(min=1)  # tokens of each sequence
    share = load / (each * choices)
    return (share * score.sum(1) / each).sum() * config.E / sequences


def z_loss(logits: Tensor, tokens: "int | Tensor", mask: Tensor | None = None) -> Tensor:
    """The mean over `tokens` of the square of logsumexp(logits[..., E]); of a part of the tokens, the part's term."""
    square = logits.logsumexp(-1).square()
    return (square if mask is None else square * mask).sum() / tokens


def losses(logits: Tensor, experts: Tensor, config: Config, mask: Tensor | None) -> dict[str, Tensor]:
    """The losses of a whole batch: logits[B, T, E], experts[B, T, k]."""
    count = experts[..., 0].numel() if mask is None else mask.sum().clamp(min=1)
    balance = balance_loss(logits, balanced_load(experts, config, mask), config, count, len(experts), mask)
    return {"balance": balance, "z": z_loss(logits, count, mask)}


def update_bias(bias: Tensor, load: Tensor, rate: float = 1e-3) -> Tensor:
    """bias[E] after a step in which `load`[E] tokens chose each expert: up by `rate` where fewer than the mean did,
    down where more did (DeepSeek-V3: no auxiliary loss disturbs the model's own)."""
    load = load.to(torch.float64)
    return bias + rate * torch.sign(load.mean() - load).to(bias.dtype)
