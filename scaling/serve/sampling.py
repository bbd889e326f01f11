"""Draw tokens from logits: greedy, temperature, top-k, top-p, min-p.

The random number of a token is a function of its request's seed and its position alone, not of the batch, the step or
the device. So in fp32 a request draws the same tokens alone, in any batch, and again after it was preempted. In bf16 it
may draw others, because a batch of another shape rounds the logits differently.
"""

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from scaling.common.arguments import whole_numbers
from scaling.serve.requests import SEEDS, Draw, Sampling


def probabilities(logits: Tensor, how: Sampling) -> Tensor:
    """Return p[..., V] float64, the distribution that a token is drawn from; greedy has 1 at the likeliest token.

    Raises:
        ValueError: The logits of a row have no finite maximum.
    """
    if how.temperature == 0:
        return torch.nn.functional.one_hot(likeliest(logits), logits.shape[-1]).to(torch.float64)
    top = _greatest(logits)
    wide = logits.to(torch.float64)
    p = ((wide - top) / how.temperature).softmax(-1)
    V = p.shape[-1]
    if how.top_k is not None and how.top_k < V:
        p = _kept(p, _rank(p) < how.top_k)
    if how.top_p is not None and how.top_p < 1:
        order = p.sort(dim=-1, descending=True, stable=True).indices
        falling = p.gather(-1, order)
        before = falling.cumsum(-1) - falling  # the likeliest token has nothing before it, and so stays
        p = _kept(p, torch.empty_like(p, dtype=torch.bool).scatter_(-1, order, before < how.top_p))
    if how.min_p is not None:
        p = _kept(p, p >= how.min_p * p.amax(-1, keepdim=True))
    return p


def likeliest(logits: Tensor) -> Tensor:
    """Return the index of the greatest of logits[..., V], the lowest of equals; ValueError as `probabilities`."""
    _greatest(logits)
    return logits.argmax(-1)


def _greatest(logits: Tensor) -> Tensor:
    """Return the greatest of each row, [..., 1]; ValueError unless logits are floats [..., V] with finite maxima."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or not logits.dim() or not logits.shape[-1]:
        found = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits must be floats [..., V]; got {found}\n  fix: give what the model gives")
    top = logits.amax(-1, keepdim=True)
    if not bool(top.isfinite().all()):
        raise ValueError(
            "logits without a finite maximum (NaN, inf or all -inf): no token can be drawn\n  fix: mend the params"
        )
    return top


def _rank(p: Tensor) -> Tensor:
    """Return the rank of each token by falling probability; among equals the lower id comes first."""
    return p.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)


def _kept(p: Tensor, keep: Tensor) -> Tensor:
    p = torch.where(keep, p, 0.0)
    return p / p.sum(-1, keepdim=True)


def draw_token(p: Tensor, u: Tensor) -> Tensor:
    """Return the token[...] whose part of the interval [0, 1), laid out by p[..., V], contains u[...]."""
    if u.shape != p.shape[:-1]:
        raise ValueError(f"u{list(u.shape)} and p{list(p.shape)}\n  fix: give one uniform number for each distribution")
    edges = p.cumsum(-1)
    if not bool((edges[..., -1] > 0).all()):  # nor NaN
        raise ValueError("p holds a distribution without a sum above 0\n  fix: give what probabilities(...) gives")
    found = torch.searchsorted(edges, (u.to(p) * edges[..., -1])[..., None], right=True)[..., 0]
    last = torch.where(p > 0, torch.arange(p.shape[-1], device=p.device), 0).amax(-1)
    return torch.minimum(found, last)  # where rounding leads beyond the last token that is possible


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Return u[B] in [0, 1), float64: row i by (seeds[i], positions[i]) alone, from numpy's counter-based Philox."""
    seeds, positions = whole_numbers("seeds", seeds), whole_numbers("positions", positions)
    if len(seeds) != len(positions) or min([*seeds, *positions], default=0) < 0 or max(seeds, default=0) >= SEEDS:
        what = f"{len(seeds)} seeds and {len(positions)} positions, seeds in 0..2^63 - 1 and positions from 0 on"
        raise ValueError(f"{what}: of each row one\n  fix: make the seeds by request_seeds(prompts, seed)")
    rows = [
        numpy.random.Philox(key=seed, counter=[0, position, 0, 0]).random_raw()
        for seed, position in zip(seeds, positions, strict=True)
    ]
    bits = numpy.array(rows, dtype=numpy.uint64)
    return torch.from_numpy((bits >> numpy.uint64(11)).astype(numpy.float64) * 2.0**-53)


def sample(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> list[int]:
    """Return a token for each row of logits[B, V], drawn in its own way; positions[B] are the tokens' positions.

    Rows that are drawn in the same way are drawn together.
    """
    if len(draws) != len(logits):
        raise ValueError(f"{len(draws)} seeds for logits{list(logits.shape)}\n  fix: give one for each row")
    groups: dict[Sampling, list[int]] = {}
    for row, draw in enumerate(draws):
        groups.setdefault(draw.how, []).append(row)
    drawn = [0] * len(draws)
    for how, rows in groups.items():
        some = logits if len(groups) == 1 else logits[rows]
        if how.temperature == 0:
            ids = likeliest(some)
        else:
            u = uniforms([draws[row].seed for row in rows], [positions[row] for row in rows])
            ids = draw_token(probabilities(some, how), u.to(logits.device))
        for row, id in zip(rows, ids.tolist(), strict=True):
            drawn[row] = id
    return drawn
