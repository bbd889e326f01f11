"""Draw tokens from logits: greedy, temperature, top-k, top-p, min-p.

The random number of a token is a function of its request's seed and its position alone, not of the batch, the step or
the device. So a request draws the same tokens alone, in any batch, and again after it was preempted, unless a batch of
another shape rounds its logits so differently that the random number falls to a neighbour's part of the interval. In
fp32 the logits of a small model (`configs.get("tiny")`) differ by up to 1.2e-6, which is another token in 1.4 of a
million draws at temperature 1. In bf16 it happens more often.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from scaling.common.arguments import whole_numbers
from scaling.serve.requests import NOT_FINITE, SEEDS, Draw, Sampling


def probabilities(logits: Tensor, how: Sampling) -> Tensor:
    """Return p[..., V] float64, the distribution that a token is drawn from; greedy has 1 at the likeliest token.

    Raises:
        ValueError: The logits of a row have no finite maximum.
    """
    top = _greatest(logits)
    if not bool(top.isfinite().all()):
        raise ValueError(f"{NOT_FINITE}\n  fix: mend the params")
    if how.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(torch.float64)
    (row,), width, any_min_p = _numbers([how], logits.shape[-1])
    return _filtered(logits, top, torch.tensor(row, dtype=torch.float64, device=logits.device), width, any_min_p)


def _numbers(hows: Sequence[Sampling], V: int) -> tuple[list[tuple[float, ...]], int, bool]:
    """Return (temperature, top_k, top_p, min_p) of each, how many likeliest tokens to sort, and whether any has min_p.

    Where there is no filter, the number is one that keeps all tokens.
    """
    rows = []
    for how in hows:
        top_p = math.inf if how.top_p is None or how.top_p == 1 else how.top_p
        rows.append((how.temperature or 1.0, min(how.top_k or V, V), top_p, how.min_p or 0.0))
    width = max([top_k for _, top_k, top_p, _ in rows if top_k < V or top_p < 1], default=0)
    return rows, width, any(min_p > 0 for *_, min_p in rows)


def _filtered(logits: Tensor, top: Tensor, numbers: Tensor, width: int, any_min_p: bool) -> Tensor:
    """Return p[..., V], filtered by numbers[4], or by numbers[4, ..., 1] of each row; `width` as in `_numbers`."""
    temperature, top_k, top_p, min_p = numbers
    scores = (logits.to(torch.float64) - top) / temperature
    if width:
        scores = scores.masked_fill(~_likeliest(logits, top, temperature, top_k, top_p, width), -math.inf)
    p = scores.softmax(-1)
    return _kept(p, p >= min_p * p.amax(-1, keepdim=True)) if any_min_p else p


def _likeliest(logits: Tensor, top: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """Return which tokens top_k and top_p keep, keep[..., V]: the n likeliest ones, of equals the lower ids.

    n follows from the `width` greatest logits alone, in falling order, so no more of them are sorted.
    """
    V = logits.shape[-1]
    falling = logits.topk(width).values if width < V else logits.sort(descending=True).values
    inside = torch.arange(width, device=logits.device) < top_k
    p = ((falling.to(torch.float64) - top) / temperature).masked_fill(~inside, -math.inf).softmax(-1)
    before = p.cumsum(-1) - p  # the likeliest token has nothing before it, and so stays
    n = (inside & (before < top_p)).sum(-1, keepdim=True)
    least = falling.gather(-1, (n - 1).clamp(min=0))
    above, equal = logits > least, logits == least
    room = n - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room)) | ((top_k >= V) & (top_p >= 1))


def _kept(p: Tensor, keep: Tensor) -> Tensor:
    """Return p with only the tokens to keep, scaled to a sum of 1; a row that keeps all tokens does not change."""
    some = torch.where(keep, p, 0.0)
    return torch.where(keep.all(-1, keepdim=True), p, some / some.sum(-1, keepdim=True))


def _greatest(logits: Tensor) -> Tensor:
    """Return the greatest of each row, [..., 1]; ValueError unless the logits are floats [..., V]."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or not logits.dim() or not logits.shape[-1]:
        found = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits must be floats [..., V]; got {found}\n  fix: give what the model gives")
    return logits.amax(-1, keepdim=True)


def draw_token(p: Tensor, u: Tensor) -> Tensor:
    """Return the token[...] whose part of the interval [0, 1), laid out by p[..., V], contains u[...]."""
    if u.shape != p.shape[:-1]:
        raise ValueError(f"u{list(u.shape)} and p{list(p.shape)}\n  fix: give one uniform number for each distribution")
    if not bool((p.sum(-1) > 0).all()):  # nor NaN
        raise ValueError("p holds a distribution without a sum above 0\n  fix: give what probabilities(...) gives")
    return _drawn_by(p, u.to(p))


def _drawn_by(p: Tensor, u: Tensor) -> Tensor:
    edges = p.cumsum(-1)
    found = torch.searchsorted(edges, (u * edges[..., -1])[..., None], right=True)[..., 0]
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


class Drawn(NamedTuple):
    """The ids[B] of tokens on a device, and on their way to the host, where -1 replaces those that cannot be drawn."""

    ids: Tensor
    host: Tensor
    arrived: Any  # the CUDA event after which they are there

    def read(self) -> list[int | None]:
        """Wait for the tokens and return them, with None for each row of logits that has no finite maximum."""
        if self.arrived:
            self.arrived.synchronize()
        return [None if id < 0 else id for id in self.host.tolist()]


def sample(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> Drawn:
    """Draw a token for each row of logits[B, V] in its own way; positions[B] are the tokens' positions.

    The rows' options and random numbers go to the device in one transfer, and the tokens come back in one. The host
    waits for nothing before it reads them.
    """
    if len(draws) != len(logits):
        raise ValueError(f"{len(draws)} seeds for logits{list(logits.shape)}\n  fix: give one for each row")
    top, ids = _greatest(logits), logits.argmax(-1)
    greedy = [draw.how.temperature == 0 for draw in draws]
    if not all(greedy):
        rows, width, any_min_p = _numbers([draw.how for draw in draws], logits.shape[-1])
        seeds = [(draw.seed, n) for draw, n, one in zip(draws, positions, greedy, strict=True) if not one]
        found = iter(uniforms(*zip(*seeds, strict=True)).tolist())
        u = [0.0 if one else next(found) for one in greedy]
        numbers = torch.tensor([*zip(*rows, strict=True), u, greedy], dtype=torch.float64)
        numbers = numbers.to(logits.device, non_blocking=True)
        drawn = _drawn_by(_filtered(logits, top, numbers[:4, :, None], width, any_min_p), numbers[4])
        ids = torch.where(numbers[5] > 0, ids, drawn)
    host = torch.where(top[:, 0].isfinite(), ids, -1).to("cpu", non_blocking=True)
    return Drawn(ids, host, torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None)
