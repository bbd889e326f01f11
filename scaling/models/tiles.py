"""One tile of attention on one device: its mask, forward, backward and tangent (Part 4, Appendix A).

    q[B, K, G, T, H], k[B, K, 1, S, H], v[B, K, 1, S, H] -> O[B, K, G, T, H], lse[B, K, G, T]

G = N/K query heads share a key. `hidden` is True where a query must not see a key, of shape [T, S] or [B, 1, 1, T, S];
or LATER, which hides the keys after each query; or None. `lse` is the log of the softmax's denominator, -inf (with
O = 0) for a query that sees no key here. In `backward` and `tangent`, lse and O belong to the whole row, and this tile
is a part of it: P = exp(scores - lse).

`fused` is torch's flash attention, which stores no T x S scores; on CPUs it also takes float64. `by_mask` is for GPUs,
whose flash attention takes 16 bits and no mask of its own: tiles with one are computed by matmuls. `written` computes
every tile by matmuls, on any device. Results are float32 or wider.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from scaling.common.torch_private import flash_cpu, flash_cpu_backward, flash_gpu, flash_gpu_backward
from scaling.models.pointwise import soft_cap

LATER = "later"
Ranges = tuple[range, ...]


class Kernel(NamedTuple):
    """The functions of a tile, and whether they take operands of 16 bits, and tiles of any size where no mask is."""

    forward: Callable
    backward: Callable
    narrow: bool = False


class Mask(NamedTuple):
    """The keys that a query sees: none after it if `causal`, and only those less than `window` away if it is given."""

    causal: bool = True
    window: int | None = None

    def pairs(self, rows: Ranges, columns: Ranges) -> int:
        """Return the number of visible (query, key) pairs, by a closed form."""
        last = 0 if self.causal else math.inf if self.window is None else self.window - 1
        before = -math.inf if self.window is None else -self.window
        return sum(_up_to(last, r, c) - _up_to(before, r, c) for r in rows for c in columns)

    def hidden(self, r: range, c: range, device) -> torch.Tensor | None:
        """hidden[T, S], True where the query does not see the key; None if all is seen."""
        if self.pairs((r,), (c,)) == len(r) * len(c):
            return None
        ahead = torch.arange(c.start, c.stop, device=device) - torch.arange(r.start, r.stop, device=device)[:, None]
        hidden = ahead > 0 if self.causal else torch.zeros_like(ahead, dtype=torch.bool)
        return hidden if self.window is None else hidden | (ahead.abs() >= self.window)


def _up_to(d: float, r: range, c: range) -> int:
    """Count the pairs (t, s) of r x c with s - t <= d: the sum over t of clip(t + d - c.start + 1, 0, len(c))."""
    if math.isinf(d):
        return len(r) * len(c) if d > 0 else 0

    def below(x: int) -> int:  # 0 + 1 + ... + (x - 1)
        return x * (x - 1) // 2 if x > 0 else 0

    first = r.start + int(d) - c.start + 1
    return below(first + len(r)) - below(first) - below(first + len(r) - len(c)) + below(first - len(c))


def _scores(q, k, scale, cap=None):
    """scores[B, K, G, T, S], softly capped: one matmul for the G heads of a key."""
    return soft_cap((q.flatten(2, 3) @ k[:, :, 0].mT).unflatten(2, q.shape[2:4]) * scale, cap)


def _masked(scores, hidden):
    """Return the scores, -inf where hidden."""
    if hidden is LATER:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def _times(scores, k):
    """[B, K, G, T, S] * k[B, K, 1, S, H] -> [B, K, G, T, H]."""
    return (scores.flatten(2, 3) @ k[:, :, 0]).unflatten(2, scores.shape[2:4])


def _over_queries(scores, q):
    """[B, K, G, T, S] * q[B, K, G, T, H] -> [B, K, 1, S, H]: summed over the heads that share the key."""
    return (scores.flatten(2, 3).mT @ q.flatten(2, 3))[:, :, None]


def _written_forward(q, k, v, hidden, scale, cap):
    scores = _masked(_scores(q, k, scale, cap), hidden)
    M = scores.amax(-1, keepdim=True)
    M = M.masked_fill(M.isneginf(), 0)
    P = (scores - M).exp()
    L = P.sum(-1, keepdim=True)
    return _times(P, v) / L.clamp(min=torch.finfo(L.dtype).tiny), (M + L.log()).squeeze(-1)


def _written_backward(dO, O, lse, q, k, v, hidden, scale, cap):
    scores = _scores(q, k, scale, cap)
    P = (_masked(scores, hidden) - lse[..., None]).exp()
    delta = (dO * O).sum(-1, keepdim=True)  # sum_j P_ij dP_ij = sum_d dO_id O_id
    dS = P * (_scores(dO, v, 1.0) - delta) * scale
    dS = dS if cap is None else dS * (1 - (scores / cap).square())
    return _times(dS, k), _over_queries(dS, q), _over_queries(P, dO)


def tangent(tq, lse, q, tk, tv, k, v, hidden, scale, cap=None):
    """Return (A, m) = (sum_j P_ij (tS_ij v_j + tv_j), sum_j P_ij tS_ij); the tangent of the output is A - m O."""
    scores = _scores(q, k, scale, cap)
    P = (_masked(scores, hidden) - lse[..., None]).exp()
    tS = _scores(tq, k, scale) + _scores(q, tk, scale)
    PtS = P * (tS if cap is None else tS * (1 - (scores / cap).square()))
    return _times(PtS, v) + _times(P, tv), PtS.sum(-1)


def _for_flash(q, k, v, hidden):
    """Reshape [B, K, G, ...] to flash's [batch, heads, ...] with KV heads in the batch, so that keys are not copied."""
    B, K, G, T, _ = q.shape
    k, v = (x.expand(-1, -1, G, -1, -1).flatten(0, 1) for x in (k, v))
    if isinstance(hidden, torch.Tensor):
        hidden = hidden.expand(B, K, 1, T, k.shape[-2]).flatten(0, 1).expand(-1, G, -1, -1)
        hidden = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -math.inf)
    return q.flatten(0, 1), k, v, hidden if hidden is not LATER else None


