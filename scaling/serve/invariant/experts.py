"""A layer of experts in which a token's bits do not depend on who else chose them."""

from collections.abc import Callable

import torch
from torch import Tensor

from scaling.configs import Config
from scaling.models.moe import by_expert, expert_rows, route


def moe(W: dict, y: Tensor, config: Config, least: int, mlp: Callable[[dict, Tensor], Tensor]) -> Tensor:
    """Out[R, D] of y[R, D], as `models.moe.forward`; mlp(an expert's W, rows[n, D]), n a multiple of `least`."""
    routed = [route(token[None].clone(), W["router"], config, W.get("bias")) for token in y]  # each token by itself
    weights, experts = (torch.cat(column) for column in zip(*routed, strict=True))
    rows = expert_rows(experts, config.E)
    Out = by_expert(lambda W, Row: _filled(mlp, W, Row, least), W, rows.spread(y), rows.counts.tolist())
    total = mlp(W["shared"], y) if "shared" in W else torch.zeros_like(y)
    for j in range(config.k):  # in this order, the best first
        total = total + weights[:, j, None].to(Out.dtype) * Out[rows.place[:, j]]
    return total


def _filled(mlp: Callable, W: dict, Row: Tensor, least: int) -> Tensor:
    """mlp of an expert's rows, filled up to whole tiles with copies of the first."""
    if not len(Row):
        return Row
    fill = Row[:1].expand(-len(Row) % least, -1)
    return mlp(W, torch.cat([Row, fill]))[: len(Row)]
