"""Attention of this rank's queries to a block of keys: what is computed between two lines of communication.

    Q[B, T, N, H], K[B, S, K, H], V[B, S, K, H] -> O[B, T, N, H], lse[B, T, N]

lse is the log of the softmax's denominator. Positions are known, so tiles that the mask hides altogether are never
computed. Results are float32 or wider; `merge` joins those of different keys, whether of two tiles or of two ranks.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from scaling import trace
from scaling.spec import parse_line
from scaling.strategies.context.kernels import fused, tangent, written
from scaling.strategies.context.layout import Mask, Ranges

TILE = 512  # queries, and keys, that are computed at a time: no more than TILE^2 scores a head exist


class Seen(NamedTuple):
    """What queries have seen so far: O[B, T, N, H], the attention to those keys, and lse[B, T, N], their weight's log."""

    O: torch.Tensor
    lse: torch.Tensor


def merge(a: Seen | None, b: Seen | None) -> Seen | None:
    """What is seen of the keys of both. No exponent is above 0, so nothing overflows; blocks may come in any order."""
    if a is None or b is None:
        return b if a is None else a
    lse = torch.logaddexp(a.lse, b.lse)
    base = lse.masked_fill(lse == -math.inf, 0)  # where a query has seen no key yet
    wa, wb = ((lse - base).exp()[..., None] for lse in (a.lse, b.lse))
    return Seen(wa * a.O + wb * b.O, lse)


class Block(NamedTuple):
    """Queries at the positions `rows` meet keys at `columns`. `segments`: None, or (of the queries [B, T], of the keys
    [B, S]): a query sees keys of its own segment alone. `line`: the types, for the trace."""

    rows: Ranges
    columns: Ranges
    mask: Mask
    scale: float
    segments: tuple[torch.Tensor, torch.Tensor] | None = None
    line: str = "Q[B, T, N, H] * KV[2, B, S, K, H] -> O[B, T, N, H]"

    @property
    def empty(self) -> bool:
        return not self.mask.pairs(self.rows, self.columns)

    def tiles(self, device) -> Iterator[tuple[slice, slice, torch.Tensor | None, bool]]:
        """(queries, keys, what is hidden, whether that is the causal triangle and nothing else) of each tile seen."""
        for i, r in _cut(self.rows):
            for j, c in _cut(self.columns):
                if not self.mask.pairs((r,), (c,)):
                    continue
                hidden = self.mask.hidden(r, c, device)
                diagonal = hidden is not None and r == c and self.mask == (True, None) and self.segments is None
                if self.segments is not None:
                    of_queries, of_keys = self.segments[0][:, i, None], self.segments[1][:, None, j]
                    other = (of_queries != of_keys)[:, None, None]
                    hidden = other if hidden is None else other | hidden
                yield i, j, hidden, diagonal

    @contextmanager
    def traced(self, Q: torch.Tensor, matmuls: int):
        """One event: FLOPs of the scores that are seen, in so many matmuls."""
        if not trace.active():
            yield
            return
        (*before, after), (B, _, N, H) = (*parse_line(self.line).operands, parse_line(self.line).result), Q.shape
        flops = 2 * matmuls * B * N * H * self.mask.pairs(self.rows, self.columns)
        event = trace.record(trace.Event("Einsum", (), tuple(before), after, flops=flops, start=trace.now()))
        yield
        event.end = trace.now()


def _cut(ranges: Ranges) -> Iterator[tuple[slice, range]]:
    """(place in the local array, positions) of at most TILE tokens each."""
    at = 0
    for chunk in ranges:
        for start in range(0, len(chunk), TILE):
            part = chunk[start : start + TILE]
            yield slice(at, at + len(part)), part
            at += len(part)


def forward(Q, K, V, block: Block) -> Seen | None:
    """What the queries see of these keys; None if the mask hides them all."""
    if block.empty:
        return None
    with block.traced(Q, matmuls=2):
        if Q.is_meta:
            O = torch.empty_like(Q, dtype=_wide(Q.dtype))
            return Seen(O, O[..., 0])
        q, k, v = _heads_of_keys(K.shape[2], Q, K, V)
        O, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
        for i, j, hidden, diagonal in block.tiles(Q.device):
            tile = _kernel(Q).forward(q[..., i, :], k[..., j, :], v[..., j, :], hidden, diagonal, block.scale)
            O[..., i, :], lse[..., i] = merge(Seen(O[..., i, :], lse[..., i]), Seen(*tile))
        return Seen(*_heads(O, lse))


def backward(dO, O, lse, Q, K, V, block: Block):
    """(dQ, dK, dV) through this block, or None. O and lse are those of all the keys, of this block and the others."""
    if block.empty:
        return None
    with block.traced(Q, matmuls=5):
        if Q.is_meta:
            return tuple(torch.empty_like(x, dtype=_wide(x.dtype)) for x in (Q, K, V))
        dO, O, lse, q, k, v = _heads_of_keys(K.shape[2], dO, O, lse, Q, K, V)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for i, j, hidden, diagonal in block.tiles(Q.device):
            row, keys = (O[..., i, :], lse[..., i]), (k[..., j, :], v[..., j, :])
            tile = _kernel(Q).backward(dO[..., i, :], q[..., i, :], *keys, *row, hidden, diagonal, block.scale)
            dq[..., i, :] += tile[0]
            dk[..., j, :] += tile[1]
            dv[..., j, :] += tile[2]
        return _heads(dq, dk, dv)


def jvp(tQ, tK, tV, lse, Q, K, V, block: Block):
    """(A[B, T, N, H], m[B, T, N]) of this block, or None: summed over the blocks of all keys, tO = A - m O."""
    if block.empty:
        return None
    with block.traced(Q, matmuls=5):
        if Q.is_meta:
            A = torch.empty_like(Q, dtype=_wide(Q.dtype))
            return A, A[..., 0]
        tq, lse, q, tk, tv, k, v = _heads_of_keys(K.shape[2], tQ, lse, Q, tK, tV, K, V)
        A, m = torch.zeros_like(q), torch.zeros_like(lse)
        for i, j, hidden, _ in block.tiles(Q.device):
            keys = (x[..., j, :] for x in (tk, tv, k, v))
            tile = tangent(tq[..., i, :], q[..., i, :], lse[..., i], *keys, hidden, block.scale)
            A[..., i, :] += tile[0]
            m[..., i] += tile[1]
        return _heads(A, m)


def _kernel(Q: torch.Tensor):
    return fused if Q.device.type == "cpu" else written


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _heads_of_keys(K: int, *arrays):
    """[B, T, N(, H)] -> [B, K, G, T(, H)], float32 or wider: G = N/K heads of queries, or one of keys, a KV head."""
    return [x.to(_wide(x.dtype)).unflatten(2, (K, -1)).movedim(1, 3).contiguous() for x in arrays]


def _heads(*arrays):
    """[B, K, G, T(, H)] -> [B, T, N(, H)]."""
    return tuple(x.movedim(3, 1).flatten(2, 3) for x in arrays)