def in_float32(x: torch.Tensor) -> torch.Tensor:
    """Return x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _fused_forward(q, k, v, hidden, scale):
    *operands, bias = _for_flash(q, k, v, hidden)
    flash: Callable = flash_gpu if q.is_cuda else flash_cpu
    O, lse = flash(*operands, 0.0, hidden is LATER, attn_mask=bias, scale=scale)
    O, lse = (in_float32(x).unflatten(0, q.shape[:2]) for x in (O, lse))
    if bias is not None:  # flash's lse is 0 for a query that sees no key
        blind = hidden.all(-1).expand(lse.shape)
        O, lse = O.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -math.inf)
    return O, lse


def _fused_backward(dO, O, lse, q, k, v, hidden, scale):
    *operands, bias = _for_flash(q, k, v, hidden)
    rows = (x.flatten(0, 1) for x in (O, lse))
    flash: Callable = flash_gpu_backward if q.is_cuda else flash_cpu_backward
    grads = flash(dO.flatten(0, 1), *operands, *rows, 0.0, hidden is LATER, attn_mask=bias, scale=scale)
    dq, dk, dv = (in_float32(x).unflatten(0, q.shape[:2]) for x in grads)
    return dq, dk.sum(2, keepdim=True), dv.sum(2, keepdim=True)


def _by_mask(fused, written, *given):
    """Call `fused`, or `written` in float32 or wider if the last argument but one, `hidden`, is an array."""
    *operands, hidden, scale = given
    if not isinstance(hidden, torch.Tensor):
        return fused(*operands, hidden, scale)
    return written(*map(in_float32, operands), hidden, scale, cap=None)


def written(cap: float | None) -> Kernel:
    """Return the functions of a tile by matmuls, with a soft cap of the scores unless it is None."""
    return Kernel(partial(_written_forward, cap=cap), partial(_written_backward, cap=cap))


fused = Kernel(_fused_forward, _fused_backward)
by_mask = Kernel(
    partial(_by_mask, _fused_forward, _written_forward), partial(_by_mask, _fused_backward, _written_backward), True
)
